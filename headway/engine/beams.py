"""The beam searches of an engine: between its steps they go on, fork and end, and each answers as one request."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from headway.engine.executor import StepOutcome
from headway.engine.messages import AddRequest, SequenceOutput, TokenLogprobs
from headway.policy.step.beam_group import BeamGroup, check_beams
from headway.policy.step.beams import Beam
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import FinishReason, Sequence
from headway.policy.step.scheduler import Scheduler

__all__ = ["BeamSearches", "check_beams"]


class BeamSearches:
    """All searches under way, by their requests.

    Args:
        output: what is said of a sequence that has ended, which is forgotten then.
        forget: forgets a sequence that has ended.
        join: takes note of a new sequence.
        drop: forgets what was computed of a sequence.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        output: Callable[[Sequence, list[int]], SequenceOutput],
        forget: Callable[[Sequence], None],
        join: Callable[[Sequence], None],
        drop: Callable[[int], None],
    ) -> None:
        self._scheduler = scheduler
        self._output, self._forget, self._join, self._drop = output, forget, join, drop
        self._under_way: dict[str, tuple[AddRequest, BeamGroup]] = {}

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._under_way

    def add(self, request: AddRequest, leader: Sequence) -> None:
        """Begin a search with the request's sequence."""
        self._under_way[request.request_id] = request, BeamGroup(leader, self._scheduler)

    def take(self, outcome: StepOutcome) -> None:
        """Take the rows of a step, before it is completed: what was drawn beside them is not meant."""
        for _, group in self._under_way.values():
            for member in group.members:
                if rows := outcome.logprobs.pop(member.seq_id, None):
                    group.take(member.seq_id, rows[0])
                    outcome.tokens[member.seq_id] = []

    def go_on(self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], now: int) -> list[SequenceOutput]:
        """Let all searches go on after a step, and return the answers of those that are done.

        Args:
            plan: the step's. If nothing ran in it, sequences can only have lost their blocks.
            changed: what the step has changed, for metrics; the tokens of the answers are added.
        """
        answers: list[SequenceOutput] = []
        lost = set(plan.preempted)
        for request_id, (request, group) in list(self._under_way.items()):
            if any(member.finish_reason is not None for member in group.members):
                continue  # end() ends it
            if lost and not lost.isdisjoint([member.seq_id for member in group.members]):
                group.give_up(now)
            else:
                group.advance(now)
            done = group.search.is_done
            texts = group.finish(now) if done else []
            for seq_id in group.reused:
                self._drop(seq_id)
            for member in group.joined:
                self._join(member)
            for member in group.left:
                self._forget(member)
            group.reused, group.joined, group.left = [], [], []
            if done:
                del self._under_way[request_id]
                told = self._answers(request, group, texts)
                changed += [(group.leader, answer.token_ids) for answer in told]
                answers += told
        return answers

    def _answers(
        self, request: AddRequest, group: BeamGroup, texts: list[tuple[FinishReason, Beam]]
    ) -> list[SequenceOutput]:
        said = self._output(group.leader, [])
        answers: list[SequenceOutput] = []
        for index, (reason, beam) in enumerate(texts):
            path = beam.path()
            answers.append(
                replace(
                    said,
                    index=index,
                    token_ids=[each.token for each in path],
                    finish_reason=reason,
                    stop_token_id=beam.token if reason is FinishReason.STOP else None,
                    logprobs=_logprobs(path, request.params.logprobs),
                )
            )
        return answers

    def only_others(self, changed: list[tuple[Sequence, list[int]]]) -> list[tuple[Sequence, list[int]]]:
        """What a step has changed that is to be told: not the members of searches, unless they have failed."""
        under_way = self._under_way
        return [(s, new) for s, new in changed if s.request_id not in under_way or s.finish_reason is not None]

    def end(self, outputs: list[SequenceOutput], now: int) -> list[SequenceOutput]:
        """End the searches of which a sequence has ended without an answer: each of their choices is told."""
        told: list[SequenceOutput] = []
        ended: set[str] = set()
        for output in outputs:
            name = output.request_id
            if name in self._under_way:
                ended.add(name)
                told += self._stop(name, now, output)
            elif name not in ended:
                told.append(output)
        return told

    def abort(self, request_id: str, now: int) -> list[SequenceOutput]:
        """End a search that somebody has dropped, with an output for each of its choices."""
        return self._stop(request_id, now, None)

    def _stop(self, name: str, now: int, why: SequenceOutput | None) -> list[SequenceOutput]:
        """End what is left of a search. The ledger is that of the leader, which may have ended already."""
        request, group = self._under_way.pop(name)
        for member in group.members:
            if member.finish_reason is None:
                self._scheduler.abort(member, now)
                said = self._output(member, [])
                if member is group.leader:
                    why = said if why is None else replace(why, timings=said.timings)
        assert why is not None
        return [replace(why, index=index, token_ids=[]) for index in range(request.params.n)]


def _logprobs(path: list[Beam], top: int | None) -> list[TokenLogprobs] | None:
    """The log-probabilities of a text's tokens, with so many alternatives; None where nobody asked."""
    if top is None:
        return None
    found = []
    for beam in path:
        assert beam.row is not None
        ids, logprobs = beam.row.top_ids, beam.row.top_logprobs
        found.append(TokenLogprobs(logprobs[beam.place], beam.place + 1, ids[:top], logprobs[:top]))
    return found
