"""The pictures of a run, each with the sentence that says what it shows, computed from the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.bench.report import figures, figures_rates, figures_requests, figures_time, samples
from headway.bench.report.figures_rates import LoadPoint
from headway.bench.report.phases import (
    GROUP_WORDS,
    Part,
    Slice,
    growth_in_words,
    in_words,
    lengths,
    median_and_slowest,
    most_in_words,
)
from headway.bench.report.views import main_views
from headway.load.measures.latencies import Latencies
from headway.load.measures.numbers import Summary, Window
from headway.load.measures.phases import phases_of
from headway.load.record import RequestRecord, RunResult
from headway.report.parts import Picture
from headway.report.style import number, plain, sentence


def latency_pictures(result: RunResult, whole: Summary) -> list[Picture]:
    """How latencies are distributed; a second picture where there are classes."""
    figure = figures.latency_cdf(result.records, whole)
    found = [Picture("latency-cdf", "How latencies are distributed", _cdf_caption(whole), figure)]
    names = samples.class_names(result.records)
    if len(names) > 1:
        shown = names[: figures.MOST_GROUPS]
        groups = {
            plain(name or "(no class)", 24): [each for each in result.records if each.class_name == name]
            for name in shown
        }
        figure = figures.groups_cdf(groups)
        found.append(Picture("class-cdf", "Latencies of each class", _groups_caption(groups), figure))
    return found


def tail_pictures(result: RunResult) -> list[Picture]:
    """What the tail is made of: the composition, and the slowest requests one by one."""
    names = {"e2el": "E2EL"} if _is_of_vectors(result) else NAMES
    slices = {metric: median_and_slowest(result.records, metric) for metric in names}  # type: ignore[arg-type]
    rows = [(f"{name}, {each.name}", each) for metric, name in names.items() for each in slices[metric]]
    made_of, slowest = figures_requests.composition(rows), figures_requests.slowest_requests(result.records)
    return [
        Picture("tail-composition", "What the tail is made of", _composition_caption(slices), made_of),
        Picture("slowest-requests", "The slowest requests", _slowest_caption(result), slowest),
        timeline_picture(result),
    ]


def timeline_picture(result: RunResult) -> Picture:
    """Requests side by side over the run's time."""
    figure = figures_requests.timeline(result.records, result.began_ns)
    return Picture("timeline", "Every request over time", _timeline_caption(result), figure)


def time_pictures(result: RunResult, summaries: Sequence[Summary]) -> list[Picture]:
    """The run over its time."""
    records, began = result.records, result.began_ns
    steady = next((view.window for view in main_views(summaries)[1:]), None)
    caption, figure = _latency_caption(result), figures_time.latency_over_time(records, began, steady)
    if _is_of_vectors(result):
        found = [Picture("latency-over-time", "Latency over time", caption, figure)]
    else:
        gaps = figures_time.itl_over_time(records, began, steady)
        found = [
            Picture("ttft-over-time", "First tokens over time", caption, figure),
            Picture("itl-over-time", "Gaps between tokens over time", _itl_caption(result, summaries[0]), gaps),
        ]
    return [*found, load_picture(result, steady), *server_pictures(result)]


def _is_of_vectors(result: RunResult) -> bool:
    """Whether all answers are vectors or scores, without tokens."""
    answered = [record for record in result.records if record.ok]
    return bool(answered) and all(record.is_vector for record in answered)


def server_pictures(result: RunResult) -> list[Picture]:
    """What the server said of itself over the run's time; none where it said nothing."""
    metrics = result.server.get("metrics") or {}
    gauges = metrics.get("gauges_over_time")
    if not gauges:
        return []
    words = []
    for name, what in (("kv_cache_usage", "of its KV cache in use"), ("utilisation", "of the time busy with steps")):
        if found := metrics["gauges"].get(name):
            words.append(f"{number(100 * found['mean'])} % {what} on average, {number(100 * found['peak'])} % at most")
    figure = figures_time.server_over_time(gauges)
    return [Picture("server-over-time", "The server over time", sentence("; ".join(words) or "By its gauges"), figure)]


def load_picture(result: RunResult, steady: Window | None) -> Picture:
    """Arrivals, requests in flight and tokens over the run's time."""
    figure = figures_time.load_over_time(result.records, result.began_ns, result.ended_ns, steady)
    return Picture("load-over-time", "Load over time", _load_caption(result), figure)


def client_picture(result: RunResult) -> Picture:
    """How late the client itself was."""
    client = result.client
    lag = np.asarray(client.start_lag_ms, dtype=float)
    loop = np.asarray(client.loop_lag_ms, dtype=float)
    words = []
    if len(lag):
        words.append(f"99 % of the requests were sent within {number(np.quantile(lag, 0.99))} ms of their schedule")
    if len(loop):
        words.append(f"the client's event loop was at most {number(loop.max())} ms late")
    share = "the latency tables show the possible share of each figure"
    verdict = "the run is client-bound" if client.bound else share
    caption = sentence("; ".join([*words, verdict]))
    return Picture("client-lag", "The client itself", caption, figures.client_lag(client))


def load_pictures(points: Sequence[LoadPoint], load: str, target: float = 0.99) -> list[Picture]:
    """Several runs against their load."""
    caption = "Percentiles from the schedule with their 95 % intervals; percentiles with too few requests are left out."
    latency = figures_rates.latency_against_load(points, load)
    found = [Picture("latency-against-load", "Latency against load", caption, latency)]
    if any(point.summary.tokens.get("output", 0) for point in points):
        caption, trade = _front_caption(points), figures_rates.throughput_against_latency(points)
        found.append(Picture("throughput-against-latency", "Throughput against latency", caption, trade))
    caption, goodput = _goodput_caption(points), figures_rates.goodput_against_load(points, load, target)
    return [*found, Picture("goodput-against-load", "Goodput against load", caption, goodput)]


NAMES = {"ttft": "TTFT", "e2el": "E2EL"}


def _cdf_caption(whole: Summary) -> str:
    metric, what = (
        ("ttft_ms", "had their first token") if "ttft_ms" in whole.from_send else ("e2el_ms", "were answered")
    )
    due, sent = whole.from_schedule.get(metric), whole.from_send.get(metric)
    if due is None or sent is None:
        return "No request was answered."
    claims = [claim for claim in due.percentiles if claim.value is not None]
    if not claims:
        return f"{due.count} requests are too few for any percentile."
    tail = claims[-1]
    from_send = sent.percentile(tail.p)
    compared = (
        f"; counted from the send it is {number(from_send.value)} ms"
        if from_send is not None and from_send.value is not None
        else ""
    )
    return (
        f"{tail.p:g} % of the requests {what} within {number(tail.value or 0.0)} ms of when they were "
        f"due{compared}. Where the two curves differ, requests waited before they were sent. Percentiles with enough "
        f"samples are marked."
    )


def _groups_caption(groups: Mapping[str, Sequence[RequestRecord]]) -> str:
    medians, metric = [], "TTFT"
    for name, records in groups.items():
        latencies = Latencies.of(records)
        values = latencies.ttft("schedule")
        if np.isnan(values).any():
            values, metric = latencies.e2el("schedule"), "latency"
        if len(values):
            medians.append(f"{name} {number(float(np.median(values)))} ms")
    return f"Median {metric} from the schedule: {', '.join(medians) or 'no request was answered'}."


def sides_picture(groups: Mapping[str, Sequence[RequestRecord]]) -> Picture:
    """Two sides of a comparison (or more), by what they are called."""
    return Picture("sides-cdf", "Both sides", _groups_caption(groups), figures.groups_cdf(groups))


def _composition_caption(slices: dict[str, list[Slice]]) -> str:
    sentences = []
    for metric, name in NAMES.items():
        if slices.get(metric):
            median, slowest = slices[metric]
            ratio = slowest.total_ms / median.total_ms if median.total_ms else 1.0
            who = "the slowest 1 %" if slowest.name.endswith("%") else "the slowest request"
            words = [
                f"{name}: {who} took {number(slowest.total_ms)} ms, {number(ratio)} times the median",
                in_words(slowest),
                growth_in_words(median, slowest),
            ]
            sentences.append("; ".join(filter(None, words)) + ".")
    return " ".join(sentences) or "Fewer than two requests were answered, so there is no tail to analyse."


def _slowest_caption(result: RunResult) -> str:
    rows = figures_requests.slowest(result.records)
    if not rows:
        return "No request was answered."
    due = [(record.scheduled_ns - result.began_ns) / 1e9 for record in rows]
    return (
        f"The {len(rows)} slowest, by E2EL from the schedule; they were due between {number(min(due))} and "
        f"{number(max(due))} s of the run. The parts of a bar are totals per phase; the dot marks the first token."
    )


def _timeline_caption(result: RunResult) -> str:
    rows, first = figures_requests.timeline_rows(result.records)
    if not rows:
        return "No request was sent."
    totals: dict[Part, float] = {}
    for record in rows:
        for each, length in lengths(record).items():
            if each.group in GROUP_WORDS:
                totals[each] = totals.get(each, 0) + length
    sent = len(samples.sent(result.records))
    part = f"Shown are {len(rows)} of {sent:,} requests, from the {first + 1:,}th on: those around the slowest one. "
    shown = part if len(rows) < sent else ""
    if not any(record.ok for record in rows):
        return f"{shown}None of them was answered."
    if not any(phases_of(record) for record in rows):
        return f"{shown}The server sends no timings, so only the wait and the stream are shown separately."
    words, share = most_in_words(totals)
    return f"{shown}{100 * share:.0f} % of their accounted time was spent {words}."


def _latency_caption(result: RunResult) -> str:
    """The caption about TTFT, or about the latency of whole answers if they are vectors or scores."""
    ttft, _ = figures_time.first_latency(Latencies.of(result.records))
    if not len(ttft):
        return "No request was answered."
    half = len(ttft) // 2
    if half < 10:
        return f"Each dot is a request; the slowest waited {number(float(ttft.max()))} ms."
    return (
        f"The median was {number(float(np.median(ttft[:half])))} ms in the first half of the requests and "
        f"{number(float(np.median(ttft[half:])))} ms in the second; the slowest waited {number(float(ttft.max()))} ms. "
        "A growing median means overload."
    )


def _itl_caption(result: RunResult, whole: Summary) -> str:
    gaps = Latencies.of(result.records).itl_ms
    if not gaps.any():
        return "No request has two chunks of tokens at different times."
    median = float(np.median(gaps))
    long = gaps > 4 * median
    claim = whole.from_schedule["itl_ms"].percentile(99.0) if "itl_ms" in whole.from_schedule else None
    tail = f" and P99 is {number(claim.value)} ms" if claim is not None and claim.value is not None else ""
    share_of_gaps, share_of_time = 100 * float(long.mean()), 100 * float(gaps[long].sum() / gaps.sum())
    return (
        f"The median gap is {number(median)} ms{tail}. Gaps of more than four times the median are "
        f"{share_of_gaps:.2g} % of all gaps and {share_of_time:.2g} % of the time between tokens: the cost of stalls."
    )


def _load_caption(result: RunResult) -> str:
    known = samples.sent(result.records)
    if not known or result.duration_s <= 0:
        return "No request was sent."
    answered = sum(record.ok for record in known)
    span = (max(record.scheduled_ns for record in known) - result.began_ns) / 1e9
    asked = f"{number(len(known) / span)} requests/s were due over {number(span)} s and " if span > 0 else ""
    _, open_ = samples.open_over_time(
        np.asarray([record.sent_ns for record in known], float), np.asarray([record.end_ns for record in known], float)
    )
    rate = number(answered / result.duration_s)
    return sentence(
        f"{asked}{rate} requests/s were answered over the whole {number(result.duration_s)} s; at most "
        f"{int(open_.max()):,} were in flight"
    )


def _front_caption(points: Sequence[LoadPoint]) -> str:
    best = max(points, key=lambda point: point.summary.rates.get("output_throughput", 0.0), default=None)
    if best is None:
        return "There are no runs."
    tokens = number(best.summary.rates.get("output_throughput", 0.0))
    return (
        f"The most output was {tokens} tokens/s, at a load of {number(best.load)}. The speed of a request is "
        "1 / TPOT. A line joins the runs that no other run beats in both."
    )


def _goodput_caption(points: Sequence[LoadPoint]) -> str:
    judged = [(point, point.summary.attainment) for point in points if point.summary.attainment is not None]
    if not judged:
        return "No objectives were given (--goodput), so there is no goodput."
    best, found = max(judged, key=lambda each: each[1].requests_per_s)
    return (
        f"Goodput is highest at a load of {number(best.load)}: {number(found.requests_per_s)} requests/s that "
        "met their objectives."
    )
