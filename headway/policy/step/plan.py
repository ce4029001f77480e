"""A step as plain data: what the scheduler has decided, and all that an executor must know to run it.

A plan can be encoded as it is, to go to another process. It names sequences by a number, `seq_id`. The executor does
not know sequences that have not run yet or were preempted: the plan says everything about them, and only what has
changed about the others. An executor keeps each `SequenceState` until it is told to forget it.
"""

from __future__ import annotations

import operator

import msgspec

from headway.policy.cache.checkpoints import Checkpoint
from headway.policy.cache.kv_groups import PASSED
from headway.policy.cache.swap import BlockSwap
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.request import Sequence
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.step_time import StepWork, pairs


class SequenceState(msgspec.Struct, array_like=True, gc=False, eq=False):
    """What an executor knows of a sequence. A plan hands it over, and the executor updates it by later plans."""

    seq_id: int
    params: SamplingParams
    seed: int  # the seed of its draws
    stop_ids: frozenset[int]  # ids that end it
    prompt_len: int
    tokens: list[int]  # the prompt and the output up to now
    block_table: list[int]  # KV blocks in order of position, in the first KV cache group
    # The slot with the state behind its computed tokens; -1: there are none, or no recurrent layers.
    checkpoint: int = -1
    # Block tables in further groups. Where a window has passed, tables have PASSED.
    further_tables: list[list[int]] = []
    pooling: PoolingParams | None = None  # the vector that is wanted of its prompt, in place of tokens
    slot: int = -1  # the slot of its adapter; -1: it has none

    @property
    def block_tables(self) -> list[list[int]]:
        """The block table in each KV cache group."""
        return [self.block_table, *self.further_tables]

    def change_table(self, change: TableChange) -> None:
        """Apply a change of a table."""
        table = self.further_tables[change.group - 1] if change.group else self.block_table
        table[change.start :] = change.blocks
        for entry in range(change.first - 1, change.sinks - 1, -1):
            if table[entry] == PASSED:
                break
            table[entry] = PASSED


def state_of(sequence: Sequence) -> SequenceState:
    """All that an executor has to know of a sequence, with copies of its lists."""
    tables = [table.entries(0, table.end) if table.first else table.blocks[:] for table in sequence.tables]
    return SequenceState(
        sequence.seq_id,
        sequence.params,
        sequence.seed,
        sequence.stop_ids,
        sequence.prompt_len,
        list(sequence.tokens),
        tables[0],
        sequence.checkpoint,
        tables[1:],
        sequence.pooling,
        sequence.slot,
    )


class TableChange(msgspec.Struct, array_like=True, gc=False):
    """A change of one block table of a sequence that the executor knows: these blocks stand from entry `start` on."""

    seq_id: int
    start: int
    blocks: list[int]
    group: int = 0  # number of the KV cache group whose table it is
    first: int = 0  # a window has passed the entries from `sinks` up to this one
    sinks: int = 0  # how many of the first entries stay


class ScheduledSequence(msgspec.Struct, array_like=True, gc=False):
    """A sequence's part of a step: some tokens after the `start` tokens that are computed already."""

    seq_id: int
    start: int
    token_ids: list[int]  # a chunk of known tokens; or the newest one, followed by drafts, which may be refused
    decoding: bool
    # How many of the last tokens have their logits sampled: the newest known one and the drafts. None where known
    # tokens are left for later steps, or a vector is wanted in place of tokens.
    samples: int
    logit_rows: int = 0  # how many of the first tokens need their logits for prompt_logprobs
    # Behind which tokens the state of recurrent layers is to be kept; in order, no two behind the same.
    keeps: tuple[Checkpoint, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


NO_WORK = StepWork()
UNKNOWN = -1  # in the place of a token that the step before is about to draw


class StepPlan(msgspec.Struct, array_like=True):
    """One step."""

    scheduled: list[ScheduledSequence] = []  # which sequences compute which tokens
    new: list[SequenceState] = []  # sequences that the executor does not know
    tables: list[TableChange] = []  # changes of the block tables of others
    swaps: list[BlockSwap] = []  # blocks to copy to and from the host before anything else, one after the other
    copies: list[tuple[int, int]] = []  # blocks to copy then, from source to target
    preempted: list[int] = []  # sequences that have lost their blocks; the executor forgets them before the step
    expired: list[int] = []  # sequences that waited too long or can't be in time, and are finished
    work: StepWork = NO_WORK  # what the scheduled parts come to, as `work_of` says
    pools: bool = False  # some of the sequences want a vector
    wait_until_ns: int = 0  # nothing runs as the first request waits for others; schedule again then, or when one comes

    @property
    def num_tokens(self) -> int:
        return self.work.tokens


def accepted_drafts(item: ScheduledSequence, new: list[int]) -> int:
    """How many of an item's drafts are among the new tokens of its sequence: those up to the first that differs."""
    return sum(map(operator.eq, item.token_ids[item.num_tokens - item.samples + 1 :], new))


def work_of(scheduled: list[ScheduledSequence]) -> StepWork:
    """The work of a step with these parts."""
    prefill_tokens = decode_tokens = prefill_pairs = decode_context = logit_rows = all_drafts = 0
    for item in scheduled:
        if item.decoding:
            decode_tokens += 1
            decode_context += item.start + 1
            if item.samples > 1:
                drafts = item.samples - 1
                all_drafts += drafts
                decode_tokens += drafts
                decode_context += pairs(item.start + 1, drafts)
        else:
            tokens = len(item.token_ids)
            prefill_tokens += tokens
            prefill_pairs += pairs(item.start, tokens)
            logit_rows += item.logit_rows
    return StepWork(prefill_tokens, decode_tokens, prefill_pairs, decode_context, logit_rows, all_drafts)
