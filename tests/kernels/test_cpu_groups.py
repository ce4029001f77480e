"""Weights that are packed in groups, on CPU: rows to the bit, products against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.weights import Groups, Weight
from headway.models.grouped import expanded, stacked_groups
from tests.kernels.grouped import CASES, UNROUNDED, multiplied_out, random_weight, rounded_by_group
from tests.kernels.steps import random
from tests.kernels.test_cpu import with_threads
from tests.kernels.test_cpu_linear import ROUNDING, relative_error

pytestmark = pytest.mark.timeout(600)


def activations(x: Tensor, weight: Weight) -> Tensor:
    """Activations rounded as the documentation says, in float64."""
    groups = weight.groups
    assert groups is not None
    if weight.scheme in UNROUNDED:
        return x.double()
    order = torch.arange(x.shape[1]) if groups.order is None else groups.order.long()
    result = torch.empty(x.shape, dtype=torch.float64)
    result[:, order] = rounded_by_group(x[:, order], groups.size)
    return result


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("scheme", "out", "width", "size", "run"), CASES)
def test_products_and_rows(scheme: str, out: int, width: int, size: int, run: int, ordered: bool) -> None:
    """Also of few tokens and many, gated, with a bias, and with inputs in another order."""
    if ordered and scheme in UNROUNDED:
        pytest.skip("no format has it")
    weight = random_weight(scheme, out, width, size, run, ordered)
    dense, bias, x = multiplied_out(weight), random(1, torch.float32, out), random(2, torch.float32, 300, width)
    linear = CpuKernels().linear(weight, bias)
    assert torch.equal(linear.rows(torch.arange(out)), dense)
    assert torch.equal(expanded(weight), dense)
    expected = F.linear(activations(x, weight), dense.double(), bias.double())
    for tokens in (1, 2, 5, 6, 7, 13, 49, 300):
        assert relative_error(linear(x[:tokens]), expected[:tokens]) < ROUNDING[torch.float32], tokens
    if out % 2 == 0:
        gate, up = expected.chunk(2, dim=1)
        got = CpuKernels().gated_linear(weight, bias)(x)
        assert relative_error(got, F.silu(gate) * up) < 2 * ROUNDING[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "scheme"), [(torch.bfloat16, "int4-weight-only"), (torch.float16, "float8-weight-only")]
)
def test_other_dtypes(dtype: torch.dtype, scheme: str) -> None:
    weight = random_weight(scheme, 70, 256, 64, 1, dtype=dtype)
    dense, x = multiplied_out(weight), random(2, dtype, 9, 256)
    linear, wide = CpuKernels().linear(weight, None), CpuKernels().linear(weight, None, True)(x)
    assert torch.equal(linear.rows(torch.arange(70)), dense.to(dtype))
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), linear(x))
    assert relative_error(linear(x), F.linear(activations(x, weight), dense.double())) < ROUNDING[dtype]


@pytest.mark.parametrize(
    "scheme",
    ["int4-weight-only", "int8-weight-only", "float8-weight-only", "float4-weight-only", "normal4-weight-only"],
)
def test_a_token_s_result_depends_on_nothing_else(scheme: str) -> None:
    weight = random_weight(scheme, 200, 256, 32, 8)
    one, three = (with_threads(n).linear(weight, None) for n in (1, 3))
    x = random(2, torch.float32, 100, 256)
    alone = torch.cat([one(x[i : i + 1]) for i in range(100)])
    for tokens in (1, 4, 11, 100):
        assert torch.equal(three(x[:tokens]), alone[:tokens])


@pytest.mark.parametrize("scheme", ["int4-weight-only", "float8-weight-only"])
def test_what_is_no_number_spoils_its_token_alone_and_zeros_stay(scheme: str) -> None:
    weight = random_weight(scheme, 80, 256, 32, 8)
    x = random(1, torch.float32, 8, 256)
    linear = CpuKernels().linear(weight, None)
    sound = linear(x)
    x[3, 17], x[5] = float("nan"), 0
    got = linear(x)
    assert not got[3].isfinite().any() and (got[5] == 0).all()
    assert torch.equal(got[[0, 1, 2, 4, 6, 7]], sound[[0, 1, 2, 4, 6, 7]])


def test_parts_that_are_packed_in_other_ways_become_one() -> None:
    """Four bits beside eight, groups of 32 beside 16, runs of other lengths: every number as it was."""
    parts = [
        random_weight("int4-weight-only", 70, 512, 32, 8),
        random_weight("int8-weight-only", 33, 512, 16, 16),
        random_weight("int4-weight-only", 20, 512, 32, 1),
        random_weight("int8-weight-only", 9, 512, 128, 4),
    ]
    dense = torch.cat([multiplied_out(part) for part in parts])
    for some in (parts, parts[:1] * 2, parts[:2], parts[::2]):
        together = stacked_groups(some)
        assert torch.equal(expanded(together), torch.cat([multiplied_out(part) for part in some]))
        rows = sum(len(part.values) for part in some)
        got = CpuKernels().linear(together, None).rows(torch.arange(rows))
        assert torch.equal(got, torch.cat([multiplied_out(part) for part in some]))
    plain = random(0, torch.float32, 5, 512)
    mixed = stacked_groups([*parts, plain])
    assert mixed.format == "none" and torch.equal(mixed.values, torch.cat([dense, plain]))


def test_inputs_in_two_orders_become_plain() -> None:
    parts = [random_weight("int4-weight-only", 70, 256, 32, 8, ordered) for ordered in (True, False)]
    together = stacked_groups(parts)
    assert together.format == "none"
    assert torch.equal(together.values, torch.cat([multiplied_out(part) for part in parts]))
    assert stacked_groups(parts[:1] * 2).groups is not None


def test_groups_that_fill_no_word_are_refused() -> None:
    ones = torch.ones(4, 2, dtype=torch.int8)
    groups = Groups(12, ones, ones, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"groups of 12 inputs.*multiple of 8"):
        CpuKernels().linear(Weight(torch.ones(4, 24, dtype=torch.uint8), "int4-weight-only", groups=groups), None)
