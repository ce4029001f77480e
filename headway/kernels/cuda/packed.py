"""Matrices as the Triton products of cuda.product read them: packed in groups of inputs, by rows, or plain.

Inputs come one under the other, so that neighbouring threads read neighbouring outputs. They are cut into chunks, none
of which is of two groups, and a chunk is filled up to its lanes with zeros. Of numbers of four bits a byte has one of a
chunk in its low half, and the one of the next chunk in its high half. Groups stay as `interface.Groups` has them; what
says nothing (factors of 1, offsets of 0) is left out, and scales that half precision can hold are kept in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.kernels.weights import E2M1, NF4, Groups, Product, Weight

# Inputs of a chunk at most: float32 is multiplied from registers, of which a program has few.
_MOST_INPUTS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
_LEAST_LANES = 16  # the fewest that tl.dot takes
# For int4: inputs of a group, its largest number before it is rounded, the largest factor of its scale; the fractions
# of the scale that keeps the largest weight between which scales are tried, and how many at most.
INT4_GROUP, _LARGEST_INT4, _LARGEST_FACTOR, _FRACTIONS, _CANDIDATES = 32, 7.5, 16, (0.65, 1.1), 9
_ROUNDED_ROWS = 4096  # at a time
_ALL = 1 << 30  # chunks of a group that has all inputs
_FORMATS = {
    "int4-weight-only": "int4",
    "int8-weight-only": "int8",
    "int8": "int8",  # activations keep the model's dtype, which is finer
    "int4": "int4",
    "float8-weight-only": "float8",
    "float4-weight-only": "float4",
    "normal4-weight-only": "normal4",
}
_IN_FOUR_BITS = ("int4", "float4", "normal4")


@dataclass(frozen=True, slots=True)
class Packed:
    """E matrices [out, in] that are packed alike.

    Args:
        numbers: [E, steps * lanes, out]; a step is a chunk, or two of four bits.
        scales, minima: [E, runs, out]. None: numbers are plain; there are no offsets.
        factors, offsets: int8 [E, groups, out]; None: all are 1, all are 0.
        order: int32 [E, in], which input each column is multiplied with.
        bias: [E, out], in the order of the numbers' rows.
        table: float32 [16], what codes stand for that are looked up.
        unit: float32 [E], what the products of each matrix are multiplied with. None: all are 1.
        format: plain, int4, int8, float8, float4 or normal4.
        chunk: inputs of a chunk.
        of_group, of_run: chunks that share a factor, and a scale.
        dtype: the dtype of what it is multiplied with.
    """

    numbers: Tensor
    scales: Tensor | None
    factors: Tensor | None
    minima: Tensor | None
    offsets: Tensor | None
    order: Tensor | None
    bias: Tensor | None
    table: Tensor | None
    unit: Tensor | None
    format: str
    inputs: int
    chunk: int
    of_group: int
    of_run: int
    dtype: torch.dtype

    @property
    def outputs(self) -> int:
        return self.numbers.shape[2]

    @property
    def in_byte(self) -> int:
        """The number of chunks in a step."""
        return 2 if self.format in _IN_FOUR_BITS else 1

    @property
    def lanes(self) -> int:
        return max(self.chunk, _LEAST_LANES)

    @property
    def steps(self) -> int:
        return self.numbers.shape[1] // self.lanes

    @property
    def nbytes(self) -> int:
        """All that a product reads but the activations."""
        parts = {id(part): part for part in (self.scales, self.minima) if part is not None}.values()
        rest = (self.factors, self.offsets, self.order, self.bias, self.unit)
        return self.numbers.nbytes + sum(part.nbytes for part in (*parts, *rest) if part is not None)

    def rows(self, which: Tensor, matrix: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Rows [T] int64 of a matrix -> [T, in], numbers as their format defines them, in `dtype` or its own."""
        stored = self.numbers[matrix].index_select(1, which).T.unflatten(1, (self.steps, 1, self.lanes))
        if self.in_byte == 2:
            stored = torch.cat([stored & 15, stored >> 4], 2)
        plain = self._plain(stored)[..., : self.chunk].flatten(1, 2)  # [T, chunks, inputs of a chunk]
        if self.scales is not None:
            chunks = torch.arange(plain.shape[1], device=which.device)
            plain = plain * self._chunk_scales(self.scales, self.factors, matrix, chunks, which)
            if self.offsets is not None and self.minima is not None:
                plain = plain - self._chunk_scales(self.minima, self.offsets, matrix, chunks, which)
        plain = plain.flatten(1)[:, : self.inputs]
        if self.order is not None:
            plain = torch.empty_like(plain).index_copy_(1, self.order[matrix].long(), plain)
        return plain.to(dtype or self.dtype)

    def _plain(self, stored: Tensor) -> Tensor:
        if self.format == "plain":
            return stored
        if self.format in ("float4", "normal4"):
            table = torch.tensor(E2M1, device=stored.device) if self.table is None else self.table
            return table[stored.int()]
        kinds = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "int4": torch.uint8}
        return stored.contiguous().view(kinds[self.format]).float()

    def _chunk_scales(
        self, floats: Tensor, bytes_: Tensor | None, matrix: int, chunks: Tensor, which: Tensor
    ) -> Tensor:
        """[T, chunks, 1]: of a matrix' rows."""
        found = floats[matrix].float()[(chunks // self.of_run).clamp_max(floats.shape[1] - 1)][:, which]
        if bytes_ is not None:
            found = found * bytes_[matrix][(chunks // self.of_group).clamp_max(bytes_.shape[1] - 1)][:, which]
        return found.T.unsqueeze(2)


def pack(products: Iterable[Product], count: int, gated: bool = False) -> Packed:
    """Lay out `count` matrices and their biases, all alike; the gated with gate and up rows by turns.

    What is to be rounded is rounded before. Each is packed alone, in the memory of one matrix beside them.
    """
    numbers, found, biases, units = torch.empty(0), [], [], []
    for at, (given, bias) in enumerate(products):
        weight = rounded(given)
        values = torch.cat(weight.parts) if len(weight.parts) > 1 else weight.parts[0]
        rows = torch.arange(len(values), device=values.device)
        if gated:
            rows = rows.view(2, -1).T.flatten()
        groups, dtype = _groups_of(weight, values), weight.dtype or values.dtype
        form = "plain" if groups is None else _FORMATS[weight.scheme]
        inputs, most = values.shape[1], _MOST_INPUTS[dtype]
        size = inputs if groups is None else groups.size
        chunk = most if size == inputs else min(most, size & -size)
        packed = _chunks(values, form, chunk, rows)
        if at == 0:
            numbers = torch.empty((count, *packed.shape), dtype=packed.dtype, device=packed.device)
            alike = form, inputs, chunk, *_spans(groups, inputs, chunk), dtype
        numbers[at] = packed
        units.append(weight.factor)
        if groups is not None:
            found.append((groups, rows))
        if bias is not None:
            biases.append(bias[rows])
    form, inputs, chunk, of_group, of_run, dtype = alike
    return Packed(
        numbers,
        **_group_tensors(found, inputs),
        bias=torch.stack(biases) if biases else None,
        table=torch.tensor(NF4, device=numbers.device) if form == "normal4" else None,
        unit=None if all(unit == 1.0 for unit in units) else torch.tensor(units, device=numbers.device),
        format=form,
        inputs=inputs,
        chunk=chunk,
        of_group=of_group,
        of_run=of_run,
        dtype=dtype,
    )


def rounded(weight: Weight) -> Weight:
    """A plain matrix rounded to its scheme, as docs/quantization.md says; any other as it is."""
    if weight.scheme == "none" or weight.scales is not None or weight.groups is not None:
        return weight
    values = torch.cat(weight.parts)
    pieces = [_rounded_rows(rows.float(), weight.scheme) for rows in values.split(_ROUNDED_ROWS)]
    numbers, factors, units = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if weight.scheme != "int4":
        return replace(weight, values=numbers, scales=units, dtype=values.dtype)
    groups = Groups(INT4_GROUP, factors, -8 * factors, units, minima=-units)
    return replace(weight, values=numbers, groups=groups, dtype=values.dtype)


def _rounded_rows(rows: Tensor, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    """(whole numbers, factors of groups, scales of rows) of float32 rows."""
    largest = rows.abs().amax(1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    if scheme != "int4":
        whole = (rows * (torch.full_like(largest, 127) / largest)).round()  # torch divides a number by reciprocals
        return whole.to(torch.int8), largest[:, :0].to(torch.int8), largest / 127
    unit = largest / (_LARGEST_INT4 * _LARGEST_FACTOR)
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[1] % INT4_GROUP)).unflatten(1, (-1, INT4_GROUP))
    least, greatest = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    # The sign with which a group's largest weight is below zero, where there is a number more.
    negative = least + greatest > 0
    plain = torch.maximum(greatest, -least) / (_LARGEST_INT4 * unit)
    lowest = (plain * _FRACTIONS[0]).floor().clamp_min(1)
    limit = torch.where(negative, _LARGEST_FACTOR - 1, _LARGEST_FACTOR)  # -8 times the factor still is a byte
    highest = torch.minimum((plain * _FRACTIONS[1]).floor() + 1, limit)
    sign = torch.where(negative, -1.0, 1.0)
    best, least_loss = lowest, torch.full_like(lowest, float("inf"))
    for more in range(_CANDIDATES):
        factor = lowest + more
        scale = (factor * sign * unit).unsqueeze(2)
        loss = (groups - _four_bits(groups, scale) * scale).square().sum(2)
        better = (factor <= highest) & (loss < least_loss)
        best, least_loss = torch.where(better, factor, best), torch.where(better, loss, least_loss)
    best = best * sign
    numbers = _four_bits(groups, (best * unit).unsqueeze(2)).flatten(1)[:, : rows.shape[1]] + 8
    return numbers.to(torch.uint8), best.to(torch.int8), unit


def _four_bits(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups * (1 / scale)).round().clamp(-8, 7)


def _groups_of(weight: Weight, values: Tensor) -> Groups | None:
    """A scale for each row is that of one group."""
    if weight.scales is None or weight.groups is not None:
        return weight.groups
    ones = torch.ones(weight.scales.shape, dtype=torch.int8, device=values.device)
    return Groups(values.shape[1], ones, torch.zeros_like(ones), weight.scales)


def _spans(groups: Groups | None, inputs: int, chunk: int) -> tuple[int, int]:
    """Chunks that share a factor, and a scale."""
    if groups is None or groups.size == inputs:
        return _ALL, _ALL
    of_group = groups.size // chunk
    return of_group, of_group * groups.run if groups.scales.shape[1] > 1 else _ALL


def _group_tensors(found: list[tuple[Groups, Tensor]], inputs: int) -> dict[str, Tensor | None]:
    """The tensors that packed matrices have beside their numbers, with rows in this order."""
    none = dict.fromkeys(("scales", "factors", "minima", "offsets", "order"))
    if not found:
        return none

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(groups, name)[rows].T for groups, rows in found])

    scales, factors, offsets = _narrowed(stacked("scales")), stacked("factors"), stacked("offsets")
    beside = none | {"scales": scales, "factors": None if (factors == 1).all() else factors}
    if offsets.any():
        own = [groups.scales if groups.minima is None else groups.minima for groups, _ in found]
        are_scales = all(minima is groups.scales for minima, (groups, _) in zip(own, found, strict=True))
        minima = torch.stack([minima[rows].T for minima, (_, rows) in zip(own, found, strict=True)])
        beside |= {"offsets": offsets, "minima": scales if are_scales else _narrowed(minima)}
    if any(groups.order is not None for groups, _ in found):
        plain = torch.arange(inputs, dtype=torch.int32, device=scales.device)
        beside["order"] = torch.stack([plain if groups.order is None else groups.order for groups, _ in found])
    return beside


def _chunks(values: Tensor, form: str, chunk: int, rows: Tensor) -> Tensor:
    """Numbers [out, in] as [steps * lanes, out]."""
    lanes, in_byte = max(chunk, _LEAST_LANES), 2 if form in _IN_FOUR_BITS else 1
    stored = (values if form == "plain" else values.view(torch.uint8))[rows]
    steps = -(-stored.shape[1] // (chunk * in_byte))
    stored = torch.nn.functional.pad(stored, (0, steps * in_byte * chunk - stored.shape[1]))
    stored = torch.nn.functional.pad(stored.unflatten(1, (steps, in_byte, chunk)), (0, lanes - chunk))
    if in_byte == 2:
        stored = stored[:, :, 0] | stored[:, :, 1] << 4
    return stored.reshape(len(stored), -1).T


def _narrowed(floats: Tensor) -> Tensor:
    """The numbers in half precision if they are all exact there; else as they are."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(floats.to(dtype).float(), floats):
            return floats.to(dtype).contiguous()
    return floats.contiguous()
