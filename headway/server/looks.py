"""The parts of a look at an engine, as the page's live view has them; of one that runs, or of one that was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from headway.engine.messages import ExplainedStep, LiveSequence
from headway.policy.objectives.service_class import ServiceClass

NS_PER_MS = 1e6


def classes_look(table: Iterable[ServiceClass]) -> list[dict[str, Any]]:
    """Classes with their objectives in milliseconds, null for none."""
    found = []
    for each in table:
        limits = {key: getattr(each, key) for key in ("ttft_ms", "tpot_ms", "e2e_ms")}
        found.append({"name": each.name} | {key: ms if math.isfinite(ms) else None for key, ms in limits.items()})
    return found


def in_ms(phases_ns: Mapping[str, int]) -> dict[str, float]:
    """A ledger in milliseconds."""
    return {phase: length / NS_PER_MS for phase, length in phases_ns.items()}


def step_look(step: ExplainedStep) -> dict[str, Any]:
    """A step as the page draws it."""
    return {
        "at_ms": step.planned_ns / NS_PER_MS,
        "decoding": step.decoding,
        "prompt_tokens": step.prompt_tokens,
        "took_ms": step.took_ns / NS_PER_MS,
        "predicted_ms": step.predicted_ns / NS_PER_MS,
        "least_ms": step.least_ns / NS_PER_MS,
    }


def sequence_look(sequence: LiveSequence) -> dict[str, Any]:
    """A choice in the engine as the page draws it."""
    return {
        "id": f"{sequence.request_id}/{sequence.index}",
        "service_class": sequence.service_class,
        "arrived_ms": sequence.arrival_ns / NS_PER_MS,
        "phase": sequence.phase,
        "phases_ms": in_ms(sequence.phases_ns),
        "prompt_len": sequence.prompt_len,
        "computed": sequence.computed,
        "tokens": sequence.tokens,
        "blocks": sequence.blocks,
        "slack_ms": None if sequence.slack_ns is None else sequence.slack_ns / NS_PER_MS,
    }
