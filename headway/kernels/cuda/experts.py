"""Mixtures of experts on CUDA in Triton: rows sorted by expert, a product over all of them, and the weighted sums.

A row is a token's visit to one expert. Nothing here waits for the device: grids follow from the number of rows, and
programs beyond the last tile of an expert end at once.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.cuda.packed import pack
from headway.kernels.cuda.product import Routed, multiply
from headway.kernels.interface import RoutingCounts
from headway.kernels.weights import Gate, Product

_SORTED = 128  # rows that a program sorts
_COLUMNS = 512


@triton.jit(do_not_specialize=["rows", "places_stride"])
def sort_kernel(experts, rows, counts, places, places_stride, BLOCK: tl.constexpr):
    """places[e] has the rows of expert e, counts[e] of them, in any order: none depends on the others."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    expert = tl.load(experts + row, mask=there, other=0)
    place = tl.atomic_add(counts + expert, 1, mask=there, sem="relaxed")
    tl.store(places + expert * places_stride + place, row, mask=there)


@triton.jit
def combine_kernel(
    results, weights, weights_stride, shared, shared_stride, out, counts, seen, width,
    VISITS: tl.constexpr, COLS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program (token, columns): a weighted sum of a token's results; the first adds to what is `seen` of experts."""
    token = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = col < width
    of_token = weights + token * weights_stride
    total = tl.zeros([COLS], tl.float32)
    for visit in tl.static_range(VISITS):
        result = tl.load(results + (token * VISITS + visit).to(tl.int64) * width + col, mask=there, other=0.0)
        total += tl.load(of_token + visit) * result.to(tl.float32)
    if shared is not None:
        result = tl.load(shared + token.to(tl.int64) * shared_stride + col, mask=there, other=0.0)
        total += tl.load(of_token + VISITS) * result.to(tl.float32)
    tl.store(out + token.to(tl.int64) * width + col, total.to(out.dtype.element_ty), mask=there)
    if counts is not None:
        is_first = (token == 0) & (tl.program_id(1) == 0)
        expert = tl.arange(0, PADDED)
        has = tl.load(counts + expert, mask=is_first & (expert < EXPERTS), other=0)
        tl.store(seen, tl.load(seen) + tl.sum((has > 0).to(tl.int64), axis=0), mask=is_first)
        tl.store(seen + 1, tl.load(seen + 1) + tl.max(has, axis=0), mask=is_first)


class Seen:
    """Counts what mixtures have done: the host counts what it knows, and the device how rows were spread."""

    def __init__(self) -> None:
        self._known = RoutingCounts()
        self._of_device: Tensor | None = None  # experts touched, rows of the busiest
        self._read = 0, 0
        self._is_read = True

    def add(self, tokens: int, visits: int, device: torch.device) -> Tensor:
        """Count a mixture, except for how its rows are spread: the device adds that to the tensor that this returns."""
        self._known.mixtures += 1
        self._known.pairs += tokens * visits
        if tokens == 1:
            self._known.touched += visits
            self._known.busiest += 1
        if self._of_device is None:
            self._of_device = torch.zeros(2, dtype=torch.int64, device=device)
        self._is_read &= tokens == 1
        return self._of_device

    @property
    def known(self) -> RoutingCounts:
        """What the host counts by itself."""
        return replace(self._known)

    def repeat(self, counted: RoutingCounts) -> None:
        """Count mixtures that run again as they were counted once."""
        known = self._known
        known.mixtures += counted.mixtures
        known.pairs += counted.pairs
        known.touched += counted.touched
        known.busiest += counted.busiest
        self._is_read &= counted.mixtures == 0 or counted.touched > 0  # of several tokens the device counts

    def counts(self) -> RoutingCounts:
        """Return the counts. This waits for the device if there was a mixture of several tokens since the last call."""
        if not self._is_read and self._of_device is not None:
            touched, busiest = self._of_device.tolist()
            self._read, self._is_read = (touched, busiest), True
        known = self._known
        return RoutingCounts(known.mixtures, known.pairs, known.touched + self._read[0], known.busiest + self._read[1])


class CudaMixture:
    """See Mixture."""

    def __init__(
        self,
        gate_up: Iterable[Product],
        down: Iterable[Product],
        count: int,
        gate: Gate,
        multiprocessors: int,
        seen: Seen,
    ) -> None:
        self.gate_up, self.down = pack(gate_up, count, gated=True), pack(down, count)
        self._count, self._gate, self._multiprocessors, self._seen = count, gate, multiprocessors, seen

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        tokens, visits = len(x), chosen.shape[1] - (shared is not None)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if tokens == 0:
            return out
        experts = chosen[:, :visits].reshape(-1).contiguous()  # of one visit the view is strided
        counts = places = None
        if tokens > 1:  # a single token visits each of its experts alone
            counts = torch.zeros(self._count, dtype=torch.int32, device=x.device)
            places = torch.empty((self._count, tokens), dtype=torch.int32, device=x.device)
            sort_kernel[(triton.cdiv(len(experts), _SORTED),)](
                experts, len(experts), counts, places, tokens, BLOCK=_SORTED
            )
        opened = multiply(
            self.gate_up, x, self._multiprocessors, self._gate, Routed(experts, counts, places, visits)
        )  # fmt: skip
        results = multiply(self.down, opened, self._multiprocessors, None, Routed(experts, counts, places, 1))
        seen = self._seen.add(tokens, visits, x.device)
        combine_kernel[(tokens, triton.cdiv(x.shape[1], _COLUMNS))](
            results, weights, weights.stride(0), shared, 0 if shared is None else shared.stride(0), out, counts, seen,
            x.shape[1], VISITS=visits, COLS=_COLUMNS, EXPERTS=self._count,
            PADDED=triton.next_power_of_2(self._count),
        )  # fmt: skip
        return out
