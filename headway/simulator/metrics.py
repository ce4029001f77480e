"""The metrics of simulated servers, in the form of those of live ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from headway.load.measures.server_metrics import over_time
from headway.policy.admission.quota import UNITS
from headway.policy.admission.tenants import ALL
from headway.simulator.clients import BEGAN_NS
from headway.simulator.fleet import Fleet
from headway.simulator.log import StepLog

MOST_POINTS = 2000  # points of what is kept over time


def metrics_of(fleet: Fleet) -> dict[str, Any]:
    """What the servers did together, under the keys of a live one's metrics and how busy they were."""
    schedulers = [server.scheduler for server in fleet.servers]
    prefixes = [scheduler.blocks.prefix_stats for scheduler in schedulers]
    queries, hits = sum(each.queries for each in prefixes), sum(each.hits for each in prefixes)
    answers = [answer for answer in fleet.answers if answer.finish_reason is not None]
    took_ns = np.concatenate(
        [np.asarray(each.steps.sampled_ns) - np.asarray(each.steps.planned_ns) for each in fleet.servers]
    )
    stalls: Counter[str] = Counter()
    for scheduler in schedulers:
        stalls.update({str(phase): ns for phase, ns in scheduler.accounting.take_stalls().items()})
    return {
        "prefix": "headway",
        "prompt_tokens": sum(answer.prompt_len for answer in answers if not answer.index),
        "generation_tokens": sum(len(answer.token_ns) for answer in answers),
        "preemptions": sum(scheduler.sequences.num_preemptions for scheduler in schedulers),
        "prefix_cache": {"queries": queries, "hits": hits, "hit_rate": hits / queries if queries else None},
        "step": {
            "count": len(took_ns),
            "sum_s": float(took_ns.sum()) / 1e9,
            "mean_ms": float(took_ns.mean()) / 1e6 if len(took_ns) else None,
        },
        "requests_finished": dict(sorted(Counter(str(answer.finish_reason) for answer in answers).items())),
        "stall_seconds": {phase: ns / 1e9 for phase, ns in sorted(stalls.items())},
        **_tenants_of(fleet),
        **_adapters_of(fleet),
        **over_time(gauges_of_all(fleet)),
    }


def _tenants_of(fleet: Fleet) -> dict[str, Any]:
    """Figures of quotas and of turns between tenants, summed over all servers; nothing without tenants."""
    found: dict[str, Any] = {}
    fair = [each.scheduler.waiting for each in fleet.servers if each.scheduler.config.weights]
    if fair:
        found = {"fairness_lead_tokens": max(each.lead for each in fair)}
        found["fairness_bound_tokens"] = max(each.bound for each in fair)
    sums: dict[str, Counter[str]] = {}
    for tenant, meters in (pair for each in fleet.servers if each.quotas for pair in each.quotas.meters.items()):
        for unit, meter in zip(UNITS, meters, strict=True):
            for name in ("reserved", "settled", "refunded"):
                sums.setdefault(tenant or ALL, Counter())[f"{unit}_{name}"] += getattr(meter, name)
    return found | ({"tenants": sums} if sums else {})


def _adapters_of(fleet: Fleet) -> dict[str, Any]:
    """Whether requests found their adapters in slots, in all servers; nothing without adapters."""
    counts: Counter[str] = Counter()
    for server in fleet.servers:
        if server.adapters is not None:
            counts.update(server.adapters.counts)
    return {"adapters": counts} if counts else {}


def gauges_of_all(fleet: Fleet) -> list[tuple[float, dict[str, float]]]:
    """The gauges of gauges_of() for all servers: sums of sequences, and means of shares."""
    each = [gauges_of(one.steps, fleet.now, one.scheduler.blocks.num_blocks) for one in fleet.servers]
    means = {"kv_cache_usage", "utilisation"}
    return [
        (
            points[0][0],
            {
                name: sum(gauges[name] for _, gauges in points) / (len(points) if name in means else 1)
                for name in points[0][1]
            },
        )
        for points in zip(*each, strict=True)
    ]


def gauges_of(steps: StepLog, ended_ns: int, num_blocks: int) -> list[tuple[float, dict[str, float]]]:
    """What a live server's gauges would say at the end of each second of the run, or of as many as make MOST_POINTS.

    Returns:
        Seconds since the run began; and requests that run and wait, the share of the pool that is held, and the share
        of the time since the point before in which a step was under way.
    """
    length = max(1, -(-(ended_ns - BEGAN_NS) // (MOST_POINTS * 1_000_000_000))) * 1_000_000_000
    ends = np.arange(BEGAN_NS + length, ended_ns + length, length)
    begun, sampled = np.asarray(steps.planned_ns), np.asarray(steps.sampled_ns)
    done = np.searchsorted(sampled, ends, side="right")
    busy = np.concatenate([[0], np.cumsum(sampled - begun)])[done]
    under_way = done < len(steps)
    busy[under_way] += np.maximum(0, ends[under_way] - begun[done[under_way]])
    shares = np.diff(busy, prepend=0) / length
    found = []
    for end, last, share in zip(ends.tolist(), (done - 1).tolist(), shares.tolist(), strict=True):
        gauges = {"running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0}
        if last >= 0:
            gauges = {"running": steps.running[last], "waiting": steps.waiting[last]}
            gauges["kv_cache_usage"] = steps.blocks[last] / num_blocks
        found.append(((end - BEGAN_NS) / 1e9, gauges | {"utilisation": share}))
    return found
