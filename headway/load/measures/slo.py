"""Objectives and goodput: which requests were fast enough, and how many of those there were in a second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from headway.load.measures.dependence import effective_count
from headway.load.measures.latencies import NS_PER_MS, Latencies, Since
from headway.load.measures.numbers import Attainment
from headway.load.measures.percentiles import proportion_interval
from headway.load.record import FailureKind, RequestRecord
from headway.policy.objectives.objectives import OBJECTIVES

FAILED = "failed"

Objectives = Mapping[str, float]  # {"ttft": 200.0, ...}, in ms
Goals = Mapping[str, Objectives]  # by the class of a request; those of "" are of all whose class has none
NO_GOALS: Goals = {}


def goals_of(settings: Mapping[str, Any]) -> Goals:
    """What the requests of a run were to meet, by its settings."""
    return {"": settings.get("goodput") or {}, **(settings.get("goodput_by_class") or {})}


def objectives_of(record: RequestRecord, goals: Goals) -> Objectives:
    """What this request was to meet: its class's objectives, else the general ones; empty where there are none."""
    return goals.get(record.class_name) or goals.get("", {})


def missed_objectives(
    records: Iterable[RequestRecord], goals: Goals, since: Since = "schedule"
) -> dict[int, tuple[str, ...]]:
    """Which objectives each request missed, by its index; () when it met all. A failed request missed "failed".

    Requests without objectives are left out. So are those that were abandoned when the run was interrupted, or given up
    by their client, and might still have met theirs. An answer of one token, or that came in one chunk, meets any TPOT.
    """
    records = list(records)
    judged = {record.index: objectives_of(record, goals) for record in records}
    missed: dict[int, tuple[str, ...]] = {}
    latencies = Latencies.of(records)
    measured = {"ttft": latencies.ttft(since), "tpot": latencies.tpot_ms, "e2el": latencies.e2el(since)}
    for position, record in enumerate(latencies.records):
        limits = judged[record.index]
        if limits:
            missed[record.index] = tuple(
                key for key in OBJECTIVES if key in limits and measured[key][position] > limits[key]
            )
    for record in records:
        if record.ok or not judged[record.index]:
            continue
        if record.failure_kind not in (FailureKind.ABANDONED, FailureKind.CANCELLED):
            missed[record.index] = (FAILED,)
        elif already := _missed_when_given_up(record, judged[record.index], since):
            missed[record.index] = already
    return missed


def slowness(records: Iterable[RequestRecord], goals: Goals) -> np.ndarray:
    """For each judged request, by due time: the largest ratio of a latency from the schedule to its limit.

    Above 1 it has missed, by `missed_objectives`; inf has failed. Shape (judged requests,).
    """
    records = sorted(records, key=lambda record: record.scheduled_ns)
    missed = missed_objectives(records, goals)
    latencies = Latencies.of(records)
    measured = {"ttft": latencies.ttft("schedule"), "tpot": latencies.tpot_ms, "e2el": latencies.e2el("schedule")}
    found = {}
    for position, record in enumerate(latencies.records):
        ratios = [measured[key][position] / limit for key, limit in objectives_of(record, goals).items()]
        found[record.index] = max((ratio for ratio in ratios if not math.isnan(ratio)), default=0.0)
    judged = [record.index for record in records if record.index in missed]
    return np.array([found.get(index, math.inf) for index in judged])


def attainment(records: Iterable[RequestRecord], goals: Goals, *, duration_s: float) -> Attainment | None:
    """How many requests met all their objectives, and the goodput.

    Args:
        duration_s: seconds that the goodput is counted over.

    Returns:
        None where no request has objectives. The interval (95 %) around the share that met allows for requests that
        depend on each other. The keys of Attainment.objectives are `ttft` and so on, and `chat.ttft` where classes have
        different ones.
    """
    records = list(records)
    missed = missed_objectives(records, goals)
    stated = _stated(records, goals)
    if not stated:
        return None
    judged = sorted((record for record in records if record.index in missed), key=lambda record: record.scheduled_ns)
    met = [record for record in judged if not missed[record.index]]
    worth = effective_count(np.array([not missed[record.index] for record in judged], dtype=float))
    low, high = proportion_interval(len(met), len(judged), 0.95, n_eff=worth)
    reasons = Counter(reason for of_request in missed.values() for reason in of_request)
    asked = {name.rsplit(".", 1)[-1] for name in stated}
    return Attainment(
        objectives=stated,
        met=len(met),
        total=len(judged),
        low=low,
        high=high,
        requests_per_s=len(met) / duration_s if duration_s > 0 else 0.0,
        tokens_per_s=sum(record.tokens for record in met) / duration_s if duration_s > 0 else 0.0,
        missed_by={reason: reasons[reason] for reason in (*OBJECTIVES, FAILED) if reason in asked or reason == FAILED},
    )


def _missed_when_given_up(record: RequestRecord, limits: Objectives, since: Since) -> tuple[str, ...]:
    """What it had missed already when it was abandoned or cancelled; its TPOT is not known."""
    start_ns = record.scheduled_ns if since == "schedule" else record.sent_ns
    if not start_ns or not record.end_ns:
        return ()
    waited = {
        "ttft": ((record.first_token_ns or record.end_ns) - start_ns) / NS_PER_MS,
        "e2el": (record.end_ns - start_ns) / NS_PER_MS,
    }
    return tuple(key for key in OBJECTIVES if key in limits and waited.get(key, -np.inf) > limits[key])


def _stated(records: Iterable[RequestRecord], goals: Goals) -> dict[str, float]:
    by_name = {record.class_name: objectives_of(record, goals) for record in records}
    different = {tuple(sorted(limits.items())) for limits in by_name.values()}
    if len(different) == 1:
        return dict(next(iter(by_name.values())))
    return {f"{name or 'other'}.{key}": limit for name, limits in by_name.items() for key, limit in limits.items()}
