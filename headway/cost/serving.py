"""Many requests on one deployment: a recursion over engine steps with the rules that engines share.

It stands for continuous batching with chunked prefill (Orca, Yu et al., 2022; Sarathi-Serve, Agrawal et al., 2024): in
each step every decoding sequence gets one token, and the prompts that wait, first come first served, share what is left
of the step's budget of tokens. By other rules (`Limits.sharing`) nobody decodes while prompts can be computed. Steps
take as long as `Deployment.step` says.

A pipeline has a batch on its way for each of its stages. The batches go round in one order, so the longest of them
holds up all the others: a round takes as long as its way through all stages, or as the slowest stage takes with all
batches.

Assumptions: all requests are alike, nothing is preempted, and no prefix is found in the cache unless the workload says
so. Runs of steps without prompts and without anybody coming or going are taken in one go, at the time of the middle
one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.cost.attention import Chunk, append_alike, attended_pairs
from headway.cost.decoding import Decoding
from headway.cost.requests import USUAL, Limits, RequestShape
from headway.cost.timing import Deployment

_UNBOUNDED = 2**31
MOST_CHUNKS_ALIKE = 16
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Served:
    """What clients of one replica see, over the requests that were counted. Times in seconds.

    Args:
        ttft_s, tpot_s, e2e_s: means. TPOT is 0 where only one token is asked for.
        ttft_p50_s and the like: percentiles.
        running: sequences in an average step, or in a round of a pipeline's steps.
        requests_per_s: that end.
        prompt_share: of the time, in steps with prompt tokens.
        bubble: share of the time in which a stage of a pipeline waits for another one, or has no batch; 0 without.
    """

    ttft_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    e2e_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    e2e_p99_s: float
    requests_per_s: float
    running: float
    prompt_share: float
    bubble: float = 0.0


@dataclass(slots=True)
class _Waiting:
    sent: float
    left: int
    done: int


@dataclass(frozen=True, slots=True)
class _Finished:
    sent: float
    first: float
    last: float
    output: int


@dataclass(slots=True)
class _Lane:
    """A batch of sequences that make steps together, and the prompts that wait to join it."""

    decoding: Decoding
    waiting: deque[_Waiting] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.decoding)


@dataclass(slots=True)
class _Step:
    """What a lane does next.

    Args:
        firsts: those whose prompt it ends.
    """

    lane: _Lane
    decodes: list[Chunk]
    prompts: list[Chunk]
    firsts: list[_Waiting]


@dataclass(frozen=True, slots=True)
class _PromptCost:
    """What a prompt adds to a step as the scheduler's model has it (`policy.step_time`): by token, and by pair."""

    token_s: float
    pair_s: float

    @classmethod
    def of(cls, deployment: Deployment, workload: RequestShape, limits: Limits) -> _PromptCost:
        """From steps of a chunk, of half of it, and of the half at the prompt's end."""
        half = max(1, min(limits.batched_tokens, workload.prompt) // 2)
        context = max(half, workload.prompt - half)
        chunks = (Chunk(half), Chunk(2 * half), Chunk(half, context))
        short, long, late = (deployment.step([chunk]).seconds for chunk in chunks)
        pair_s = max(0.0, late - short) / (half * context)
        more = attended_pairs(2 * half, 0) - attended_pairs(half, 0)
        return cls(max(0.0, long - short - more * pair_s) / half, pair_s)

    def seconds(self, start: int, tokens: int) -> float:
        return tokens * self.token_s + attended_pairs(tokens, start) * self.pair_s

    def within(self, seconds: float, start: int) -> int:
        """The most tokens after the first `start` that add no more."""
        slope = self.token_s + self.pair_s * (start + 0.5)
        steepest = slope + math.sqrt(slope * slope + 2.0 * self.pair_s * min(seconds, 1e9))
        return int(min(2.0 * seconds / steepest, _UNBOUNDED)) if steepest else _UNBOUNDED


def _later(chunks: Sequence[Chunk], steps: int) -> list[Chunk]:
    """What these come to so many steps further on."""
    return [Chunk(each.tokens, each.context + steps * each.tokens, each.logit_rows, each.sequences) for each in chunks]


class _Replica:
    """The recursion. Requests are given by `arrive`, and `run` goes on until so many have ended."""

    def __init__(self, deployment: Deployment, workload: RequestShape, limits: Limits) -> None:
        self._deployment = deployment
        self._workload = workload
        self._limits = limits
        self.sends: deque[float] = deque()  # when requests are sent that nobody's answer brings, ascending
        self._coming: list[tuple[float, float]] = []  # (at the scheduler, sent)
        windows = sorted({window for window in deployment.shape.sliding_windows if window is not None})
        stages = deployment.parallelism.pipeline
        self._lanes = [_Lane(Decoding(workload.prompt, windows)) for _ in range(stages)]
        self._room = max(1, limits.sequences // stages)  # of a lane
        self._cost = _PromptCost.of(deployment, workload, limits)
        self._intake_free = 0.0
        self._answered = 0
        self._began = 0.0  # the last step
        self.now = 0.0
        self.finished: list[_Finished] = []
        self.busy_s = self.prompt_s = self.sequence_s = self.stage_s = 0.0

    def arrive(self, sent: float) -> None:
        """A request is sent: its prompt is tokenized, one after the other, and then it is at the scheduler."""
        e, tokens = self._deployment.efficiency, self._workload.prompt
        self._intake_free = max(self._intake_free, sent) + e.token_s * tokens
        heapq.heappush(self._coming, (self._intake_free + e.request_s, sent))

    def run(self, until: int, again: int = 0) -> None:
        """Until so many requests have ended; `again` times the next one is sent whenever one ends."""
        while len(self.finished) < until:
            self._admit(self._began if self._limits.ahead else self.now)
            while not any(map(len, self._lanes)):
                self.now = self._began = max(self.now, self._next_s())
                self._admit(self.now)
            ended = self._step()
            for _ in range(min(ended, again)):
                self.arrive(self.now + self._late_s())
            again -= min(ended, again)

    def _next_s(self) -> float:
        """When the next request comes, or is sent."""
        return min(self._coming[0][0] if self._coming else math.inf, self.sends[0] if self.sends else math.inf)

    def _admit(self, until: float) -> None:
        while self.sends and self.sends[0] <= self.now:
            self.arrive(self.sends.popleft())
        while self._coming and self._coming[0][0] <= until:
            _, sent = heapq.heappop(self._coming)
            cached = self._workload.cached
            waiting = _Waiting(sent, self._workload.prompt - cached, cached)
            min(self._lanes, key=len).waiting.append(waiting)

    def _step(self) -> int:
        """One step of each lane, or many without prompts. Returns how many requests they ended."""
        steps = [self._next_step(lane) for lane in self._lanes if len(lane)]
        with_prompts = any(step.prompts for step in steps)
        took, stages_s = self._round([step.decodes + step.prompts for step in steps])
        times = self._chunks_alike(steps, took) if with_prompts else self._quiet_steps(steps, took)
        if times > 1:
            took, stages_s = self._round([_later(step.decodes + step.prompts, times // 2) for step in steps])
        self._began = self.now + (times - 1) * took
        self.now += times * took
        self.busy_s += times * took
        self.stage_s += times * stages_s
        sequences = sum(len(step.lane.decoding) + sum(chunk.sequences for chunk in step.prompts) for step in steps)
        self.sequence_s += times * took * sequences
        self.prompt_s += times * took if with_prompts else 0.0
        return sum([self._advance(step, times) for step in steps])

    def _round(self, batches: Sequence[Sequence[Chunk]]) -> tuple[float, float]:
        """Seconds until each lane has made its step, and those in which the stages are busy, all together."""
        found = [self._deployment.step(batch) for batch in batches]
        if len(self._lanes) == 1:
            return found[0].seconds, found[0].seconds
        longest, paces = max(step.seconds for step in found), sum(self._deployment.pace(step) for step in found)
        return max(longest, paces), sum(step.seconds for step in found)

    def _quiet_steps(self, steps: Sequence[_Step], took: float) -> int:
        """How many steps of this length go by before a sequence ends, or a request that has room comes."""
        times = min(step.lane.decoding.until_one_ends() for step in steps)
        if (next_s := self._next_s()) < math.inf:
            times = min(times, math.ceil((next_s - self.now) / took))
        return max(1, times)

    def _chunks_alike(self, steps: Sequence[_Step], took: float) -> int:
        """How many steps take another chunk of the one prompt that is under way, as long as this one.

        Only where a stall's bound cuts prompts into small chunks.
        """
        step = steps[0]
        alone = len(self._lanes) == 1 and len(step.prompts) == 1 and not step.firsts
        if math.isinf(self._limits.prefill_stall_s) or not alone or not step.decodes:
            return 1
        request, tokens = step.lane.waiting[0], step.prompts[0].tokens
        times = min(MOST_CHUNKS_ALIKE, 1 + (request.left - 1) // tokens, self._quiet_steps(steps, took))
        request.left -= (times - 1) * tokens
        request.done += (times - 1) * tokens
        return times

    def _next_step(self, lane: _Lane) -> _Step:
        """Decodes, and chunks of the prompts that wait."""
        room = self._room - len(lane.decoding)
        mixed = self._limits.sharing.decodes(with_prompts=bool(lane.waiting) and room > 0)
        decodes, beside = (lane.decoding.chunks(), len(lane.decoding)) if mixed else ([], 0)
        budget = self._limits.batched_tokens - beside
        step = _Step(lane, decodes, [], [])
        stall = self._stall_s(decodes)
        least = self._limits.least_tokens
        while lane.waiting and budget > 0 and room > 0:
            request = lane.waiting[0]
            tokens = min(budget, request.left, max(least, self._cost.within(stall, request.done)))
            if tokens == 0 or (self._limits.whole_prompts and tokens < request.left <= self._limits.batched_tokens):
                break
            last = tokens == request.left
            append_alike(step.prompts, Chunk(tokens, request.done, int(last)))
            if math.isinf(stall):
                stall = self._stall_s(step.prompts)
            else:
                stall = max(0.0, stall - self._cost.seconds(request.done, tokens))
            request.left -= tokens
            request.done += tokens
            budget -= tokens
            room -= 1
            least = 0
            if last:
                step.firsts.append(lane.waiting.popleft())
        return step

    def _stall_s(self, others: Sequence[Chunk]) -> float:
        """By which prompts may make a step longer for those who are in it; nobody is held up in an empty one."""
        if math.isinf(self._limits.prefill_stall_s) or not others:
            return math.inf
        return max(self._limits.prefill_stall_s, self._deployment.step(others).seconds)

    def _advance(self, step: _Step, times: int) -> int:
        before, decoding = len(self.finished), step.lane.decoding
        for group in decoding.advance(times) if step.decodes else ():
            self.finished += [_Finished(sent, group.first, self.now, group.output) for sent in group.members]
        begun: dict[int, list[float]] = {}
        late_s = self._late_s() if step.firsts else 0.0
        for request in step.firsts:  # a first token that comes late is as one whose request was sent earlier
            begun.setdefault(self._workload.output_of(self._answered), []).append(request.sent - late_s)
            self._answered += 1
        for output, members in begun.items():
            if output == 1:
                self.finished += [_Finished(sent, self.now, self.now, 1) for sent in members]
            else:
                decoding.add(output, self.now, members)
        return len(self.finished) - before

    def _late_s(self) -> float:
        """Seconds until a token of the last step is at its client: those of all who decode are sent before it."""
        return self._deployment.efficiency.output_s * sum(len(lane.decoding) for lane in self._lanes)

    def served(self, skip: int) -> Served:
        """What those saw who ended after the first `skip`; their rate is the whole run's where all ended at once."""
        counted = self.finished[skip:]
        began = self.finished[skip - 1].last if skip else 0.0
        count = len(counted)
        rate = count / (self.now - began) if self.now > began else len(self.finished) / self.now
        import numpy as np

        figures: dict[str, float] = {}
        for name, values in (
            ("ttft", [each.first - each.sent for each in counted]),
            ("tpot", [(each.last - each.first) / max(1, each.output - 1) for each in counted]),
            ("e2e", [each.last - each.sent for each in counted]),
        ):
            figures[f"{name}_s"] = sum(values) / count
            for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True):
                figures[f"{name}_p{percent}_s"] = value
        return Served(
            **figures,
            requests_per_s=rate,
            running=self.sequence_s / self.busy_s,
            prompt_share=self.prompt_s / self.busy_s,
            bubble=max(0.0, 1.0 - self.stage_s / (len(self._lanes) * self.busy_s)),
        )


def closed_loop(
    deployment: Deployment,
    workload: RequestShape,
    concurrency: int,
    limits: Limits = USUAL,
    rounds: int = 4,
    skip: int = 1,
) -> Served:
    """`concurrency` clients, each of which sends its next request when the last is answered.

    All begin at once. So many `rounds` of requests are taken, of which the first `skip` are not counted.
    """
    engine = _Replica(deployment, workload, limits)
    for _ in range(concurrency):
        engine.arrive(0.0)
    engine.run(concurrency * rounds, again=concurrency * rounds)
    return engine.served(skip=concurrency * skip)


def benchmark(
    deployment: Deployment,
    workload: RequestShape,
    concurrency: int,
    prompts: int,
    limits: Limits = USUAL,
    ramp_s: float = 0.0,
) -> Served:
    """A closed loop as load generators run it: all clients begin at once, and all of so many prompts count.

    Args:
        ramp_s: some let clients begin one after the other, over so long, and do not count what ends in that time.
    """
    engine = _Replica(deployment, workload, limits)
    engine.sends.extend(ramp_s * number / concurrency for number in range(min(concurrency, prompts)))
    engine.run(prompts, again=max(0, prompts - concurrency))
    return engine.served(skip=sum(each.last < ramp_s for each in engine.finished[:-1]))


def burst(deployment: Deployment, workload: RequestShape, requests: int, limits: Limits = USUAL) -> Served:
    """All requests at once, and no more after them."""
    return open_loop(deployment, workload, [0.0] * requests, limits)


def open_loop(
    deployment: Deployment, workload: RequestShape, arrivals: Sequence[float], limits: Limits = USUAL, skip: int = 0
) -> Served:
    """Requests sent at these times, in seconds, ascending; the first `skip` are not counted."""
    engine = _Replica(deployment, workload, limits)
    for sent in arrivals:
        engine.arrive(sent)
    engine.run(len(arrivals))
    return engine.served(skip)
