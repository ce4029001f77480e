"""Low-rank adapters on CUDA in Triton: what those of a step's rows add to the result of a product.

A program has a segment of rows, which have one adapter (see kernels.adapters). The first kernel multiplies them with
some rows of A; inputs are split among programs, whose sums the second kernel adds in their order, so that a row's
result depends on nothing else in the step. The second multiplies these with B, for some outputs. Grids follow from the
number of rows alone, so that a step can be captured in a graph: programs without a segment do nothing.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.adapters import SEGMENT_ROWS, AdapterRows, AdapterSpec, Slots

_STEP = 16  # rows of A that a program multiplies; ranks are a multiple
_INPUTS = 64  # that a program reads at a time
_SPLIT_INPUTS, _MOST_SPLITS = 1024, 8
_COLUMNS = 64


@triton.jit
def _segment(segments, order, ROWS: tl.constexpr):
    """(slot, -1 for none; its rows; whether each is there) of a program."""
    number = tl.program_id(0)
    there = number < tl.load(segments)
    slot = tl.load(segments + 3 + number * 3, mask=there, other=-1)
    first = tl.load(segments + 4 + number * 3, mask=there, other=0)
    count = tl.load(segments + 5 + number * 3, mask=there, other=0)
    at = tl.arange(0, ROWS)
    return slot, tl.load(order + first + at, mask=at < count, other=0), at < count


@triton.jit(do_not_specialize=["rows"])
def lower_kernel(
    x, x_stride, segments, order, down, ranks, lowered, rows, inputs, split_inputs,
    PARTS: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (segment, rows of A, split): lowered[split, row] is the sum over its inputs, float32."""
    slot, row, live = _segment(segments, order, ROWS)
    at = tl.program_id(1) * STEP
    split = tl.program_id(2)
    if slot < 0:
        return
    if at % RANK >= tl.load(ranks + slot):
        return
    low = at + tl.arange(0, STEP)
    matrix = down + (slot.to(tl.int64) * PARTS * RANK + low) * inputs
    of_rows = x + row.to(tl.int64) * x_stride
    totals = tl.zeros([ROWS, STEP], tl.float32)
    first = split * split_inputs
    for start in range(first, tl.minimum(first + split_inputs, inputs), INPUTS):
        place = start + tl.arange(0, INPUTS)
        value = tl.load(of_rows[:, None] + place[None, :], mask=live[:, None] & (place < inputs)[None, :], other=0.0)
        numbers = tl.load(matrix[None, :] + place[:, None], mask=(place < inputs)[:, None], other=0.0)
        if WIDEN:
            value, numbers = value.to(tl.float32), numbers.to(tl.float32)
        totals = tl.dot(value, numbers, totals, input_precision="ieee")
    to = lowered + (split * rows + row).to(tl.int64)[:, None] * (PARTS * RANK) + low[None, :]
    tl.store(to, totals, mask=live[:, None])


@triton.jit(do_not_specialize=["rows"])
def raise_kernel(
    lowered, segments, order, up, ranks, part_of, out, rows, outputs,
    PARTS: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (segment, columns): out[row] += B's products with what A made, each column with that of its part."""
    slot, row, live = _segment(segments, order, ROWS)
    if slot < 0:
        return
    rank = tl.load(ranks + slot)
    if rank == 0:
        return
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = col < outputs
    part = tl.load(part_of + col, mask=there, other=-1)
    totals = tl.zeros([ROWS, COLUMNS], tl.float32)
    for each in tl.static_range(PARTS):
        if tl.max((part == each).to(tl.int32), axis=0) > 0:
            for start in range(0, rank, STEP):
                low = start + tl.arange(0, STEP)
                value = tl.zeros([ROWS, STEP], tl.float32)
                for split in tl.static_range(SPLITS):
                    at = (split * rows + row).to(tl.int64)[:, None] * (PARTS * RANK) + each * RANK + low[None, :]
                    value += tl.load(lowered + at, mask=live[:, None], other=0.0)
                at = (slot.to(tl.int64) * RANK + low)[:, None] * outputs + col[None, :]
                numbers = tl.load(up + at, mask=(there & (part == each))[None, :], other=0.0).to(tl.float32)
                totals = tl.dot(value, numbers, totals, input_precision="ieee")
    to = out + row.to(tl.int64)[:, None] * outputs + col[None, :]
    mask = live[:, None] & there[None, :]
    totals += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, totals.to(out.dtype.element_ty), mask=mask)


class AdaptedLinear:
    """A product with adapters beside it.

    Args:
        linear: the product without its gate, [T, in] -> dense [T, out].
        behind: what is done with its result, such as the gate.
        order: int64 [out], which output of the checkpoint's layers each of the product's is; None: they are in order.
    """

    def __init__(
        self,
        linear: Callable[[Tensor], Tensor],
        spec: AdapterSpec,
        rows: AdapterRows,
        behind: Callable[[Tensor], Tensor] | None = None,
        order: Tensor | None = None,
    ) -> None:
        self._linear, self._behind, self._rows, self._order = linear, behind, rows, order
        self._slots, self._parts = Slots(spec, _STEP), spec.parts
        part_of = spec.part_of if order is None else spec.part_of[order]
        self._part_of = part_of.to(torch.int32)
        self._up = self._slots.zeros(spec.slots, self._slots.rank, len(part_of))
        self._splits = max(1, min(_MOST_SPLITS, spec.inputs // _SPLIT_INPUTS))
        per_split = triton.cdiv(spec.inputs, self._splits)
        self._split_inputs = triton.cdiv(per_split, _INPUTS) * _INPUTS

    def __call__(self, x: Tensor) -> Tensor:
        out, slots, rows, parts = self._linear(x), self._slots, self._rows, self._parts
        x, count = x if x.stride(-1) == 1 else x.contiguous(), len(x)
        segments, width = rows.segments_of(count), parts * slots.rank
        if segments:
            lowered = torch.empty((self._splits, count, width), dtype=torch.float32, device=x.device)
            sizes = {"PARTS": parts, "RANK": slots.rank, "STEP": _STEP, "ROWS": SEGMENT_ROWS, "num_warps": 4}
            of_rows = rows.segments, rows.order
            lower_kernel[(segments, width // _STEP, self._splits)](
                x, x.stride(0), *of_rows, slots.down, slots.ranks, lowered, count, x.shape[1], self._split_inputs,
                **sizes, INPUTS=_INPUTS, WIDEN=not isinstance(lower_kernel, triton.JITFunction),
            )  # fmt: skip
            raise_kernel[(segments, triton.cdiv(out.shape[1], _COLUMNS))](
                lowered, *of_rows, self._up, slots.ranks, self._part_of, out, count, out.shape[1],
                **sizes, COLUMNS=_COLUMNS, SPLITS=self._splits,
            )  # fmt: skip
        return out if self._behind is None else self._behind(out)

    def write(self, slot: int, down: Tensor, up: Tensor) -> None:
        moved = up if self._order is None else up[:, self._order.to(up.device)]
        self._slots.write(slot, down, moved, self._up[slot])
