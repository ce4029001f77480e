"""A step's sequences as tensors: tokens, positions, slots and block tables, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.kernels.interface import StepGeometry
from headway.policy.accounting import ScheduledSequence
from headway.policy.request import Sequence

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


class BlockTables:
    """Block tables of the running sequences as one array, updated only where they changed; `version` counts that."""

    def __init__(self, max_sequences: int, max_blocks: int) -> None:
        self.array = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self.version = 0
        self._rows: dict[int, tuple[int, list[int], int]] = {}  # id(sequence) -> row, its table, entries written
        self._free = list(range(max_sequences - 1, -1, -1))

    def row(self, sequence: Sequence) -> int:
        table = sequence.block_table
        known = self._rows.get(id(sequence))
        if known is not None and known[1] is table and known[2] == len(table):
            return known[0]
        row = known[0] if known is not None else self._free.pop()
        written = known[2] if known is not None and known[1] is table else 0
        self.array[row, written : len(table)] = table[written:]
        self._rows[id(sequence)] = (row, table, len(table))
        self.version += 1
        return row

    def rewrite(self, sequence: Sequence) -> None:
        """An entry of the table was exchanged."""
        known = self._rows.get(id(sequence))
        if known is not None:
            self._rows[id(sequence)] = (known[0], known[1], 0)

    def forget(self, sequence: Sequence) -> None:
        known = self._rows.pop(id(sequence), None)
        if known is not None:
            self._free.append(known[0])


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
        self._numbers = np.zeros((4, fixed), np.int64)
        self._contexts = np.zeros(fixed, np.int32)
        self._tables = np.zeros((fixed, self.tables.array.shape[1]), np.int32)
        self._taken: tuple[list[int], int, int] | None = None  # the rows, blocks and version that _tables has
        self._decodes: dict[int, _DecodeTensors] = {}  # by the number of sequences

    def lay_out(self, scheduled: list[ScheduledSequence]) -> LaidOut:
        """The tensors of a step, good until the next one is laid out."""
        if len(scheduled) <= self._most_repeated and all(item.num_tokens == 1 and item.samples for item in scheduled):
            return self._lay_out_decodes(scheduled)
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        starts, contexts, lengths, last = [0], [], [], []
        for item in scheduled:
            sequence, start, count = item.sequence, item.start, item.num_tokens
            table = sequence.block_table
            span = range(start, start + count)
            tokens.extend(sequence.tokens[start : start + count])
            positions.extend(span)
            slots.extend([table[p // size] * size + p % size for p in span])
            starts.append(len(tokens))
            lengths.append(count)
            contexts.append(start + count)
            rows.append(self.tables.row(sequence))
            if item.samples:
                last.append(len(tokens) - 1)
        most = -(-max(contexts) // size)
        n = len(tokens)
        repeatable = n <= self._most_repeated
        if repeatable:
            numbers = self._numbers
            numbers[0, :n], numbers[1, :n], numbers[2, :n], numbers[3, : len(last)] = tokens, positions, slots, last
            fixed = torch.from_numpy(numbers)
            wide = [fixed[0, :n], fixed[1, :n], fixed[2, :n], fixed[3, : len(last)]]
            tables = torch.from_numpy(self._tables_of(rows, most))
        else:
            all_numbers = self._to_device(np.array(tokens + positions + slots + last, dtype=np.int64))
            wide = list(all_numbers.split([n, n, n, len(last)]))
            tables = self._to_device(self.tables.array[rows, :most])
        narrow = self._to_device(np.array(starts + contexts, dtype=np.int32))
        geometry = StepGeometry(
            query_start=narrow[: len(starts)],
            context_lens=narrow[len(starts) :],
            block_tables=tables,
            slots=wide[2],
            positions=wide[1],
            num_sequences=len(scheduled),
            max_query_len=max(lengths),
            max_context_len=max(contexts),
            query_lens_host=lengths,
            context_lens_host=contexts,
            repeatable=repeatable,
        )
        return LaidOut(wide[0], geometry, wide[3])

    def _lay_out_decodes(self, scheduled: list[ScheduledSequence]) -> LaidOut:
        """One token of each sequence, in tensors that are only filled anew."""
        size, count = self._block_size, len(scheduled)
        tokens, positions, slots, contexts, rows = [], [], [], [], []
        for item in scheduled:
            sequence, position = item.sequence, item.start
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(sequence.block_table[position // size] * size + position % size)
            contexts.append(position + 1)
            rows.append(self.tables.row(sequence))
        self._numbers[:3, :count] = tokens, positions, slots
        self._contexts[:count] = contexts
        longest = max(contexts)
        self._tables_of(rows, -(-longest // size))
        fixed = self._decodes.get(count)
        if fixed is None:
            fixed = self._decodes[count] = _DecodeTensors(self._numbers, self._contexts, self._tables, count)
        geometry = StepGeometry(
            query_start=fixed.query_start,
            context_lens=fixed.context_lens,
            block_tables=fixed.block_tables,
            slots=fixed.slots,
            positions=fixed.positions,
            num_sequences=count,
            max_query_len=1,
            max_context_len=longest,
            query_lens_host=fixed.query_lens,
            context_lens_host=contexts,
            repeatable=True,
        )
        return LaidOut(fixed.token_ids, geometry, fixed.last_rows)

    def _tables_of(self, rows: list[int], most: int) -> np.ndarray:
        """The block tables of a repeatable step, [S, all blocks], of which the first `most` count."""
        wanted = rows, most, self.tables.version
        if self._taken != wanted:
            np.take(self.tables.array[:, :most], rows, axis=0, out=self._tables[: len(rows), :most])
            self._taken = wanted
        return self._tables[: len(rows)]

    def _to_device(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


class _DecodeTensors:
    """Views of the memory of a step in which each of `count` sequences decodes a token."""

    def __init__(self, numbers: np.ndarray, contexts: np.ndarray, tables: np.ndarray, count: int) -> None:
        self.token_ids, self.positions, self.slots, _ = torch.from_numpy(numbers)[:, :count]
        self.context_lens = torch.from_numpy(contexts)[:count]
        self.block_tables = torch.from_numpy(tables)[:count]
        self.query_start = torch.arange(count + 1, dtype=torch.int32)
        self.last_rows = torch.arange(count)
        self.query_lens = [1] * count
