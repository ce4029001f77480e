"""The policy `slo`: each step is decided by the time until promised tokens are due, and each class has its shares.

Before a step, an engine in which nothing runs may wait for more requests (`window`). Then prompts that would make
others late yield (`promises`), an urgent one takes the place of sequences without a promise (`victims`), and blocks
that were lent go back to the class that wants them (`shares`). The step may last until the tightest promised token is
due; prompts share what decoding leaves of it. A sequence is admitted if its class has a seat, and its tokens make no
others late.

Nothing starves. A decoding sequence that was left out of steps for MOST_LEFT_OUT_NS gets its next token before all
others that are left out, one such sequence in each step. A prompt behind all promises has starved when it has been
there for the `starvation_s` of its class. The starved are served to their end one at a time, in the order in which that
time was over: with a block of the prompt or a token in every step, and with the first seat and the first blocks that
are given back. A starved sequence may take more of a step's prompt tokens than a block: all of them where no other
prompt is promised, else STARVED_SHARE of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from headway.policy.objectives.fairness import FairSequences
from headway.policy.objectives.orders import BEHIND_ALL, SLO
from headway.policy.objectives.output_lengths import OutputLengths
from headway.policy.objectives.prefix_batching import PrefixLeaders
from headway.policy.objectives.promises import LOOKED_AT, STARVED_SHARE, Outlook, Promises, Yield, is_promised
from headway.policy.objectives.shares import Shares
from headway.policy.objectives.victims import Displacement
from headway.policy.objectives.window import Window
from headway.policy.step.accounting import StepTimes
from headway.policy.step.order import OrderedSequences
from headway.policy.step.request import NEVER, FinishReason, Sequence, Status
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.scheduling_policy import SchedulingPolicy
from headway.policy.step.sequences import Sequences, Step
from headway.policy.step.step_budget import StepBudget
from headway.policy.step.step_time import StepWork

WINDOW_LOOKS_AT = 16  # with more waiting sequences than this, an idle engine begins at once


class SloPolicy(SchedulingPolicy):
    """Keeps objectives of requests and shares of classes."""

    orders = SLO

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        config, blocks = self.config, self.blocks
        self.promises = Promises(self.step_time, config.max_num_batched_tokens, self.block_manager.known_tokens)
        self.window = Window(self.step_time)
        sizes = config.kept_free(blocks.num_blocks), blocks.most_blocks(config.max_model_len)
        self.shares = Shares(config.classes, config.max_num_seqs, blocks, *sizes)
        self._lengths = OutputLengths()
        self._leaders = PrefixLeaders(blocks.block_size, self.orders.admission, blocks.checkpoints is not None)
        self._displacement = Displacement(self)
        self._starved: Sequence | None = None
        self._outlook = Outlook()  # the limits of the step
        self._open_until_ns = NEVER  # sequences without a promise start only if their first token is planned by then

    # --- who comes and goes -------------------------------------------------------------------------

    def arrives(self, sequence: Sequence, now: int) -> None:
        sequence.expected_len = sequence.prompt_len + self._lengths.expected(sequence)
        self.shares.waiting[sequence.service.name] += 1
        if sequence.index == 0:
            self.window.arrived(now)

    def starts(self, sequence: Sequence) -> None:
        self.promises.begins(sequence)
        self._leaders.begins(sequence)
        self.shares.waiting[sequence.service.name] -= 1
        self.shares.running[sequence.service.name] += 1

    def first_token(self, sequence: Sequence, now: int) -> None:
        """A sequence that had yielded may be in time after all."""
        if now <= sequence.due_ns:
            sequence.yielded = ""

    def leaves(self, sequence: Sequence, reason: FinishReason | None) -> None:
        name = sequence.service.name
        self._leaders.ends(sequence)
        if sequence.status is Status.RUNNING:
            self.shares.running[name] -= 1
            self.shares.waiting[name] += reason is None
        else:
            self.shares.waiting[name] -= 1
            if not self.shares.waiting.total():
                self.window.close()
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.pooling is None:
            self._lengths.ended(sequence)

    def set_config(self, config: SchedulerConfig) -> None:
        super().set_config(config)
        self.promises.step_tokens = config.max_num_batched_tokens
        # Shares are of what is left of the pool, which may have changed.
        self.shares.set_classes(config.classes, config.max_num_seqs)

    def heed(self, planned_ns: int, times: StepTimes) -> None:
        self.promises.heed(planned_ns, (times,))

    def heed_steady(self, planned_ns: int, steps: list[StepTimes]) -> None:
        self.promises.heed(planned_ns, steps)

    # --- before a step ------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        sequences, now = step.sequences, step.now
        until = 0 if len(sequences.running) else self._window_until(sequences.waiting, now)
        if until:
            return step.wait_until(until)
        self._put_starved_first(step)
        self._promise_again(step)
        yields, urgent = self._yielding(step)
        for each in yields:
            self._yield(each, step)
        self._outlook = self._look_ahead(step, urgent)
        if urgent is not None:
            self._displacement.displace(step, self.shares.may_go)
        if self.lends_blocks:
            seats = self.config.max_num_seqs - len(sequences.running)
            self.shares.give_back(step, seats, self.orders.victims, self.may_start)

    def _window_until(self, waiting: OrderedSequences, now: int) -> int:
        """When an engine in which nothing runs should begin with those who wait; 0 for now."""
        if 0 < len(waiting) <= WINDOW_LOOKS_AT:
            sequences = list(waiting)
            if not any(sequence.preemptions or sequence.output_len for sequence in sequences):
                until = self.window.until(sequences, self.promises.prefill_ns(sequences[0]), now)
                if until > now:
                    return until
        return 0

    def _put_starved_first(self, step: Step) -> None:
        starved = self.starved(step.prompts, step.sequences.waiting, step.now)
        if starved is not None:
            step.sequences.rekey(starved, has_starved=True)

    def starved(self, prompts: list[Sequence], waiting: OrderedSequences, now: int) -> Sequence | None:
        """The sequence that goes first from now on: the one behind all promises that was the first to starve.

        Args:
            prompts: running sequences with a prompt under way.
        """
        if self._starved is not None and self._starved.status is not Status.FINISHED:
            return None
        self._starved, first_ns = None, now
        behind = (sequence for sequence in prompts if sequence.is_behind)
        for sequence in chain(behind, first_of_ranks(waiting)):
            starved_ns = sequence.arrival_ns + int(sequence.service.starvation_s * 1e9)
            if starved_ns <= first_ns:
                self._starved, first_ns = sequence, starved_ns - 1
        return self._starved

    def _promise_again(self, step: Step) -> None:
        """Promise again what has yielded and is owed to its tenant, among running prompts and the first that wait."""
        fair = step.sequences.waiting
        if isinstance(fair, FairSequences):
            running = [sequence for sequence in step.prompts if sequence.has_yielded and fair.is_owed(sequence)]
            for sequence in running + [sequence for sequence in fair.owed() if sequence.has_yielded]:
                step.sequences.rekey(sequence, yielded="", renewed_ns=0)

    def _yielding(self, step: Step) -> tuple[list[Yield], Sequence | None]:
        """Which of the running and the first waiting prompts yield, and which is urgent; see Promises.yielding()."""
        self.window.close()
        waiting, prompts = step.sequences.waiting, step.prompts
        in_order = waiting.before(BEHIND_ALL, LOOKED_AT)
        if prompts:
            order = self.orders.admission
            in_order += [(order(sequence), sequence) for sequence in prompts if not sequence.is_behind]
            in_order.sort()
        fair = waiting if isinstance(waiting, FairSequences) else None
        return self.promises.yielding([sequence for _, sequence in in_order], step.decoding, step.now, fair)

    def _yield(self, each: Yield, step: Step) -> None:
        """Plan a sequence as if it came now and its work were free, or end it where its class wants that."""
        sequence = each.sequence
        step.decision.yielded.append((sequence.request_id, each.reason))
        renewed_ns = step.now + sequence.due_ns - sequence.arrival_ns + int(sequence.work_ns)
        step.sequences.rekey(sequence, yielded=sequence.yielded or each.reason, renewed_ns=renewed_ns)
        if sequence.service.when_late == "refuse":
            sequence.retry_after_s = max(1, math.ceil(each.backlog_ns / 1e9))
            step.end(sequence, FinishReason.LATE)

    def _look_ahead(self, step: Step, urgent: Sequence | None) -> Outlook:
        """The limits that promises set to the step."""
        outlook = self.promises.outlook(step.decoding, step.prompts, urgent, step.now)
        self._open_until_ns = 0 if outlook.left_out else NEVER
        decision, step.left_out = step.decision, outlook.left_out
        decision.slack_ns = outlook.slack_ns
        if outlook.tightest is not None:
            decision.tightest = outlook.tightest.request_id
        if urgent is not None:
            self._open_until_ns = urgent.planned_ns
            decision.urgent = urgent.request_id
        return outlook

    # --- what the step is made of -------------------------------------------------------------------

    @property
    def lends_blocks(self) -> bool:  # type: ignore[override]
        return self.shares.are_lent

    def make_room(self, decoding: list[Sequence], step: Step) -> list[Sequence]:
        return self.shares.make_room(decoding, step, self.orders.victims) if self.lends_blocks else decoding

    def most_drafts(self, decodes: StepWork) -> int:
        return self.promises.drafts_within(decodes, self._outlook.slack_ns)

    def time_for(self, decodes: StepWork, running: Iterable[Sequence]) -> float:
        """The time until the tightest promised token is due, or more where a starved sequence needs it for a block."""
        self.shares.begin_step(running)
        slack_ns, first = self._outlook.slack_ns, self._starved
        if not self.config.enable_chunked_prefill:
            return math.inf
        if first is None or first.status is Status.FINISHED or first.is_decoding:
            return slack_ns
        if first.status is Status.WAITING and self.shares.running.total() >= self.config.max_num_seqs:
            return slack_ns
        block = self.step_time.prefill_ns(self.blocks.block_size, first.num_computed)
        return max(slack_ns, self.step_time.predict_ns(decodes) + block)

    def most_tokens(self, sequence: Sequence, budget: StepBudget) -> int:
        if not self.config.enable_chunked_prefill:
            return sequence.num_to_compute
        most = min(sequence.num_to_compute, self.shares.tokens_for(sequence.service.name, budget))
        if sequence.has_starved and self.promises.are_prompts_promised:
            share = int(STARVED_SHARE * budget.fit(0, self.config.max_num_batched_tokens))
            most = min(most, max(self.blocks.block_size, share))
        return most

    def takes(self, sequence: Sequence, count: int) -> None:
        self.shares.give_tokens(sequence.service.name, count)

    # --- who is admitted ----------------------------------------------------------------------------

    def may_start(self, sequence: Sequence, num_running: int) -> bool:
        if num_running + self.shares.seats_kept_from(sequence.service.name) >= self.config.max_num_seqs:
            return False
        name = sequence.service.name
        if name in self.shares.most and not self._fits_in_bound(sequence):
            return False
        if sequence.has_starved:
            return True
        is_held_up = sequence.planned_ns > self._open_until_ns and not is_promised(sequence)
        if is_held_up and not self.shares.has_seat_left(sequence.service.name):
            return False
        if sequence.output_len:
            return True
        return self.promises.has_room_for(sequence) and not self._follows(sequence)

    def _fits_in_bound(self, sequence: Sequence) -> bool:
        """Whether its class stays within its bound with the sequence, and also with a starved one that waits."""
        name, first, wanted = sequence.service.name, self._starved, self.block_manager.wanted
        if first is not None and first.status is Status.WAITING and first.service.name == name:
            return self.shares.may_use(name, wanted(first)) and self.shares.may_use(name, wanted(sequence))
        return self.shares.may_use(name, wanted(sequence))

    def _follows(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for another prompt that begins alike."""
        return self.blocks.enable_prefix_caching and self._leaders.is_worth_waiting_for(sequence)

    def spare_for(self, sequence: Sequence, spare: int) -> int:
        """How many blocks must stay free when the sequence is admitted.

        They are those that are kept for other classes, and `spare` besides where its own class exceeds its share. For a
        starved sequence they are only `spare`.
        """
        if not self.shares.blocks or sequence.has_starved or not self.shares.running.total():
            return spare
        kept = self.shares.blocks_kept_from(sequence.service.name)
        return kept if self.may_pass(sequence) else kept + spare

    def past(self, head: list[Sequence], waiting: OrderedSequences) -> list[Sequence]:
        """The first sequence of each class with a share, of those behind all promises."""
        if not self.shares.classes:
            return []
        firsts = (
            waiting.first_like(sequence)
            for sequence in first_of_ranks(waiting)
            if sequence.service.name in self.shares.classes
        )
        return [sequence for sequence in firsts if sequence not in head]

    def lets_past(self, blocked: Sequence) -> bool:
        return self.lends_blocks and not blocked.has_starved

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether its class keeps within its share of blocks when the sequence is admitted."""
        return self.shares.has_blocks_left(sequence.service.name, self.block_manager.wanted(sequence))

    # --- after it -----------------------------------------------------------------------------------

    def is_outranked(self, sequences: Sequences) -> bool:
        return self._displacement.is_outranked(sequences)

    @property
    def num_windows(self) -> int:  # type: ignore[override]
        return self.window.num_opened

    def is_steady(self, running: Iterable[Sequence]) -> bool:
        return not self.shares.most and len({each.due_ns == NEVER == each.tpot_ns for each in running}) <= 1

    def steady_steps(self, count: int) -> None:
        self.promises.has_no_prompts(count)


def first_of_ranks(waiting: OrderedSequences) -> Iterator[Sequence]:
    """The first sequence of each rank that waits behind all promises."""
    rank = 0
    while (first := waiting.first_from((*BEHIND_ALL, rank))) is not None:
        yield first
        rank = first.rank + 1
