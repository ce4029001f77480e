"""Products with packed matrices on CUDA, alone and of experts: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.interface import Mixture
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import CLAMPED, SILU, Groups, Product, Weight
from tests.kernels import operations
from tests.kernels.grouped import CASES, multiplied_out, random_weight
from tests.kernels.operations import DTYPES
from tests.kernels.steps import random

pytest.importorskip("triton")
import tests.kernels.interpreted  # noqa: F401
from headway.kernels.cuda.kernels import CudaKernels
from headway.kernels.cuda.packed import pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Errors of the result, compared with exact products of the weights as they are defined. Triton's interpreter truncates
# bfloat16.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 5e-4}
REFERENCE = ReferenceKernels()


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    return CudaKernels()


def there(weight: Weight) -> Weight:
    return weight.to(DEVICE)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


# Inputs in another order are found in the same way for all numbers of four bits, and for all of eight.
QUICK = [(*each, False) for each in CASES if each[2] <= 400] + [(*CASES[2], True), (*CASES[6], True)]


@pytest.mark.parametrize(
    ("scheme", "out", "width", "size", "run", "ordered"),
    [
        *(("int8-weight-only", 17, 40, 40, 1, ordered) for ordered in (False, True)),
        *QUICK,
        *(
            pytest.param(*each, ordered, marks=pytest.mark.slow)
            for each in CASES
            for ordered in (False, True)
            if (*each, ordered) not in QUICK
        ),
    ],
)
def test_products_and_rows(
    kernels: CudaKernels, scheme: str, out: int, width: int, size: int, run: int, ordered: bool
) -> None:
    """One token, some and many; gated, with a bias, a factor and inputs in another order; rows to the bit."""
    weight = random_weight(scheme, out, width, size, run, ordered)
    dense, bias, x = multiplied_out(weight), random(1, torch.float32, out), random(2, torch.float32, 40, width)
    linear = kernels.linear(replace(there(weight), factor=0.5), bias.to(DEVICE))
    assert torch.equal(linear.rows(torch.arange(out, device=DEVICE)).cpu(), dense)
    expected = F.linear(x.double(), dense.double())
    for tokens in (1, 40):
        got = linear(x[:tokens].to(DEVICE))
        assert relative_error(got, expected[:tokens] / 2 + bias) < ROUNDING[torch.float32], tokens
    if out % 2 == 0:
        gate, up = (expected + bias).chunk(2, dim=1)
        gated = kernels.gated_linear(there(weight), bias.to(DEVICE))
        for tokens in (1, 5):
            got = gated(x[:tokens].to(DEVICE))
            assert relative_error(got, (F.silu(gate) * up)[:tokens]) < 2 * ROUNDING[torch.float32]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    "scheme",
    ["int4-weight-only", "int8-weight-only", "float8-weight-only", "float4-weight-only", "normal4-weight-only"],
)
def test_half_precision_rounds_results_alone(kernels: CudaKernels, scheme: str, dtype: torch.dtype) -> None:
    """Numbers are exact as operands but for those of NF4, and scales are applied in float32."""
    weight, x = random_weight(scheme, 70, 256, 32, 8, dtype=dtype), random(2, dtype, 18, 256)
    dense, linear = multiplied_out(weight), kernels.linear(there(weight), None)
    assert torch.equal(linear.rows(torch.arange(70, device=DEVICE)).cpu(), dense.to(dtype))
    for tokens in (1, 18):
        got = linear(x[:tokens].to(DEVICE))
        assert got.dtype == dtype
        assert relative_error(got, F.linear(x[:tokens].double(), dense.double())) < ROUNDING[dtype]


def test_matrices_with_a_scale_for_each_row(kernels: CudaKernels) -> None:
    values = torch.randint(-128, 128, (50, 100), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales, x = torch.rand(50, 1) + 0.1, random(1, torch.float32, 20, 100)
    for scheme in ("int8", "int8-weight-only"):
        linear = kernels.linear(there(Weight([values[:30], values[30:]], scheme, scales, dtype=torch.float32)), None)
        assert relative_error(linear(x.to(DEVICE)), F.linear(x.double(), (values * scales).double())) < 1e-6


@pytest.mark.parametrize("tokens", [1, 20, pytest.param(2, marks=pytest.mark.slow)])
def test_long_inputs_are_split_and_a_row_depends_on_no_other(kernels: CudaKernels, tokens: int) -> None:
    weight = random_weight("int4-weight-only", 66, 2048, 32, 8)
    linear = kernels.gated_linear(there(weight), None)
    x = random(1, torch.float32, tokens, 2048)
    gate, up = F.linear(x.double(), multiplied_out(weight).double()).chunk(2, dim=1)
    got = linear(x.to(DEVICE)).cpu()
    assert relative_error(got, F.silu(gate) * up) < 2e-6
    x[1:] = x[1:].flip(0) * 3
    assert torch.equal(linear(x.to(DEVICE))[0].cpu(), got[0])


def test_what_is_no_number_spoils_its_token_alone(kernels: CudaKernels) -> None:
    weight, x = random_weight("float4-weight-only", 70, 96, 32, 1), random(1, torch.float32, 8, 96)
    linear = kernels.linear(there(weight), None)
    sound = linear(x.to(DEVICE)).cpu()
    x[3, 17], x[5] = float("nan"), 0
    got = linear(x.to(DEVICE)).cpu()
    assert not got[3].isfinite().any() and (got[5] == 0).all()
    others = [0, 1, 2, 4, 6, 7]
    assert torch.equal(got[others], sound[others])


def test_numbers_stay_as_packed_as_they_come() -> None:
    """Bits of a weight: scales that half precision holds take 16, and offsets that say nothing none."""
    ones, zeros = torch.ones(64, 32, dtype=torch.int8), torch.zeros(64, 32, dtype=torch.int8)
    codes = torch.zeros(64, 1024, dtype=torch.uint8)
    powers = 2.0 ** torch.arange(-100, -36).unsqueeze(1).expand(64, 32).contiguous()
    mxfp4 = Weight(codes, "float4-weight-only", groups=Groups(32, ones, zeros, powers), dtype=torch.bfloat16)
    assert pack([(mxfp4, None)], 1).nbytes * 8 == codes.numel() * 4.5
    halves = torch.full((64, 8), 0.1).half().float()
    awq = Weight(codes, "int4-weight-only", groups=Groups(128, ones[:, :8], ones[:, :8], halves), dtype=torch.bfloat16)
    assert pack([(awq, None)], 1).nbytes * 8 == codes.numel() * (4 + 24 / 128)


@pytest.mark.parametrize("scheme", ["int8", "int8-weight-only", "int4"])
def test_plain_weights_are_rounded_as_on_cpu(kernels: CudaKernels, scheme: str) -> None:
    """The same numbers; of int4 but for a group here and there in which two scales lose as much."""
    weight = random(0, torch.bfloat16, 70, 328) / 18
    weight[3], weight[5, :32] = 0, 0
    rows = torch.arange(70)
    theirs = CpuKernels().linear(Weight(weight, scheme), None).rows(rows)
    ours = kernels.linear(there(Weight([weight[:40], weight[40:]], scheme)), None)
    got = ours.rows(rows.to(DEVICE)).cpu()
    assert got.dtype == theirs.dtype == torch.bfloat16
    assert (got == theirs).float().mean() >= (0.99 if scheme == "int4" else 1)
    x = random(1, torch.bfloat16, 3, 328)
    assert relative_error(ours(x.to(DEVICE)), F.linear(x.double(), got.double())) < 1.2 * ROUNDING[torch.bfloat16]


def _experts(form: str, dtype: torch.dtype) -> tuple[list[Product], list[Product]]:
    """Five with biases, 64 inputs and a width of 48; of whole numbers of four bits one has its inputs in an order."""
    if form == "plain":
        gate_up, down = operations.random_experts(dtype, 5, 64, 48)
        return gate_up, down
    products: list[list[Product]] = []
    for rows, width in ((96, 64), (64, 48)):
        made = [random_weight(form, rows, width, 16, 1, e == 2 and form.startswith("int"), dtype) for e in range(5)]
        for number, weight in enumerate(made):  # random_weight gives all the same numbers
            groups, size = weight.groups, float(multiplied_out(weight).std()) * width**0.5
            assert isinstance(weight.values, Tensor) and groups is not None
            minima = None if groups.minima is None else groups.minima / size
            groups = replace(groups, scales=groups.scales / size, minima=minima)
            made[number] = replace(weight, values=_turned(weight.values, number), groups=groups)
        products.append([(weight, random(e, dtype, rows)) for e, weight in enumerate(made)])
    return products[0], products[1]


def _turned(values: Tensor, by: int) -> Tensor:
    return values.view(torch.uint8).roll(by, 1).view(values.dtype)


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])])
@pytest.mark.parametrize(
    "form",
    [
        "plain",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("float4-weight-only", "int4-weight-only", "float8-weight-only")
        ),
    ],
)
def test_experts_in_any_format(kernels: CudaKernels, form: str, dtype: torch.dtype) -> None:
    """Beside the reference's loop over plain experts: biases, factors, a shared expert, and gpt-oss's gate."""
    gate_up, down = _experts(form, dtype)
    down = [(replace(weight, factor=1.0 + number / 4), bias) for number, (weight, bias) in enumerate(down)]

    def of(products: list[Product]) -> Iterator[Product]:
        return ((there(weight), None if bias is None else bias.to(DEVICE)) for weight, bias in products)

    def plain(products: list[Product]) -> Iterator[Product]:
        for weight, bias in products:
            dense = torch.cat(weight.parts) if form == "plain" else multiplied_out(weight)
            yield Weight(dense.float(), factor=weight.factor), None if bias is None else bias.float()

    gate = CLAMPED if form != "int4-weight-only" else SILU
    mixture = kernels.mixture(of(gate_up), of(down), 5, gate)
    exact = REFERENCE.mixture(plain(gate_up), plain(down), 5, gate)
    for tokens in (1, 2, 23):
        x, shared = random(4, dtype, tokens, 64), random(5, dtype, tokens, 64)
        weights = random(6, torch.float32, tokens, 4).softmax(1)
        chosen = torch.rand(tokens, 4, generator=torch.Generator().manual_seed(tokens)).argsort(1)[:, :3] + 1
        chosen = torch.cat([chosen, torch.full((tokens, 1), 5)], 1)  # nobody chooses number 0
        for given in (None, shared):
            picked = (chosen, weights) if given is not None else (chosen[:, :3], weights[:, :3].contiguous())
            expected = exact(x.float(), *picked, None if given is None else given.float())
            got = mixture(
                x.to(DEVICE), *(each.to(DEVICE) for each in picked), None if given is None else given.to(DEVICE)
            )
            assert relative_error(got, expected.double()) < 3 * ROUNDING[dtype]


def mixtures_of_both(kernels: CudaKernels) -> list[Mixture]:
    """The same six experts, on the device under test and for the reference."""
    experts = operations.random_experts(torch.float32, 6, 40, 21)
    ours = (operations.products_on(DEVICE, each) for each in experts)
    return [kernels.mixture(*ours, 6), REFERENCE.mixture(*experts, 6)]


def test_a_single_choice_of_sorted_experts_is_read_where_it_stands(kernels: CudaKernels) -> None:
    """It is a column of all choices in order, as routers make it: its numbers do not lie one behind the other."""
    of_both = mixtures_of_both(kernels)
    x, logits = random(4, torch.float32, 9, 40).to(DEVICE), random(5, torch.float32, 9, 6).to(DEVICE)
    ours = of_both[0](x, *kernels.route(logits, 1, True, False), None)
    theirs = of_both[1](x.cpu(), *REFERENCE.route(logits.cpu(), 1, True, False), None)
    assert relative_error(ours, theirs.double()) < 3 * ROUNDING[torch.float32]


def test_routing_counts_are_those_of_the_reference(kernels: CudaKernels) -> None:
    of_both = mixtures_of_both(kernels)
    before = [each.routing_counts() for each in (kernels, REFERENCE)]
    for tokens in (1, 1, 9, 3):
        x, weights = random(4, torch.float32, tokens, 40), random(6, torch.float32, tokens, 2).softmax(1)
        chosen = torch.rand(tokens, 5, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :2]
        for mixture, device in zip(of_both, (DEVICE, "cpu"), strict=True):
            mixture(x.to(device), chosen.to(device), weights.to(device), None)
    ours, theirs = (each.routing_counts().since(b) for each, b in zip((kernels, REFERENCE), before, strict=True))
    assert ours == theirs and ours[0] == 4
