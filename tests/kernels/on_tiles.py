"""Products as on a processor with matrix tiles, whose instructions are taken over by plain code, anywhere.

    python -m tests.kernels.on_tiles

A process of its own: the instructions are exchanged before the jobs that use them are made. Where the tokens' and the
weights' tiles lie in memory, and in which order they are multiplied, is the kernels' own. It prints how many products
came out as the instruction's order of sums has them, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
import torch

from headway.kernels import cpu_matrix
from headway.kernels.cpu_compile import compiled
from headway.kernels.cpu_matrix import STEP_BYTES, STEP_WORDS
from headway.kernels.cpu_panels import TOTALS_BYTES
from headway.kernels.cpu_simd import BFLOAT16, FLOAT32, load, read_byte, read_int64, store, write_integer
from headway.kernels.weights import Weight

_STATE = np.zeros(1, np.int64)  # the address of the configuration; of one thread
_STATE_AT = int(_STATE.ctypes.data)
_ZERO = np.float32(0)


@compiled()
def configure(address):
    write_integer(_STATE_AT, 0, address, 64)


@compiled()
def release():
    write_integer(_STATE_AT, 0, 0, 64)


@compiled()
def _part(x, lane, half):
    total = _ZERO
    for word in range(STEP_WORDS):
        product = np.float64(load(x, 2 * word + half, BFLOAT16)) * load(lane, word * TOTALS_BYTES // 2 + half, BFLOAT16)
        total = np.float32(total + product)
    return total


@compiled()
def _multiply(x, x_stride, packed, steps, sums, fresh, lanes):
    tokens = read_byte(read_int64(_STATE_AT, 0), 48)
    for token in range(tokens):
        for lane in range(lanes):
            total = _ZERO if fresh else load(sums + token * TOTALS_BYTES, lane, FLOAT32)
            for step in range(steps):
                row, at = x + token * x_stride + step * 64, packed + step * STEP_BYTES + lane * 4
                total += _part(row, at, 0) + _part(row, at, 1)
            store(sums + token * TOTALS_BYTES, lane, total, FLOAT32)


@compiled()
def multiply_one(kind, x, x_stride, packed, steps, sums, fresh):
    _multiply(x, x_stride, packed, steps, sums, fresh, 64)


@compiled()
def multiply_two(kind, x, other, x_stride, packed, steps, sums, others, fresh):
    _multiply(x, x_stride, packed, steps, sums, fresh, 32)
    _multiply(other, x_stride, packed, steps, others, fresh, 32)


def check_experts() -> int:
    """Rows of a plan, whose experts have different numbers of them, come out as those of each expert alone."""
    from headway.kernels.cpu import CpuKernels
    from tests.kernels.operations import random_experts
    from tests.kernels.steps import random

    kernels, checked = CpuKernels(tiles=True), 0
    gate_up, down = random_experts(torch.bfloat16, 3, 40, 33)
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


def main() -> None:
    for emulation in (configure, release, multiply_one, multiply_two):
        setattr(cpu_matrix, emulation.__name__, emulation)
    torch.set_num_threads(1)
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
    checked += check_experts()
    print(checked)


if __name__ == "__main__":
    main()
