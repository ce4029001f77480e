"""What a run says, in words: whether it is valid, steady, and met its objectives, and what to beware of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from headway.bench.options import Claims
from headway.bench.report.views import Run, load_of, steady_or_whole, tokens_per_s
from headway.load.measures.client_effect import spoilt
from headway.load.measures.numbers import Attainment, Summary
from headway.load.measures.slo import FAILED
from headway.load.record import FailureKind, RunResult
from headway.report.parts import Banner
from headway.report.style import number, plain, sentence

USUAL = Claims()
OMISSION_RATIO = 1.1  # P99 from the schedule over that from the send; the report points larger ratios out
OMISSION_MS = 5.0
MOST_SPOILT_SHOWN = 4
METRIC_NAMES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2el_ms": "E2EL",
    "normalized_latency_ms": "E2EL/token",
}


def count(number_: int, thing: str) -> str:
    return f"{number_:,} {thing}{'' if number_ == 1 else 's'}"


def banners(result: RunResult, summaries: Sequence[Summary], claims: Claims = USUAL) -> tuple[Banner, ...]:
    """The verdict, the gravest first. The summaries are those of `summarise_all`: the whole run first."""
    found = [
        _no_answer(result),
        _interrupted(result),
        _client_bound(result),
        _spoilt(result, summaries),
        _failures(result, claims.max_failed_share),
        _refused(result),
        *(_objectives(view, claims.attainment) for view in _main_views(summaries)),
        _steady(summaries),
        _omission(summaries),
    ]
    return tuple(banner for banner in found if banner is not None)


def headline(result: RunResult, summaries: Sequence[Summary], claims: Claims = USUAL) -> str:
    """One sentence for the top of a page."""
    whole = summaries[0]
    asked = whole.completed + whole.failed
    valid = "Valid" if is_valid(result, summaries, claims) else "Not valid"
    figures = spoilt_figures(summaries)
    if valid == "Valid" and figures:
        valid = f"Valid but for {figures[0]}" + (f" and {len(figures) - 1} more" if len(figures) > 1 else "")
    rate, of_what = tokens_per_s(whole)
    return (
        f"{valid}: {whole.completed:,} of {count(asked, 'request')} answered"
        f"{f', {whole.refused:,} refused,' if whole.refused else ''} in {number(result.duration_s)} s, "
        f"{number(whole.rates.get('request_throughput', 0.0))} requests/s and {number(rate)} {of_what}."
    )


def is_valid(result: RunResult, summaries: Sequence[Summary], claims: Claims = USUAL) -> bool:
    """Whether requests were answered, few failed, and the client offered the load and did not spoil every figure.

    Requests that the server refused on purpose do not count as failed. Single figures may be spoilt all the same
    (`spoilt_figures`).
    """
    whole = summaries[0]
    asked = whole.completed + whole.failed
    few_failed = bool(asked) and whole.failed - whole.refused <= claims.max_failed_share * asked
    return bool(whole.completed) and few_failed and not result.client.bound and not result.interrupted


def spoilt_figures(summaries: Sequence[Summary], shown: Sequence[float] = ()) -> list[str]:
    """Figures of the main view of which the client may be more than a tenth, as "TPOT P99", in the tables' order.

    Those of the percentiles `shown` come first.
    """
    metrics = list(METRIC_NAMES)
    found = spoilt(steady_or_whole(summaries).from_schedule)
    found.sort(key=lambda each: (each[1].p not in shown, metrics.index(each[0]), each[1].p))
    return [f"{METRIC_NAMES[metric]} P{claim.p:g}" for metric, claim in found]


def of_runs(runs: Sequence[Run], target: float = USUAL.attainment) -> tuple[Banner, ...]:
    """Say which runs of a workload were client-bound, and up to what load the objectives held.

    A client only ever adds to latencies, so objectives that were met by its clock were met. Only a run in which the
    client was the limit and which missed them says nothing of the server.
    """
    found = []
    bound = sorted(load_of(result) for result, _ in runs if result.client.bound)
    if bound:
        loads = ", ".join(number(load) for load in bound)
        line = f"At a load of {loads} this client was the limit; the server may do better. Run it on another machine."
        found.append(Banner("CLIENT-BOUND", (line,), "warn"))
    attained = {
        load_of(result): view.attainment
        for result, summaries in sorted(runs, key=lambda run: load_of(run[0]))
        if (view := steady_or_whole(summaries)).attainment is not None
        and not (result.client.bound and outcome(view.attainment, target) == "missed")
    }
    return (*found, _highest_load(attained, target)) if attained else tuple(found)


def _highest_load(attained: dict[float, Attainment], target: float) -> Banner:
    """Say up to which load the objectives held. The loads rise."""
    decided = {load: outcome(found, target) for load, found in attained.items()}
    wanted = f"{100 * target:g} % of the requests met their objectives"
    first_missed = min((load for load, decision in decided.items() if decision == "missed"), default=math.inf)
    below = {load: decision for load, decision in decided.items() if load < first_missed}
    first_open = min((load for load, decision in below.items() if decision == "undecided"), default=math.inf)
    if held := [load for load in below if load < first_open]:
        line = f"With 95 % confidence {wanted} at every load up to {number(max(held))}, of those that were run."
        return Banner(f"Objectives held up to {number(max(held))}", (line,), "good")
    if below:
        shares = ", ".join(f"{number(load)} ({100 * attained[load].share:.4g} %)" for load in below)
        enough = math.ceil(math.log(0.025) / math.log(target))
        line = (
            f"Objectives met, by load: {shares}. To show {100 * target:g} %, each load needs at least "
            f"{enough:,} requests, and more if any misses its objectives: raise --num-prompts."
        )
        return Banner("Objectives: too few requests to decide", (line,), "warn")
    lowest = min(decided)
    line = f"At the lowest load, {number(lowest)}, {100 * attained[lowest].share:.4g} % met their objectives."
    return Banner("Objectives missed at every load", (line,), "bad")


def other_notes(whole: Summary) -> list[str]:
    """Notes that no banner says."""
    said = ("client-bound:", "interrupted:", "no steady state:")
    return [note for note in whole.notes if not note.startswith(said)]


def failures_by_kind(result: RunResult) -> list[tuple[str, int, str]]:
    """Kind, how many, and the commonest message of that kind; the commonest kind first."""
    by_kind: dict[str, Counter[str]] = {}
    for record in result.records:
        if record.failed:
            by_kind.setdefault(str(record.failure_kind), Counter())[record.reason] += 1
    rows = [(kind, messages.total(), messages.most_common(1)[0][0]) for kind, messages in by_kind.items()]
    return sorted(rows, key=lambda row: -row[1])


def outcome(attainment: Attainment, target: float) -> Literal["held", "missed", "undecided"]:
    """Whether the share that met the objectives is above the target, below it, or too uncertain to say."""
    if attainment.low >= target:
        return "held"
    return "missed" if attainment.high < target else "undecided"


def objectives_in_words(objectives: dict[str, float]) -> str:
    """ "TTFT ≤ 200 ms, TPOT ≤ 50 ms"; those of a class carry its name."""
    words = []
    for key, limit in objectives.items():
        class_name, dot, metric = key.rpartition(".")
        name = METRIC_NAMES.get(f"{metric}_ms", metric)
        words.append(f"{plain(class_name, 24) + ' ' if dot else ''}{name} ≤ {number(limit)} ms")
    return ", ".join(words)


def _main_views(summaries: Sequence[Summary]) -> list[Summary]:
    """The steady state where there is one, else the whole run, and the classes."""
    return [steady_or_whole(summaries), *(view for view in summaries if view.name.startswith("class "))]


def _no_answer(result: RunResult) -> Banner | None:
    if any(record.ok for record in result.records):
        return None
    if not result.records:
        return Banner("NO ANSWER", ("There are no latencies, because no request was made.",))
    requests = count(len(result.records), "request")
    if all(record.cancelled for record in result.records):
        return Banner("NO ANSWER", (f"Each of {requests} was cancelled by its client.",))
    reasons = [f"{kind}, {plain(message, 160)}" for kind, _, message in failures_by_kind(result)[:1]]
    line = ": ".join([f"none of {requests} succeeded", *reasons])
    return Banner("NO ANSWER", (sentence(line),))


def _client_bound(result: RunResult) -> Banner | None:
    if not result.client.bound:
        return None
    advice = "The figures are not the server's alone: run the client on another machine, or at a lower rate."
    return Banner("CLIENT-BOUND", (*map(sentence, result.client.reasons), advice))


def _spoilt(result: RunResult, summaries: Sequence[Summary]) -> Banner | None:
    """The figures that the client may have made more than a tenth of; the run is valid without them."""
    found = spoilt(steady_or_whole(summaries).from_schedule)
    if not found or result.client.bound:
        return None
    named = ", ".join(
        f"{METRIC_NAMES[metric]} P{claim.p:g} by up to {number(claim.client_ms)} ms ({100 * claim.client_share:.0f} %)"
        for metric, claim in found[:MOST_SPOILT_SHOWN]
    )
    more = f", and {len(found) - MOST_SPOILT_SHOWN} more" if len(found) > MOST_SPOILT_SHOWN else ""
    line = f"This client's own delays may have raised {named}{more}. Do not quote these figures; the others are valid."
    return Banner("CLIENT DELAYS", (line,), "warn")


def _interrupted(result: RunResult) -> Banner | None:
    if not result.interrupted:
        return None
    sent = sum(record.sent_ns > 0 for record in result.records)
    asked = result.settings.get("num_prompts", len(result.records))
    early = result.settings.get("ended_early")
    began = f"Ended early, as {early}," if early else "Interrupted"
    line = (
        f"{began} after {number(result.duration_s)} s: {sent:,} of {asked:,} sent; the "
        "figures are of those that were answered."
    )
    return Banner("ENDED EARLY" if early else "INTERRUPTED", (line,))


def _failures(result: RunResult, most: float) -> Banner | None:
    rows = [row for row in failures_by_kind(result) if row[0] != FailureKind.REFUSED]
    if not rows:
        return None
    failed = sum(row[1] for row in rows)
    share = failed / len(result.records)
    grave = share > most
    title = f"{count(failed, 'request').upper()} FAILED ({number(100 * share)} %)"
    lines = tuple(
        f"{kind} × {times:,}, for example: {plain(message, 160).rstrip('.')}." for kind, times, message in rows
    )
    limit = (f"More than {100 * most:g} % failed: the run is not valid.",) if grave else ()
    return Banner(title, (*lines, *limit), "bad" if grave else "warn")


def _refused(result: RunResult) -> Banner | None:
    found = next((row for row in failures_by_kind(result) if row[0] == FailureKind.REFUSED), None)
    if found is None:
        return None
    _, times, message = found
    title = f"{count(times, 'request')} refused ({number(100 * times / len(result.records))} %)"
    line = (
        f"The server kept a limit, for example: {plain(message, 160)}. These requests have no latency and have missed "
        "their objectives. They do not make the run invalid."
    )
    return Banner(title, (line,), "warn")


def _objectives(view: Summary, target: float) -> Banner | None:
    found = view.attainment
    if found is None or not found.total:
        return None
    decision = outcome(found, target)
    words = {
        "held": f"Objectives held ({view.name})",
        "missed": f"Objectives missed ({view.name})",
        "undecided": f"Objectives: too few requests to decide ({view.name})",
    }[decision]
    by = {key: times for key, times in found.missed_by.items() if times}
    unanswered = by.pop(FAILED, 0)
    missed = ", ".join(f"{METRIC_NAMES.get(key + '_ms', key)} by {times:,}" for key, times in by.items())
    why = f"; missed: {missed}" * bool(missed) + f"; not answered: {unanswered:,}" * bool(unanswered)
    line = (
        f"{100 * found.share:.4g} % of {count(found.total, 'request')} met {objectives_in_words(found.objectives)} "
        f"(95 % interval {100 * found.low:.4g} to {100 * found.high:.4g} %, target {100 * target:g} %)"
    )
    tone: dict[str, Literal["good", "bad", "warn"]] = {"held": "good", "missed": "bad", "undecided": "warn"}
    return Banner(plain(words, 90), (f"{line}{why}.",), tone[decision])


def _steady(summaries: Sequence[Summary]) -> Banner | None:
    window = next((view.window for view in summaries if view.name == "steady state"), None)
    if window is not None:
        began = summaries[0].window.began_ns
        low, high = (window.began_ns - began) / 1e9, (window.ended_ns - began) / 1e9
        where = f"From {number(low)} to {number(high)} s of the run: {sentence(plain(window.reason, 200))}"
        return Banner("Steady", (where,), "good")
    reason = next((note for note in summaries[0].notes if note.startswith("no steady state")), "")
    if not reason:
        return None
    return Banner("No steady state", (sentence(plain(reason.removeprefix("no steady state: "), 300)),), "warn")


def _omission(summaries: Sequence[Summary]) -> Banner | None:
    """Where latency counted from the send hides what requests waited before they were sent."""
    whole = summaries[0]
    for metric in ("ttft_ms", "e2el_ms"):
        due, sent = whole.from_schedule.get(metric), whole.from_send.get(metric)
        for p in (99.0, 90.0):
            claims = [each.percentile(p) if each else None for each in (due, sent)]
            values = [claim.value if claim else None for claim in claims]
            if values[0] is None or values[1] is None:
                continue
            if values[0] > OMISSION_RATIO * values[1] and values[0] - values[1] > OMISSION_MS:
                line = (
                    f"P{p:g} {METRIC_NAMES[metric]} is {number(values[0])} ms from when requests were due, and only "
                    f"{number(values[1])} ms from when they were sent: values from the send leave this wait out."
                )
                return Banner("Requests waited before they were sent", (line,), "warn")
    return None
