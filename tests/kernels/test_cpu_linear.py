"""Linear layers on CPU against float32 arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headway.kernels import cpu_linear
from headway.kernels.cpu import CpuKernels
from headway.kernels.cpu_linear import MOST_DOTTED, TiledLinear
from headway.kernels.cpu_simd import has_bfloat16_dot, has_wide_vectors
from headway.kernels.reference import ReferenceLinear
from tests.kernels.steps import random
from tests.kernels.test_cpu import with_threads

pytestmark = pytest.mark.timeout(600)

# Around every change of path: passes of six tokens, the last dotted count, panels of sixteen and their groups.
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, MOST_DOTTED, MOST_DOTTED + 1, 32, 33, 48, 49, 64, 65, 100, 130]
NEEDS = {torch.bfloat16: has_bfloat16_dot, torch.float32: has_wide_vectors}


def expected_and_scale(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    result = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    return result, result.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), [(160, 64), (9, 128), (1003, 352), (8, 32), (5, 64), (24, 40), (300, 7)])
def test_linear(dtype: torch.dtype, biased: bool, out: int, width: int) -> None:
    """Whatever path the shape takes: tiles, or torch where tiles do not cover it."""
    weight, bias = random(0, dtype, out, width), random(1, dtype, out) if biased else None
    linear = CpuKernels().linear(weight, bias)
    assert linear.out_features == out
    for tokens in TOKENS:
        x = random(2, dtype, tokens, width)
        expected, scale = expected_and_scale(x, weight, bias)
        error = (linear(x).double() - expected).abs().max().item() / scale
        assert error < (1e-5 if dtype == torch.float32 else 5e-3), tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_of_several_threads(dtype: torch.dtype) -> None:
    """Enough rows for many shares, so that every thread takes some; equal, bit for bit, to one thread."""
    weight, bias = random(0, dtype, 1237, 1024), random(1, dtype, 1237)
    one, three = with_threads(1).linear(weight, bias), with_threads(3).linear(weight, bias)
    for tokens in (1, 4, 11, 24, 25, 70):
        x = random(2, dtype, tokens, 1024)
        for _ in range(5):
            assert torch.equal(one(x), three(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_share_the_weights_memory(dtype: torch.dtype) -> None:
    if not NEEDS[dtype]():
        pytest.skip("this processor has no instructions for tiles of this dtype")
    weight = random(0, dtype, 64, 128)
    linear = CpuKernels().linear(weight, None)
    assert isinstance(linear, TiledLinear)
    assert linear.weight.data_ptr() == weight.data_ptr()
    x = random(1, dtype, 2, 128)
    weight.zero_()
    assert not linear(x).any()


def test_a_slice_of_a_weight_is_made_dense() -> None:
    weight = random(0, torch.float32, 64, 256)
    x = random(1, torch.float32, 3, 128)
    linear = CpuKernels().linear(weight[:, 128:], None)
    torch.testing.assert_close(linear(x), F.linear(x, weight[:, 128:]), atol=1e-4, rtol=1e-4)


def test_strided_tokens() -> None:
    weight, wide = random(0, torch.float32, 40, 64), random(1, torch.float32, 30, 128)
    linear = CpuKernels().linear(weight, None)
    for tokens in (3, 30):
        x = wide[:tokens, 64:]
        torch.testing.assert_close(linear(x), F.linear(x, weight), atol=1e-4, rtol=1e-4)


def test_no_tokens() -> None:
    assert CpuKernels().linear(random(0, torch.float32, 16, 64), None)(torch.empty(0, 64)).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processors_without_the_instructions_use_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(cpu_linear, "has_bfloat16_dot", lambda: False)
    monkeypatch.setattr(cpu_linear, "has_wide_vectors", lambda: False)
    weight, bias = random(0, dtype, 48, 64), random(1, dtype, 48)
    linear = CpuKernels().linear(weight, bias)
    assert isinstance(linear, ReferenceLinear)
    x = random(2, dtype, 9, 64)
    assert torch.equal(linear(x), F.linear(x, weight, bias))


def test_processors_with_matrix_tiles_use_torch_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_bfloat16_dot():
        pytest.skip("this processor has no instructions for tiles of bfloat16")
    monkeypatch.setattr(cpu_linear, "has_matrix_tiles", lambda: True)
    weight = random(0, torch.bfloat16, 48, 64)
    linear = CpuKernels().linear(weight, None)
    few, many = random(2, torch.bfloat16, 3, 64), random(3, torch.bfloat16, MOST_DOTTED + 1, 64)
    calls = []
    monkeypatch.setattr(cpu_linear.F, "linear", lambda *arguments: calls.append(arguments) or many)
    linear(few)
    assert not calls
    linear(many)
    assert len(calls) == 1
