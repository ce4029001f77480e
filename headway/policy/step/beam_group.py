"""The sequences of a beam search: a sequence for each beam, which share blocks and are one request to everybody else.

The leader is the request's own sequence. It alone is queued, admitted and preempted; it has the seats of all beams and
the ledger. When its prompt is computed, the others fork from it. A step gives each beam a row of likely tokens; once
all have one, beams that go on in several ways fork, into the sequences of those that do not go on. Blocks are shared
until one writes into them.

When one of the sequences loses its blocks, all do: one beam alone could not go on, and would hold what others need. The
leader waits like any preempted sequence, with the tokens that all beams begin with. Once these are computed again, the
others fork from it and compute the rest of their own.
"""

from __future__ import annotations

from headway.policy.step.beams import Beam, BeamSearch, Row, most_tokens
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import FinishReason, Request, Sequence, Status
from headway.policy.step.scheduler import Scheduler


def check_beams(request: Request, scheduler: Scheduler, vocab_size: int | None) -> None:
    """Refuse a search that could never run. Raises ValueError: one line for the user."""
    width, seats, blocks = request.params.width, scheduler.most_seqs, scheduler.blocks
    if width > seats:
        raise ValueError(f"beam search with {width} beams takes as many seats; this server has {seats} (max_num_seqs)")
    if vocab_size is not None and width > vocab_size:
        raise ValueError(f"beam search with {width} beams needs as many tokens; the vocabulary has {vocab_size}")
    if type(scheduler) is not Scheduler:
        raise ValueError("steps are recorded (--record-steps), which beam search cannot be; leave one of them out")
    if blocks.checkpoints is not None:
        raise ValueError("beam search needs a model without recurrent layers, whose states cannot be forked")
    prompt_len, size = len(request.prompt_token_ids), blocks.block_size
    max_len = min(scheduler.config.max_model_len, prompt_len + (request.params.max_tokens or 2**31))
    needed = (
        width * blocks.most_blocks(max_len) + 1
        if blocks.groups
        else most_tokens(width, prompt_len, max_len, size) // size
    )
    if needed > blocks.num_blocks:
        raise ValueError(
            f"beam search with {width} beams of {max_len} tokens needs {needed} KV blocks, the pool has "
            f"{blocks.num_blocks}; ask for fewer tokens or beams"
        )


class BeamGroup:
    """A beam search under way.

    Args:
        leader: the request's sequence, which has not run yet.

    Attributes:
        members: the sequence of each beam, in the order of `search.beams`.
        joined, left: sequences that have come and gone; who takes note of them empties the lists.
        reused: numbers of sequences of which an executor must forget what it knows; likewise.
    """

    def __init__(self, leader: Sequence, scheduler: Scheduler) -> None:
        params, most = leader.params, leader.max_len - leader.prompt_len
        self.search = BeamSearch(params.width, most, leader.stop_ids, params.length_penalty, params.early_stopping)
        self.leader = leader
        self.members = [leader]
        self.joined: list[Sequence] = []
        self.left: list[Sequence] = []
        self.reused: list[int] = []
        self._scheduler = scheduler
        self._sequences, self._manager = scheduler.sequences, scheduler.block_manager
        self._rows: dict[int, Row] = {}  # of the step under way, by seq_id
        self._gathers = False  # the leader has only what all beams begin with
        self._named = 0  # the last index that a fork has got
        leader.seats = params.width

    def take(self, seq_id: int, row: Row) -> None:
        """A step has computed the likeliest tokens of a member."""
        self._rows[seq_id] = row

    def advance(self, now: int) -> None:
        """Go on, if all beams have their rows; `search.is_done` says whether that was the end.

        A member that has its row before others computes its newest token again, which changes nothing.
        """
        if len(self._rows) < len(self.members):
            return
        for member in self.members:
            member.num_computed = len(member.tokens)
        rows = [self._rows.pop(member.seq_id) for member in self.members]
        if self._gathers:
            self._spread(now)
            return
        if self.leader.output_len == 0:
            self._scheduler.policy.first_token(self.leader, now)
        going = self.search.advance(rows)
        if not self.search.is_done:
            self._go_on(going, now)

    def _go_on(self, going: list[tuple[int, Beam]], now: int) -> None:
        """Give each beam a sequence: the first behind another takes that one's, others take one that is left over."""
        before, after = self.members, dict[int, Sequence]()
        kept: set[int] = set()
        for at, (number, _) in enumerate(going):
            if number not in kept:
                kept.add(number)
                after[at] = before[number]
        over = [member for number, member in enumerate(before) if number not in kept]
        over.sort(key=lambda member: member is not self.leader)
        if over and over[0] is self.leader and len(after) == len(going):
            over.append(after.pop(len(going) - 1))
        for at, (number, _) in enumerate(going):
            if at not in after:
                source, computed = before[number], before[number].num_computed
                after[at] = self._forked(source, over.pop(0) if over else None, source.tokens[:computed], now)
        for member in over:
            self.leader.seats, member.seats = self.leader.seats + member.seats, 0
            self._leave(member, now)
        self.members = [after[at] for at in range(len(going))]
        for member, (_, beam) in zip(self.members, going, strict=True):
            member.tokens.append(beam.token)

    def _forked(self, source: Sequence, reused: Sequence | None, tokens: list[int], now: int) -> Sequence:
        """A sequence with these tokens that goes on from the computed ones of another.

        Args:
            reused: a member whose beam does not go on; None for a new sequence.
        """
        computed = source.num_computed
        if reused is None:
            self._named += 1
            self.leader.seats -= 1
            fork = self._sequences.fork(source, self._named, now)
            self.joined.append(fork)
        else:
            fork = reused
            self._manager.release(fork)
            self.reused.append(fork.seq_id)
        self._manager.fork(fork, source, computed)
        fork.tokens, fork.charged = tokens, min(source.charged, len(tokens))
        return fork

    def _leave(self, member: Sequence, now: int) -> None:
        self._sequences.finish(member, FinishReason.ABORT, now)
        self.left.append(member)

    # --- preemption ---------------------------------------------------------------------------------

    def give_up(self, now: int) -> None:
        """Give up all blocks, as a member has lost its own; the leader waits for the prompt's end to be there again."""
        for member in self.members:
            if member is not self.leader:
                self._leave(member, now)
        leader = self.leader
        if leader.status is Status.RUNNING:
            self._sequences.preempt(leader, StepPlan(), now)
            self.reused.append(leader.seq_id)
        self._manager.release(leader)  # also what a host holds of it
        common = self.search.common()
        tokens = leader.tokens[: leader.prompt_len] + common
        charged = min(leader.charged, len(tokens))
        self._sequences.rekey(
            leader, tokens=tokens, charged=charged, swapped=None, prefix_match=None, seats=leader.params.width
        )
        self._rows.clear()
        self.members = [leader]
        self._gathers = len(common) < self.search.beams[0].length

    def _spread(self, now: int) -> None:
        """Let the other beams fork from the leader, and all compute the rest of their tokens."""
        leader, prompt = self.leader, self.leader.tokens[: self.leader.prompt_len]
        texts = [prompt + beam.tokens for beam in self.search.beams]
        self.members += [self._forked(leader, None, tokens, now) for tokens in texts[1:]]
        leader.tokens = texts[0]
        for member in self.members:
            member.is_unreserved = True
        self._gathers = False

    # --- the end ------------------------------------------------------------------------------------

    def finish(self, now: int) -> list[tuple[FinishReason, Beam]]:
        """End all sequences of a search that is done, and return its texts, the best first."""
        for member in self.members:
            if member is not self.leader:
                self._leave(member, now)
        texts = [
            (FinishReason.STOP if self.search.ends_at_stop(beam) else FinishReason.LENGTH, beam)
            for _, beam in self.search.ended[: self.leader.params.n]
        ]
        reason, best = texts[0]
        self.leader.tokens = self.leader.tokens[: self.leader.prompt_len] + best.tokens
        self._sequences.finish(self.leader, reason, now)
        return texts
