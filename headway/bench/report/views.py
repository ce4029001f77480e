"""The views of a run that reports show, and the load that a run was asked to bear."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.load.measures.numbers import Summary
from headway.load.measures.summary import LENGTHS, PARTS, PROBE_STREAM, STEADY_STATE
from headway.load.record import RunResult

Run = tuple[RunResult, Sequence[Summary]]  # and what `summarise_all` makes of it


def main_views(summaries: Sequence[Summary]) -> list[Summary]:
    """The whole run and its steady state; without classes, tenants, lengths and probes."""
    return [view for view in summaries if not view.name.startswith((*PARTS.values(), LENGTHS, PROBE_STREAM))]


def part_views(summaries: Sequence[Summary], kind: str) -> list[tuple[str, Summary]]:
    """The name and the summary of each class (kind `class_name`), tenant (`tenant`) or length (`prompt_tokens`)."""
    prefix = PARTS.get(kind, LENGTHS)
    return [(view.name.removeprefix(prefix), view) for view in summaries if view.name.startswith(prefix)]


def probe_view(summaries: Sequence[Summary]) -> Summary | None:
    return next((view for view in summaries if view.name == PROBE_STREAM), None)


def steady_or_whole(summaries: Sequence[Summary]) -> Summary:
    return next((view for view in summaries if view.name == STEADY_STATE), summaries[0])


def tokens_per_s(view: Summary) -> tuple[float, str]:
    """The rate of output tokens and its unit; that of input tokens if the answers are vectors or scores."""
    if view.completed and not view.tokens.get("output", 0):
        return view.rates.get("total_token_throughput", 0.0), "input tokens/s"
    return view.rates.get("output_throughput", 0.0), "output tokens/s"


def load_of(result: RunResult) -> float:
    """The load of a run: its rate, else its concurrency, else the rate at which requests came."""
    for key in ("request_rate", "max_concurrency"):
        asked = result.settings.get(key)
        if isinstance(asked, int | float) and 0 < asked < math.inf:
            return float(asked)
    return len(result.records) / result.duration_s if result.duration_s > 0 else 0.0


def load_name(results: Sequence[RunResult]) -> str:
    """The label of the axis that `load_of` belongs to."""
    if all(result.settings.get("request_rate") in (None, math.inf, "inf") for result in results):
        closed = all(result.settings.get("max_concurrency") for result in results)
        return "Requests in flight, at most" if closed else "Requests that came (1/s)"
    return "Request rate (1/s)"
