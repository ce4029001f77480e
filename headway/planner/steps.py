"""The two phases of a request as steps: prefill and decode, with what they do, take, and could take at best."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from headway.cost.attention import Chunk, append_alike, read_once
from headway.cost.requests import RequestShape
from headway.cost.timing import LINEAR, Deployment, PartTime, TimeBreakdown
from headway.cost.work import Operation, step_work, total
from headway.planner.plan import PlannedStep

MOST_SEQUENCES = 2**16


def prompt_steps(workload: RequestShape, budget: int, requests: int = 1) -> list[list[Chunk]]:
    """The steps that so many prompts take, one after the other, with at most `budget` tokens in a step."""
    steps: list[list[Chunk]] = []
    room = 0
    for _ in range(requests):
        done = workload.cached
        while done < workload.prompt:
            if room == 0:
                steps.append([])
                room = budget
            tokens = min(room, workload.prompt - done)
            append_alike(steps[-1], Chunk(tokens, done, int(done + tokens == workload.prompt)))
            done += tokens
            room -= tokens
    return steps


def steps_s(deployment: Deployment, steps: Sequence[Sequence[Chunk]]) -> float:
    """Seconds of steps one after the other; those that are alike are timed once."""
    kinds: dict[tuple[Chunk, ...], int] = {}
    for step in steps:
        kinds[tuple(step)] = kinds.get(tuple(step), 0) + 1
    return sum(count * deployment.step(step).seconds for step, count in kinds.items())


def prefill_step(deployment: Deployment, workload: RequestShape, budget: int) -> PlannedStep:
    """The step, or steps, of one request's prompt alone."""
    whole = Chunk(workload.prompt - workload.cached, workload.cached)
    return _planned(deployment, whole, prompt_steps(workload, budget))


def decode_step(deployment: Deployment, workload: RequestShape, batch: int, lane_batch: int) -> PlannedStep:
    """One token of each of `batch` sequences of a replica, of which a device works on `lane_batch` at a time."""
    context, common = workload.mean_context, read_once(workload.cached)
    of_lane = Chunk(1, context, 1, lane_batch, common)
    return _planned(deployment, Chunk(1, context, 1, batch, common), [[of_lane]])


def _planned(deployment: Deployment, whole: Chunk, timed: list[list[Chunk]]) -> PlannedStep:
    work = step_work(deployment.shape, [whole], deployment.precision, deployment.flash)
    time = joined([deployment.step(step) for step in timed])
    ideal = deployment.ideal()
    floor = joined([ideal.step(step) for step in timed])
    sums = total(work.values())
    return PlannedStep(
        work=work,
        flops=sums.flops,
        bytes=sums.kept_bytes,
        activation_bytes=sums.activation_bytes,
        time=time,
        floor_s=floor.seconds,
        floors_s={part.name: part.seconds for part in floor.parts},
        bound=time.bound,
    )


def joined(steps: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """Steps one after the other as if they were one, added up part by part, in the order of a layer."""
    parts: dict[str, PartTime] = {}
    for step in steps:
        for part in step.parts:
            before = parts.get(part.name, PartTime(part.name, 0.0))
            parts[part.name] = PartTime(
                part.name,
                before.seconds + part.seconds,
                before.compute_s + part.compute_s,
                before.memory_s + part.memory_s,
                before.network_s + part.network_s,
                before.overhead_s + part.overhead_s,
                before.work + part.work,
            )
    order = {str(operation): place for place, operation in enumerate(Operation)}
    order["attention"] = order[Operation.SCORES]
    ordered = sorted(parts.values(), key=lambda part: order.get(part.name, len(order)))
    return TimeBreakdown(tuple(ordered), sum(step.host_s for step in steps))


def compute_bound_batch(deployment: Deployment, context: int) -> int | None:
    """The smallest batch of decodes in whose step arithmetic takes most of the time; None where it never does.

    Beyond some context the cache takes most of any batch's time, as its bytes grow with the batch (document 002).
    """
    return _smallest(lambda batch: deployment.step([Chunk(1, context, 1, batch)]).bound == "compute")


def compute_bound_weights(deployment: Deployment) -> int | None:
    """The smallest batch of decodes whose products with weights take longer than reading them (document 002).

    Attention, whose intensity no batch raises, is left out.
    """

    def bound(batch: int) -> bool:
        parts = deployment.step([Chunk(1, 0, 1, batch)]).parts
        linear = [part for part in parts if part.name in LINEAR]
        return sum(part.compute_s for part in linear) >= sum(part.memory_s for part in linear)

    return _smallest(bound)


def _smallest(holds: Callable[[int], bool]) -> int | None:
    """The smallest batch up to MOST_SEQUENCES for which something holds, if it holds for all larger ones too."""
    batch = 1
    while not holds(batch):
        batch *= 2
        if batch > MOST_SEQUENCES:
            return None
    untried = range(batch // 2 + 1, batch)  # it does not hold at half of the batch
    return untried.start + bisect.bisect_left(untried, True, key=holds)
