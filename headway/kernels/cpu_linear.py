"""Linear layers on CPU: weights packed into panels once at load, in the dtype of the model or quantised.

One layout serves decoding and prompts, vectors and matrix tiles. Activations of quantised layers are quantised as they
come, each token and block of inputs by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu_arithmetic import (
    FLOAT8,
    GROUPS4,
    GROUPS8,
    INT4,
    INT8,
    PANEL,
    WIDE_INT8,
    Arithmetic,
    arithmetic_of,
)
from headway.kernels.cpu_groups import GROUPED_ROWS, GroupedPanels, group_bytes, grouped_rows_job, pack_groups
from headway.kernels.cpu_matrix import STEP_WORDS, TILE_ROWS, configuration
from headway.kernels.cpu_memory import LargePages
from headway.kernels.cpu_packing import PACK, ROWS, pack_job, rows_job
from headway.kernels.cpu_product import ON_TILES, PRODUCT, product_job, tile_product_job
from headway.kernels.cpu_simd import BFLOAT16, FLOAT16, KINDS
from headway.kernels.cpu_team import Team
from headway.kernels.interface import Linear, Weight
from headway.kernels.reference import ReferenceGatedLinear, ReferenceKernels, ReferenceLinear

_QUANTISED = {"int8": INT8, "int8-weight-only": WIDE_INT8, "int4": INT4}
_GROUPED = {"int4-weight-only": GROUPS4, "int8-weight-only": GROUPS8, "float8-weight-only": FLOAT8}
_PACKED = [f"{scheme} packed in rows" for scheme in ("int8", "int8-weight-only")]
_FORMATS = ("none", *_QUANTISED, *_PACKED, *(f"{scheme} packed in groups" for scheme in _GROUPED))
# A block of a panel, which all tokens are multiplied with before the next, stays in a core's first two caches. For
# integer kinds it is so many inputs, which share a scale of the activations.
_BLOCK_BYTES, _BLOCK_INPUTS = 32 * 1024, 512
# The same on matrix tiles, in steps: sums are brought into tiles and back for each.
_BLOCK_STEPS = 32
# Tokens whose sums a thread keeps at a time, and the least that an item of work is cut down to for many threads.
_MOST_TOKENS, _LEAST_TOKENS = 256, 24
_ITEMS_PER_THREAD = 4
_NO_GROUPS = (0,) * 7


class PackedLinear:
    """A weight in panels; see cpu_arithmetic for the kinds.

    Args:
        weight: float32, bfloat16 or float16; or packed in rows of int8. Its memory is not needed afterwards.
        bias: [out] or None.
        memory: what the packed weight is cut from.
        gated: the first half of the rows is a gate and the second half is what it lets through: the result is
            silu(gate) * up, half as wide.
        tiles: whether this process has matrix tiles, which then multiply what is not quantised in bfloat16.

    Raises:
        ValueError: the weight has another format.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        team: Team,
        memory: LargePages,
        gated: bool = False,
        tiles: bool = False,
    ) -> None:
        if weight.format not in _FORMATS:
            raise ValueError(f"the cpu kernels have no weights in {weight.format}; they have {', '.join(_FORMATS)}")
        if weight.groups is not None and weight.groups.size % 8:
            raise ValueError(f"a weight has groups of {weight.groups.size} inputs; it must be a multiple of 8")
        parts = [part.contiguous() for part in weight.parts]
        self.in_features, self._dtype = parts[0].shape[1], weight.dtype or parts[0].dtype
        self.out_features = sum(map(len, parts)) // (2 if gated else 1)
        self._team, self._gated = team, gated
        self._x_kind = KINDS[self._dtype]
        groups = weight.groups
        self._kind = kind = (_QUANTISED if groups is None else _GROUPED).get(weight.scheme, self._x_kind)
        layout = arithmetic_of(kind)
        self._on_tiles = tiles and kind is BFLOAT16
        step = (STEP_WORDS if self._on_tiles else layout.words) * layout.inputs
        self._padded = -(-self.in_features // step) * step
        self._step_bytes = PANEL * layout.lane_bytes // layout.words  # a word of the panel's rows, with its scales
        # Inputs that share a scale of the activations, and words of a block.
        self._inputs = _BLOCK_INPUTS if groups is None else groups.size
        self._words = self._padded // layout.inputs
        self._block = _BLOCK_INPUTS // layout.inputs if layout.integer else _BLOCK_BYTES // self._step_bytes
        # A token as it is multiplied: four bytes a word, then scale and start of each block of an integer kind.
        self._x_bytes = -(-self._words * 4 // 64) * 64
        self._x_stride = self._x_bytes + (-(-self._padded // self._inputs) * 8 if layout.integer else 0)
        self._row_bytes = self._words * layout.lane_bytes // layout.words
        if groups is not None:  # a group is what a word is otherwise
            self._words = self.in_features // groups.size
            self._step_bytes = group_bytes(kind, groups.size)
            self._block = max(1, _BLOCK_INPUTS // groups.size)
            self._row_bytes = self._words * self._step_bytes // PANEL
        self._panels = -(-self.out_features // (PANEL // 2 if gated else PANEL))
        self._packed = memory.empty(self._panels * PANEL * self._row_bytes)
        self._bias = torch.zeros(self._panels * PANEL) if bias is None else _in_lanes(bias, self._panels, gated)
        self._row_scales = torch.ones(self._panels * PANEL)
        self._groups: GroupedPanels | None = None
        self._order = None if groups is None else groups.order
        if groups is not None:
            rows = _in_lanes(torch.arange(1.0, 1 + len(parts[0])), self._panels, gated)
            self._groups = pack_groups(kind, parts[0], groups, rows.long() - 1, self._packed)
        elif weight.scales is None:
            self._fill(parts, layout, pack_job(self._x_kind, kind))
        else:
            self._row_scales = _in_lanes(weight.scales.view(-1), self._panels, gated)
            self._fill(parts, layout, pack_job(WIDE_INT8, kind))
        if weight.factor != 1.0:
            self._row_scales *= weight.factor
        self._prepared = (
            layout.integer
            or kind is FLOAT16
            or groups is not None
            or (self._on_tiles and self._padded != self.in_features)
        )
        self._code = tile_product_job() if self._on_tiles else product_job(self._x_kind, kind)

    def _fill(self, parts: list[Tensor], layout: Arithmetic, code: int) -> None:
        starts = itertools.accumulate((len(part) for part in parts), initial=0)
        table = np.array([(start, part.data_ptr()) for start, part in zip(starts, parts, strict=False)], np.int64)
        arguments = (
            1, self._panels, table.ctypes.data, len(table), sum(map(len, parts)), self.in_features,
            parts[0].element_size(), self._padded, self._row_bytes, layout.lane_bytes, self._packed.data_ptr(),
            self._row_scales.data_ptr(), int(self._gated),
        )  # fmt: skip
        self._team.run(code, PACK, arguments)

    @staticmethod
    def takes(weight: Weight) -> bool:
        """Whether a row is whole words; integer kinds pad theirs."""
        part = weight.parts[0]
        return weight.format != "none" or part.shape[1] % arithmetic_of(KINDS[part.dtype]).inputs == 0

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        tokens = x.shape[0]
        if x.stride(1) != 1:
            x = x.contiguous()
        out = self._team.empty((tokens, self.out_features), x.dtype)
        if tokens == 0:
            return out
        rows = self._team.empty((tokens * self._x_stride if self._prepared else 0,), torch.uint8)
        if self._on_tiles:
            self._team.run(self._code, ON_TILES, self._arguments_on_tiles(x, rows, out))
        else:
            self._team.run(self._code, PRODUCT, self._arguments(x, rows, out))
        return out

    def _arguments(self, x: Tensor, rows: Tensor, out: Tensor) -> tuple[int, ...]:
        """Of product_job."""
        tokens = x.shape[0]
        return (
            self._team.threads, self._panels, tokens, self._chunks(tokens), x.data_ptr(), x.stride(0),
            x.element_size(), self.in_features, rows.data_ptr(), self._x_bytes, self._x_stride, self._padded,
            self._inputs, self._packed.data_ptr(), self._words, self._block,
            self._step_bytes, PANEL * self._row_bytes, self._row_scales.data_ptr(), self._bias.data_ptr(),
            out.data_ptr(), self.out_features, int(self._gated),
            0 if self._order is None else self._order.data_ptr(),
            *(_NO_GROUPS if self._groups is None else self._groups.arguments()[1:]),
        )  # fmt: skip

    def _arguments_on_tiles(self, x: Tensor, rows: Tensor, out: Tensor) -> tuple[int, ...]:
        """Of tile_product_job. Tokens are cut evenly into as few groups as there may be, all of one size."""
        tokens = x.shape[0]
        chunks = self._chunks(tokens)
        most = -(-tokens // chunks)
        of_group = -(-most // -(-most // TILE_ROWS))
        return (
            self._team.threads, self._panels, tokens, chunks, x.data_ptr(), x.stride(0) * x.element_size(),
            self.in_features, rows.data_ptr() if self._prepared else 0, self._x_stride, self._packed.data_ptr(),
            self._words // STEP_WORDS, _BLOCK_STEPS, PANEL * self._row_bytes, self._row_scales.data_ptr(),
            self._bias.data_ptr(), out.data_ptr(), self.out_features, int(self._gated), of_group,
            configuration(of_group),
        )  # fmt: skip

    def _chunks(self, tokens: int) -> int:
        """Into how many pieces the tokens are cut, so that sums stay in cache and every thread has work."""
        wanted = -(-_ITEMS_PER_THREAD * self._team.threads // self._panels)
        return max(-(-tokens // _MOST_TOKENS), min(wanted, tokens // _LEAST_TOKENS), 1)

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T] int64 of the weight -> [T, in], in the model's dtype."""
        numbers = numbers.contiguous()
        out = self._team.empty((numbers.shape[0], self.in_features), self._dtype)
        if self._groups is not None:
            order = 0 if self._order is None else self._order.data_ptr()
            of_groups = (
                4, numbers.shape[0], numbers.data_ptr(), self._packed.data_ptr(), self._words, out.element_size(),
                order, out.data_ptr(), *self._groups.arguments(),
            )  # fmt: skip
            self._team.run(grouped_rows_job(self._x_kind, self._kind), GROUPED_ROWS, of_groups)
            return out
        layout = arithmetic_of(self._kind)
        arguments = (
            4, numbers.shape[0], numbers.data_ptr(), self._packed.data_ptr(), self.in_features, self._row_bytes,
            layout.lane_bytes, out.element_size(), self._row_scales.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._team.run(rows_job(self._x_kind, self._kind), ROWS, arguments)
        return out


def _in_lanes(bias: Tensor, panels: int, gated: bool) -> Tensor:
    """bias [out] in the order of the panels' lanes, float32."""
    parts = bias.float().chunk(2) if gated else (bias.float(),)
    width = PANEL // len(parts)
    lanes = [F.pad(part, (0, panels * width - len(part))).view(panels, width) for part in parts]
    return torch.cat(lanes, dim=1).view(-1)


def linear_for(weight: Weight, bias: Tensor | None, team: Team, memory: LargePages, tiles: bool = False) -> Linear:
    """The fastest way to multiply with weight [out, in] on this processor. Raises as PackedLinear."""
    if not PackedLinear.takes(weight):
        return ReferenceLinear(weight, bias)
    return PackedLinear(weight, bias, team, memory, tiles=tiles)


def gated_linear_for(
    weight: Weight, bias: Tensor | None, team: Team, memory: LargePages, tiles: bool = False
) -> Callable[[Tensor], Tensor]:
    """The fastest way to a gated product with weight [2 * F, in] on this processor. Raises as PackedLinear."""
    if not PackedLinear.takes(weight):
        return ReferenceGatedLinear(ReferenceLinear(weight, bias), ReferenceKernels().silu_and_mul)
    return PackedLinear(weight, bias, team, memory, gated=True, tiles=tiles)
