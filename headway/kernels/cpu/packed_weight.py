"""How a matrix is packed into panels at load, in the dtype of the model or quantised.

One layout serves decoding and prompts, vectors and matrix tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu.arithmetic import (
    FLOAT4,
    FLOAT8,
    GROUPS4,
    GROUPS8,
    INT4,
    INT8,
    NORMAL4,
    PANEL,
    WIDE_INT8,
    arithmetic_of,
)
from headway.kernels.cpu.choice import Choice, choice_for
from headway.kernels.cpu.groups import GroupedPanels, group_bytes, pack_groups, stacked_panels
from headway.kernels.cpu.matrix import ON_TILES, SPLIT, STEP_WORDS, configurations
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.packing import PACK, pack_job, pack_nibbles
from headway.kernels.cpu.planes import words_of_tile
from headway.kernels.cpu.product import product_job
from headway.kernels.cpu.simd import FLOAT16, KINDS
from headway.kernels.cpu.team import Team
from headway.kernels.weights import Gate, Groups, Product, Weight

_QUANTISED = {"int8": INT8, "int8-weight-only": WIDE_INT8, "int4": INT4}
_GROUPED = {
    "int4-weight-only": GROUPS4,
    "int8-weight-only": GROUPS8,
    "float8-weight-only": FLOAT8,
    "float4-weight-only": FLOAT4,
    "normal4-weight-only": NORMAL4,
}
_PACKED = [*(f"{scheme} packed in rows" for scheme in ("int8", "int8-weight-only")), "int4 packed in groups"]
_FORMATS = ("none", *_QUANTISED, *_PACKED, *(f"{scheme} packed in groups" for scheme in _GROUPED))
# A block of a panel, which all tokens are multiplied with before the next, stays in a core's first two caches. For
# integer kinds it is so many inputs, which share a scale of the activations.
_BLOCK_BYTES, _BLOCK_INPUTS = 32 * 1024, 512
# The same of floats on matrix tiles, in words: sums are brought into tiles and back for each.
_BLOCK_WORDS = 512
# Attributes that depend on the ways that a process takes, or on its memory.
_OF_A_PROCESS = ("_code", "_tiles", "_x_stride", "_block_at_once", "_lane_bytes")


def kind_of(scheme: str, dtype: torch.dtype) -> Any:
    """The kind of the weights that --quantization makes, or that most checkpoints in this scheme have."""
    return {**_GROUPED, **_QUANTISED}.get(scheme, KINDS[dtype])


class PackedWeight:
    """A weight in panels; see cpu.arithmetic for the kinds. Or those of experts, whose panels follow each other.

    Args:
        products: the weight and its bias, or those of each expert: float32, bfloat16 or float16; or packed. Their
            memory is not needed afterwards.
        count: how many there are; they are of one shape and format.
        memory: what the packed weights are cut from.
        gate: with one, the first half of the rows is a gate and the second half is what it lets through, and the result
            is half as wide.
        choice: which way products take; None: that of this process.
        wide: results are float32, as the sums are; without a gate.

    Raises:
        ValueError: a weight has another format.
    """

    def __init__(
        self,
        products: Iterable[Product],
        team: Team,
        memory: LargePages,
        gate: Gate | None = None,
        choice: Choice | None = None,
        count: int = 1,
        wide: bool = False,
    ) -> None:
        self._team, self._choice, self._wide = team, choice or choice_for(), wide
        self._gate = None if gate is None else _numbers(gate)
        panels: list[GroupedPanels] = []
        orders: list[Tensor | None] = []
        for number, (weight, bias) in enumerate(products):
            like = weight.format, weight.rows, weight.parts[0].shape[1], weight.groups and weight.groups.layout
            if number == 0:
                first = like
                self._lay_out(weight, memory, count)
            elif like != first:
                raise ValueError(f"an expert's weight is {like}, but that of another is {first}; they must be alike")
            if weight.groups is None:
                self._fill(number, weight)
            elif self._kind is INT4:
                self._fill_int4(number, weight, weight.groups)
            else:
                panels.append(self._fill_groups(number, weight, weight.groups))
                orders.append(weight.groups.order)
            if bias is not None:
                self._part(self._bias, number).copy_(self._in_lanes(bias))
            if weight.factor != 1.0:
                self._part(self._row_scales, number).mul_(weight.factor)
        self._groups = stacked_panels(panels) if panels else None
        self._order = _orders(orders, self.in_features)

    def _lay_out(self, weight: Weight, memory: LargePages, count: int) -> None:
        """Settle how weights like this one are kept."""
        if weight.format not in _FORMATS:
            raise ValueError(f"the cpu kernels have no weights in {weight.format}; they have {', '.join(_FORMATS)}")
        if weight.groups is not None and weight.groups.size % 8:
            raise ValueError(f"a weight has groups of {weight.groups.size} inputs; it must be a multiple of 8")
        part, gated = weight.parts[0], self._gate is not None
        self.in_features, self._dtype = part.shape[1], weight.dtype or part.dtype
        self.out_features = weight.rows // (2 if gated else 1)
        self._x_kind = KINDS[self._dtype]
        groups = None if weight.scheme == "int4" else weight.groups  # whose factors lie with its numbers
        self._kind = kind = (_QUANTISED if groups is None else _GROUPED).get(weight.scheme, self._x_kind)
        layout = arithmetic_of(kind)
        self._splits = any(kind is each for each in SPLIT)
        step = layout.words * layout.inputs
        if groups is None and self._choice.tiles and any(kind is each for each in ON_TILES):
            step = max(step, STEP_WORDS * (4 if self._splits else layout.inputs))  # whole tiles
        self._padded = -(-self.in_features // step) * step
        self._step_bytes = PANEL * layout.lane_bytes // layout.words  # a word of the panel's rows, with its scales
        # Inputs that share a scale of the activations, and words of a block.
        self._inputs = _BLOCK_INPUTS if groups is None else groups.size
        self._words = self._padded // layout.inputs
        self._block = _BLOCK_INPUTS // layout.inputs if layout.integer else _BLOCK_BYTES // self._step_bytes
        # A token as it is multiplied: four bytes a word, then scale and start of each block of an integer kind.
        self._x_bytes = -(-self._words * 4 // 64) * 64
        self._row_bytes = self._words * layout.lane_bytes // layout.words
        if groups is not None:  # a group is what a word is otherwise
            self._words = self.in_features // groups.size
            self._step_bytes = group_bytes(kind, groups.size)
            self._block = max(1, _BLOCK_INPUTS // groups.size)
            self._row_bytes = self._words * self._step_bytes // PANEL
        self._panels = -(-self.out_features // (PANEL // 2 if gated else PANEL))
        self._packed = memory.empty(count * self._panels * PANEL * self._row_bytes)
        self._bias = torch.zeros(count * self._panels * PANEL)
        self._row_scales = torch.ones(count * self._panels * PANEL)
        self._prepared = layout.integer or kind is FLOAT16 or groups is not None or self._padded != self.in_features
        self._choose()

    def _choose(self) -> None:
        """Choose the way that products take. Packed weights are the same for all ways."""
        way, layout = self._choice.way(self._kind), arithmetic_of(self._kind)
        words = words_of_tile(self._inputs) if self._splits else STEP_WORDS
        on_tiles = way.least_on_tiles > 0 and words > 0
        self._tiles = configurations(way.least_on_tiles, words) if on_tiles else 0
        self._x_stride = self._x_bytes + (-(-self._padded // self._inputs) * 8 if layout.integer else 0)
        if on_tiles and self._splits:  # and two planes; see cpu.planes
            self._x_stride = -(-self._x_stride // 64) * 64 + 2 * -(-self._padded // 64) * 64
        self._lane_bytes = layout.lane_bytes
        self._block_at_once = _BLOCK_WORDS if on_tiles and not layout.integer else self._block
        self._code = product_job(self._x_kind, way.kind, on_tiles)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_A_PROCESS}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._choose()

    def _part(self, all_panels: Tensor, number: int) -> Tensor:
        """The part of the weight of this number."""
        size = len(all_panels) * self._panels * PANEL // len(self._row_scales)
        return all_panels[number * size : (number + 1) * size]

    def _in_lanes(self, rows: Tensor) -> Tensor:
        """Numbers of rows [out] in the order of the panels' lanes, float32."""
        parts = (rows.float(),) if self._gate is None else rows.float().chunk(2)
        width = PANEL // len(parts)
        lanes = [F.pad(part, (0, self._panels * width - len(part))).view(self._panels, width) for part in parts]
        return torch.cat(lanes, dim=1).view(-1)

    def _fill(self, number: int, weight: Weight) -> None:
        """Pack a weight that has no groups."""
        parts, layout = [part.contiguous() for part in weight.parts], arithmetic_of(self._kind)
        scales = self._part(self._row_scales, number)
        if weight.scales is not None:
            scales.copy_(self._in_lanes(weight.scales.view(-1)))
        code = pack_job(self._x_kind if weight.scales is None else WIDE_INT8, self._kind)
        starts = itertools.accumulate((len(part) for part in parts), initial=0)
        table = np.array([(start, part.data_ptr()) for start, part in zip(starts, parts, strict=False)], np.int64)
        arguments = (
            1, self._panels, table.ctypes.data, len(table), weight.rows, self.in_features,
            parts[0].element_size(), self._padded, self._row_bytes, layout.lane_bytes,
            self._part(self._packed, number).data_ptr(), scales.data_ptr(), int(self._gate is not None),
        )  # fmt: skip
        self._team.run(code, PACK, arguments)

    def _fill_int4(self, number: int, weight: Weight, groups: Groups) -> None:
        """Pack numbers that have been rounded before, whose groups' factors belong to one scale for each row."""
        self._part(self._row_scales, number).copy_(self._in_lanes(groups.scales.view(-1)))
        lanes, inputs = self.rows_in_lanes(weight.rows), self._padded - self.in_features
        numbers = F.pad(weight.parts[0], (0, inputs, 0, 1), value=8)[lanes]
        factors = F.pad(groups.factors, (0, inputs // groups.size, 0, 1), value=1)[lanes]
        pack_nibbles(numbers, factors, self._part(self._packed, number))

    def rows_in_lanes(self, rows: int) -> Tensor:
        """Which row each lane of the panels has, int64; -1: none."""
        return self._in_lanes(torch.arange(1.0, 1 + rows)).long() - 1

    def _fill_groups(self, number: int, weight: Weight, groups: Groups) -> GroupedPanels:
        rows, packed = self.rows_in_lanes(weight.rows), self._part(self._packed, number)
        return pack_groups(self._kind, weight.parts[0].contiguous(), groups, rows, packed)


def _numbers(gate: Gate) -> Tensor:
    """The numbers of a gate, in the order in which jobs read them."""
    return torch.tensor([gate.slope, gate.cubic, gate.limit, gate.shift])


def _orders(orders: list[Tensor | None], inputs: int) -> Tensor | None:
    """The orders of inputs of all experts, one after the other; None if no expert has one."""
    if all(order is None for order in orders):
        return None
    own = torch.arange(inputs, dtype=torch.int32)
    return torch.cat([own if order is None else order for order in orders])
