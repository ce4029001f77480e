"""Low-rank adapters (LoRA; Hu et al., arXiv:2106.09685) beside a product, those of a step computed together.

To W x a row's adapter adds B (A x), A being [rank, in] and B [out, rank]. Each product keeps the adapters that may be
used in numbered slots, and a step says which row has which. What a row gets depends on its own adapter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

SEGMENT_ROWS = 16  # rows of a segment; a kernel reads the weights of an adapter once for so many
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What of a product is adapted."""

    inputs: int  # of the product
    # int64 [out]: which projection each output is of, where the product has the rows of several. Each of these has an A
    # of its own.
    part_of: Tensor
    # dtype, device: of the product's inputs.
    dtype: torch.dtype
    device: torch.device
    slots: int  # how many adapters are kept
    rank: int  # the greatest

    @property
    def parts(self) -> int:
        return int(self.part_of.max()) + 1

    def padded_rank(self, step: int) -> int:
        """The greatest rank, rounded up to a multiple."""
        return -(-self.rank // step) * step


class Adapted(Protocol):
    """A product with adapters beside it."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> what the product gives, with what the adapters of the step's rows add."""

    def write(self, slot: int, down: Tensor, up: Tensor) -> None:
        """Put an adapter into a slot that no step uses: the A of each part, [parts, r, in], and B of all, [r, out].

        r may be less than the greatest rank, and 0 where the adapter leaves the product as it is. Rows of B that are
        beyond the rank of their part are zeros.
        """


class AdaptedMixture(Protocol):
    """A Mixture with adapters beside its experts."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """See Mixture; with what the adapters of the step's rows add."""

    def write(self, slot: int, matrices: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Do as Adapted.write(), for the products of gate and up and for those of down.

        All experts are stacked, [E, parts, r, in] and [E, r, out].
        """


@runtime_checkable
class AdaptableMixture(Protocol):
    """A Mixture whose experts may have adapters."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """See Mixture."""

    def adapted(self, specs: Sequence[AdapterSpec], rows: AdapterRows) -> AdaptedMixture:
        """The same experts with slots for adapters: beside their products of gate and up, and beside those of down."""


class AdapterRows:
    """Which rows of a step have which adapter. Kernels find it at the same addresses in every step.

    Attributes:
        order: int32, the numbers of the rows, those of a slot together.
        segments: int32 [1 + most, 3]. The first entry has their number; then each has its slot, its first entry of
            `order`, and how many it has, up to SEGMENT_ROWS. Rows without an adapter have NO_SLOT, and come first.
        slot_of: int32, the slot of each row.
        of_slots: the rows of each slot that the step has, on the host.

    Args:
        most_rows: the most that a step has.
    """

    def __init__(self, most_rows: int, slots: int, device: torch.device) -> None:
        self.most_segments = -(-most_rows // SEGMENT_ROWS) + slots + 1
        self._slots = slots
        self.order = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self.slot_of = torch.full((most_rows,), NO_SLOT, dtype=torch.int32, device=device)
        self.segments = torch.zeros((1 + self.most_segments, 3), dtype=torch.int32, device=device)
        self.of_slots: list[tuple[int, list[int]]] = []
        self._filled: tuple[list[int], int] | None = None

    def segments_of(self, rows: int) -> int:
        """The most segments that a step of so many rows can have."""
        return min(self.most_segments, -(-rows // SEGMENT_ROWS) + self._slots + 1, rows)

    def fill(self, slots: list[int], rows: int) -> None:
        """Take the slots of the first rows of a step; further ones, up to `rows`, have none."""
        if (slots, rows) == self._filled:  # as in the step before, where sequences decode
            return
        self._filled = list(slots), rows
        of_slots: dict[int, list[int]] = {NO_SLOT: []}
        for row, slot in enumerate(slots):
            of_slots.setdefault(slot, []).append(row)
        of_slots[NO_SLOT] += range(len(slots), rows)
        order: list[int] = []
        segments = [(0, 0, 0)]
        for slot, mine in of_slots.items():
            for at in range(0, len(mine), SEGMENT_ROWS):
                segments.append((slot, len(order) + at, min(SEGMENT_ROWS, len(mine) - at)))
            order += mine
        segments[0] = len(segments) - 1, 0, 0
        del of_slots[NO_SLOT]
        self.of_slots = list(of_slots.items())
        of_rows = [*slots, *[NO_SLOT] * (rows - len(slots))]
        for target, numbers in ((self.order, order), (self.slot_of, of_rows), (self.segments, segments)):
            source = torch.tensor(numbers, dtype=torch.int32)
            # The device may still copy what the step before has sent, so that each has memory of its own.
            source = source.pin_memory() if target.is_cuda else source
            target[: len(numbers)].copy_(source, non_blocking=True)


class Slots:
    """Memory for the adapters of a product, zeros at first.

    Attributes:
        down: [slots, parts, rank, in].
        ranks: int32 [slots], what the kernels compute of each; 0: nothing.
    """

    def __init__(self, spec: AdapterSpec, step: int) -> None:
        self.spec, self.rank, self._step = spec, spec.padded_rank(step), step
        self.down = self.zeros(spec.slots, spec.parts, self.rank, spec.inputs)
        self.ranks = torch.zeros(spec.slots, dtype=torch.int32, device=spec.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.spec.dtype, device=self.spec.device)

    def write(self, slot: int, down: Tensor, up: Tensor, place: Tensor) -> None:
        """Put an adapter into a slot: see Adapted.write(). `place` is where B goes, [rank, outputs in any order]."""
        rank = down.shape[1]
        used = -(-rank // self._step) * self._step
        for target, source in ((self.down[slot].transpose(0, 1), down.transpose(0, 1)), (place, up)):
            target[:rank].copy_(source)
            target[rank:used].zero_()
        self.ranks[slot] = used


class TorchAdapted:
    """A product with adapters in plain torch, slot by slot, as its sums are in the product's outputs.

    Args:
        linear: the product, [T, in] -> [T, out].
        behind: what is done with its result, such as a gate.
    """

    def __init__(
        self,
        linear: Callable[[Tensor], Tensor],
        spec: AdapterSpec,
        rows: AdapterRows,
        behind: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._linear, self._behind, self._rows = linear, behind, rows
        self._slots = Slots(spec, 1)
        self._up = self._slots.zeros(spec.slots, spec.rank, len(spec.part_of))
        self._part_of = spec.part_of

    def __call__(self, x: Tensor) -> Tensor:
        result = self._linear(x)
        for slot, rows in self._rows.of_slots:
            low = torch.einsum("ti,pri->tpr", x[rows].float(), self._slots.down[slot].float())
            added = torch.einsum("tor,ro->to", low[:, self._part_of], self._up[slot].float())
            result[rows] = (result[rows].float() + added).to(result.dtype)
        return result if self._behind is None else self._behind(result)

    def write(self, slot: int, down: Tensor, up: Tensor) -> None:
        self._up[slot].zero_()
        self._slots.down[slot].zero_()
        self._slots.write(slot, down, up, self._up[slot])
