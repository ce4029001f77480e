"""Beam searches between the steps of an engine; each answers as one request."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from headway.engine.executor import StepOutcome
from headway.engine.hooks import StepHooks
from headway.engine.messages import AddRequest, SequenceOutput, TokenLogprobs
from headway.policy.step.beam_group import BeamGroup
from headway.policy.step.beams import Beam
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import FinishReason, Sequence
from headway.policy.step.scheduler import Scheduler


class SearchedRequest(StepHooks):
    """A request that is answered by beam search: between two steps the search goes on, forks and ends.

    Args:
        leader: the request's sequence.
        hooks: the engine's, which the search leaves when it ends.
        output: what is said of a sequence that has ended, which is forgotten then.
        forget: forgets a sequence that has ended.
        join: takes note of a new sequence.
        drop: forgets what was computed of a sequence.
    """

    def __init__(
        self,
        request: AddRequest,
        leader: Sequence,
        scheduler: Scheduler,
        hooks: list[StepHooks],
        output: Callable[[Sequence, list[int]], SequenceOutput],
        forget: Callable[[Sequence], None],
        join: Callable[[Sequence], None],
        drop: Callable[[int], None],
    ) -> None:
        self._request, self._scheduler, self._hooks = request, scheduler, hooks
        self._group = BeamGroup(leader, scheduler)
        self._output, self._forget, self._join, self._drop = output, forget, join, drop

    def computed(self, outcome: StepOutcome) -> None:
        """Take the rows of a step: what was drawn beside them is not meant."""
        for member in self._group.members:
            if rows := outcome.logprobs.pop(member.seq_id, None):
                self._group.take(member.seq_id, rows[0])
                outcome.tokens[member.seq_id] = []

    def after(
        self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], outputs: list[SequenceOutput], now: int
    ) -> list[SequenceOutput]:
        """Let the search go on, and answer the request once it is done.

        Where one of its sequences has ended without an answer, so has the request, and each of its choices is told.
        """
        group = self._group
        if any(member.finish_reason is not None for member in group.members):
            own = [output for output in outputs if output.request_id == self._request.request_id]
            told = self._stop(now, own[0] if own else None)
            return [output for output in outputs if output.request_id != self._request.request_id] + told
        if plan.preempted and not {member.seq_id for member in group.members}.isdisjoint(plan.preempted):
            group.give_up(now)
        else:
            group.advance(now)
        texts = group.finish(now) if group.search.is_done else []
        for seq_id in group.reused:
            self._drop(seq_id)
        for member in group.joined:
            self._join(member)
        for member in group.left:
            self._forget(member)
        group.reused, group.joined, group.left = [], [], []
        if not group.search.is_done:
            return outputs
        self._hooks.remove(self)
        answers = self._answers(texts)
        changed += [(group.leader, answer.token_ids) for answer in answers]
        return outputs + answers

    def _answers(self, texts: list[tuple[FinishReason, Beam]]) -> list[SequenceOutput]:
        said = self._output(self._group.leader, [])
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
                    logprobs=_logprobs(path, self._request.params.logprobs),
                )
            )
        return answers

    def abort(self, request_id: str, now: int) -> list[SequenceOutput]:
        """End the search, if it is the request's that somebody has dropped, with an output for each choice."""
        return self._stop(now, None) if request_id == self._request.request_id else []

    def _stop(self, now: int, why: SequenceOutput | None) -> list[SequenceOutput]:
        """End what is left of the search. The ledger is that of the leader, which may have ended already."""
        self._hooks.remove(self)
        for member in self._group.members:
            if member.finish_reason is None:
                self._scheduler.abort(member, now)
                said = self._output(member, [])
                if member is self._group.leader:
                    why = said if why is None else replace(why, timings=said.timings)
        assert why is not None
        return [replace(why, index=index, token_ids=[]) for index in range(self._request.params.n)]


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
