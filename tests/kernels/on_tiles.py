"""Products as on a processor with matrix tiles, whose instructions are taken over by plain code, anywhere.

    python -m tests.kernels.on_tiles none|int8|int4|int8-weight-only|groups

A process of its own: the instructions are exchanged before the jobs that use them are made. Where the tokens' and the
weights' tiles lie in memory, and in which order they are multiplied, is the kernels' own. It prints how many products
came out as the instruction's order of sums has them, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import json
import os
import sys
import tempfile
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import torch
from numba import types
from numba.extending import overload

from headway.kernels import cpu_matrix
from headway.kernels.cpu_compile import compiled
from headway.kernels.cpu_matrix import STEP_BYTES, STEP_WORDS
from headway.kernels.cpu_panels import TOTALS_BYTES
from headway.kernels.cpu_simd import BFLOAT16, FLOAT32, load, read_byte, read_int32, read_int64, store, write_integer
from headway.kernels.weights import Weight

if TYPE_CHECKING:
    from headway.kernels.cpu import CpuKernels

_STATE = np.zeros(1, np.int64)  # the address of the configuration; of one thread
_STATE_AT = int(_STATE.ctypes.data)
_ZERO, _UNSIGNED = np.float32(0), np.uint64(0)


@compiled()
def configure(address):
    write_integer(_STATE_AT, 0, address, 64)


@compiled()
def _words():
    """Of a step, by the rows of the weights' tiles, which are the words of the tokens'."""
    at = read_int64(_STATE_AT, 0)
    return read_byte(at, 54) if 4 * read_byte(at, 54) == read_byte(at, 24) else 0


@compiled()
def release():
    write_integer(_STATE_AT, 0, 0, 64)


def _sum_so_far(kind, sums, lane, fresh):
    """Sums in their type, which numpy scalars are told apart by."""


def _dot(kind, row, at):
    """What a step adds to a sum."""


def _write(kind, sums, lane, total):
    """The sum's bits."""


def _of_others(kind):
    """The kind by which the other tokens of multiply_two are multiplied: unsigned bytes beside the signed ones."""


@overload(_sum_so_far)
def _(kind, sums, lane, fresh):
    if kind != types.uint16:
        return lambda kind, sums, lane, fresh: 0 if fresh else read_int32(sums, lane)
    return lambda kind, sums, lane, fresh: _ZERO if fresh else load(sums, lane, FLOAT32)


@overload(_dot)
def _(kind, row, at):
    if kind == types.uint16:
        return lambda kind, row, at: _part(row, at, 0) + _part(row, at, 1)
    signed_tokens, signed_weights = kind != types.uint64, kind != types.uint8

    def integers(kind, row, at):
        total = 0
        for byte in range(4 * _words()):
            token = read_byte(row, byte)
            weight = read_byte(at, byte // 4 * (TOTALS_BYTES // 4) * 4 + byte % 4)
            token -= 256 if signed_tokens and token >= 128 else 0
            weight -= 256 if signed_weights and weight >= 128 else 0
            total += token * weight
        return total

    return integers


@overload(_write)
def _(kind, sums, lane, total):
    if kind != types.uint16:
        return lambda kind, sums, lane, total: write_integer(sums, lane, total, 32)
    return lambda kind, sums, lane, total: store(sums, lane, total, FLOAT32)


@overload(_of_others)
def _(kind):
    return (lambda kind: _UNSIGNED) if kind == types.int8 else (lambda kind: kind)


@compiled()
def _part(x, lane, half):
    total = _ZERO
    for word in range(STEP_WORDS):
        product = np.float64(load(x, 2 * word + half, BFLOAT16)) * load(lane, word * TOTALS_BYTES // 2 + half, BFLOAT16)
        total = np.float32(total + product)
    return total


@compiled()
def _multiply(kind, x, x_stride, packed, steps, sums, fresh, lanes):
    tokens = read_byte(read_int64(_STATE_AT, 0), 48)
    for token in range(tokens):
        for lane in range(lanes):
            total = _sum_so_far(kind, sums + token * TOTALS_BYTES, lane, fresh)
            for step in range(steps):
                row, at = x + token * x_stride + step * 64, packed + step * STEP_BYTES + lane * 4
                total += _dot(kind, row, at)
            _write(kind, sums + token * TOTALS_BYTES, lane, total)


@compiled()
def multiply_one(kind, x, x_stride, packed, steps, sums, fresh):
    _multiply(kind, x, x_stride, packed, steps, sums, fresh, 64)


@compiled()
def multiply_two(kind, x, other, x_stride, packed, steps, sums, others, fresh):
    _multiply(kind, x, x_stride, packed, steps, sums, fresh, 32)
    _multiply(_of_others(kind), other, x_stride, packed, steps, others, fresh, 32)


def kernels_with(ways: dict[str, str]) -> CpuKernels:
    """On tiles, in these ways."""
    from headway.kernels.cpu import CpuKernels
    from headway.kernels.cpu_choice import VARIABLE

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps({"ways": ways}))
        file.flush()
        with patch.dict(os.environ, {VARIABLE: file.name}):
            return CpuKernels(tiles=True)


def check_integers(scheme: str) -> int:
    """Sums of whole numbers are those of vectors, bit for bit, with a gate or without, wherever tiles begin."""
    from headway.kernels.cpu import CpuKernels
    from tests.kernels.steps import random

    vectors, checked = CpuKernels(tiles=False), 0
    for least in (1, 12):
        tiles = kernels_with({scheme: f"tiles from {least}"})
        for out, width in ((70, 64), (9, 1090), (130, 520)):
            weight, x = random(1, torch.bfloat16, 2 * out, width), random(2, torch.bfloat16, 49, width)
            x[7] *= 1000.0
            weight[3] = 0.0
            for gated in (False, True):
                products = [
                    (kernels.gated_linear if gated else kernels.linear)(Weight(weight.clone(), scheme), None)
                    for kernels in (vectors, tiles)
                ]
                for tokens in (1, 6, 13, 16, 17, 33, 49):
                    expected, got = (linear(x[:tokens]) for linear in products)
                    assert torch.equal(got, expected), (scheme, least, out, width, gated, tokens)
                    checked += 1
            assert torch.equal(
                *(kernels.linear(Weight(weight, scheme), None).rows(torch.arange(out)) for kernels in (vectors, tiles))
            )
    return checked


def check_groups() -> int:
    """Weights with groups of every size and format give the bits of vectors; some are left on these."""
    from headway.kernels.cpu import CpuKernels
    from tests.kernels.grouped import CASES, UNROUNDED, random_weight
    from tests.kernels.steps import random

    vectors, checked = CpuKernels(tiles=False), 0
    tiles = kernels_with(
        {
            "int4-weight-only": "tiles from 1",
            "int8-weight-only in groups": "tiles from 12",
            "float4-weight-only": "tiles from 6",
        }
    )
    more = [
        ("int4-weight-only", 70, 192, 96, 1),
        ("int4-weight-only", 66, 40, 40, 1),
        ("int8-weight-only", 70, 288, 32, 1),
        ("int8-weight-only", 66, 2048, 1024, 1),
    ]
    for scheme, out, width, size, run in (*CASES, *more):
        for gated, ordered in ((False, False), (True, True)):
            if scheme in UNROUNDED or (gated and out % 2):
                continue
            weight, bias = random_weight(scheme, out, width, size, run, ordered), random(1, torch.float32, out)
            expected, got = (
                (kernels.gated_linear if gated else kernels.linear)(weight, bias) for kernels in (vectors, tiles)
            )
            on_tiles = size != 8 and size != 96  # too few, and no whole tiles
            assert bool(got._tiles) == on_tiles, size  # type: ignore[attr-defined]
            got = copy(got)  # as a process makes it that reads packed weights
            x = random(2, torch.float32, 300, width)
            x[7] *= 1000.0
            x[9, 3] = float("nan")
            for tokens in (1, 12, 15, 16, 17, 33, 300):
                same = torch.isclose(got(x[:tokens]), expected(x[:tokens]), 0, 0, equal_nan=True)
                assert same.all(), (scheme, size, gated, tokens)
                checked += 1
    return checked + check_grouped_experts(tiles)


def check_grouped_experts(kernels: CpuKernels) -> int:
    """Also where each expert has another number of rows, and where pieces of a step are on vectors and on tiles."""
    from tests.kernels.grouped import random_weight
    from tests.kernels.steps import random

    def products(out: int, width: int) -> list[tuple[Weight, None]]:
        weight = random_weight("int8-weight-only", out, width, 32, 1)
        assert weight.groups is not None
        scales = [weight.groups.scales * factor for factor in (1, -2, 3)]
        return [(replace(weight, groups=replace(weight.groups, scales=each)), None) for each in scales]

    gate_up, down = products(2 * 64, 96), products(96, 64)
    mixture = kernels.mixture(gate_up, down, 3)
    chosen = torch.tensor([0] * 5 + [2] * 34).view(-1, 1)
    x = random(7, torch.float32, len(chosen), 96)
    got = mixture(x, chosen, torch.ones(len(chosen), 1), None)
    for number in (0, 2):
        first, second = kernels.gated_linear(*gate_up[number]), kernels.linear(*down[number])
        mine = chosen[:, 0] == number
        assert torch.equal(got[mine], second(first(x[mine]))), number
    return 2


def check_experts(scheme: str) -> int:
    """Rows of a plan, whose experts have different numbers of them, come out as those of each expert alone."""
    from headway.kernels.cpu import CpuKernels
    from tests.kernels.operations import random_experts
    from tests.kernels.steps import random

    kernels, checked = CpuKernels(tiles=True), 0
    gate_up, down = (
        [(replace(weight, scheme=scheme), bias) for weight, bias in products]
        for products in random_experts(torch.bfloat16, 3, 40, 33)
    )
    mixture = kernels.mixture(gate_up, down, 3)
    chosen = torch.tensor([0] * 19 + [2] * 34).view(-1, 1)
    x = random(7, torch.bfloat16, len(chosen), 40)
    got = mixture(x, chosen, torch.ones(len(chosen), 1), None)
    for number in (0, 2):
        first, second = kernels.gated_linear(*gate_up[number]), kernels.linear(*down[number])
        mine = chosen[:, 0] == number
        assert torch.equal(got[mine], second(first(x[mine]))), number
        checked += 1
    return checked


def check_choice(product: str) -> int:
    """All ways can be timed; what is found of them is one of them."""
    from headway.kernels.cpu_choice import fastest, measured, ways_of

    rates = measured(product, True)
    assert fastest(product, True, rates) in ways_of(product, True) and "tiles" in rates, (product, rates)
    return 1


def check_floats() -> int:
    """A token gets the same among any number of others, and what the instruction's order of sums comes to."""
    from headway.kernels.cpu import CpuKernels
    from tests.kernels.steps import random
    from tests.kernels.tile_sums import products_of_tiles

    checked = 0
    for out, width in ((70, 64), (9, 1090), (130, 40)):
        weight, bias, x = (
            random(i, torch.bfloat16, *shape) for i, shape in enumerate([(out, width), (out,), (99, width)])
        )
        linear = CpuKernels(tiles=True).linear(Weight(weight), bias)
        expected = products_of_tiles(x, weight, bias)
        for tokens in (1, 7, 16, 17, 33, 49, 99):
            assert torch.equal(linear(x[:tokens]), expected[:tokens]), (out, width, tokens)
            checked += 1
        assert torch.equal(linear.rows(torch.arange(out)), weight)
    return checked


def main() -> None:
    for emulation in (configure, release, multiply_one, multiply_two):
        setattr(cpu_matrix, emulation.__name__, emulation)
    torch.set_num_threads(1)
    os.environ["HEADWAY_CPU_KERNELS"] = "default"
    scheme = sys.argv[1]
    timed = {
        "none": (),
        "int8": ("int8", "bfloat16"),
        "int4": ("int4",),
        "int8-weight-only": ("int8-weight-only",),
        "groups": ("int4-weight-only", "int8-weight-only in groups", "float4-weight-only"),
    }[scheme]
    if scheme == "groups":
        checked = check_groups()
    else:
        checked = (check_floats() if scheme == "none" else check_integers(scheme)) + check_experts(scheme)
    print(checked + sum(map(check_choice, timed)))


if __name__ == "__main__":
    main()
