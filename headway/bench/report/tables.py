"""The tables of a run, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headway.bench.options import Claims
from headway.bench.report.phases import SERVER_REST, part_of
from headway.bench.report.verdict import METRIC_NAMES, failures_by_kind, is_valid, objectives_in_words, outcome
from headway.bench.report.views import Run, load_of, main_views, part_views, probe_view, steady_or_whole, tokens_per_s
from headway.load.measures.client_effect import SPOILT, is_spoilt
from headway.load.measures.numbers import Attainment, Distribution, Percentile, Summary, Validity
from headway.load.record import ClientHealth, RunResult
from headway.report.parts import NOTHING, Cell, Table, Tone, cells
from headway.report.style import number, plain

Row = tuple[str, Sequence[str | Cell]]  # its label, and a value for each column

LATENCY_NOTE = (
    "Milliseconds, with the 95 % interval below each percentile. Schedule: counted from when a request was due; send: "
    "from when it was sent. Needs N+: this percentile needs at least N samples; more if requests depend on each other, "
    "so the whole run may have a percentile that its steady state lacks."
)
CLIENT_NOTE = (
    " Client: the largest share of a figure that this client's own delays may have added; above 10 % the figure is not "
    "valid."
)
RATES = (
    ("request_throughput", "requests/s"),
    ("output_throughput", "output tokens/s"),
    ("total_token_throughput", "all tokens/s"),
    ("max_output_tokens_per_s", "most output tokens in a second"),
    ("mean_concurrent_requests", "in flight, mean"),
    ("max_concurrent_requests", "in flight, most"),
)

VECTOR_RATES = (RATES[0], ("total_token_throughput", "input tokens/s"), *RATES[4:])
TOKENS = (("prompt", "prompt tokens"), ("cached", "of them cached"), ("output", "output tokens"))

TOKEN_COLUMNS = (("TTFT P50", "ttft_ms", 50.0), ("TTFT P99", "ttft_ms", 99.0), ("TPOT P99", "tpot_ms", 99.0))
E2EL_COLUMNS = (("E2EL P50", "e2el_ms", 50.0), ("E2EL P99", "e2el_ms", 99.0))


def overview(summaries: Sequence[Summary]) -> Table:
    """Requests, rates, tokens, goodput and cost: a column for each view."""
    views = main_views(summaries)
    rows: list[Row] = [
        ("requests answered", [f"{view.completed:,}" for view in views]),
        *_refused_rows("requests refused by a limit", views),
        ("requests failed", [_failed_cell(view) for view in views]),
        ("requests cancelled by clients", [f"{view.cancelled:,}" for view in views]),
        ("requests sent again", [Cell(f"{view.resent:,}", "warn" if view.resent else "") for view in views]),
        ("seconds", [number((view.window.ended_ns - view.window.began_ns) / 1e9) for view in views]),
    ]
    rates, counts = (RATES, TOKENS) if tokens_per_s(views[0])[1] == "output tokens/s" else (VECTOR_RATES, TOKENS[:2])
    rows += [(label, [number(view.rates.get(key, 0.0)) for view in views]) for key, label in rates]
    rows += _request_rows(views)
    for key, label in counts:
        rows.append((label, [f"{view.tokens.get(key, 0):,}" for view in views]))
    rows += _graph_rows(views) + _validity_rows(views) + _goodput_rows(views) + _cost_rows(views)
    return Table(
        "Run", ("", *(plain(view.name) for view in views)), tuple(cells(label, *values) for label, values in rows)
    )


def _request_rows(views: Sequence[Summary]) -> list[Row]:
    """Rows of what a request is like: its tokens/s, and when its answer begins after reasoning."""
    asked = (
        ("tokens/s of a request, median", [view.tps for view in views], 50.0),
        ("tokens/s of the slowest tenth, at most", [view.tps for view in views], 10.0),
        ("first token after reasoning, ms, median", [view.first_answer_ms for view in views], 50.0),
    )
    return [
        (label, [percentile_cell(each.percentile(p)) if each else NOTHING for each in found])
        for label, found, p in asked
        if any(found)
    ]


def _failed_cell(view: Summary) -> Cell:
    failed = view.failed - view.refused
    return Cell(f"{failed:,}", "bad" if failed else "")


def _refused_rows(label: str, views: Sequence[Summary]) -> list[Row]:
    return [(label, [f"{view.refused:,}" for view in views])] if any(view.refused for view in views) else []


def _graph_rows(views: Sequence[Summary]) -> list[Row]:
    found = [view.graphs for view in views]
    if not any(found):
        return []
    rows: list[Row] = [
        ("graphs complete", [f"{each.complete:,} of {each.total:,}" if each else NOTHING for each in found])
    ]
    for p in (50.0, 90.0, 99.0):
        claims = [each.makespan_ms.percentile(p) if each and each.makespan_ms else None for each in found]
        if any(claims):
            rows.append((f"makespan P{p:g}, ms", [percentile_cell(claim) for claim in claims]))
    served = [each.served_share if each else None for each in found]
    if any(served):
        rows.append(("of which waiting for answers", [f"{100 * each:.3g} %" if each else NOTHING for each in served]))
    return rows


def _validity_rows(views: Sequence[Summary]) -> list[Row]:
    found = [view.validity for view in views]
    return [("have the structure asked for", [_share_cell(each) for each in found])] if any(found) else []


def _goodput_rows(views: Sequence[Summary]) -> list[Row]:
    found = [view.attainment for view in views]
    if not any(found):
        return []
    rows: list[Row] = [
        ("met their objectives", [_share_cell(each) for each in found]),
        ("goodput, requests/s", [number(each.requests_per_s) if each else NOTHING for each in found]),
    ]
    if any(view.tokens.get("output", 0) for view in views):
        tokens = [number(each.tokens_per_s) if each else NOTHING for each in found]
        rows.append(("goodput, output tokens/s", tokens))
    return rows


def _share_cell(found: Attainment | Validity | None) -> Cell:
    if found is None or not (found.total if isinstance(found, Attainment) else found.asked):
        return NOTHING
    return Cell(f"{100 * found.share:.4g} %", detail=f"{100 * found.low:.4g}–{100 * found.high:.4g}")


def _cost_rows(views: Sequence[Summary]) -> list[Row]:
    named = (
        ("cost per 1M output tokens", [view.cost_per_million_output_tokens for view in views]),
        ("cost per 1M tokens", [view.cost_per_million_tokens for view in views]),
        ("output tokens per joule (tokens/s/W)", [view.tokens_per_joule for view in views]),
    )
    return [
        (label, [NOTHING if value is None else number(value) for value in values])
        for label, values in named
        if any(value is not None for value in values)
    ]


def latency_tables(summaries: Sequence[Summary]) -> list[Table]:
    """Latency tables of the whole run and of its steady state. Only the last one explains the columns."""
    found = [latency_table(view) for view in main_views(summaries) if view.from_schedule]
    return [replace(table, note="") for table in found[:-1]] + found[-1:]


def latency_table(view: Summary) -> Table:
    """Every latency of a view, from the schedule and from the send: mean and percentiles with their intervals."""
    claims = [claim for each in view.from_schedule.values() for claim in each.percentiles]
    shown, has_client = sorted({claim.p for claim in claims}), any(claim.client_share for claim in claims)
    rows = []
    for metric, name in METRIC_NAMES.items():
        due, sent = view.from_schedule.get(metric), view.from_send.get(metric)
        if due is None or sent is None:
            continue
        if metric in ("tpot_ms", "itl_ms"):
            rows.append(_latency_row(name, due, shown))
        else:
            rows.append(_latency_row(f"{name}, schedule", due, shown))
            rows.append(_latency_row(f"{name}, send", sent, shown, quiet=True))
    columns = ("ms", "samples", "mean", *(f"P{p:g}" for p in shown), "client")
    if not has_client:  # as in a simulation
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    note = LATENCY_NOTE + CLIENT_NOTE * has_client
    return Table(f"Latency, {plain(view.name)}", columns, tuple(rows), note=note)


def _latency_row(name: str, found: Distribution, shown: Sequence[float], quiet: bool = False) -> tuple[Cell, ...]:
    tone: Tone = "quiet" if quiet else ""
    claims = [percentile_cell(found.percentile(p), tone) for p in shown]
    most = max((claim.client_share for claim in found.percentiles), default=0.0)
    added = Cell("< 1 %" if most < 0.01 else f"≤ {100 * most:.0f} %", "bad" if most > SPOILT else tone)
    return (Cell(name, tone), Cell(f"{found.count:,}", tone), Cell(number(found.mean), tone), *claims, added)


def percentile_cell(claim: Percentile | None, tone: Tone = "") -> Cell:
    """The value over its interval, or how many samples the claim would need."""
    if claim is None:
        return NOTHING
    if claim.value is None:
        return Cell(f"needs {claim.needs:,}+" if claim.needs else "refused", "quiet")
    low, high = ("?" if bound is None else number(bound) for bound in (claim.low, claim.high))
    if is_spoilt(claim):
        return Cell(number(claim.value), "bad", f"client ≤ {100 * claim.client_share:.0f} %")
    return Cell(number(claim.value), tone, f"{low}–{high}")


def part_tables(summaries: Sequence[Summary]) -> list[Table]:
    """Each class of a mix, each tenant, and requests by the tokens of their prompts: latencies and goodput."""
    kinds = (("Classes", "class_name"), ("Tenants", "tenant"), ("By prompt length, tokens", "prompt_tokens"))
    return [_part_table(title, found) for title, kind in kinds if (found := part_views(summaries, kind))]


def _part_table(title: str, parts: Sequence[tuple[str, Summary]]) -> Table:
    names, views = [plain(name, 24) for name, _ in parts], [view for _, view in parts]
    rows = _apart_rows(views) + _answer_rows(views)
    rows += _graph_rows(views) + _validity_rows(views) + _goodput_rows(views)
    stated = {name: view.attainment.objectives for name, view in zip(names, views, strict=True) if view.attainment}
    if len(stated) == len(names) > 1 and all(limits == stated[names[0]] for limits in stated.values()):
        stated = {"each": stated[names[0]]}
    note = "; ".join(f"{name}: {objectives_in_words(limits)}" for name, limits in stated.items() if limits)
    shown = tuple(cells(label, *values) for label, values in rows)
    return Table(title, ("", *names), shown, note=f"Latencies from the schedule. {note}".strip())


def probe_table(summaries: Sequence[Summary]) -> Table | None:
    """The latencies of the probes; None without a probe stream."""
    view = probe_view(summaries)
    if view is None:
        return None
    rows = tuple(cells(label, *values) for label, values in _apart_rows([view]))
    note = "Short requests in addition to the load; no figure of the load includes them. Latencies from the schedule."
    return Table("Probes", ("", "probes"), rows, note=note)


def _apart_rows(views: Sequence[Summary]) -> list[Row]:
    """Rows with the requests and latencies of several views, one column each."""
    rows: list[Row] = [
        ("answered", [f"{view.completed:,}" for view in views]),
        *_refused_rows("refused by a limit", views),
        ("failed", [_failed_cell(view) for view in views]),
        ("cancelled", [f"{view.cancelled:,}" for view in views]),
    ]
    for metric, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "E2EL")):
        if not any(metric in view.from_schedule for view in views):
            continue
        rows += [(f"{name} P{p:g}, ms", [_claim_cell(view, metric, p) for view in views]) for p in (50.0, 90.0, 99.0)]
    return rows


def _answer_rows(views: Sequence[Summary]) -> list[Row]:
    """How long answers were, in tokens and in steps of the server."""
    if not any(view.answers for view in views):
        return []
    rows: list[Row] = []
    for key, label in (("output_tokens", "output tokens"), ("steps", "steps")):
        found = [view.answers.get(key) for view in views]
        rows += [
            (f"{label} of an answer, mean", [NOTHING if each is None else number(each.mean) for each in found]),
            ("  standard deviation", [NOTHING if each is None else number(each.std) for each in found]),
        ]
        for p in (90.0, 99.0):
            rows.append(
                (f"  P{p:g}", [NOTHING if each is None else percentile_cell(each.percentile(p)) for each in found])
            )
    per_step = [
        view.answers["output_tokens"].mean / view.answers["steps"].mean if view.answers else 0.0 for view in views
    ]
    rows.append(("tokens of a step", [number(each) if each else NOTHING for each in per_step]))
    cut = [view.ended_by.get("length", 0) / view.completed if view.completed else 0.0 for view in views]
    rows.append(("ended by max_tokens", [f"{100 * each:.3g} %" for each in cut]))
    return rows


def _claim_cell(view: Summary, metric: str, p: float) -> Cell:
    found = view.from_schedule.get(metric)
    return percentile_cell(found.percentile(p)) if found else NOTHING


KEY_NOTE = f" “{SERVER_REST.label}” in a picture of TTFT: transport, schedule and sampling together."
SUMS = {"queue": "All queue phases", "stall": "All stalls"}


def phase_table(view: Summary, pictured: bool = False) -> Table | None:
    """Where the server says that time went; None where it does not say.

    Args:
        pictured: a column says what each phase is called in the pictures.
    """
    if not view.phases_ms:
        return None
    phases = {name: found for name, found in view.phases_ms.items() if name not in SUMS}
    whole = sum(found.mean for found in phases.values())
    rows = []
    for name, found in phases.items():
        called = (Cell(part_of(name).label),) if pictured else ()
        claims = [_without_interval(percentile_cell(found.percentile(p))) for p in (50.0, 99.0)]
        share = f"{100 * found.mean / whole:.1f} %" if whole else "–"
        figures = (Cell(share), Cell(number(found.mean)), *claims, Cell(number(found.maximum)))
        rows.append((Cell(plain(name)), *called, *figures))
    return Table(
        f"Where the server says the time went, {plain(view.name)}",
        ("phase", *(("in the pictures",) if pictured else ()), "share", "mean", "P50", "P99", "most"),
        tuple(rows),
        left=frozenset({0, 1} if pictured else {0}),
        note=f"Milliseconds per request. Shares are of the mean. {_sums_in_words(view, whole)}{KEY_NOTE * pictured}",
    )


def _sums_in_words(view: Summary, whole: float) -> str:
    """What the phases of the queue, and those of stalls, sum to."""
    sums = {words: view.phases_ms[name].mean for name, words in SUMS.items() if name in view.phases_ms}
    return " ".join(f"{words}: {number(mean)} ms, {100 * mean / (whole or 1):.1f} %." for words, mean in sums.items())


def _without_interval(cell: Cell) -> Cell:
    return Cell(cell.text, cell.tone)


METRIC_TIMES = (
    ("ttft", "first token after arrival"),
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("decode", "decode"),
    ("step", "step of the engine"),
)
GAUGES = (
    ("running", "requests running", 1),
    ("waiting", "requests waiting", 1),
    ("kv_cache_usage", "KV cache, %", 100),
    ("utilisation", "busy with steps, %", 100),
)


def metrics_table(metrics: Mapping[str, Any]) -> Table | None:
    """What the server's own metrics say of the run (`server_metrics`); None where it has none."""
    rows = [
        cells(f"{label}, ms", number(mean), NOTHING)
        for key, label in METRIC_TIMES
        if (mean := metrics.get(key, {}).get("mean_ms")) is not None
    ]
    for key, label, scale in GAUGES:
        if gauge := metrics.get("gauges", {}).get(key):
            rows.append(cells(label, number(scale * gauge["mean"]), number(scale * gauge["peak"])))
    if metrics.get("preemptions") is not None:
        rows.append(cells("preemptions", f"{metrics['preemptions']:,.0f}", NOTHING))
    if (rate := (metrics.get("prefix_cache") or {}).get("hit_rate")) is not None:
        rows.append(cells("prompt tokens found in its prefix cache, %", number(100 * rate), NOTHING))
    if not rows:
        return None
    note = "Includes other clients' requests."
    return Table("By the server's own metrics", ("", "mean", "most"), tuple(rows), note=note)


def failure_table(result: RunResult) -> Table | None:
    rows = [cells(kind, f"{times:,}", plain(message, 200)) for kind, times, message in failures_by_kind(result)]
    if not rows:
        return None
    return Table("Failures", ("kind", "requests", "for example"), tuple(rows), left=frozenset({0, 2}))


def client_table(client: ClientHealth) -> Table | None:
    """How late the client itself was; None where there was none, as in a simulation."""
    if not client.loop_lag_ms and not client.start_lag_ms:
        return None
    rows = [
        _lag_row("sends after their schedule, ms", client.start_lag_ms),
        _lag_row("event loop after its timer, ms", client.loop_lag_ms),
        _lag_row("unread bytes in its sockets", client.backlog_bytes),
    ]
    note = f"It used {100 * client.cpu_share:.0f} % of a core."
    return Table("The client itself", ("", "P50", "P99", "most"), tuple(rows), note=note)


def _lag_row(name: str, values: Sequence[float]) -> tuple[Cell, ...]:
    if not len(values):
        return cells(name, NOTHING, NOTHING, NOTHING)
    found = (*np.quantile(np.asarray(values, dtype=float), (0.5, 0.99)), max(values))
    return cells(name, *(number(float(value)) for value in found))


def server_table(server: Mapping[str, Any]) -> Table | None:
    """What the server says of itself; its metrics have a table of their own."""
    return mapping_table("The server", {name: value for name, value in server.items() if name != "metrics"})


def mapping_table(title: str, values: Mapping[str, Any]) -> Table | None:
    """Settings and the like; nested ones as dotted names. None when there is nothing."""
    rows = tuple(cells(plain(name, 60), plain(text, 160)) for name, text in _flat(values))
    return Table(title, ("", ""), rows, left=frozenset({0, 1})) if rows else None


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif (text := value_in_words(value)) != NOTHING.text:
            found.append((f"{prefix}{name}", text))
    return found


def value_in_words(value: Any) -> str:
    """A setting for a table: "yes", "1,000.5", "ttft 300, tpot 50"; a dash for None and whatever is empty."""
    if isinstance(value, Mapping):
        value = [f"{name} {value_in_words(each)}" for name, each in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(value_in_words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return NOTHING.text if value is None or value == "" else str(value)


def sweep_table(
    runs: Sequence[Run], load: str, claims: Claims, intervals: bool = True, names: Sequence[str] | None = None
) -> Table:
    """A row for each run of a sweep or search, in the order given; a narrow one without intervals.

    Args:
        names: the names of the runs; None tells them apart by their loads, which `load` is the heading of.
    """
    rows = []
    wholes = [summaries[0] for _, summaries in runs]
    of_vectors = any(tokens_per_s(whole)[1] == "input tokens/s" for whole in wholes)
    shown = E2EL_COLUMNS if of_vectors else TOKEN_COLUMNS
    any_failed, any_refused = any(each.failed > each.refused for each in wholes), any(each.refused for each in wholes)
    for at, (result, summaries) in enumerate(runs):
        view = steady_or_whole(summaries)
        valid = is_valid(result, summaries, claims)
        word = "client" if result.client.bound else "valid" if valid else "not valid"
        found = view.attainment
        decision = outcome(found, claims.attainment) if found is not None and found.total else ""
        tone: Tone = {"held": "good", "missed": "bad"}.get(decision, "quiet")  # type: ignore[assignment]
        rows.append(
            cells(
                number(load_of(result)) if names is None else names[at],
                f"{wholes[at].completed:,}",
                *([f"{wholes[at].refused:,}"] if any_refused else []),
                *([_failed_cell(wholes[at])] if any_failed else []),
                number(view.rates.get("request_throughput", 0.0)),
                number(tokens_per_s(view)[0]),
                *(_claim_cell(view, metric, p) for _, metric, p in shown),
                replace(_share_cell(found), tone=tone),
                Cell(word, "" if valid else "bad"),
            )
        )
    more = ("refused",) * any_refused + ("failed",) * any_failed
    columns = (load, "done", *more, "req/s", "tok/s", *(name for name, *_ in shown), "met", "run")
    if not intervals:
        rows = [tuple(_without_interval(cell) for cell in row) for row in rows]
    note = (
        "Latencies in ms from the schedule. Latencies, rates and shares are of the steady state if there is one, "
        "otherwise of the whole run. Needs N+: this percentile needs at least N samples."
    )
    if any(result.client.bound for result, _ in runs):
        note += " `client`: this client was the limit."
    return Table("Runs", columns, tuple(rows), note=note)
