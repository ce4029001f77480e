"""A step as plain data: what the scheduler has decided, and all that who runs it must be told.

A plan can be encoded as it is, to go to another process. Sequences go by number, `seq_id`. Of one that the executor
does not know, as it has not run yet or was preempted, the plan has everything that it takes to run it; of others only
what has changed. An executor keeps each `SequenceState` that it was given until it is told to forget it.
"""

from __future__ import annotations

import msgspec

from headway.policy.request import Sequence
from headway.policy.sampling_params import SamplingParams


class SequenceState(msgspec.Struct, array_like=True, gc=False, eq=False):
    """What an executor knows of a sequence. The plan hands it over, for the executor to keep up to date by later plans.

    Args:
        tokens: the prompt, and what follows it as far as it is known.
        stop_ids: ids that end it.
        seed: of its draws.
        block_table: KV blocks in order of position.
    """

    seq_id: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    prompt_len: int
    tokens: list[int]
    block_table: list[int]


def state_of(sequence: Sequence) -> SequenceState:
    """All that an executor has to know of a sequence; the lists are the executor's own."""
    return SequenceState(
        sequence.seq_id,
        sequence.params,
        sequence.seed,
        sequence.stop_ids,
        sequence.prompt_len,
        list(sequence.tokens),
        list(sequence.block_table),
    )


class TableChange(msgspec.Struct, array_like=True, gc=False):
    """The block table of a sequence that the executor knows has these blocks from entry `start` on."""

    seq_id: int
    start: int
    blocks: list[int]


class ScheduledSequence(msgspec.Struct, array_like=True, gc=False):
    """A sequence's part of a step: the tokens after the `start` tokens that are computed already.

    Args:
        token_ids: of a sequence that decodes its newest token, and drafts, which may turn out not to follow it.
        samples: how many of the last tokens have their logits sampled: none where more of the known ones are still to
            come, else the newest known one and the drafts.
        logit_rows: how many of the first tokens want their logits for prompt_logprobs.
    """

    seq_id: int
    start: int
    token_ids: list[int]
    decoding: bool
    samples: int
    logit_rows: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class StepPlan(msgspec.Struct, array_like=True):
    """One step.

    Args:
        scheduled: who computes which tokens.
        new: sequences that the executor does not know.
        tables: changes of the block tables that it knows.
        copies: of blocks, before anything else: source and target.
        preempted: sequences that have lost their blocks, and that the executor is to forget before the step.
        expired: sequences that waited too long or can't be in time, and are finished.
        wait_until_ns: nothing runs as the first request waits for others; schedule again then, or when one comes.
    """

    scheduled: list[ScheduledSequence] = []
    new: list[SequenceState] = []
    tables: list[TableChange] = []
    copies: list[tuple[int, int]] = []
    preempted: list[int] = []
    expired: list[int] = []
    wait_until_ns: int = 0

    @property
    def num_tokens(self) -> int:
        return sum([len(item.token_ids) for item in self.scheduled])
