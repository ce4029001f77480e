"""What a server's own metrics say of a run: the change of its Prometheus counters, and its gauges over time.

Known are the metrics of Headway, vLLM, SGLang and llama.cpp's server, under any prefix (`headway:`, `vllm:`, ...).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Series = dict[tuple[tuple[str, str], ...], float]  # labels to value

PREEMPTIONS = ("num_preemptions_total", "num_retracted_requests_total")
# Our name: theirs, of which the first that a server has is taken.
COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total",),
    "generation_tokens": ("generation_tokens_total", "tokens_predicted_total"),
    "preemptions": PREEMPTIONS,
}
HITS = ("prefix_cache_hits_total", "cached_tokens_total")
QUERIES = ("prefix_cache_queries_total", "prompt_tokens_total")
TIMES = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds",),
    "e2el": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds", "queue_time_seconds"),
    "prefill": ("request_prefill_time_seconds",),
    "decode": ("request_decode_time_seconds",),
    "inference": ("request_inference_time_seconds",),
    "step": ("step_duration_seconds",),
}
BUSY_SECONDS = {"prompt_seconds": ("prompt_seconds_total",), "predicted_seconds": ("tokens_predicted_seconds_total",)}
BY_LABEL = {
    "requests_finished": (("request_success_total",), "finished_reason"),
    "stall_seconds": (("stall_seconds_total",), "cause"),
}
GAUGES = {
    "running": ("num_requests_running", "num_running_reqs", "requests_processing"),
    "waiting": ("num_requests_waiting", "num_queue_reqs", "requests_deferred"),
    "kv_cache_usage": ("kv_cache_usage_perc", "token_usage", "kv_cache_usage_ratio", "gpu_cache_usage_perc"),
}

PREFIX = re.compile(r"(headway|vllm|sglang|llamacpp)[:_]|\w+:")
_GAUGE_LINE = re.compile(
    r"^(?:\w+:|(?:headway|vllm|sglang|llamacpp)_)?(" + "|".join(name for of in GAUGES.values() for name in of) + r")"
    r"(?:\{[^\n]*\})?[ \t]+([-+.\w]+)",
    re.MULTILINE,
)


@dataclass(slots=True)
class Snapshot:
    """One scrape: series by name without its prefix."""

    prefix: str = ""
    series: dict[str, Series] = field(default_factory=dict)

    def find(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self.series), None)


def parse_metrics(text: str) -> Snapshot:
    """All series of a scrape of /metrics.

    Raises:
        ValueError: it is not Prometheus text.
    """
    from prometheus_client.parser import text_string_to_metric_families

    snapshot = Snapshot()
    for family in text_string_to_metric_families(_unquoted(text)):
        for sample in family.samples:
            prefix = PREFIX.match(sample.name)
            name = sample.name[prefix.end() :] if prefix else sample.name
            if prefix and not snapshot.prefix:
                snapshot.prefix = prefix.group().rstrip(":_")
            snapshot.series.setdefault(name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return snapshot


def read_gauges(text: str) -> dict[str, float]:
    """Running and waiting requests, and the share of the KV cache in use, of one scrape.

    Cheap enough for the event loop of a run: it looks for these lines only. Over several engines, requests are
    summed and the share is the mean. Gauges that the server does not have are left out.
    """
    found: dict[str, list[float]] = {}
    for name, value in _GAUGE_LINE.findall(_unquoted(text)):
        number = _number(value)
        if math.isfinite(number):
            found.setdefault(name, []).append(number)
    gauges = {}
    for gauge, names in GAUGES.items():
        values = next((found[name] for name in names if name in found), [])
        if values:
            gauges[gauge] = sum(values) / (len(values) if gauge == "kv_cache_usage" else 1)
    return gauges


def server_metrics(before: str, after: str, gauges: Sequence[tuple[float, Mapping[str, float]]] = ()) -> dict[str, Any]:
    """What happened in the server between two scrapes, for RunResult.server["metrics"].

    Args:
        before, after: the text of /metrics before the first and after the last request.
        gauges: seconds since the run began, and `read_gauges` of a scrape at that time.

    Returns:
        JSON-able, with what the server has: `prefix`; `prompt_tokens`, `generation_tokens`, `preemptions`;
        `prefix_cache` {queries, hits, hit_rate} in tokens; `ttft`, `itl`, `e2el`, `queue`, `prefill`, `decode`,
        `inference`, `step`, each {count, sum_s, mean_ms}; `prompt_seconds`, `predicted_seconds` (llama.cpp's busy
        time); `requests_finished` by reason; `stall_seconds` by cause; `gauges` by name {mean, peak} with
        `gauges_over_time` {t_s, ...}; and `resets`, counters that went back, so that the server was started anew and
        what it counted before is lost. `{"error": ...}` where a text is not Prometheus', `{}` where one is empty or
        nothing in it is known.
    """
    if not before.strip() or not after.strip():
        return {}
    try:
        first, last = parse_metrics(before), parse_metrics(after)
    except ValueError as error:
        return {"error": f"/metrics is not Prometheus text: {' '.join(str(error).split())}"}
    change = Increase(first, last)
    metrics: dict[str, Any] = {}
    for ours, names in (COUNTERS | BUSY_SECONDS).items():
        metrics[ours] = change.total(names)
    metrics["prefix_cache"] = _prefix_cache(change)
    for ours, names in TIMES.items():
        metrics[ours] = _mean_time(change, names)
    for ours, (names, label) in BY_LABEL.items():
        metrics[ours] = change.by_label(names, label)
    metrics = {name: value for name, value in metrics.items() if value is not None}
    if gauges:
        metrics |= over_time(gauges)
    if change.resets:
        metrics["resets"] = sorted(change.resets)
    return {"prefix": last.prefix, **metrics} if metrics else {}


class Increase:
    """Counters after less counters before; one that went back was reset, and counts from 0."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self._before, self._after = before, after
        self.resets: set[str] = set()

    def _each(self, names: Iterable[str]) -> dict[tuple[tuple[str, str], ...], float] | None:
        name = self._after.find(names)
        if name is None:
            return None
        before = self._before.series.get(name, {})
        changes = {}
        for labels, value in self._after.series[name].items():
            since = before.get(labels, 0.0)
            if value < since:
                self.resets.add(name)
                since = 0.0
            changes[labels] = value - since
        return changes

    def total(self, names: Iterable[str]) -> float | None:
        """The growth of the first of these metrics that there is; None where there is none."""
        each = self._each(names)
        return None if each is None else sum(each.values())

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the first series of this name, after; empty where there is none."""
        return next((dict(labels) for labels in self._after.series.get(name, {})), {})

    def values(self, name: str, label: str) -> tuple[str, ...]:
        """The values of a label of this metric, after, in order."""
        series = self._after.series.get(name, {})
        return tuple(sorted({dict(labels)[label] for labels in series if label in dict(labels)}))

    def by_label(self, names: Iterable[str], label: str) -> dict[str, float] | None:
        each = self._each(names)
        if each is None:
            return None
        sums: dict[str, float] = {}
        for labels, value in each.items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return dict(sorted(sums.items()))


def _prefix_cache(change: Increase) -> dict[str, float | None] | None:
    hits, queries = change.total(HITS), change.total(QUERIES)
    if hits is None or queries is None:
        return None
    return {"queries": queries, "hits": hits, "hit_rate": hits / queries if queries else None}


def _mean_time(change: Increase, names: Iterable[str]) -> dict[str, float | None] | None:
    names = list(names)
    count = change.total(f"{name}_count" for name in names)
    total = change.total(f"{name}_sum" for name in names)
    if count is None or total is None:
        return None
    return {"count": count, "sum_s": total, "mean_ms": 1000 * total / count if count else None}


def over_time(gauges: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, Any]:
    """`gauges` and `gauges_over_time` of `server_metrics`; a gauge that one scrape lacks is None there."""
    names = dict.fromkeys(name for _, of_scrape in gauges for name in of_scrape)
    columns = {name: [of_scrape.get(name) for _, of_scrape in gauges] for name in names}
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    if not columns:
        return {}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    return {
        "gauges": {name: {"mean": sum(values) / len(values), "peak": max(values)} for name, values in known.items()},
        "gauges_over_time": {"t_s": [seconds for seconds, _ in gauges], **columns},
    }


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _unquoted(text: str) -> str:
    """Some builds of llama.cpp's server send the text as one JSON string."""
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except json.JSONDecodeError:
            return text
    return text
