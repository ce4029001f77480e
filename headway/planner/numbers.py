"""What a plan comes to where speculative decoding counts: the figures that plans are compared and ranked by."""

from __future__ import annotations

from dataclasses import dataclass

from headway.planner.plan import Estimate, Plan


@dataclass(frozen=True, slots=True)
class Shortened:
    """What speculative decoding multiplies a plan's times by; 1 without it."""

    # Factor on TPOT. Decode steps are faster; what the prompts of others take of TPOT stays, as does TTFT.
    tpot: float = 1.0
    # Factor on the time of a whole answer. Tokens a second and dollars for a token follow it, but not under a rate of
    # arrivals, where as many tokens come as are asked for.
    answer: float = 1.0


def shortened(plan: Plan) -> Shortened:
    """The factors of a plan, which has its own speculation or none."""
    if plan.speculated is None or plan.tpot is None:
        return Shortened()
    saved = plan.speculated.tpot_s * (plan.speculated.speedup - 1.0)
    tpot = 1.0 - saved / plan.tpot.value
    if plan.ttlt is None:
        return Shortened(tpot)
    return Shortened(tpot, 1.0 - (plan.workload.output - 1) * saved / plan.ttlt.value)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The figures of a plan in seconds, tokens a second and dollars; None where the plan has no such figure."""

    ttft_s: float | None
    tpot_s: float | None
    e2el_s: float | None
    # Output tokens of all devices; under a rate of arrivals, those that can be served at most.
    tokens_per_s: float | None
    cost: float | None  # price of a million output tokens
    devices: int


def numbers_of(plan: Plan) -> Numbers:
    """The figures of a plan. What can be served at most under a rate of arrivals does not count speculation."""
    faster = shortened(plan)
    tokens, cost = _scaled(plan.output_tokens_per_s, 1 / faster.answer), plan.costs.per_million_output_tokens
    if plan.load == "rate":
        tokens = plan.saturation_rate * plan.workload.output if plan.capacity.fits else None
    elif cost is not None:
        cost *= faster.answer
    return Numbers(
        ttft_s=_scaled(plan.ttft, 1.0),
        tpot_s=_scaled(plan.tpot, faster.tpot),
        e2el_s=_scaled(plan.ttlt, faster.answer),
        tokens_per_s=tokens,
        cost=cost,
        devices=plan.devices,
    )


def missed_by(plan: Plan) -> tuple[str, ...]:
    """The objectives that a plan misses."""
    if plan.speculated is None:
        return tuple(name for name, met in plan.slo_met.items() if not met)
    found = numbers_of(plan)
    values = {"ttft": found.ttft_s, "tpot": found.tpot_s, "e2el": found.e2el_s}
    limits = {name: limit_ms / 1e3 for name, limit_ms in plan.request.slo.items()}
    return tuple(name for name, limit in limits.items() if (value := values[name]) is None or value > limit)


def value_of(numbers: Numbers, objective: str) -> float | None:
    """The figure that counts, the lower the better: times, dollars, or device-seconds of a token."""
    if objective == "throughput":
        return numbers.devices / numbers.tokens_per_s if numbers.tokens_per_s else None
    return {"ttft": numbers.ttft_s, "tpot": numbers.tpot_s, "e2el": numbers.e2el_s, "cost": numbers.cost}[objective]


def gain_of(before: Numbers, after: Numbers, objective: str) -> float | None:
    """How many times as good; None where one of them has no such figure."""
    old, new = value_of(before, objective), value_of(after, objective)
    return None if old is None or new is None else old / new


def _scaled(estimate: Estimate | None, factor: float) -> float | None:
    return None if estimate is None else estimate.value * factor
