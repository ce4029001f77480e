"""Runs the same workload on a server with other flags, or on one that cannot be had.

`WhatIf` changes flags. A counterfactual takes one cause of slowness away, by a server that cannot be had: what the
slowest requests would have been without it says how much of their time is its doing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from headway.load.measures.latencies import Latencies
from headway.load.record import RequestRecord
from headway.policy.step.options import SchedulingOptions
from headway.report.parts import Cell, Table
from headway.report.style import number
from headway.simulator.deployed import Deployed, ServerOptions, deploy
from headway.simulator.members import Deploy
from headway.simulator.timing import CachedPrompts, DecodesFirst

SLOWEST = 0.01  # share of the requests that are explained, those of each metric by themselves
METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "E2EL"}


def _never_preempting(server: ServerOptions, scheduling: SchedulingOptions) -> Deployed:
    """Blocks for as many of the longest sequences as may run, so that nobody waits for one or gives one up."""
    plain = deploy(server, scheduling)
    blocks, config = plain.scheduler.blocks, plain.scheduler.config
    most = config.max_num_seqs * blocks.most_blocks(config.max_model_len)
    found = deploy(server, scheduling, max(1.0, most / blocks.num_blocks))
    found.scheduler.policy.orders = replace(found.scheduler.policy.orders, displaces=0)
    return found


def _decodes_first(server: ServerOptions, scheduling: SchedulingOptions) -> Deployed:
    plain = deploy(server, scheduling)
    return replace(plain, timing=DecodesFirst(plain.timing))


def _cached(server: ServerOptions, scheduling: SchedulingOptions) -> Deployed:
    plain = deploy(server, scheduling)
    return replace(plain, timing=CachedPrompts(plain.timing))


# Servers that lack one cause of slowness each, by their titles.
COUNTERFACTUALS: dict[str, Deploy] = {
    "without preemption": _never_preempting,
    "without others' prompts": _decodes_first,
    "with every prompt in the prefix cache": _cached,
    "with twice the KV cache": lambda server, scheduling: deploy(server, scheduling, 2.0),
}


def tail_table(asked: list[RequestRecord], others: dict[str, list[RequestRecord]]) -> Table:
    """A table of the slowest requests of a run, and of the same requests on other servers.

    Args:
        asked: the records of the run.
        others: the records of each counterfactual, by its title.
    """
    slowest = {metric: _slowest(values) for metric, values in _values(asked).items()}
    rows = [_row("as it was", slowest, slowest)]
    for title, records in others.items():
        same = {
            metric: {index: values[index] for index in slowest[metric] if index in values}
            for metric, values in _values(records).items()
        }
        rows.append(_row(title, same, slowest))
    counts = ", ".join(f"{len(each)} by {METRICS[metric]}" for metric, each in slowest.items())
    return Table(
        f"The slowest {100 * SLOWEST:g} % of the requests, here and on other servers",
        ("", *(f"{name}, ms" for name in METRICS.values())),
        tuple(rows),
        note=f"Means of the slowest requests by each metric: {counts}. The reduction is the effect of that cause.",
    )


def _values(records: list[RequestRecord]) -> dict[str, dict[int, float]]:
    """The milliseconds of each answered request from when it was due, by metric and by the request's index."""
    found = Latencies.of(records)
    arrays = {"ttft_ms": found.ttft("schedule"), "tpot_ms": found.tpot_ms, "e2el_ms": found.e2el("schedule")}
    return {
        metric: {
            record.index: value
            for record, value in zip(found.records, arrays[metric].tolist(), strict=True)
            if not math.isnan(value)
        }
        for metric in METRICS
    }


def _slowest(values: dict[int, float]) -> dict[int, float]:
    """The values of the SLOWEST share of requests, and of at least one."""
    slowest_first = sorted(values.items(), key=lambda each: each[1], reverse=True)
    return dict(slowest_first[: max(1, round(len(values) * SLOWEST))])


def _row(title: str, found: dict[str, dict[int, float]], slowest: dict[str, dict[int, float]]) -> tuple[Cell, ...]:
    """A row of means, and how they compare with what the same requests took."""
    row = [Cell(title)]
    for metric, values in found.items():
        if not values:
            row.append(Cell("none answered" if slowest[metric] else "-", "quiet"))
            continue
        mean = float(np.mean(list(values.values())))
        before = float(np.mean([slowest[metric][index] for index in values]))
        change = "" if values is slowest[metric] else f"{mean / before - 1:+.0%}"
        row.append(Cell(number(mean), "good" if mean < 0.9 * before else "", change))
    return tuple(row)
