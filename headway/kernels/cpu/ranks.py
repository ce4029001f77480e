"""What the ranks of a model say to each other on one machine, within a step.

Each rank writes its part to memory that all have, they meet, and each adds up all parts in the order of the ranks. So
all get the same bits. There are places for the parts of two layers in turn: a rank writes to the first again when all
have met behind the second, and so have read the first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.rank_board import HEADER_BYTES, MEET, RankBoard, meet_job
from headway.kernels.cpu.simd import KINDS, copy_element, load, read_int64, store, write_integer
from headway.kernels.cpu.team import Team, arg, job, once_per_kind, take_rows

PLACES = 3  # for the results of two layers, and for embeddings
_PLACE_BYTES = 8 << 20  # for so many bytes of float32, but at least for _LEAST_ROWS
_LEAST_ROWS = 64  # a repeated step is not cut
_LOGITS_BYTES = 64 << 20
_PAGE = 4096


def board_bytes(count: int, hidden: int, vocab: int) -> int:
    """Bytes of the memory that ranks of a model with these sizes share. It is only taken where it is written."""
    return HEADER_BYTES + PLACES * count * _place_bytes(hidden) + _logits_bytes(vocab)


def part_of_vocabulary(vocab: int, number: int, count: int) -> tuple[int, int]:
    """The first token of a rank, and the first behind its tokens."""
    return vocab * number // count, vocab * (number + 1) // count


def _place_bytes(hidden: int) -> int:
    return -(-_rows_at_once(hidden) * hidden * 4 // _PAGE) * _PAGE


def _rows_at_once(hidden: int) -> int:
    return max(_LEAST_ROWS, _PLACE_BYTES // (4 * hidden))


def _logits_bytes(vocab: int) -> int:
    return max(_LOGITS_BYTES, -(-4 * vocab // _PAGE) * _PAGE)


ADD_UP = struct.Struct("5q")


@once_per_kind
def add_up_job(count: int, part_kind: Any, kind: Any) -> int:
    """The sum of `count` parts, element by element, the parts so many bytes apart; of one part: a copy."""

    def elements(a: int) -> None:
        step, total, parts, apart, out = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        first = take_rows(a, step)
        while first < total:
            for i in range(first, min(first + step, total)):
                value = load(parts, i, part_kind)
                for part in range(1, count):
                    value += load(parts + part * apart, i, part_kind)
                store(out, i, value, kind)
            first = take_rows(a, step)

    return job(elements)


OWN = struct.Struct("6q")


@once_per_kind
def own_job() -> int:
    """Numbers of tokens among the `rows` of this rank, which begin with `start`; any where they are of another."""

    def tokens(a: int) -> None:
        step, count, ids, start, rows, out = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        first = take_rows(a, step)
        while first < count:
            for i in range(first, min(first + step, count)):
                own = read_int64(ids, i) - start
                write_integer(out, i, own if 0 <= own < rows else 0, 64)
            first = take_rows(a, step)

    return job(tokens)


PICK = struct.Struct("9q")


@once_per_kind
def pick_job() -> int:
    """Each token's row [width] of elements of `size` bytes, from the part of the rank whose token it is.

    `starts` are the first tokens of the ranks behind the first one, int64, of which there are `others`.
    """

    def tokens(a: int) -> None:
        step, count, ids, starts, others = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        parts, apart, width, out = arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8)
        size = width & 7
        width >>= 3
        first = take_rows(a, step)
        while first < count:
            for i in range(first, min(first + step, count)):
                token, owner = read_int64(ids, i), 0
                for other in range(others):
                    owner += token >= read_int64(starts, other)
                for element in range(width):
                    copy_element(parts + owner * apart, i * width + element, out, i * width + element, size)
            first = take_rows(a, step)

    return job(tokens)


class CpuRanks:
    """See Ranks. All ranks of a model call the same methods in the same order.

    Args:
        team: whose jobs these are.
        hidden, vocab: sizes of the model.
    """

    def __init__(self, team: Team, board: RankBoard, hidden: int, vocab: int) -> None:
        self.number, self.count = board.number, board.count
        self._team, self._board = team, board
        self._hidden, self._vocab = hidden, vocab
        self.rows_at_once = _rows_at_once(hidden)
        self._place_bytes = _place_bytes(hidden)
        self._starts = np.array([part_of_vocabulary(vocab, n, self.count)[0] for n in range(1, self.count)], np.int64)

    def summed(self, linear: Any, place: int) -> Callable[[Tensor], Tensor]:
        """See Ranks."""
        assert isinstance(linear, PackedLinear)
        return _Summed(self, place, linear.into, torch.float32)

    def summed_layer(self, layer: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
        """See Ranks."""
        return _Summed(self, place, lambda x, out: self._copy(layer(x), out), None)

    def embedding(self, rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """See Ranks."""
        start, end = part_of_vocabulary(self._vocab, self.number, self.count)

        def embed(ids: Tensor) -> Tensor:
            own = self._team.empty((len(ids),), torch.int64)
            arguments = ids.data_ptr(), start, end - start, own.data_ptr()
            self._team.share(own_job(), OWN, len(ids), len(ids), arguments)
            return rows(own)

        return _Embedding(self, embed)

    def head(self, linear: Any) -> Any:
        """See Ranks."""
        assert isinstance(linear, PackedLinear)
        return _Head(self, linear, self._board, self._vocab)

    # --- for the layers below -----------------------------------------------------------------------

    def place(self, place: int, rank: int, rows: int, dtype: torch.dtype) -> Tensor:
        """The memory of a rank's part [rows, hidden] of a layer."""
        offset = HEADER_BYTES + (place * self.count + rank) * self._place_bytes
        size = rows * self._hidden
        return torch.frombuffer(self._board.mapping, dtype=dtype, count=size, offset=offset).view(rows, self._hidden)

    def meet(self) -> None:
        """Wait for the others."""
        self._team.run_alone(meet_job(), MEET, (self._board.address, self.number, self.count))

    def add_up(self, place: int, dtype: torch.dtype, out: Tensor) -> None:
        """The sum of all ranks' parts of a layer, which are of a dtype."""
        first = self.place(place, 0, len(out), dtype)
        arguments = first.data_ptr(), self._place_bytes, out.data_ptr()
        code = add_up_job(self.count, KINDS[dtype], KINDS[out.dtype])
        self._team.share(code, ADD_UP, out.numel(), out.numel(), arguments)

    def pick(self, ids: Tensor, out: Tensor) -> None:
        """Each token's embedding, from the part of its rank."""
        first = self.place(PLACES - 1, 0, len(out), out.dtype)
        width = self._hidden << 3 | out.element_size()
        arguments = (
            ids.data_ptr(), self._starts.ctypes.data, self.count - 1, first.data_ptr(), self._place_bytes, width,
            out.data_ptr(),
        )  # fmt: skip
        self._team.share(pick_job(), PICK, len(ids), out.numel(), arguments)

    def empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        return self._team.empty((rows, self._hidden), dtype)

    def _copy(self, x: Tensor, out: Tensor) -> None:
        kind = KINDS[x.dtype]
        arguments = x.data_ptr(), 0, out.data_ptr()
        self._team.share(add_up_job(1, kind, kind), ADD_UP, x.numel(), x.numel(), arguments)

    def copy_embedded(self, x: Tensor, out: Tensor) -> None:
        """Copy this rank's rows to its place."""
        self._copy(x, out)


class _Summed:
    """A layer whose result is the sum of what the ranks compute.

    Args:
        into: computes x [T, in] -> out [T, hidden] of the dtype that parts have; None stands for that of x.
    """

    def __init__(
        self, ranks: CpuRanks, place: int, into: Callable[[Tensor, Tensor], None], dtype: torch.dtype | None
    ) -> None:
        self._ranks, self._place, self._into, self._dtype = ranks, place, into, dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, hidden], in x's dtype."""
        ranks, dtype = self._ranks, self._dtype or x.dtype
        out = ranks.empty(len(x), x.dtype)
        for first in range(0, len(x), ranks.rows_at_once):
            piece = x[first : first + ranks.rows_at_once]
            self._into(piece, ranks.place(self._place, ranks.number, len(piece), dtype))
            ranks.meet()
            ranks.add_up(self._place, dtype, out[first : first + len(piece)])
            if len(x) > ranks.rows_at_once:  # the next piece has the same place
                ranks.meet()
        return out


class _Embedding:
    """The rows of an embedding of which each rank has some."""

    def __init__(self, ranks: CpuRanks, embed: Callable[[Tensor], Tensor]) -> None:
        self._ranks, self._embed = ranks, embed

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, hidden]."""
        ranks, ids = self._ranks, ids.contiguous()
        own = self._embed(ids)
        out = ranks.empty(len(ids), own.dtype)
        for first in range(0, len(ids), ranks.rows_at_once):
            piece = own[first : first + ranks.rows_at_once]
            ranks.copy_embedded(piece, ranks.place(PLACES - 1, ranks.number, len(piece), own.dtype))
            ranks.meet()
            ranks.pick(ids[first : first + len(piece)], out[first : first + len(piece)])
            if len(ids) > ranks.rows_at_once:
                ranks.meet()
        return out


class _Head:
    """The output layer, of which each rank has the rows of some tokens. Rank 0 gets the logits of all."""

    def __init__(self, ranks: CpuRanks, linear: PackedLinear, board: RankBoard, vocab: int) -> None:
        self._ranks, self._linear, self._board = ranks, linear, board
        self.out_features = vocab
        self._tokens = slice(*part_of_vocabulary(vocab, ranks.number, ranks.count))
        self._at = board_bytes(ranks.count, ranks._hidden, vocab) - _logits_bytes(vocab)
        self._rows_at_once = _logits_bytes(vocab) // (4 * vocab)

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, hidden] -> [R, vocab] float32 on rank 0, good until the next call; of no use on others."""
        pieces = x.split(self._rows_at_once)
        if self._ranks.number > 0:
            for piece in pieces:
                self._gathered(piece)
            return torch.empty((len(x), self.out_features))
        return self._gathered(x) if len(pieces) == 1 else torch.cat([self._gathered(piece).clone() for piece in pieces])

    def _gathered(self, x: Tensor) -> Tensor:
        """The logits of some rows, in the memory of all ranks."""
        self._ranks.meet()  # the last ones are not needed any more
        mapping, size = self._board.mapping, len(x) * self.out_features
        whole = torch.frombuffer(mapping, dtype=torch.float32, count=size, offset=self._at).view(len(x), -1)
        self._linear.into(x, whole[:, self._tokens])
        self._ranks.meet()
        return whole
