"""A step's sequences as tensors: tokens, positions, slots and block tables, laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from headway.engine.families import Families
from headway.kernels.families import LEAST_COMMON, CommonParts, Family, common_parts
from headway.kernels.host import to_device
from headway.kernels.interface import StepGeometry
from headway.policy.cache.kv_groups import PASSED
from headway.policy.step.plan import ScheduledSequence, SequenceState, TableChange

# Steps of up to this many tokens have their tensors at fixed addresses, so that kernels can repeat them. The objects of
# so many kinds of such steps are kept.
_MOST_REPEATED = 64
_MOST_KINDS = 256


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tensors of a step, for the model and for the runner."""

    token_ids: Tensor  # [T] int64
    geometry: StepGeometry
    last_rows: Tensor  # [R] int64, the tokens whose logits are wanted


class BlockTables:
    """Block tables of the running sequences as an array for each KV cache group. `version` changes with each change.

    `beginnings` changes with each that may concern the first `watched` blocks.

    Args:
        shares: for each group, how many blocks of a layer are in a block of the pool; the arrays have the first ones.
        passed: the number that stands for blocks that windows have passed.
    """

    def __init__(self, max_sequences: int, max_blocks: int, shares: Sequence[int] = (1,), passed: int = 0) -> None:
        self.arrays = np.zeros((len(shares), max_sequences, max_blocks), dtype=np.int32)
        self.array = self.arrays[0]
        self.shares = shares
        self._passed = passed
        self.version = self.beginnings = self.watched = 0
        self._rows: dict[int, int] = {}  # by seq_id
        self._free = list(range(max_sequences - 1, -1, -1))

    def reset(self) -> None:
        """Forget every sequence."""
        self._rows.clear()
        self._free = list(range(len(self.array) - 1, -1, -1))
        self.version += 1

    def row(self, sequence: SequenceState) -> int:
        """The row of the arrays that holds the sequence's tables; it is written when it is first asked for."""
        found = self._rows.get(sequence.seq_id)
        if found is not None:
            return found
        row = self._free.pop()
        for array, table, share in zip(self.arrays, sequence.block_tables, self.shares, strict=True):
            entries = array[row, : len(table)]
            entries[:] = table
            entries[entries == PASSED] = self._passed
            entries *= share
        self._rows[sequence.seq_id] = row
        self.version += 1
        self.beginnings += 1
        return row

    def write(self, change: TableChange) -> None:
        """Apply a change of a table."""
        row = self._rows.get(change.seq_id)
        if row is not None:
            array, share = self.arrays[change.group, row], self.shares[change.group]
            blocks = change.blocks if share == 1 else [block * share for block in change.blocks]
            array[change.start : change.start + len(blocks)] = blocks
            if change.first:
                array[change.sinks : change.first] = self._passed * share
            self.version += 1
            if change.start < self.watched:
                self.beginnings += 1

    def forget(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)


@dataclass(slots=True)
class _Listed:
    """The numbers of a step's tokens, one for each, and of its sequences."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # the tokens whose logits are wanted
    starts: list[int] = field(default_factory=[0].copy)  # where the tokens of each sequence begin; and their end
    contexts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of the block tables


class StepLayout:
    """Makes the tensors of steps.

    On a CPU a step's weights drive everything else out of the caches, so that each call of numpy or torch before the
    next step takes several times its usual time. Most steps are nothing but decodes, some with drafts behind them: they
    are laid out with few calls, as an earlier step of the same kind was.

    Args:
        block_size: tokens in a block of the KV pool.
        max_num_seqs, max_model_len: bounds of the block table array.
        shares, passed: see BlockTables.
    """

    def __init__(
        self,
        device: torch.device,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        shares: Sequence[int] = (1,),
        passed: int = 0,
    ) -> None:
        self.tables = BlockTables(max_num_seqs, -(-max_model_len // block_size), shares, passed)
        self.families = Families(self.tables, block_size)
        self._device = device
        self._block_size = block_size
        self._pitch = block_size * shares[0]  # tokens from one block of the pool to the next
        fixed = _MOST_REPEATED if device.type == "cpu" else 0
        self._most_repeated = fixed
        self._numbers = np.zeros((3, fixed), np.int64)
        self._tables = np.zeros((len(shares), fixed, self.tables.array.shape[1]), np.int32)
        self._further_slots = np.zeros((len(shares) - 1, fixed), np.int64)
        self._taken: tuple[list[int], int, int] | None = None  # the rows, blocks and version that _tables has
        # Earlier steps, found by tokens and rows of logits of each sequence; with the memory of context_lens.
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[ModelInput, np.ndarray]] = {}

    def reset(self) -> None:
        """Forget what was laid out. Its memory keeps its addresses."""
        self.tables.reset()
        self._taken = None
        self._kept.clear()

    def lay_out(self, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> ModelInput:
        """The tensors of a step of these sequences. They hold until the next step is laid out."""
        listed = self._list(scheduled, sequences)
        contexts, longest = listed.contexts, max(listed.contexts)
        most = -(-longest // self._block_size)
        make = self._copied if len(listed.tokens) > self._most_repeated else self._filled
        laid_out = make(listed, most)
        step = laid_out.geometry
        step.context_lens_host, step.max_context_len, step.spans, step.families = contexts, longest, None, ()
        if longest > LEAST_COMMON and len(contexts) > 1:
            step.families = self.families.of(listed.rows, contexts, listed.lengths)
            if step.families and self._device.type == "cuda":
                step.common = self._common(step.families, listed.lengths)
        return laid_out if len(self._tables) == 1 else self._grouped(laid_out, listed.rows, listed.positions, most)

    def _list(self, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> _Listed:
        """The numbers of a step."""
        size, pitch, listed = self._block_size, self._pitch, _Listed()
        tokens, positions, slots, last = listed.tokens, listed.positions, listed.slots, listed.last
        for item, sequence in zip(scheduled, sequences, strict=True):
            start, table = item.start, sequence.block_table
            count = len(item.token_ids)
            tokens += item.token_ids
            if count == 1:
                positions.append(start)
                slots.append(table[start // size] * pitch + start % size)
            else:
                span = range(start, start + count)
                positions.extend(span)
                slots.extend([table[p // size] * pitch + p % size for p in span])
            listed.starts.append(len(tokens))
            listed.lengths.append(count)
            listed.samples.append(item.samples)
            listed.contexts.append(start + count)
            listed.rows.append(self.tables.row(sequence))
            if item.samples == 1:
                last.append(len(tokens) - 1)
            elif item.samples:
                last.extend(range(len(tokens) - item.samples, len(tokens)))
        return listed

    def _copied(self, listed: _Listed, most: int) -> ModelInput:
        """A step whose tensors are copied to the device: one for the lengths, one for tables, one for all else."""
        numbers = listed.tokens + listed.positions + listed.slots
        copied = to_device(np.array(numbers + listed.last, np.int64), self._device)
        tables = to_device(self.tables.array[listed.rows, :most], self._device)
        lens = to_device(np.array(listed.starts + listed.contexts, np.int32), self._device)
        return _input(listed, copied[: len(numbers)].view(3, -1), copied[len(numbers) :], tables, lens, False)

    def _filled(self, listed: _Listed, most: int) -> ModelInput:
        """A step whose tensors are where they always are; the first `most` blocks of tables may be there already."""
        count, rows = len(listed.tokens), listed.rows
        self._numbers[:, :count] = listed.tokens, listed.positions, listed.slots
        wanted = rows, most, self.tables.version
        if self._taken != wanted:
            for array, tables in zip(self.tables.arrays, self._tables, strict=True):
                np.take(array[:, :most], rows, axis=0, out=tables[: len(rows), :most])
            self._taken = wanted
        kind = tuple(listed.lengths), tuple(listed.samples)
        if kind not in self._kept:
            if len(self._kept) == _MOST_KINDS:
                self._kept.clear()
            lens = np.array(listed.starts + listed.contexts, np.int32)
            numbers, tables = torch.from_numpy(self._numbers[:, :count]), torch.from_numpy(self._tables[0, : len(rows)])
            places = numbers, torch.tensor(listed.last, dtype=torch.int64), tables
            self._kept[kind] = _input(listed, *places, torch.from_numpy(lens), True), lens[len(listed.starts) :]
        laid_out, context_lens = self._kept[kind]
        context_lens[:] = listed.contexts
        return laid_out

    def _common(self, families: Sequence[Family], lengths: list[int]) -> CommonParts | None:
        """What a GPU is to read once; None where that does not pay."""
        parts, queries, tokens = common_parts(families, lengths)
        if not len(parts):
            return None
        return CommonParts(*(to_device(each, self._device) for each in (parts, queries, tokens)))

    def _grouped(self, laid_out: ModelInput, rows: list[int], positions: list[int], most: int) -> ModelInput:
        """The tensors with the geometry of each of several KV cache groups added."""
        step, count, size = laid_out.geometry, len(positions), self._block_size
        arrays, at = self.tables.arrays[1:], np.array(positions)
        blocks = arrays[:, np.repeat(rows, step.query_lens_host), at // size]
        slots = blocks.astype(np.int64, order="C") * size + at % size
        if step.repeatable:
            self._further_slots[:, :count] = slots
            of_groups = (
                torch.from_numpy(self._tables[1:, : len(rows)]),
                torch.from_numpy(self._further_slots[:, :count]),
            )
        else:
            tables = np.ascontiguousarray(arrays[:, rows, :most])
            of_groups = to_device(tables, self._device), to_device(slots, self._device)
        further = [replace(step, block_tables=each, slots=their) for each, their in zip(*of_groups, strict=True)]
        step.groups = replace(step, groups=()), *further
        return laid_out


def _input(
    listed: _Listed, numbers: Tensor, last_rows: Tensor, block_tables: Tensor, lens: Tensor, repeatable: bool
) -> ModelInput:
    """The tensors of a step: `numbers` [3, T] are tokens, positions and slots, `lens` starts and contexts."""
    query_start, context_lens = lens.split([len(listed.starts), len(listed.contexts)])
    tensors = query_start, context_lens, block_tables, numbers[2], numbers[1]
    sizes = len(listed.rows), max(listed.lengths), max(listed.contexts)
    geometry = StepGeometry(*tensors, *sizes, listed.lengths, listed.contexts, repeatable=repeatable)
    return ModelInput(numbers[0], geometry, last_rows)
