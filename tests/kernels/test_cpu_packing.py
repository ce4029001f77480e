"""Weights in panels, byte for byte, against the layout and the rounding that the documentation states, in numpy."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.kernels.cpu.arithmetic import PANEL
from headway.kernels.cpu.choice import choice_for
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.team import Team
from headway.kernels.weights import SILU, Weight
from tests.kernels.steps import random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.slow)]  # each scheme of each is compiled for a second
# Rows and inputs around panels of 64 rows, lines of 64 bytes and groups of 32.
SHAPES = [(1, 2), (64, 64), (65, 66), (130, 100), (200, 34), (78, 896)]
ODD = [(3, 7), (66, 33), (64, 31)]


def packed(weight: Tensor | list[Tensor], quantization: str, gated: bool = False) -> tuple[np.ndarray, np.ndarray]:
    return laid_out(Weight(weight, quantization), gated)


def laid_out(weight: Weight, gated: bool) -> tuple[np.ndarray, np.ndarray]:
    """The panels' bytes, and the scales of the rows."""
    on_vectors = choice_for(tiles=False)  # tiles have longer rows
    linear = PackedLinear([(weight, None)], Team(), LargePages(), SILU if gated else None, on_vectors)
    return linear._packed.numpy().copy(), linear._row_scales.numpy().copy()


def in_lanes(weight: Tensor, gated: bool) -> np.ndarray:
    """Rows in the order of lanes, zeros where a lane has none: [panels * PANEL, in] in float32."""
    rows = weight.float().numpy()
    if not gated:
        return np.pad(rows, ((0, -len(rows) % PANEL), (0, 0)))
    half = PANEL // 2
    gate, up = (np.pad(part, ((0, -len(part) % half), (0, 0))) for part in np.split(rows, 2))
    return np.concatenate([gate.reshape(-1, half, rows.shape[1]), up.reshape(-1, half, rows.shape[1])], 1).reshape(
        -1, rows.shape[1]
    )


def panels(lanes: np.ndarray, lane_bytes: int) -> np.ndarray:
    """[rows, bytes] to the bytes of [panel, step, row, lane]."""
    steps = lanes.shape[1] // lane_bytes
    return lanes.reshape(-1, PANEL, steps, lane_bytes).transpose(0, 2, 1, 3).reshape(-1)


def padded(rows: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))


def largest_of(rows: np.ndarray) -> np.ndarray:
    largest = np.abs(rows).max(1, keepdims=True)
    return np.where(largest > 0, largest, np.float32(1)).astype(np.float32)


def test_shapes_are_padded_to_whole_panels() -> None:
    assert packed(random(0, torch.float32, 65, 3), "none")[0].size == 2 * PANEL * 3 * 4


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_floats_stay_as_they_are(dtype: torch.dtype, out: int, width: int, gated: bool) -> None:
    out += out % 2
    weight = random(0, dtype, out, width)
    lanes = torch.from_numpy(in_lanes(weight, gated)).to(dtype).contiguous().view(torch.uint8).numpy()
    expected = panels(lanes, 2 if dtype == torch.float16 else 4)
    assert np.array_equal(packed(weight, "none", gated)[0], expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only"])
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("out", "width"), SHAPES + ODD)
def test_eight_bits(dtype: torch.dtype, quantization: str, out: int, width: int, gated: bool) -> None:
    out += out % 2
    weight = random(0, dtype, out, width)
    weight[0] = 0
    rows = in_lanes(weight, gated)
    largest = largest_of(rows)
    whole = np.rint(rows * (np.float32(127) / largest)).astype(np.int32)
    inputs, offset = (4, 128) if quantization == "int8" else (2, 0)
    data, scales = packed(weight, quantization, gated)
    assert np.array_equal(scales, (largest / np.float32(127)).ravel())
    assert np.array_equal(data, panels((padded(whole, inputs) + offset).astype(np.uint8), inputs))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int8-weight-only"])
@pytest.mark.parametrize(("out", "width"), SHAPES + ODD)
def test_eight_bits_that_were_packed_before_stay_as_they_are(out: int, width: int, scheme: str, gated: bool) -> None:
    """The weight comes in two parts, like gate and up."""
    out += out % 2
    whole = torch.randint(-128, 128, (out, width), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales = random(1, torch.float32, out, 1).abs()
    inputs, offset = (4, 128) if scheme == "int8" else (2, 0)
    weight = Weight(list(whole.split(out // 2)), scheme, scales, dtype=torch.bfloat16)
    data, row_scales = laid_out(weight, gated)
    assert np.array_equal(row_scales, in_lanes(scales, gated).ravel())
    rows = in_lanes(whole, gated).astype(np.int32)
    assert np.array_equal(data, panels((padded(rows, inputs) + offset).astype(np.uint8), inputs))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("out", "width"), SHAPES + ODD)
def test_four_bits(dtype: torch.dtype, out: int, width: int, gated: bool) -> None:
    out += out % 2
    weight = random(0, dtype, out, width)
    weight[0] = 0
    rows = padded(in_lanes(weight, gated), 32)
    unit = largest_of(rows) / np.float32(120)
    whole, scales = four_bits(rows.reshape(len(rows), -1, 32), unit[:, :, None])
    low, high = (whole.reshape(len(rows), -1, 4, 2, 4)[..., i, :] + 8 for i in (0, 1))
    words = (low | high << 4).reshape(-1, PANEL, scales.shape[1], 4, 4)
    of_groups = scales.reshape(-1, PANEL, scales.shape[1]) + 128
    expected = [
        np.concatenate([of_groups[p, :, g], words[p, :, g].transpose(1, 0, 2).ravel()])
        for p in range(len(words))
        for g in range(scales.shape[1])
    ]
    data, row_scales = packed(weight, "int4", gated)
    assert np.array_equal(row_scales, unit.ravel())
    assert np.array_equal(data, np.concatenate(expected).astype(np.uint8))


def four_bits(groups: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([rows, groups, 32] of -8 .. 7, scales [rows, groups]): every scale of -15 to 16 in range is tried, in float32.

    Its sign is such that the weight of greatest magnitude is below zero.
    """
    plain = np.abs(groups).max(2, keepdims=True) / (np.float32(7.5) * unit)
    negative = groups.max(2, keepdims=True) > -groups.min(2, keepdims=True)
    sign = np.where(negative, -1, 1)
    lowest = np.maximum(1, (plain * np.float32(0.65)).astype(np.int32))
    highest = np.minimum(np.where(negative, 15, 16), (plain * np.float32(1.1)).astype(np.int32) + 1)
    best, least = lowest, np.full(plain.shape, np.inf, np.float32)
    for scale in range(1, 17):
        step = (scale * sign).astype(np.float32) * unit
        lost = groups - np.clip(np.rint(groups * (np.float32(1) / step)), -8, 7) * step
        loss = np.cumsum(lost * lost, axis=2, dtype=np.float32)[:, :, -1:]  # one after the other, as they are added
        better = (lowest <= scale) & (scale <= highest) & (loss < least)
        best, least = np.where(better, scale, best), np.where(better, loss, least)
    best = best * sign
    whole = np.clip(np.rint(groups * (np.float32(1) / (best.astype(np.float32) * unit))), -8, 7)
    return whole.astype(np.int32), best[:, :, 0]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("rows", "gated"), [((70, 2, 3), False), ((1, 1), True), ((97, 97), True)])
def test_parts_are_one_weight(quantization: str, rows: tuple[int, ...], gated: bool) -> None:
    parts = [random(number, torch.bfloat16, count, 98) for number, count in enumerate(rows)]
    in_parts, whole = (packed(weight, quantization, gated) for weight in (parts, torch.cat(parts)))
    assert np.array_equal(in_parts[0], whole[0])
    assert np.array_equal(in_parts[1], whole[1])


def test_prepared_memory_is_used_first() -> None:
    first = mmap.mmap(-1, 6 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = torch.frombuffer(first, dtype=torch.uint8).data_ptr()
    memory = LargePages(first)
    inside, next_to_it, elsewhere = memory.empty(1000), memory.empty(1000), memory.empty(6 << 20)
    assert inside.data_ptr() % (2 << 20) == 0
    assert next_to_it.data_ptr() == inside.data_ptr() + 1024
    assert begin <= inside.data_ptr() < begin + len(first)
    assert not begin <= elsewhere.data_ptr() < begin + len(first)
