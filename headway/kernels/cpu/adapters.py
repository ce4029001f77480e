"""Low-rank adapters on CPU: what those of a step's rows add to the sums of a product, and the result behind that.

Three jobs follow each other. A thread multiplies a segment of rows with four rows of its adapter's A; the product
writes its sums; and a thread takes a segment and a panel of the sums, adds B's part, and rounds them or lets them
through the gate as the product itself would. So a row without an adapter gets the bits that it gets without the others.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.adapters import AdapterRows, AdapterSpec, Slots
from headway.kernels.cpu.arithmetic import PANEL
from headway.kernels.cpu.compile import compiled
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.product import finish_gated, finish_plain
from headway.kernels.cpu.rows import REORDER
from headway.kernels.cpu.simd import FLOAT32, KINDS, load, read_int32, read_int64, store
from headway.kernels.cpu.team import Team, arg, job, once_per_kind, take_share, tickets

_AT_ONCE = 4  # rows of A, or of B, that are multiplied together
_ZERO = np.float32(0)


@compiled(fastmath=REORDER)
def _lower(kind, x, down, inputs, out):
    """The products of a token with four rows of A."""
    first = second = third = fourth = _ZERO
    for i in range(inputs):
        value = load(x, i, kind)
        first += value * load(down, i, kind)
        second += value * load(down, inputs + i, kind)
        third += value * load(down, 2 * inputs + i, kind)
        fourth += value * load(down, 3 * inputs + i, kind)
    store(out, 0, first, FLOAT32)
    store(out, 1, second, FLOAT32)
    store(out, 2, third, FLOAT32)
    store(out, 3, fourth, FLOAT32)


LOWER = struct.Struct("11q")


@once_per_kind
def lower_job(kind: Any) -> int:
    """What A makes of the rows with adapters, float32 [rows, parts * rank]."""
    size = 4 if kind is FLOAT32 else 2

    def lower(a: int) -> None:
        threads, segments, order, x, x_stride, inputs = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        down, ranks, parts, rank, out = arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10)
        each = parts * rank // _AT_ONCE
        items = read_int32(segments, 0) * each
        item, end = take_share(tickets(a, 0), items, threads)
        while item < items:
            for number in range(item, end):
                segment, at = number // each, number % each * _AT_ONCE
                slot, first = read_int32(segments, 3 + segment * 3), read_int32(segments, 4 + segment * 3)
                if slot >= 0 and at % rank < read_int32(ranks, max(slot, 0)):
                    matrix = down + (slot * parts * rank + at) * inputs * size
                    for entry in range(first, first + read_int32(segments, 5 + segment * 3)):
                        row = read_int32(order, entry)
                        _lower(kind, x + row * x_stride * size, matrix, inputs, out + (row * parts * rank + at) * 4)
            item, end = take_share(tickets(a, 0), items, threads)

    return job(lower)


@compiled(fastmath={"contract"})
def _raise(kind, sums, first, last, up, lowered):
    """Add the products of four numbers with as many rows of B to lanes first .. last - 1 of a panel."""
    one, two = load(lowered, 0, FLOAT32), load(lowered, 1, FLOAT32)
    three, four = load(lowered, 2, FLOAT32), load(lowered, 3, FLOAT32)
    for i in range(first, last):
        value = load(sums, i, FLOAT32) + one * load(up, i, kind)
        value += two * load(up, PANEL + i, kind)
        value += three * load(up, 2 * PANEL + i, kind)
        store(sums, i, value + four * load(up, 3 * PANEL + i, kind), FLOAT32)


RAISE = struct.Struct("17q")


@once_per_kind
def raise_job(kind: Any) -> int:
    """Add what B makes of the lowered rows to the sums of a product, and write its results from these."""
    size = 4 if kind is FLOAT32 else 2

    def raise_(a: int) -> None:
        threads, segments, order, sums, panels = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        up, ranks, parts, rank, lowered = arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9)
        runs, runs_of, out, features, gate = arg(a, 10), arg(a, 11), arg(a, 12), arg(a, 13), arg(a, 14)
        ones, zeros = arg(a, 15), arg(a, 16)
        each = PANEL // 2 if gate != 0 else PANEL
        items = read_int32(segments, 0) * panels
        item, end = take_share(tickets(a, 0), items, threads)
        while item < items:
            for number in range(item, end):
                segment, panel = number // panels, number % panels
                slot, first = read_int32(segments, 3 + segment * 3), read_int32(segments, 4 + segment * 3)
                used = read_int32(ranks, slot) if slot >= 0 else 0
                count = min(each, features - panel * each)
                matrix = up + (max(slot, 0) * panels + panel) * rank * PANEL * size
                for entry in range(first, first + read_int32(segments, 5 + segment * 3)):
                    row = read_int32(order, entry)
                    of_panel = sums + (row * panels + panel) * PANEL * 4
                    if used > 0:
                        for run in range(read_int64(runs_of, panel), read_int64(runs_of, panel + 1)):
                            part = lowered + (row * parts + read_int64(runs, run * 3 + 2)) * rank * 4
                            for at in range(0, used, _AT_ONCE):
                                _raise(
                                    kind, of_panel, read_int64(runs, run * 3), read_int64(runs, run * 3 + 1),
                                    matrix + at * PANEL * size, part + at * 4,
                                )  # fmt: skip
                    to = out + (row * features + panel * each) * size
                    if gate != 0:
                        finish_gated(kind, 1, count, of_panel, ones, zeros, to, features, gate)
                    else:
                        finish_plain(kind, 1, count, of_panel, ones, zeros, to, features)
            item, end = take_share(tickets(a, 0), items, threads)

    return job(raise_)


class AdaptedLinear:
    """A packed product, gated or not, with adapters beside it."""

    def __init__(self, team: Team, linear: PackedLinear, spec: AdapterSpec, rows: AdapterRows) -> None:
        self._team, self._linear, self._rows, self._slots = team, linear, rows, Slots(spec, _AT_ONCE)
        self._parts, self._lanes = spec.parts, linear.rows_in_lanes(len(spec.part_of))
        self._panels = len(self._lanes) // PANEL
        self._up = self._slots.zeros(spec.slots, self._panels, self._slots.rank, PANEL)
        self._runs, self._runs_of = _runs([-1 if at < 0 else int(spec.part_of[at]) for at in self._lanes.tolist()])
        self._ones, self._zeros = torch.ones(PANEL), torch.zeros(PANEL)

    def __call__(self, x: Tensor) -> Tensor:
        """See Adapted."""
        x = x if x.stride(1) == 1 else x.contiguous()
        team, linear, slots, rows = self._team, self._linear, self._slots, self._rows
        count, kind = x.shape[0], KINDS[x.dtype]
        lowered = team.empty((count, self._parts * slots.rank), torch.float32)
        segments, order = rows.segments.data_ptr(), rows.order.data_ptr()
        ranks = slots.ranks.data_ptr()
        arguments = (
            team.threads, segments, order, x.data_ptr(), x.stride(0), x.shape[1], slots.down.data_ptr(), ranks,
            self._parts, slots.rank, lowered.data_ptr(),
        )  # fmt: skip
        team.run(lower_job(kind), LOWER, arguments)
        sums = linear.sums(x)
        out = team.empty((count, linear.out_features), x.dtype)
        more = (
            team.threads, segments, order, sums.data_ptr(), self._panels, self._up.data_ptr(), ranks, self._parts,
            slots.rank, lowered.data_ptr(), self._runs.ctypes.data, self._runs_of.ctypes.data, out.data_ptr(),
            linear.out_features, linear.gate_address, self._ones.data_ptr(), self._zeros.data_ptr(),
        )  # fmt: skip
        team.run(raise_job(kind), RAISE, more)
        return out

    def write(self, slot: int, down: Tensor, up: Tensor) -> None:
        """See Adapted."""
        beside = torch.cat([up, up.new_zeros(len(up), 1)], 1)  # lanes of no row take the last column
        panels = beside[:, self._lanes].view(len(up), self._panels, PANEL)
        self._slots.write(slot, down, panels, self._up[slot].transpose(0, 1))


def _runs(parts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Runs of lanes of one part, each within a panel, int64 [runs, 3]: first lane, end and part; and those of panels.

    Args:
        parts: of each lane; -1 for none.
    """
    runs: list[tuple[int, int, int]] = []
    of_panels = [0]
    for panel in range(0, len(parts), PANEL):
        lane = 0
        for part, lanes in itertools.groupby(parts[panel : panel + PANEL]):
            count = len(list(lanes))
            if part >= 0:
                runs.append((lane, lane + count, part))
            lane += count
        of_panels.append(len(runs))
    return np.array(runs, np.int64).reshape(-1, 3), np.array(of_panels, np.int64)
