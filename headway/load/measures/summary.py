"""A run in numbers: the whole of it, its steady state, and each class of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headway.cost.price import cost_per_million
from headway.load.measures.client_effect import with_client
from headway.load.measures.latencies import Latencies, Since
from headway.load.measures.numbers import PERCENTILES, Distribution, Graphs, Summary, Validity, Window
from headway.load.measures.percentiles import distribution, proportion_interval
from headway.load.measures.phases import phase_lengths
from headway.load.measures.slo import NO_GOALS, Goals, attainment
from headway.load.measures.steady import find_steady_window
from headway.load.measures.throughput import prompt_tokens, whole_run_rates, window_rates
from headway.load.record import ClientHealth, FailureKind, RequestRecord, RunResult

WHOLE_RUN = "whole run"
STEADY_STATE = "steady state"
PROBE_STREAM = "probe stream"
PARTS = {"class_name": "class ", "tenant": "tenant "}  # what a run is divided by, and how such views are called
LENGTHS = "prompts of "  # how views of requests by the length of their prompts begin
BANDS = 4  # of prompt lengths, with as many requests each as equal lengths allow
LEAST_IN_BANDS = 40  # requests; of fewer, a band would say nothing
NO_TEXTS = ("random", "prefix_repetition", "multi_turn", "azure", "burstgpt", "mooncake")  # datasets of random tokens
OF_TPS, OF_FIRST_ANSWERS = (10.0, 50.0, 90.0), (50.0, 90.0, 99.0)


Part = Callable[[RequestRecord], bool]


def summarise_all(
    result: RunResult,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    goals: Goals = NO_GOALS,
    price_per_hour: float | None = None,
) -> list[Summary]:
    """The whole run first, then its steady state where there is one, then each class and each tenant by name, and
    requests by the length of their prompts, over the whole run, and at last the probes, which are in none of these.

    Without a steady state the first summary's notes say why. Arguments are those of `summarise`.
    """
    options: dict[str, Any] = {
        "percentiles": percentiles,
        "goals": goals,
        "price_per_hour": price_per_hour,
    }
    whole = summarise(result, **options)
    steady = find_steady_window(result.records, result.began_ns, result.ended_ns)
    summaries = [whole]
    if steady.found:
        summaries.append(summarise(result, name=STEADY_STATE, window=steady, **options))
    else:
        whole.notes.append(f"no steady state: {steady.reason}")
    for kind in PARTS:
        names = sorted({getattr(record, kind) for record in result.records} - {""})
        parts = [(PARTS[kind] + name, partial(_is_of, kind, name)) for name in names]
        summaries += [summarise(result, name=name, part=part, **options) for name, part in parts]
    for low, high in length_bands(result.records):
        part = partial(_is_between, low, high)
        summaries.append(summarise(result, name=f"{LENGTHS}{low:,} to {high:,}", part=part, **options))
    if result.probes:
        beside = replace(result, records=result.probes)
        part = partial(_is_of, "class_name", "")
        summaries.append(summarise(beside, name=PROBE_STREAM, part=part, percentiles=percentiles))
    return summaries


def _is_of(kind: str, name: str, record: RequestRecord) -> bool:
    return bool(getattr(record, kind) == name)


def _is_between(low: int, high: int, record: RequestRecord) -> bool:
    return low <= prompt_tokens(record) <= high


def length_bands(records: Sequence[RequestRecord]) -> list[tuple[int, int]]:
    """The shortest and longest prompt, in tokens, of each of up to BANDS groups that have about as many requests.

    There are none where lengths do not differ, or of fewer than LEAST_IN_BANDS requests.
    """
    lengths = np.sort([prompt_tokens(record) for record in records])
    if len(lengths) < LEAST_IN_BANDS or lengths[0] == lengths[-1]:
        return []
    edges = np.unique(np.quantile(lengths, np.arange(1, BANDS) / BANDS, method="higher"))
    groups = np.split(lengths, np.unique(np.searchsorted(lengths, edges, side="right")))
    bands = [(int(group[0]), int(group[-1])) for group in groups if len(group)]
    return bands if len(bands) > 1 else []


def summarise(
    result: RunResult,
    *,
    name: str = WHOLE_RUN,
    window: Window | None = None,
    part: Part | None = None,
    percentiles: Sequence[float] = PERCENTILES,
    goals: Goals = NO_GOALS,
    price_per_hour: float | None = None,
) -> Summary:
    """One view of a run.

    Args:
        window: latencies, failures and attainment of the requests that were due in it, rates of what came in it. None,
            or a window that was not found, is the whole run.
        part: only requests of which it holds count; None is all.
        percentiles: 0 < p < 100, of every distribution.
        goals: what requests were to meet, see `slo.goals_of`.
        price_per_hour: the price of the machine. There is no cost of a part: all share the machine.

    Returns:
        Metrics of which there is no value at all are left out of from_schedule, from_send and phases_ms.
    """
    windowed = window is not None and window.found
    window = window or Window(result.began_ns, result.ended_ns, False, "the whole run")
    began_ns, ended_ns = (window.began_ns, window.ended_ns) if windowed else (result.began_ns, result.ended_ns)
    records, rates = _records_and_rates(result, part, began_ns, ended_ns, windowed)
    latencies = Latencies.of(records)
    failures = Counter(str(record.failure_kind) for record in records if record.failed)
    tokens = _tokens(latencies.records)
    price = price_per_hour if part is None else None
    joules = None if windowed or part is not None else result.energy_joules  # known of the whole run only
    return Summary(
        name=name,
        window=window,
        completed=len(latencies.records),
        failed=failures.total(),
        failures=dict(sorted(failures.items())),
        from_schedule=_distributions(latencies, "schedule", percentiles, result.client),
        from_send=_distributions(latencies, "send", percentiles, result.client),
        phases_ms=_phases(latencies, percentiles),
        rates=rates,
        tokens=tokens,
        resent=sum(record.resent > 0 for record in records),
        cancelled=sum(record.cancelled for record in records),
        answers=_answers(latencies, percentiles),
        ended_by=dict(Counter(record.finish_reason or "unknown" for record in latencies.records)),
        attainment=attainment(records, goals, duration_s=(ended_ns - began_ns) / 1e9),
        cost_per_million_output_tokens=cost_per_million_tokens(price, rates["output_throughput"]),
        cost_per_million_tokens=cost_per_million_tokens(price, rates["total_token_throughput"]),
        tps=_tps(latencies),
        first_answer_ms=_first_answer(latencies),
        validity=_validity(latencies.records),
        graphs=None if windowed or name.startswith(LENGTHS) else _graphs(records, percentiles),
        tokens_per_joule=tokens["output"] / joules if joules else None,
        notes=_notes(result, records, latencies),
    )


def _records_and_rates(
    result: RunResult, part: Part | None, began_ns: int, ended_ns: int, windowed: bool
) -> tuple[list[RequestRecord], dict[str, float]]:
    """The records of a part that were due in the window, and the rates of all of it that came in the window."""
    records = [record for record in result.records if part is None or part(record)]
    if not windowed:
        return records, whole_run_rates(records, began_ns, ended_ns)
    due = [record for record in records if began_ns <= record.scheduled_ns < ended_ns]
    return due, window_rates(records, began_ns, ended_ns)


def cost_per_million_tokens(price_per_hour: float | None, tokens_per_s: float) -> float | None:
    """The price of a million tokens; None without a price or without tokens."""
    if price_per_hour is None or tokens_per_s <= 0:
        return None
    return cost_per_million(price_per_hour, tokens_per_s)


def _distributions(
    latencies: Latencies, since: Since, percentiles: Sequence[float], client: ClientHealth
) -> dict[str, Distribution]:
    distributions = {}
    for metric, values in latencies.metrics(since).items():
        known = ~np.isnan(values)
        if not known.any():
            continue
        # Gaps of one request are not independent of each other.
        groups = latencies.itl_request[known] if metric == "itl_ms" else None
        distributions[metric] = distribution(values[known], percentiles, groups=groups)
    tokens = float(np.mean(latencies.output_tokens)) if len(latencies.records) else 0.0
    return with_client(distributions, client, since, tokens)


def _tps(latencies: Latencies) -> Distribution | None:
    """Tokens a second of each request after its first: the inverse of its TPOT (document 001, chapter 4)."""
    tpot_ms = latencies.tpot_ms[~np.isnan(latencies.tpot_ms)]
    return distribution(1000 / tpot_ms, OF_TPS) if len(tpot_ms) else None


def _first_answer(latencies: Latencies) -> Distribution | None:
    """Milliseconds from the send to the first chunk after the reasoning, of requests that had any."""
    found = [(record.answer_ns - record.sent_ns) / 1e6 for record in latencies.records if record.answer_ns]
    return distribution(np.array(found), OF_FIRST_ANSWERS) if found else None


def _validity(records: Sequence[RequestRecord]) -> Validity | None:
    """How many of these answers had the structure that was asked for."""
    asked = [record.invalid for record in records if record.invalid is not None]
    if not asked:
        return None
    valid = asked.count("")
    low, high = proportion_interval(valid, len(asked))
    return Validity(len(asked), valid, low, high, dict(Counter(wrong for wrong in asked if wrong).most_common()))


def _graphs(records: Sequence[RequestRecord], percentiles: Sequence[float]) -> Graphs | None:
    """How long whole graphs of requests took, in the order in which they were due."""
    found: dict[int, list[RequestRecord]] = {}
    for record in records:
        if record.graph is not None:
            found.setdefault(record.graph, []).append(record)
    if not found:
        return None
    whole = [each for each in found.values() if len(each) == each[0].graph_size and all(record.ok for record in each)]
    if not whole:
        return Graphs(0, len(found), None, None)
    spans = [sorted((record.scheduled_ns, record.last_token_ns) for record in each) for each in whole]
    spans.sort(key=lambda each: each[0])
    makespans = [max(ended for _, ended in each) - each[0][0] for each in spans]
    makespan_ms, served_ms = (np.array(ns) / 1e6 for ns in (makespans, list(map(_covered, spans))))
    return Graphs(len(whole), len(found), distribution(makespan_ms, percentiles), distribution(served_ms, percentiles))


def _covered(spans: Sequence[tuple[int, int]]) -> int:
    """How much at least one of the spans covers; they are in the order of their begin."""
    total, until = 0, 0
    for began, ended in spans:
        total += max(0, ended - max(began, until))
        until = max(until, ended)
    return total


def _phases(latencies: Latencies, percentiles: Sequence[float]) -> dict[str, Distribution]:
    lengths = phase_lengths(latencies.records)
    return {phase: distribution(each, percentiles) for phase, each in lengths.items()}


def _answers(latencies: Latencies, percentiles: Sequence[float]) -> dict[str, Distribution]:
    if not latencies.output_tokens.any():
        return {}
    found = {"output_tokens": latencies.output_tokens, "steps": latencies.steps}
    return {name: distribution(values.astype(float), percentiles) for name, values in found.items()}


def _tokens(completed: Sequence[RequestRecord]) -> dict[str, int]:
    return {
        "prompt": sum(prompt_tokens(record) for record in completed),
        "output": sum(record.tokens for record in completed),
        "cached": sum(record.cached_tokens or 0 for record in completed),
        "chunks": sum(len(record.chunk_ns) for record in completed),
    }


def _notes(result: RunResult, records: Sequence[RequestRecord], latencies: Latencies) -> list[str]:
    """What a reader must know before believing the numbers, a sentence each."""
    notes = [f"client-bound: {reason}" for reason in result.client.reasons]
    abandoned = sum(not record.ok and record.failure_kind is FailureKind.ABANDONED for record in records)
    failed = sum(record.failed for record in records) - abandoned
    cancelled = sum(record.cancelled for record in records)
    if result.interrupted:
        notes.append(f"interrupted: {_requests(abandoned)} abandoned; not in any latency")
    elif abandoned:
        notes.append(f"{_requests(abandoned)} abandoned by this client; not in any latency")
    if cancelled:
        notes.append(f"{_requests(cancelled)} cancelled by the client as planned; not failures, and not in any latency")
    if failed:
        notes.append(f"{_requests(failed)} failed; not in any latency, and counted as missed")
    if resent := sum(record.resent > 0 for record in records):
        notes.append(
            f"{_requests(resent)} sent again, because the server had closed the kept-open connection; their latency "
            f"includes both attempts, and the server may have started them twice"
        )
    if (structures := _validity(latencies.records)) is not None and structures.wrong:
        wrong, count = next(iter(structures.wrong.items()))
        faulty = structures.asked - structures.valid
        notes.append(f"{_requests(faulty)} answered without the structure asked for; most often ({count}): {wrong}")
    uncounted = sum(record.output_tokens is None for record in latencies.records)
    if uncounted:
        notes.append(f"{_requests(uncounted)} without `usage`: their output tokens are counted by chunks")
    tokens, chunks = latencies.output_tokens, np.array([len(record.chunk_ns) for record in latencies.records])
    if said := _speculation(result, latencies.records):
        notes.append(said)
    if at_once := int(np.sum((chunks == 1) & (tokens > 1))):
        notes.append(f"{_requests(at_once)} with several tokens answered in one chunk: no TPOT, no ITL")
    elif len(chunks) and tokens.sum() > 1.05 * chunks.sum():
        notes.append(f"{tokens.sum() / chunks.sum():.2f} tokens per chunk: ITL is the gap between chunks, not tokens")
    return notes


def _speculation(result: RunResult, records: Sequence[RequestRecord]) -> str:
    """How many drafts a Headway server says that it accepted, and whether that is what texts would have."""
    timings = [record.timings or {} for record in records]
    tried, accepted = (sum(each.get(name) or 0 for each in timings) for name in ("drafts", "accepted_drafts"))
    if not tried:
        return ""
    said = f"the server speculated: {100 * accepted / tried:.3g} % of {tried:,} drafts were accepted"
    is_prose = str(result.settings.get("tokens")).startswith("prose")
    if result.settings.get("dataset_name") in NO_TEXTS and not is_prose:
        said += "; random tokens have another share than texts, so measure with --prompts prose or texts"
    return said


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
