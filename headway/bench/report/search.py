"""The result of the search for the highest rate: in words, as a table and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.bench.report.verdict import count
from headway.load.measures.anytime import least_blocks
from headway.load.measures.search import SearchResult, Stop
from headway.load.measures.trials import Trial, Verdict
from headway.report import style
from headway.report.parts import NOTHING, Banner, Cell, Picture, Section, Table, Tone, cells
from headway.report.style import number, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TONES: dict[Verdict, Tone] = {
    Verdict.HELD: "good",
    Verdict.LIKELY: "quiet",
    Verdict.FAILED: "bad",
    Verdict.UNDECIDED: "warn",
}
_RELAX = "Relax --goodput or --slo-attainment, or measure a faster server."
MARKS = (
    (Verdict.HELD, "o", "green", "held"),
    (Verdict.LIKELY, "o", "gray", "looks good"),
    (Verdict.FAILED, "X", "red", "did not hold"),
    (Verdict.UNDECIDED, "D", "gray", "undecided"),
)


def search_banners(found: SearchResult, target: float = 0.99) -> tuple[Banner, ...]:
    """The outcome, then what stands against it."""
    wanted = f"{100 * target:g} % of the requests met their objectives"
    reason = f"The search ended because {found.reason}."
    claim = found.claim
    if claim is None:
        outcome = _nothing_proven(found, target, reason)
    else:
        above = "" if found.above is None else f" {number(found.above)} requests/s {_reason(found, found.above)}."
        tone: Tone = "good" if found.stop in (Stop.PRECISE, Stop.CEILING) else "warn"
        line = f"At {number(claim.rate)} requests/s at least {wanted}.{above}"
        sure = (
            f"This is {100 * found.confidence:.4g} % certain if stalls and bursts affect at most {claim.block:,} "
            f"requests in a row ({number(claim.block / claim.rate)} s)."
        )
        outcome = Banner(f"Highest rate: {number(claim.rate)} requests/s", (line, sure, reason), tone)
    doubts = (Banner("Beware", tuple(sentence(each) for each in found.warnings), "warn"),) if found.warnings else ()
    return (outcome, *doubts)


def _nothing_proven(found: SearchResult, target: float, reason: str) -> Banner:
    """No rate was proven: only if all failed is that bad news about the server."""
    failed = [trial.rate for trial in found.trials if trial.verdict is Verdict.FAILED]
    tried = f"{count(len(found.trials), 'rate')} tried with {sum(trial.total for trial in found.trials):,} requests"
    if found.trials and len(failed) == len(found.trials) and found.stop is Stop.FLOOR:
        lines = (f"{tried}; even {number(min(failed))} requests/s did not meet {100 * target:g} %.", reason, _RELAX)
        return Banner("No rate held", lines)
    missed = f"; {number(min(failed))} requests/s did not hold" if failed else ""
    if found.likely is None:
        more = "Give more time with --max-search-seconds, or start lower with --request-rate."
        return Banner("Nothing proven yet", (f"{tried}{missed}.", reason, more if found.trials else _RELAX), "warn")
    trial = next(each for each in found.trials if each.rate == found.likely)
    met = f"{trial.met:,} of {trial.total:,} requests met their objectives at {number(trial.rate)} requests/s"
    fewest = trial.block * least_blocks(target, found.confidence)
    pace = trial.total / trial.seconds if trial.seconds else trial.rate
    longer = _duration(fewest / pace)
    proof = (
        f"A proof of {100 * target:g} % takes at least {fewest:,} requests at one rate, about {longer} on this "
        "machine: raise --max-search-seconds, or lower --slo-attainment."
    )
    return Banner(
        f"{number(found.likely)} requests/s looks good, but is not proven",
        (f"{met}{missed}. {tried}.", reason, proof),
        "warn",
    )


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds)):,} s" if seconds < 100 else f"{round(seconds / 60):,} min"


def _reason(found: SearchResult, rate: float) -> str:
    trial = next((trial for trial in found.trials if trial.rate == rate), None)
    if trial is not None and trial.verdict is Verdict.FAILED and trial.client:
        return f"did not hold, but this client was late ({trial.client}): the server may do better"
    if trial is None or trial.verdict is Verdict.FAILED:
        return "did not hold"
    because = f", because {trial.reason}" if trial.reason else ""
    return (
        f"met them for {100 * trial.share:.4g} % of {trial.total:,} requests, but this is not certain: the true share "
        f"may be as low as {100 * trial.low:.4g} %{because}"
    )


def search_table(found: SearchResult) -> Table:
    """One row per rate, in the order in which they were tried."""
    rows = tuple(_row(trial) for trial in found.trials)
    note = (
        "Below each share is its interval, which allows for several looks at the same rate. A rate holds if the whole "
        "interval is above the target."
    )
    columns = ("requests/s", "probes", "requests", "met", "fell behind", "verdict")
    return Table("Rates tried", columns, rows, left=frozenset({0, 5}), note=note)


def search_json(found: SearchResult) -> dict[str, object]:
    """JSON-able: the rate that was found, and each rate that was tried, as the table has them."""
    return {
        "rate": found.rate,
        "likely": found.likely,
        "above": found.above,
        "reason": found.reason,
        "trials": [
            {
                "rate": each.rate,
                "probes": len(each.probes),
                "requests": each.total,
                "met": each.met,
                "low": each.low,
                "high": each.high,
                "verdict": str(each.verdict),
            }
            for each in found.trials
        ],
    }


def _row(trial: Trial) -> tuple[Cell, ...]:
    share = Cell(f"{100 * trial.share:.4g} %", detail=f"{100 * trial.low:.4g}–{100 * trial.high:.4g}")
    behind = Cell(f"{trial.unsteady} of {len(trial.probes)}", "warn") if trial.unsteady else Cell("no", "quiet")
    reason = next((probe.reason for probe in trial.probes if not probe.valid), "")
    word = f"{trial.verdict} (client-bound)" if trial.client and trial.verdict is Verdict.FAILED else str(trial.verdict)
    verdict = Cell(f"not valid: {reason}", "bad") if reason else Cell(word, TONES[trial.verdict])
    known = share if trial.total else NOTHING
    return cells(number(trial.rate), str(len(trial.probes)), f"{trial.total:,}", known, behind, verdict)


@style.drawing()
def attainment_of_rates(found: SearchResult, target: float = 0.99) -> Figure:
    """Attainment at each rate tried, with its interval; the limit is in the shaded range."""
    share = "Requests that met their objectives (%)"
    figure, (axes,) = style.new_figure(8.0, 3.4, x="Request rate (1/s)", y=share)
    tried = [trial for trial in found.trials if trial.total]
    if not tried:
        style.nothing_to_show(axes, "no rate was measured")
        return figure
    if len(found.fitted) > 1:
        curve = [(rate, 100 * share) for rate, share in found.fitted]
        axes.plot(*zip(*curve, strict=True), "-", lw=1.2, color=style.colour("line"), label="fitted curve")
    for verdict, mark, colour, label in MARKS:
        chosen = [trial for trial in tried if trial.verdict is verdict]
        if chosen:
            rates, shares = [trial.rate for trial in chosen], [100 * trial.share for trial in chosen]
            below = [max(100 * trial.share - 100 * trial.low, 0.0) for trial in chosen]
            above = [max(100 * trial.high - 100 * trial.share, 0.0) for trial in chosen]
            style.ranges(axes, rates, shares, colour, label, mark, yerr=[below, above], ms=5, elinewidth=1.2)
    axes.axhline(100 * target, color=style.colour("red"), lw=1, ls=(0, (4, 3)), label=f"target {100 * target:g} %")
    if found.rate is not None and found.above is not None:
        axes.axvspan(found.rate, found.above, color=style.colour("gold"), alpha=0.18, lw=0, label="the limit is here")
    rates = [trial.rate for trial in tried]
    axes.set_ylim(top=100.6)
    if style.wants_log(rates, 8):
        axes.set_xlim(min(rates) / 1.3, max(rates) * 1.3)
        style.log_axis(axes, "x")
    else:
        axes.set_xlim(0, max(rates) * 1.1)
    style.legend_outside(figure, [axes], 4, above=True)
    return figure


def search_section(found: SearchResult, target: float = 0.99) -> Section:
    """The section of a search, for the top of a report: `report_page(..., extra=[search_section(...)])`."""
    caption = "Each point has all requests at one rate, with an interval that holds for all looks together."
    if found.rate is not None and found.above is not None:
        caption += f" The limit is between {number(found.rate)} and {number(found.above)} requests/s."
    return Section(
        "The highest rate",
        banners=search_banners(found, target),
        tables=(search_table(found),),
        pictures=(Picture("rate-search", "Attainment at each rate", caption, attainment_of_rates(found, target)),),
        anchor="search",
    )
