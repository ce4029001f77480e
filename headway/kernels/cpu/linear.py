"""Linear layers on CPU: products with packed weights.

Activations of quantised layers are quantised as they come, each token and block of inputs by itself.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headway.kernels.cpu.expert_plan import MOST_ROWS
from headway.kernels.cpu.groups import GROUPED_ROWS, grouped_rows_job
from headway.kernels.cpu.packed_weight import PackedWeight
from headway.kernels.cpu.packing import ROWS, rows_job
from headway.kernels.cpu.product import FEATURE_BITS, PRODUCT, WIDE

# The least tokens that an item of work is cut down to for many threads.
_LEAST_TOKENS = 24
_ITEMS_PER_THREAD = 4
_NO_MORE: tuple[int, ...] = (0,) * 7


class Plan(Protocol):
    """Which rows are multiplied with the weight of which expert; see ExpertPlan."""

    rows: int

    @property
    def address(self) -> int: ...


class Beside(Protocol):
    """What a product computes beside its own; see cpu.adapters."""

    address: int

    def room(self, rows: int) -> Tensor:
        """Memory for a step of so many rows."""


class PackedLinear(PackedWeight):
    """Multiplies with a packed weight, or with those of experts.

    Attributes:
        adapters: those beside it, if there are any.
    """

    adapters: Beside | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], of x's dtype or wide."""
        return self._product(x, x.shape[0], 0, False)

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write the sums of x [T, in] to out [T, out] float32, strided along T or not, unrounded."""
        self._product(x, x.shape[0], 0, False, out)

    def of_experts(self, x: Tensor, plan: Plan, gathers: bool) -> Tensor:
        """Each row of the plan times the weight of its expert -> [rows, out].

        Args:
            gathers: x is [T, in], of which the plan says what row each takes; otherwise x has a row for each.
        """
        return self._product(x, plan.rows, plan.address, gathers)

    def _product(self, x: Tensor, rows: int, plan: int, gathers: bool, out: Tensor | None = None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        wide = self._wide or out is not None
        if out is None:
            out = self._team.empty((rows, self.out_features), torch.float32 if wide else x.dtype)
        if rows == 0:
            return out
        made_ready = self._team.empty((rows * self._x_stride if self._prepared or gathers else 0,), torch.uint8)
        block, more = self._block_at_once, _NO_MORE
        if self._groups is not None:
            block, more = self._block, self._groups.arguments()[1:]
        beside = 0, 0
        if self.adapters is not None:
            room = self.adapters.room(rows)
            beside = self.adapters.address, room.data_ptr()
        gate = WIDE if wide else 0 if self._gate is None else self._gate.data_ptr()
        # The rows are cut into pieces, so that sums stay in cache and every thread has work.
        wanted = -(-_ITEMS_PER_THREAD * self._team.threads // self._panels)
        pieces = max(-(-rows // MOST_ROWS), min(wanted, rows // _LEAST_TOKENS), 1)
        arguments = (
            self._team.threads, self._panels, rows, pieces, x.data_ptr(), x.stride(0),
            self.in_features, 0 if self._order is None else self._order.data_ptr(),
            made_ready.data_ptr() if len(made_ready) else 0, self._x_bytes, self._x_stride, self._padded, self._inputs,
            self._packed.data_ptr(), self._words, block, self._step_bytes,
            self._row_scales.data_ptr(), self._bias.data_ptr(), out.data_ptr(),
            out.stride(0) << FEATURE_BITS | out.shape[1], gate, plan, int(gathers),
            *more, self._tiles, *beside,
        )  # fmt: skip
        self._team.run(self._code, PRODUCT, arguments)
        return out

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
        arguments = (
            4, numbers.shape[0], numbers.data_ptr(), self._packed.data_ptr(), self.in_features, self._row_bytes,
            self._lane_bytes, out.element_size(), self._row_scales.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._team.run(rows_job(self._x_kind, self._kind), ROWS, arguments)
        return out
