"""Decode steps at fixed addresses of a GPU, padded to few sizes, so that kernels can be launched as CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from headway.engine.families import Families
from headway.engine.layout import BlockTables, ModelInput
from headway.kernels.families import LEAST_COMMON, CommonParts, Family, common_parts
from headway.kernels.interface import StepGeometry
from headway.policy.step.plan import ScheduledSequence, SequenceState

_EACH_UP_TO = 16  # where steps cannot be padded, each size up to this one is captured
_STRIDE = 8


def graph_sizes(max_num_seqs: int, padded: bool) -> list[int]:
    """Sequences of the decode steps that are captured, up to max_num_seqs; vLLM's sizes where steps are padded."""
    first = (1, 2, 4) if padded else range(1, _EACH_UP_TO)
    sizes = sorted({*first, *range(_STRIDE, max_num_seqs + 1, _STRIDE), max_num_seqs})
    return [size for size in sizes if size <= max_num_seqs]


def _most_parts(rows: int) -> int:
    """Room for the parts that so many rows have in common at most, in few sizes: a graph is launched for a size."""
    room = 1
    while 2 * room < rows:
        room *= 4
    return room


class _Mirror:
    """Arrays of the host, and a tensor at a fixed address of the device that takes their numbers.

    The arrays are used in turn: a step is laid out while the device may still copy the numbers of the one before.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        hosts = [torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(2)]
        self._host, self._other = [(host, host.numpy()) for host in hosts]

    @property
    def array(self) -> NDArray[np.generic]:
        """Where the numbers of the next send() are written; what it has is older."""
        return self._host[1]

    def send(self, *part: slice) -> None:
        """Copy these numbers; the host does not wait. Those of the next step are written to the other array."""
        self.tensor[part].copy_(self._host[0][part], non_blocking=True)
        self._host, self._other = self._other, self._host


class DecodeBuffers:
    """The tensors of decode steps: one token of each sequence, in rows that follow each other.

    A row behind the last sequence has no query, so that attention passes it over, and the slot -1, to which nothing is
    written. What else is computed of it is not read.

    Args:
        sizes: numbers of rows, in ascending order.
        padded: whether a step may have more rows than sequences; else it must have one of these sizes.
        tables: the block tables of the sequences, and how many tokens a block has.
        max_model_len: the context that kernels are launched for, whatever the sequences have.
    """

    def __init__(
        self,
        device: torch.device,
        sizes: Sequence[int],
        padded: bool,
        tables: BlockTables,
        block_size: int,
        max_model_len: int,
    ) -> None:
        groups, most, (_, max_blocks) = len(tables.shares), sizes[-1], tables.array.shape
        self._sizes, self._padded, self._source = sizes, padded, tables
        self._block_size, self._max_model_len = block_size, max_model_len
        self._numbers = _Mirror((2 + groups, most), torch.int64, device)  # tokens, positions, slots of each group
        self._lens = _Mirror((2, most + 1), torch.int32, device)  # where queries start, and contexts
        self._tables = _Mirror((groups, most, max_blocks), torch.int32, device)
        self._all_rows = torch.arange(most, device=device)
        self._taken: tuple[list[int], int, int] | None = None  # the rows, blocks and version that the tables have
        self._families = Families(tables, block_size)
        self._parts = _Mirror((_most_parts(most), 4), torch.int32, device)  # of CommonParts
        self._common = _Mirror((2, most), torch.int32, device)  # its queries and tokens
        # What these have, and for how many parts there is room.
        self._common_taken: tuple[Sequence[Family], int] = (), 0
        self._geometries: dict[tuple[int, int], StepGeometry] = {}

    def lay_out(self, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> ModelInput | None:
        """The tensors of a step, which hold until the next one is laid out.

        None for a step in which a sequence has several tokens or samples none, or that has no fitting size.
        """
        at = bisect_left(self._sizes, len(scheduled))
        if at == len(self._sizes) or (not self._padded and self._sizes[at] != len(scheduled)):
            return None
        if any(len(item.token_ids) != 1 or item.samples != 1 for item in scheduled):
            return None
        tokens, positions = [item.token_ids[0] for item in scheduled], [item.start for item in scheduled]
        return self._filled(self._sizes[at], tokens, positions, [self._source.row(each) for each in sequences])

    def empty_steps(self) -> Iterator[ModelInput]:
        """A step without sequences of each size, the largest first: to capture what it launches."""
        yield from (self._filled(size, [], [], []) for size in reversed(self._sizes))

    def _filled(self, size: int, tokens: list[int], positions: list[int], rows: list[int]) -> ModelInput:
        count, numbers, (starts, contexts) = len(tokens), self._numbers.array, self._lens.array
        numbers[0, :count], numbers[1, :count] = tokens, positions
        blocks, in_block = np.divmod(numbers[1, :count], self._block_size)
        numbers[2:, :count] = self._source.arrays[:, rows, blocks] * np.int64(self._block_size) + in_block
        numbers[:2, count:size], numbers[2:, count:size] = 0, -1
        starts[: size + 1] = np.minimum(np.arange(size + 1), count)
        contexts[:count], contexts[count:size] = numbers[1, :count] + 1, 0
        self._numbers.send()
        self._lens.send()
        self._take_tables(rows, int(blocks.max(initial=-1)) + 1)
        is_long = count > 1 and max(positions) >= LEAST_COMMON
        parts = self._take_common(rows, positions) if is_long else 0
        return ModelInput(self._numbers.tensor[0, :size], self._geometry(size, parts), self._all_rows[:count])

    def _take_tables(self, rows: list[int], most: int) -> None:
        """Copy the first blocks of these rows of the block tables, unless they are there."""
        wanted = rows, most, self._source.version
        if self._taken != wanted:
            self._tables.array[:, : len(rows), :most] = self._source.arrays[:, rows, :most]
            self._tables.send(slice(None), slice(len(rows)), slice(most))
            self._taken = wanted

    def _take_common(self, rows: list[int], positions: list[int]) -> int:
        """Copy what a GPU is to read once, unless it is there. Returns for how many parts there is room; 0 for none."""
        families = self._families.of(rows, [each + 1 for each in positions], [1] * len(rows))
        if families is not self._common_taken[0]:
            parts, queries, tokens = common_parts(families, [1] * len(rows))
            if room := _most_parts(2 * len(parts)) if len(parts) else 0:
                self._parts.array[:room], self._common.array[:] = 0, 0
                self._parts.array[: len(parts)] = parts
                self._common.array[0, : len(queries)], self._common.array[1, : len(tokens)] = queries, tokens
                self._parts.send()
                self._common.send()
            self._common_taken = families, room
        return self._common_taken[1]

    def _geometry(self, size: int, parts: int) -> StepGeometry:
        if (size, parts) not in self._geometries:
            lens, tables, numbers = self._lens.tensor, self._tables.tensor[:, :size], self._numbers.tensor[:, :size]
            longest = self._max_model_len
            step = StepGeometry(
                query_start=lens[0, : size + 1],
                context_lens=lens[1, :size],
                block_tables=tables[0],
                slots=numbers[2],
                positions=numbers[1],
                num_sequences=size,
                max_query_len=1,
                max_context_len=longest,
                query_lens_host=[1] * size,
                context_lens_host=[longest] * size,
                repeatable=True,
                common=CommonParts(self._parts.tensor[:parts], *self._common.tensor[:, :size]) if parts else None,
            )
            further = zip(tables[1:], numbers[3:], strict=True)
            of_groups = [replace(step, block_tables=table, slots=slots) for table, slots in further]
            step.groups = (replace(step), *of_groups) if of_groups else ()
            self._geometries[size, parts] = step
        return self._geometries[size, parts]
