"""What a scheduler asks of its policy, with the answers of one that decides nothing: first come, first served."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headway.policy.cache.block_manager import BlockManager
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.accounting import StepTimes
from headway.policy.step.order import FCFS, OrderedSequences
from headway.policy.step.request import FinishReason, Sequence
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.sequences import Sequences, Step
from headway.policy.step.step_budget import StepBudget
from headway.policy.step.step_time import StepTimeModel, StepWork

NO_LIMIT = 2**31


class SchedulingPolicy:
    """Decides what blocks, seats and the budget of a step leave open. docs/scheduling-policies.md explains it.

    Nothing here may read a clock or chance: the same calls give the same answers, so that a recording can be replayed.

    Args:
        config: the limits of a step, and the classes of requests.
        blocks: the KV pool.
        block_manager: says how many blocks a sequence wants.
        step_time: predicts how long steps take.

    Attributes:
        orders: who comes first.
        uses_priority: requests may have a priority.
        lends_blocks: make_room() may preempt somebody although there are blocks for the next tokens.
        queue_waits_for_seats: while all seats are taken, steps in which all decode go on whoever waits.
        num_windows: how often an idle engine has waited for more requests.
    """

    orders = FCFS
    uses_priority = False
    lends_blocks = False
    queue_waits_for_seats = False
    num_windows = 0

    def __init__(
        self, config: SchedulerConfig, blocks: KVBlocks, block_manager: BlockManager, step_time: StepTimeModel
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.block_manager = block_manager
        self.step_time = step_time

    # --- it is told who comes and goes --------------------------------------------------------------

    def arrives(self, sequence: Sequence, now: int) -> None:
        """A new sequence is about to be queued."""

    def starts(self, sequence: Sequence) -> None:
        """A waiting sequence was admitted and runs."""

    def first_token(self, sequence: Sequence, now: int) -> None:
        """A running sequence has its first token, or its vector."""

    def leaves(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """A running sequence is preempted (`reason` is None), or any sequence ends. Its status has not changed yet."""

    def set_config(self, config: SchedulerConfig) -> None:
        """Classes of requests or weights of tenants have changed, or blocks of the pool stay in use for good."""
        self.config = config

    # --- before a step ------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Let sequences yield, end or give up their places, leave some out of the step, or have it wait."""

    # --- what the step is made of -------------------------------------------------------------------

    def make_room(self, decoding: list[Sequence], step: Step) -> list[Sequence]:
        """The decoding sequences that get a token. Where blocks run out for them, the scheduler preempts."""
        return decoding

    def most_drafts(self, decodes: StepWork) -> int:
        """How many drafts a step with these decodes may try."""
        return NO_LIMIT

    def time_for(self, decodes: StepWork, running: Iterable[Sequence]) -> float:
        """Nanoseconds that a step with these decodes may take with prompts; infinite for `max_prefill_stall_ms`."""
        return math.inf

    def most_tokens(self, sequence: Sequence, budget: StepBudget) -> int:
        """How many tokens of its prompt a sequence may take of what the step has left."""
        return sequence.num_to_compute

    def takes(self, sequence: Sequence, count: int) -> None:
        """A sequence takes so many tokens of its prompt."""

    # --- who is admitted ----------------------------------------------------------------------------

    def may_start(self, sequence: Sequence, num_running: int) -> bool:
        """Whether a waiting sequence may be admitted beside so many, if there are blocks."""
        return True

    def spare_for(self, sequence: Sequence, spare: int) -> int:
        """How many blocks must stay free when a sequence is admitted; `spare` is what the scheduler leaves free."""
        return spare

    def past(self, head: list[Sequence], waiting: OrderedSequences) -> list[Sequence]:
        """Waiting sequences that may be admitted although they are not in the head of the queue."""
        return []

    def lets_past(self, blocked: Sequence) -> bool:
        """Whether may_pass() is asked, now that a sequence without blocks has been overtaken as often as it may be."""
        return False

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether a sequence may still go before that one."""
        return False

    # --- after it -----------------------------------------------------------------------------------

    def is_outranked(self, sequences: Sequences) -> bool:
        """Whether the first that waits would run by now if the policy had not put others before it."""
        return False

    def heed(self, planned_ns: int, times: StepTimes) -> None:
        """A step that was decided at `planned_ns` has ended."""

    # --- steps that are not scheduled one by one: on a GPU, and in simulations -----------------------

    def is_steady(self, running: Iterable[Sequence]) -> bool:
        """Whether steps in which all of these decode, and nobody waits, go on without the policy."""
        return False

    def heed_steady(self, planned_ns: int, steps: list[StepTimes]) -> None:
        """Such steps have ended, each of which was planned when the one before had ended."""
        for times in steps:
            self.heed(planned_ns, times)
            planned_ns = times.sampled_ns

    def steady_steps(self, count: int) -> None:
        """So many of these steps begin, one after the other."""


class FcfsPolicy(SchedulingPolicy):
    """First come, first served."""

    queue_waits_for_seats = True

    def is_steady(self, running: Iterable[Sequence]) -> bool:
        return True
