"""Representative kernels against the reference, for whatever processor NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name.

    python -m tests.kernels.on_processor [what cpu_features is to answer, with commas]

A process of its own: what the kernels are compiled for is settled when they are imported. It prints the bits of the
instructions that it chose: for words of four bytes, for pairs of int16.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from headway.kernels.cpu import simd as cpu_simd
from headway.kernels.weights import CODES, Weight


def pretend(features: str) -> None:
    """Choose instructions as for a processor with these extensions; Numba goes on compiling for this one."""
    present = set(features.split(","))
    cpu_simd.cpu_features = lambda: present  # type: ignore[assignment]


def check_passes() -> None:
    """Up to MOST_STRAIGHT tokens read a panel straight through; more go through it again, and fetch ahead."""
    from headway.kernels.cpu.arithmetic import FLOAT32, MOST_STRAIGHT, PANEL_VECTORS, TILE_TOKENS, tile_vectors

    assert tile_vectors(MOST_STRAIGHT, FLOAT32) == PANEL_VECTORS
    assert MOST_STRAIGHT == TILE_TOKENS or tile_vectors(MOST_STRAIGHT + 1, FLOAT32) < PANEL_VECTORS


def check_products(dtype: torch.dtype, quantization: str) -> None:
    """Check products of 1 to 9 tokens, with rows and inputs that are not whole panels and words."""
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels.steps import random
    from tests.kernels.test_cpu_linear import ROUNDING, relative_error, rounded

    kernels, weight = CpuKernels(), random(0, dtype, 70, 1030)
    # The largest weights and activations of one sign: an instruction that cuts sums off would show.
    weight[:2] = torch.tensor([[3.0], [-3.0]])
    linear = kernels.linear(Weight(weight, quantization), None)
    packed = linear.rows(torch.arange(70)).double()
    for tokens in range(1, 10):
        for x in (random(1, dtype, tokens, 1030), torch.full((tokens, 1030), 2.0, dtype=dtype)):
            error = relative_error(linear(x), F.linear(rounded(x, quantization), packed))
            assert error < ROUNDING[dtype], (dtype, quantization, tokens, error)


def check_groups(scheme: str) -> None:
    """Whatever the instructions, the same sums."""
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels.grouped import UNROUNDED, multiplied_out, random_weight, rounded_by_group
    from tests.kernels.steps import random
    from tests.kernels.test_cpu_linear import ROUNDING, relative_error

    weight = random_weight(scheme, 70, 96, 32, 1)
    linear, dense = CpuKernels().linear(weight, None), multiplied_out(weight)
    assert torch.equal(linear.rows(torch.arange(70)), dense), scheme
    for tokens in range(1, 10):
        x = random(1, torch.float32, tokens, 96)
        taken = x.double() if scheme in UNROUNDED else rounded_by_group(x, 32)
        error = relative_error(linear(x), F.linear(taken, dense.double()))
        assert error < ROUNDING[torch.float32], (scheme, tokens, error)


def check_attention(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    """A long context that is decoded, its parts merged; a prompt; the middle of a prompt."""
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels import operations

    operations.check_attention(
        CpuKernels(), "cpu", dtype, [1, 40, 7], [700, 40, 150], 6, 2, 32, 16, None, cache_dtype=cache_dtype
    )


def check_adapters(dtype: torch.dtype) -> None:
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels import operations

    for sizes in ((1038, 33, 20), (64, 128, 8)):
        operations.check_adapters(CpuKernels(), dtype, *sizes)


def check_rows(dtype: torch.dtype) -> None:
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels import operations

    kernels = CpuKernels()
    operations.check_norms(kernels, "cpu", dtype, 3, 40)
    operations.check_gate(kernels, "cpu", dtype, 2, 24)
    operations.check_rotate(kernels, "cpu", dtype, 5, 24, 12)
    operations.check_take(kernels, "cpu", dtype, 7, 40)
    operations.check_draw(kernels, "cpu", dtype)
    operations.check_route(kernels, "cpu", dtype)
    operations.check_mixture(kernels, "cpu", dtype, 9)


def main() -> None:
    if len(sys.argv) > 1:
        pretend(sys.argv[1])
    torch.set_num_threads(1)
    check_passes()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_products(dtype, "none")
        check_adapters(dtype)
    for quantization in ("int8", "int8-weight-only", "int4"):
        check_products(torch.float32, quantization)
    for scheme in ("int4-weight-only", "int8-weight-only", "float8-weight-only", *CODES):
        check_groups(scheme)
    check_attention(torch.bfloat16, None)
    check_attention(torch.bfloat16, torch.int8)
    check_rows(torch.bfloat16)

    from headway.kernels.cpu import arithmetic as cpu_arithmetic

    print(cpu_arithmetic._VNNI, cpu_arithmetic._PAIRS)


if __name__ == "__main__":
    main()
