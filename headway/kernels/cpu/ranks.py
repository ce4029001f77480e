"""What the ranks of a model say to each other on one machine, within a step.

Each rank writes its part to memory that all have, they meet, and each adds up all parts in the order of the ranks. So
all get the same bits. There are places for the parts of layers in turn: a rank writes to the first again when all have
met behind the second, and so have read the first.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cpu.compile import compiled
from headway.kernels.cpu.experts import PackedExperts
from headway.kernels.cpu.jobs import arg, job, once_per_kind, real_arg, take_rows
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.rank_board import (
    AWAIT,
    COUNT,
    HANDED_ON,
    HEADER_BYTES,
    MEET,
    RECEIVED,
    RankBoard,
    await_job,
    count_job,
    meet_job,
)
from headway.kernels.cpu.rows import REORDER, add_rms_norm_rows
from headway.kernels.cpu.simd import FLOAT32, KINDS, copy_element, load, read_int64, store, write_integer
from headway.kernels.cpu.team import Team
from headway.kernels.interface import AddRMSNorm, RMSNorm
from headway.kernels.ranks import Share

PLACES = 6  # for the results of layers and of embeddings, for what goes to the next stage, and for normed rows
_EMBEDDED, _HANDED_ON, _NORMED = 3, 4, 5
_PLACE_BYTES = 64 << 20  # for so many bytes of float32, but at least for _LEAST_ROWS
_LEAST_ROWS = 64  # a repeated step is not cut
_DIVIDED = 32768  # from so many elements on, each rank joins some of the rows: meeting again costs less
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


JOIN = struct.Struct("8qd")


@once_per_kind
def join_job(count: int, part_kind: Any, kind: Any) -> int:
    """Add the sum of `count` parts, rounded, to rows of the residual stream, and norm these; see add_rms_norm_rows."""

    def rows(a: int) -> None:
        step, total, parts, apart, out, width = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 6)
        first = take_rows(a, step)
        while first < total:
            end = min(first + step, total)
            for i in range(first * width, end * width):
                value = load(parts, i, part_kind)
                for part in range(1, count):
                    value += load(parts + part * apart, i, part_kind)
                store(out, i, value, kind)
            add_rms_norm_rows(kind, first, end, out, arg(a, 5), width, arg(a, 7), np.float32(real_arg(a, 8)))
            first = take_rows(a, step)

    return job(rows)


SQUARES = struct.Struct("6q")


@once_per_kind
def squares_job(kind: Any) -> int:
    """The sum of the squares of each row, float32."""

    def rows(a: int) -> None:
        step, total, x, stride, width, out = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        first = take_rows(a, step)
        while first < total:
            for row in range(first, min(first + step, total)):
                store(out, row, _sum_of_squares(kind, x, row * stride, width), FLOAT32)
            first = take_rows(a, step)

    return job(rows)


@compiled(fastmath=REORDER)
def _sum_of_squares(kind, x, at, width):
    total = np.float32(0)
    for d in range(width):
        value = load(x, at + d, kind)
        total += value * value
    return total


SCALE = struct.Struct("9qd")


@once_per_kind
def scale_job(count: int, kind: Any) -> int:
    """Rows, each divided by the root of the mean of all `count` parts' squares, times weights."""

    def rows(a: int) -> None:
        step, total, x, stride, width, weight = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        squares, apart, out, eps = arg(a, 6), arg(a, 7), arg(a, 8), np.float32(real_arg(a, 9))
        first = take_rows(a, step)
        while first < total:
            for row in range(first, min(first + step, total)):
                whole = np.float32(0)
                for part in range(count):
                    whole += load(squares + part * apart, row, FLOAT32)
                scale = np.float32(1) / np.sqrt(whole / np.float32(width * count) + eps)
                for d in range(width):
                    value = load(x, row * stride + d, kind) * scale * load(weight, d, kind)
                    store(out, row * width + d, value, kind)
            first = take_rows(a, step)

    return job(rows)


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

    def __init__(self, team: Team, board: RankBoard, share: Share, hidden: int, vocab: int) -> None:
        self.share, self.number, self.count = share, share.number, share.count
        self._first = board.number - share.number  # of the ranks that share these layers
        self._team, self._board = team, board
        self._hidden, self._vocab = hidden, vocab
        self.rows_at_once = self._most_rows = _rows_at_once(hidden)
        self._places: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._place_bytes = _place_bytes(hidden)
        self._starts = np.array([part_of_vocabulary(vocab, n, self.count)[0] for n in range(1, self.count)], np.int64)

    @property
    def lost(self) -> list[int]:
        """Ranks with which there is no connection any more; on one machine none."""
        return []

    def summed(self, linear: Any, place: int) -> Callable[[Tensor], Tensor]:
        assert isinstance(linear, PackedLinear)
        return _Summed(self, place, linear.into, torch.float32)

    def summed_layer(self, layer: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
        return _Summed(self, place, lambda x, out: self.copy(layer(x), out), None)

    def part(self, linear: Any, place: int) -> Callable[[Tensor], Tensor]:
        assert isinstance(linear, PackedLinear)
        return _Summed(self, place, linear.into, torch.float32).part

    def part_of_layer(self, layer: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
        return _Summed(self, place, lambda x, out: self.copy(layer(x), out), None).part

    def joined(self, add_rms_norm: AddRMSNorm) -> AddRMSNorm:
        """See Ranks. In long steps, each rank joins some rows, and puts them where all multiply them."""

        def join(part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            rows, width = residual.shape
            if rows > self.rows_at_once:  # it is the sum already
                return add_rms_norm(part, residual, weight, eps)
            self.meet(part)
            divides, first, end = rows * width >= _DIVIDED, 0, rows
            if divides:
                first, end = rows * self.number // self.count, rows * (self.number + 1) // self.count
                normed = self._place(_NORMED, self._first, rows, residual.dtype)
            else:
                normed = self.empty(rows, residual.dtype)
            parts = part.data_ptr() - self.number * self._place_bytes
            size, at = residual.element_size(), first * width
            arguments = (
                parts + at * part.element_size(), self._place_bytes, normed.data_ptr() + at * size,
                residual.data_ptr() + at * size, width, weight.data_ptr(), eps,
            )  # fmt: skip
            code = join_job(self.count, KINDS[part.dtype], KINDS[residual.dtype])
            self._team.share(code, JOIN, end - first, (end - first) * width, arguments)
            if divides:
                self.meet(normed[first:end])
            return normed, residual

        return join

    def rms_norm(self, place: int) -> RMSNorm:

        def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            tokens, width, kind = len(x), x.shape[-1], KINDS[x.dtype]
            out, at_x = self._team.empty(tuple(x.shape), x.dtype), (x.data_ptr(), x.stride(0), width)
            first, own = (self.place(place, rank, self._most_rows, torch.float32) for rank in (0, self.number))
            self._team.share(squares_job(kind), SQUARES, tokens, x.numel(), (*at_x, own.data_ptr()))
            self.meet(own.view(-1)[:tokens])
            arguments = *at_x, weight.data_ptr(), first.data_ptr(), self._place_bytes, out.data_ptr(), eps
            self._team.share(scale_job(self.count, kind), SCALE, tokens, x.numel(), arguments)
            return out

        return norm

    def dealt(self, experts: Any, count: int) -> Any:
        assert isinstance(experts, PackedExperts)
        _, each = experts.here
        experts.of_all, experts.here = count, (self.number * each, each)
        return experts

    def hand_on(self, residual: Tensor) -> None:
        own = self._board.number
        for piece in residual.split(self.rows_at_once):
            self._await(own - self.count, RECEIVED, HANDED_ON, 0)
            place = self._place(_HANDED_ON, own, len(piece), piece.dtype)
            self.copy(piece, place)
            self._count(HANDED_ON, own - self.count, place)

    def received(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        before = self._board.number + self.count

        def receive(ids: Tensor) -> Tensor:
            out = self.empty(len(ids), dtype)
            for piece in out.split(self.rows_at_once):
                self._await(before, HANDED_ON, RECEIVED, 1)
                self.copy(self._place(_HANDED_ON, before, len(piece), dtype), piece)
                self._count(RECEIVED, before)
            return out

        return receive

    def embedding(self, rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        start, end = part_of_vocabulary(self._vocab, self.number, self.count)

        def embed(ids: Tensor) -> Tensor:
            own = self._team.empty((len(ids),), torch.int64)
            arguments = ids.data_ptr(), start, end - start, own.data_ptr()
            self._team.share(own_job(), OWN, len(ids), len(ids), arguments)
            return rows(own)

        return _Embedding(self, embed)

    def head(self, linear: Any) -> Any:
        assert isinstance(linear, PackedLinear)
        return _Head(self, linear, self._board, self._vocab)

    # --- for the layers below -----------------------------------------------------------------------

    def place(self, place: int, rank: int, rows: int, dtype: torch.dtype) -> Tensor:
        """The memory of a rank's part [rows, hidden] of a layer, by its number among those that share the layer."""
        return self._place(place, self._first + rank, rows, dtype)

    def _place(self, place: int, rank: int, rows: int, dtype: torch.dtype) -> Tensor:
        whole = self._places.get((place, rank, dtype))
        if whole is None:
            offset = HEADER_BYTES + (place * self._board.count + rank) * self._place_bytes
            size = self._most_rows * self._hidden
            whole = torch.frombuffer(self._board.mapping, dtype=dtype, count=size, offset=offset)
            whole = self._places[place, rank, dtype] = whole.view(self._most_rows, self._hidden)
        return whole[:rows]

    def meet(self, written: Tensor | None = None, for_first: bool = False) -> None:
        """Wait for the others.

        Args:
            written: what this rank has written since they last met, to the memory of all.
            for_first: only the first of them reads it.
        """
        self._team.run_alone(meet_job(), MEET, (self._board.address, self._board.number, self._first, self.count))

    def _await(self, other: int, theirs: int, own: int, lead: int) -> None:
        self._team.run_alone(await_job(), AWAIT, (self._board.address, self._board.number, other, theirs, own, lead))

    def _count(self, what: int, other: int, written: Tensor | None = None) -> None:
        """Add one to a word of this rank, for which another one waits, behind what was written for it."""
        self._team.run_alone(count_job(), COUNT, (self._board.address, self._board.number, what))

    def add_up(self, place: int, dtype: torch.dtype, out: Tensor) -> None:
        """The sum of all ranks' parts of a layer, which are of a dtype."""
        first = self.place(place, 0, len(out), dtype)
        arguments = first.data_ptr(), self._place_bytes, out.data_ptr()
        code = add_up_job(self.count, KINDS[dtype], KINDS[out.dtype])
        self._team.share(code, ADD_UP, out.numel(), out.numel(), arguments)

    def pick(self, ids: Tensor, out: Tensor) -> None:
        """Each token's embedding, from the part of its rank."""
        first = self.place(_EMBEDDED, 0, len(out), out.dtype)
        width = self._hidden << 3 | out.element_size()
        arguments = (
            ids.data_ptr(), self._starts.ctypes.data, self.count - 1, first.data_ptr(), self._place_bytes, width,
            out.data_ptr(),
        )  # fmt: skip
        self._team.share(pick_job(), PICK, len(ids), out.numel(), arguments)

    def empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        return self._team.empty((rows, self._hidden), dtype)

    def copy(self, x: Tensor, out: Tensor) -> None:
        """Copy x to memory of its dtype."""
        kind = KINDS[x.dtype]
        arguments = x.data_ptr(), 0, out.data_ptr()
        self._team.share(add_up_job(1, kind, kind), ADD_UP, x.numel(), x.numel(), arguments)


class _Summed:
    """A layer whose result is the sum of what the ranks compute.

    Args:
        into: computes x [T, in] -> out [T, hidden] of the dtype that parts have; None stands for that of x.
    """

    def __init__(
        self, ranks: CpuRanks, place: int, into: Callable[[Tensor, Tensor], None], dtype: torch.dtype | None
    ) -> None:
        self._ranks, self._place, self._into, self._dtype = ranks, place, into, dtype

    def part(self, x: Tensor) -> Tensor:
        """x [T, in] -> this rank's part [T, hidden], where all see it; of too many rows, the sum."""
        ranks = self._ranks
        if len(x) > ranks.rows_at_once:
            return self(x)
        out = ranks.place(self._place, ranks.number, len(x), self._dtype or x.dtype)
        self._into(x, out)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, hidden], in x's dtype."""
        ranks, dtype = self._ranks, self._dtype or x.dtype
        out = ranks.empty(len(x), x.dtype)
        for first in range(0, len(x), ranks.rows_at_once):
            piece = x[first : first + ranks.rows_at_once]
            part = ranks.place(self._place, ranks.number, len(piece), dtype)
            self._into(piece, part)
            ranks.meet(part)
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
            part = ranks.place(_EMBEDDED, ranks.number, len(piece), own.dtype)
            ranks.copy(piece, part)
            ranks.meet(part)
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
        self._at = board_bytes(board.count, ranks._hidden, vocab) - _logits_bytes(vocab)
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
        part = whole[:, self._tokens]
        self._linear.into(x, part)
        self._ranks.meet(part, for_first=True)
        return whole
