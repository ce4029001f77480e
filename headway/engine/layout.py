"""A step's sequences as tensors: tokens, positions, slots and block tables, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.kernels.interface import StepGeometry
from headway.policy.plan import ScheduledSequence, SequenceState, TableChange

# Steps of up to so many tokens have their tensors at the same addresses, so that kernels can repeat them.
_MOST_REPEATED = 64


@dataclass(frozen=True, slots=True)
class LaidOut:
    """The tensors of a step.

    Args:
        token_ids: [T] int64.
        last_rows: [R] int64, the tokens whose logits are wanted.
    """

    token_ids: Tensor
    geometry: StepGeometry
    last_rows: Tensor


@dataclass(slots=True)
class _Tensors:
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    last_rows: Tensor


class BlockTables:
    """Block tables of the running sequences as one array, updated only where they changed; `version` counts that."""

    def __init__(self, max_sequences: int, max_blocks: int) -> None:
        self.array = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self.version = 0
        self._rows: dict[int, int] = {}  # by seq_id
        self._free = list(range(max_sequences - 1, -1, -1))

    def reset(self) -> None:
        """Forget every sequence."""
        self._rows.clear()
        self._free = list(range(len(self.array) - 1, -1, -1))
        self.version += 1

    def row(self, sequence: SequenceState) -> int:
        """The row that has its table."""
        found = self._rows.get(sequence.seq_id)
        if found is not None:
            return found
        row = self._free.pop()
        self.array[row, : len(sequence.block_table)] = sequence.block_table
        self._rows[sequence.seq_id] = row
        self.version += 1
        return row

    def write(self, change: TableChange) -> None:
        """A table has changed."""
        row = self._rows.get(change.seq_id)
        if row is not None:
            self.array[row, change.start : change.start + len(change.blocks)] = change.blocks
            self.version += 1

    def forget(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)


class StepLayout:
    """Makes the tensors of steps.

    On a CPU a step follows right upon the one before, whose weights have driven all else out of the caches, so that
    each call of numpy or torch takes several times its usual time: a step of nothing but decodes, which is most, is
    laid out with few of them.

    Args:
        block_size: of the KV pool.
        max_num_seqs, max_model_len: bounds of the block table array.
    """

    def __init__(self, device: torch.device, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.tables = BlockTables(max_num_seqs, -(-max_model_len // block_size))
        self._device = device
        self._block_size = block_size
        fixed = _MOST_REPEATED if device.type == "cpu" else 0
        self._most_repeated = fixed
        self._numbers = np.zeros((3, fixed), np.int64)
        self._contexts = np.zeros(fixed, np.int32)
        self._tables = np.zeros((fixed, self.tables.array.shape[1]), np.int32)
        self._taken: tuple[list[int], int, int] | None = None  # the rows, blocks and version that _tables has
        self._decodes: dict[int, _Tensors] = {}  # by the number of sequences

    def reset(self) -> None:
        """Forget what was laid out; its memory stays where it is."""
        self.tables.reset()
        self._taken = None
        self._decodes.clear()

    def lay_out(self, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> LaidOut:
        """The tensors of a step of these sequences, good until the next one is laid out."""
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        starts, contexts, lengths, last = [0], [], [], []
        for item, sequence in zip(scheduled, sequences, strict=True):
            start, table = item.start, sequence.block_table
            count = len(item.token_ids)
            tokens += item.token_ids
            if count == 1:
                positions.append(start)
                slots.append(table[start // size] * size + start % size)
            else:
                span = range(start, start + count)
                positions.extend(span)
                slots.extend([table[p // size] * size + p % size for p in span])
            starts.append(len(tokens))
            lengths.append(count)
            contexts.append(start + count)
            rows.append(self.tables.row(sequence))
            if item.samples == 1:
                last.append(len(tokens) - 1)
            elif item.samples:
                last.extend(range(len(tokens) - item.samples, len(tokens)))
        longest = max(contexts)
        most = -(-longest // size)
        repeatable = len(tokens) <= self._most_repeated
        if not repeatable:
            tensors = self._transfer(tokens, positions, slots, starts, contexts, last, self.tables.array[rows, :most])
        else:
            self._fill(tokens, positions, slots, rows, most)
            if len(last) == len(tokens) == len(scheduled):
                tensors = self._of_decodes(contexts)
            else:
                tensors = self._in_place(len(tokens), starts, contexts, last)
        geometry = StepGeometry(
            query_start=tensors.query_start,
            context_lens=tensors.context_lens,
            block_tables=tensors.block_tables,
            slots=tensors.slots,
            positions=tensors.positions,
            num_sequences=len(scheduled),
            max_query_len=max(lengths),
            max_context_len=longest,
            query_lens_host=lengths,
            context_lens_host=contexts,
            repeatable=repeatable,
        )
        return LaidOut(tensors.token_ids, geometry, tensors.last_rows)

    def _transfer(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        starts: list[int],
        contexts: list[int],
        last: list[int],
        tables: np.ndarray,
    ) -> _Tensors:
        """New tensors on the device, in three transfers."""
        count = len(tokens)
        wide = self._to_device(np.array(tokens + positions + slots + last, dtype=np.int64))
        token_ids, position_ids, slot_ids, last_rows = wide.split([count, count, count, len(last)])
        narrow = self._to_device(np.array(starts + contexts, dtype=np.int32))
        query_start, context_lens = narrow.split([len(starts), len(contexts)])
        block_tables = self._to_device(tables)
        return _Tensors(token_ids, position_ids, slot_ids, block_tables, query_start, context_lens, last_rows)

    def _fill(self, tokens: list[int], positions: list[int], slots: list[int], rows: list[int], most: int) -> None:
        """Write a repeatable step to its place; of its block tables the first `most` entries, unless they are there."""
        self._numbers[:, : len(tokens)] = tokens, positions, slots
        wanted = rows, most, self.tables.version
        if self._taken != wanted:
            np.take(self.tables.array[:, :most], rows, axis=0, out=self._tables[: len(rows), :most])
            self._taken = wanted

    def _of_decodes(self, contexts: list[int]) -> _Tensors:
        """Of a step in which each sequence decodes a token, kept for the next one of as many."""
        count = len(contexts)
        self._contexts[:count] = contexts
        if count not in self._decodes:
            ones = list(range(count))
            self._decodes[count] = self._in_place(count, [*ones, count], contexts, ones)
            self._decodes[count].context_lens = torch.from_numpy(self._contexts[:count])
        return self._decodes[count]

    def _in_place(self, count: int, starts: list[int], contexts: list[int], last: list[int]) -> _Tensors:
        """Views of the memory of repeatable steps, for one of `count` tokens."""
        numbers, narrow = torch.from_numpy(self._numbers), torch.tensor([*starts, *contexts], dtype=torch.int32)
        return _Tensors(
            token_ids=numbers[0, :count],
            positions=numbers[1, :count],
            slots=numbers[2, :count],
            block_tables=torch.from_numpy(self._tables[: len(contexts)]),
            query_start=narrow[: len(starts)],
            context_lens=narrow[len(starts) :],
            last_rows=torch.tensor(last, dtype=torch.int64),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)
