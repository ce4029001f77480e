"""Many requests on one deployment: a recursion over engine steps with the rules that engines share.

It stands for continuous batching with chunked prefill (Orca, Yu et al., 2022; Sarathi-Serve, Agrawal et al., 2024): in
each step every decoding sequence gets one token, and the prompts that wait, first come first served, share what is left
of the step's budget of tokens. Steps take as long as `Deployment.step` says.

Assumptions: all requests are alike, nothing is preempted, and no prefix is found in the cache unless the workload says
so. Runs of steps without prompts and without anybody coming or going are taken in one go, at the time of the middle
one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway.cost.attention import Chunk
from headway.cost.timing import Deployment

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are alike, in tokens.

    Args:
        output: of an answer, on average.
        cached: of the prompt, found in the prefix cache; at least one token of a prompt is always computed.
        spread: answers are evenly spread between output * (1 - spread) and output * (1 + spread). At 0 requests that
            begin together end together and their successors come together: bursts that never dissolve.
    """

    prompt: int
    output: int
    cached: int = 0
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1:
            raise ValueError(f"prompt_tokens is {self.prompt} and output_tokens {self.output}; both must be at least 1")
        if not 0 <= self.cached < self.prompt:
            raise ValueError(f"cached tokens are {self.cached}; they must be fewer than the prompt's {self.prompt}")
        if not 0.0 <= self.spread <= 1.0:
            raise ValueError(f"spread is {self.spread}; it must be between 0 and 1")

    def output_of(self, number: int) -> int:
        """Tokens of the answer to the request of this number: a low-discrepancy sequence, the same in every run."""
        share = 2.0 * (number * _GOLDEN % 1.0) - 1.0
        return max(1, round(self.output * (1.0 + self.spread * share)))


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the engine: tokens in a step, and sequences at once."""

    batched_tokens: int = 8192
    sequences: int = 256

    def __post_init__(self) -> None:
        if self.batched_tokens < 1 or self.sequences < 1:
            raise ValueError(
                f"max_num_batched_tokens is {self.batched_tokens} and max_num_seqs {self.sequences}; "
                "both must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Served:
    """What clients of one replica see, over the requests that were counted. Times in seconds.

    Args:
        ttft_s, tpot_s, e2e_s: means. TPOT is 0 where only one token is asked for.
        ttft_p50_s: median.
        running: sequences in an average step.
        requests_per_s: that end.
        prompt_share: of the time, in steps with prompt tokens.
    """

    ttft_s: float
    ttft_p50_s: float
    tpot_s: float
    e2e_s: float
    requests_per_s: float
    running: float
    prompt_share: float


@dataclass(slots=True)
class _Waiting:
    arrived: float
    sent: float
    left: int
    done: int


@dataclass(slots=True)
class _Group:
    """Sequences with the same output length whose prompts ended in the same step.

    Args:
        born: steps taken before their first decode.
        ends: steps taken after their last one.
        members: when each was sent.
        passed: window sizes that their context has reached.
    """

    born: int
    ends: int
    output: int
    first: float
    members: list[float]
    passed: int = 0


class _Decoding:
    """All groups that decode. What a step needs of them is kept up to date, as there may be thousands.

    Args:
        prompt: tokens, the context of a group when it is born; from then on it grows by one a step.
        windows: sizes, ascending.
    """

    def __init__(self, prompt: int, windows: Sequence[int]) -> None:
        self._prompt = prompt
        self._windows = windows
        self._steps = 0
        self._by_end: list[tuple[int, int, _Group]] = []
        self._to_pass: list[deque[_Group]] = [deque() for _ in windows]
        self._born = 0
        # By how many windows they have passed, at least: sequences, and the sum of what `born` says of each.
        self._counts = [0] * (len(windows) + 1)
        self._births = [0] * (len(windows) + 1)

    def __len__(self) -> int:
        """Sequences."""
        return self._counts[0]

    def add(self, output: int, first: float, members: list[float]) -> None:
        """Sequences that got their first token in the step before, and are to get `output` in all."""
        group = _Group(self._steps, self._steps + output - 1, output, first, members)
        heapq.heappush(self._by_end, (group.ends, self._born, group))
        self._born += 1
        self._count(group, 0, len(members))
        for waiting in self._to_pass:
            waiting.append(group)
        self._pass_windows()

    def chunks(self) -> list[Chunk]:
        """Sequences between the same window sizes as one chunk of their mean context.

        A decode's work is linear in its context between two window sizes, so nothing is lost by it.
        """
        found = []
        for passed, (count, births) in enumerate(zip(self._counts, self._births, strict=True)):
            if passed < len(self._windows):
                count -= self._counts[passed + 1]
                births -= self._births[passed + 1]
            if count:
                contexts = count * (self._prompt + self._steps) - births
                found.append(Chunk(1, round(contexts / count), 1, count))
        return found

    def until_one_ends(self) -> int:
        """Steps."""
        return self._by_end[0][0] - self._steps

    def advance(self, steps: int) -> list[_Group]:
        """So many steps go by; those that end with them, in the order in which they were added."""
        self._steps += steps
        ended = []
        while self._by_end and self._by_end[0][0] <= self._steps:
            ended.append(heapq.heappop(self._by_end)[1:])
        for _, group in ended:
            for passed in range(group.passed + 1):
                self._count(group, passed, -len(group.members))
        self._pass_windows()
        return [group for _, group in sorted(ended, key=lambda each: each[0])]

    def _pass_windows(self) -> None:
        for number, (window, waiting) in enumerate(zip(self._windows, self._to_pass, strict=True)):
            while waiting and self._prompt + self._steps - waiting[0].born >= window:
                group = waiting.popleft()
                if group.ends > self._steps:
                    group.passed = number + 1
                    self._count(group, number + 1, len(group.members))

    def _count(self, group: _Group, passed: int, members: int) -> None:
        self._counts[passed] += members
        self._births[passed] += members * group.born


@dataclass(frozen=True, slots=True)
class _Finished:
    sent: float
    first: float
    last: float
    output: int


class _Engine:
    """The recursion. Requests are given by `arrive`, and `run` goes on until so many have ended."""

    def __init__(self, deployment: Deployment, workload: Workload, limits: Limits) -> None:
        self._deployment = deployment
        self._workload = workload
        self._limits = limits
        self._coming: list[tuple[float, float]] = []  # (at the scheduler, sent)
        self._waiting: deque[_Waiting] = deque()
        windows = {window for window in deployment.shape.sliding_windows if window is not None}
        self._decoding = _Decoding(workload.prompt, sorted(windows))
        self._intake_free = 0.0
        self._answered = 0
        self.now = 0.0
        self.finished: list[_Finished] = []
        self.busy_s = self.prompt_s = self.sequence_s = 0.0

    def arrive(self, sent: float) -> None:
        """A request is sent: its prompt is tokenized, one after the other, and then it is at the scheduler."""
        e, tokens = self._deployment.efficiency, self._workload.prompt
        self._intake_free = max(self._intake_free, sent) + e.token_s * tokens
        heapq.heappush(self._coming, (self._intake_free + e.request_s, sent))

    def run(self, until: int, again: bool) -> None:
        """Until so many requests have ended; `again` sends the next one whenever one ends."""
        while len(self.finished) < until:
            if not self._waiting and not self._decoding:
                self.now = max(self.now, self._coming[0][0])
            self._admit()
            ended = self._step()
            if again:
                for _ in range(ended):
                    self.arrive(self.now)

    def _admit(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            arrived, sent = heapq.heappop(self._coming)
            cached = self._workload.cached
            self._waiting.append(_Waiting(arrived, sent, self._workload.prompt - cached, cached))

    def _step(self) -> int:
        """One step, or many without prompts. Returns how many requests it ended."""
        decoding = len(self._decoding)
        prompts, firsts = self._prompts(decoding)
        decodes = self._decoding.chunks()
        took = self._deployment.step(decodes + prompts).seconds
        steps = 1 if prompts else self._quiet_steps(took)
        if steps > 1:
            middle = steps // 2
            later = [Chunk(1, each.context + middle, 1, each.sequences) for each in decodes]
            took = self._deployment.step(later).seconds
        self.now += steps * took
        self.busy_s += steps * took
        self.sequence_s += steps * took * (decoding + sum(chunk.sequences for chunk in prompts))
        self.prompt_s += took if prompts else 0.0
        return self._advance(steps, firsts)

    def _quiet_steps(self, took: float) -> int:
        """How many steps of this length go by before a sequence ends, or a request that has room comes."""
        steps = self._decoding.until_one_ends()
        if self._coming:
            steps = min(steps, math.ceil((self._coming[0][0] - self.now) / took))
        return max(1, steps)

    def _prompts(self, decoding: int) -> tuple[list[Chunk], list[_Waiting]]:
        """Chunks of waiting prompts for the next step, and those whose prompt it ends."""
        budget = self._limits.batched_tokens - decoding
        room = self._limits.sequences - decoding
        chunks: list[Chunk] = []
        firsts: list[_Waiting] = []
        while self._waiting and budget > 0 and room > 0:
            request = self._waiting[0]
            tokens = min(budget, request.left)
            last = tokens == request.left
            self._add(chunks, Chunk(tokens, request.done, int(last)))
            request.left -= tokens
            request.done += tokens
            budget -= tokens
            room -= 1
            if last:
                firsts.append(self._waiting.popleft())
        return chunks, firsts

    @staticmethod
    def _add(chunks: list[Chunk], chunk: Chunk) -> None:
        """Chunks that are alike count as one with several sequences."""
        if chunks and (chunks[-1].tokens, chunks[-1].context, chunks[-1].logit_rows) == (
            chunk.tokens,
            chunk.context,
            chunk.logit_rows,
        ):
            chunk = Chunk(chunk.tokens, chunk.context, chunk.logit_rows, chunks.pop().sequences + 1)
        chunks.append(chunk)

    def _advance(self, steps: int, firsts: list[_Waiting]) -> int:
        before = len(self.finished)
        for group in self._decoding.advance(steps):
            self.finished += [_Finished(sent, group.first, self.now, group.output) for sent in group.members]
        begun: dict[int, list[float]] = {}
        for request in firsts:
            begun.setdefault(self._workload.output_of(self._answered), []).append(request.sent)
            self._answered += 1
        for output, members in begun.items():
            if output == 1:
                self.finished += [_Finished(sent, self.now, self.now, 1) for sent in members]
            else:
                self._decoding.add(output, self.now, members)
        return len(self.finished) - before

    def served(self, skip: int) -> Served:
        """What those saw who ended after the first `skip`; their rate is the whole run's where all ended at once."""
        counted = self.finished[skip:]
        began = self.finished[skip - 1].last if skip else 0.0
        count = len(counted)
        rate = count / (self.now - began) if self.now > began else len(self.finished) / self.now
        ttfts = sorted(each.first - each.sent for each in counted)
        return Served(
            ttft_s=sum(ttfts) / count,
            ttft_p50_s=(ttfts[count // 2] + ttfts[(count - 1) // 2]) / 2,
            tpot_s=sum((each.last - each.first) / max(1, each.output - 1) for each in counted) / count,
            e2e_s=sum(each.last - each.sent for each in counted) / count,
            requests_per_s=rate,
            running=self.sequence_s / self.busy_s,
            prompt_share=self.prompt_s / self.busy_s,
        )


def closed_loop(
    deployment: Deployment,
    workload: Workload,
    concurrency: int,
    limits: Limits = Limits(),
    rounds: int = 4,
    skip: int = 1,
) -> Served:
    """`concurrency` clients, each of which sends its next request when the last is answered.

    All begin at once. So many `rounds` of requests are taken, of which the first `skip` are not counted.

    Raises:
        ValueError: concurrency is below 1, or no round is counted.
    """
    if concurrency < 1 or not 0 <= skip < rounds:
        raise ValueError(
            f"concurrency is {concurrency}, with {rounds} rounds of which {skip} are skipped; give at least 1, and "
            "fewer to skip than rounds"
        )
    engine = _Engine(deployment, workload, limits)
    for _ in range(concurrency):
        engine.arrive(0.0)
    engine.run(concurrency * rounds, again=True)
    return engine.served(skip=concurrency * skip)


def burst(deployment: Deployment, workload: Workload, requests: int, limits: Limits = Limits()) -> Served:
    """All requests at once, and no more after them. Raises ValueError when there are none."""
    if requests < 1:
        raise ValueError(f"requests is {requests}; it must be at least 1")
    return open_loop(deployment, workload, [0.0] * requests, limits)


def open_loop(
    deployment: Deployment, workload: Workload, arrivals: Iterable[float], limits: Limits = Limits(), skip: int = 0
) -> Served:
    """Requests sent at these times, in seconds, ascending; the first `skip` are not counted.

    Raises:
        ValueError: no request is left to count.
    """
    engine = _Engine(deployment, workload, limits)
    count = 0
    for sent in arrivals:
        engine.arrive(sent)
        count += 1
    if not 0 <= skip < count:
        raise ValueError(f"{count} requests of which {skip} are skipped leave none to count; at least 1 is needed")
    engine.run(count, again=False)
    return engine.served(skip)
