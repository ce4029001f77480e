"""A server without a scheduler: static batching with padding, the baseline that continuous batching replaced.

What waits when a batch has ended is the next batch, as far as seats and memory reach. Its prompts are padded to the
longest, every seat decodes until the longest answer is complete, and all end together (document 001, chapter 7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.cost.attention import Chunk
from headway.cost.timing import Deployment
from headway.policy.admission.intake import taken_up
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ledger import Phase
from headway.policy.step.request import NEVER, FinishReason
from headway.policy.step.step_time import StepWork, pairs
from headway.simulator.answers import Answer, Present
from headway.simulator.server import Server
from headway.simulator.timing import Predicted


@dataclass(frozen=True, slots=True)
class Seat:
    """An answer of a batch."""

    of: Present
    answer: Answer
    most: int  # tokens that it may have, for which memory is kept
    output: int  # tokens that it will have


class StaticServer(Server):
    """The server of a deployment, which answers one batch after the other.

    Its scheduler decides nothing. It gives seats and blocks, and checks what comes.
    """

    def __init__(self, deployment: Deployment, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._step_times = Predicted(deployment)
        self._seats: deque[Seat] = deque()  # that wait
        self._seated: list[Seat] = []

    def life(self) -> Generator[int, int, None]:
        """Run batches for ever; see `Engine.life`."""
        yield self.now
        while True:
            for do, present in taken_up(self._messages(len(self._inbox)), lambda: self.now):
                do(present)
            if self._seats:
                yield from self._batch()
            elif not self._inbox:
                yield from self._idle(NEVER)
            yield self.now

    def fail(self, now: int) -> list[Present]:
        self._seats.clear()
        self._seated = []
        return super().fail(now)

    def _add(self, present: Present) -> None:
        arrival = present.arrival
        most = arrival.request.params.max_tokens or 1
        output = most if arrival.output_len is None else max(1, min(most, arrival.output_len))
        for answer in present.answers:
            answer.ledger.mark(Phase.TRANSPORT, self.now)
            self._seats.append(Seat(present, answer, most, output))

    def _abort(self, present: Present) -> None:
        self._seats = deque(seat for seat in self._seats if seat.of is not present)
        if present.left:
            self._give_up(present, self.now)

    def _next_batch(self) -> list[Seat]:
        """Take seats in the order of arrival, while all of them have room at the length of the longest."""
        batch: list[Seat] = []
        blocks, longest = self.scheduler.blocks, 0
        while self._seats and len(batch) < self.scheduler.config.max_num_seqs:
            seat = self._seats[0]
            longest = max(longest, seat.answer.prompt_len + seat.most)
            if batch and (len(batch) + 1) * blocks.most_blocks(longest) > blocks.num_blocks:
                break
            batch.append(self._seats.popleft())
        return batch

    def _batch(self) -> Generator[int, int, None]:
        self._seated = batch = self._next_batch()
        began, count = self.now, len(batch)
        prompt, output = (
            max(getattr(each, name) for each in group)
            for name, group in (("prompt_len", [seat.answer for seat in batch]), ("output", batch))
        )
        steps = list(self._steps(count, prompt, output))
        token_ns = [times.sampled_ns for _, times in steps]
        ended, held = token_ns[-1], count * self.scheduler.blocks.most_blocks(prompt + output)
        yield ended - 1
        for planned, (work, times) in zip([began, *token_ns], steps, strict=False):
            self.steps.add(planned, work, count, 0, times, count, len(self._seats) + len(self._inbox), held)
        self.now = self._ran_ns = ended
        self._seated = []
        for seat in batch:
            answer = seat.answer
            answer.ledger.mark(Phase.QUEUE_CAPACITY, began)
            answer.ledger.mark(Phase.PREFILL_COMPUTE, token_ns[0])
            answer.ledger.mark(Phase.DECODE_COMPUTE, ended)
            answer.token_ns.extend(token_ns[: seat.output])
            answer.steps = len(steps)
            answer.finish_reason = FinishReason.LENGTH if seat.output == seat.most else FinishReason.STOP
            seat.of.place.had_output(0, ended)
            self._ended(seat.of, 1, ended)

    def _steps(self, count: int, prompt: int, output: int) -> Iterator[tuple[StepWork, StepTimes]]:
        """The steps of a batch of padded prompts, until the longest answer is complete."""
        work = StepWork(count * prompt, 0, count * pairs(0, prompt))
        times = self._step_times.times_of((Chunk(prompt, 0, 1, count),), self.now)
        yield work, times
        for context in range(prompt + 1, prompt + output):
            work = StepWork(decode_tokens=count, decode_context=count * context)
            times = self._step_times.decode_times(work, partial(_all_at, context - 1, count), times.sampled_ns)
            yield work, times


def _all_at(context: int, count: int) -> list[int]:
    return [context] * count
