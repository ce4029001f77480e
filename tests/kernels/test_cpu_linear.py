"""Linear layers on CPU against arithmetic in float64, in the model's dtype and quantised."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.matrix import has_matrix_tiles, may_use_tiles
from headway.kernels.weights import QUANTIZATIONS, Weight
from tests.kernels.on_tiles import check_groups, check_integers
from tests.kernels.steps import random
from tests.kernels.test_cpu import with_threads
from tests.kernels.tile_sums import products_of_tiles, sums_of_tiles

pytestmark = pytest.mark.timeout(600)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Dtypes differ in how numbers are loaded and stored, whatever the scheme; each pair of both takes seconds to compile.
CASES = [
    pytest.param(scheme, dtype, marks=pytest.mark.slow if dtype is torch.float16 and scheme != "none" else ())
    for dtype in DTYPES
    for scheme in QUANTIZATIONS
]
needs_tiles = pytest.mark.skipif(not has_matrix_tiles(), reason="no AMX, or the system refuses it")
# Around every change of path: tiles of up to six tokens, passes that fetch ahead, chunks of sums.
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 24, 25, 33, 48, 49, 65, 100, 257, 300]
SHAPES = [(160, 64), (9, 128), (1003, 352), (8, 32), (5, 64), (24, 40), (300, 1030), (65, 2050)]
# The result's own rounding, relative to its norm, and what quantising adds for normal weights and activations: half a
# step, uniform, of weights (largest of a row / 127, or of a group / 8) and of activations.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
QUANTISING = {"none": 0.0, "int8": 0.016, "int8-weight-only": 0.011, "int4": 0.1}
# Inputs that share a scale, and the largest whole number.
BLOCKS = {"int8": (512, 127), "int8-weight-only": (512, 32767), "int4": (512, 127)}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def rounded(x: Tensor, quantization: str) -> Tensor:
    """Activations as the documentation says that they are rounded, in float64."""
    if quantization == "none":
        return x.double()
    block, largest = BLOCKS[quantization]
    padded = F.pad(x.float(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    best = padded.abs().amax(2, keepdim=True).clamp_min(1e-30)
    # The same operations in float32 as in the kernel, so that ties between two steps fall the same way.
    whole = (padded * (torch.full_like(best, largest) / best)).round().double()
    return (whole * (best.double() / largest)).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize(("quantization", "dtype"), CASES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_linear(quantization: str, dtype: torch.dtype, out: int, width: int) -> None:
    """The product of the weights as they were packed and of the activations as they are rounded."""
    weight, bias, x = (random(i, dtype, *shape) for i, shape in enumerate([(out, width), (out,), (TOKENS[-1], width)]))
    # The rows are read in float32, so that what is packed comes out as it is.
    packed = CpuKernels().linear(Weight(weight.float(), quantization), None).rows(torch.arange(out)).double()
    expected = F.linear(rounded(x, quantization), packed)
    for addend in (None, bias):
        linear = CpuKernels().linear(Weight(weight, quantization), addend)
        assert linear.out_features == out
        total = expected if addend is None else expected + addend.double()
        for tokens in TOKENS:
            assert relative_error(linear(x[:tokens]), total[:tokens]) < ROUNDING[dtype], tokens


@pytest.mark.parametrize(("quantization", "dtype"), CASES)
def test_how_much_quantising_loses(quantization: str, dtype: torch.dtype) -> None:
    """On normal weights and activations, enough of them for chance to play no part."""
    weight, x = random(0, dtype, 1003, 1500), random(2, dtype, 40, 1500)
    got = CpuKernels().linear(Weight(weight, quantization), None)(x)
    assert relative_error(got, F.linear(x.double(), weight.double())) < ROUNDING[dtype] + QUANTISING[quantization]


@pytest.mark.parametrize(("scheme", "dtype"), [each for each in CASES if "int8" in str(each.values[0])])
def test_a_weight_that_was_packed_before(scheme: str, dtype: torch.dtype) -> None:
    """Its rows are the whole numbers times their scales, and so are its products."""
    whole = torch.randint(-128, 128, (130, 300), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales, bias, x = random(1, torch.float32, 130, 1).abs() / 100, random(2, dtype, 130), random(3, dtype, 40, 300)
    dense = whole * scales
    kernels, weight = CpuKernels(), Weight([whole[:65], whole[65:]], scheme, scales, dtype=dtype)
    linear = kernels.linear(weight, bias)
    assert torch.equal(linear.rows(torch.arange(130)), dense.to(dtype))
    expected = F.linear(rounded(x, scheme), dense.double(), bias.double())
    assert relative_error(linear(x), expected) < ROUNDING[dtype]
    gate, up = expected.chunk(2, dim=1)
    assert relative_error(kernels.gated_linear(weight, bias)(x), F.silu(gate) * up) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        (Weight(torch.ones(4, 128), "fp8"), "fp8"),
        (Weight(torch.ones(4, 128, dtype=torch.uint8), "int4", torch.ones(4, 1)), "int4 packed in rows"),
    ],
)
def test_a_format_that_is_not_there_is_named(weight: Weight, named: str) -> None:
    for lay_out in (CpuKernels().linear, CpuKernels().gated_linear):
        with pytest.raises(
            ValueError, match=f"the cpu kernels have no weights in {named}.*; they have none, int8, int8-"
        ):
            lay_out(weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_whole_words_is_filled_up(dtype: torch.dtype) -> None:
    weight, x = random(0, dtype, 30, 7), random(1, dtype, 5, 7)
    linear = CpuKernels().linear(Weight(weight), None)
    assert relative_error(linear(x), F.linear(x.double(), weight.double())) < ROUNDING[dtype]
    assert torch.equal(linear.rows(torch.tensor([29, 3])), weight[[29, 3]])


@pytest.mark.parametrize(("quantization", "dtype"), CASES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("features", "width"), [(32, 96), (100, 64), (7, 96), (7, 5)])
def test_gate(quantization: str, dtype: torch.dtype, biased: bool, features: int, width: int) -> None:
    """Half as many results as rows; the gate opens by its sigmoid, also where that is 0 or 1."""
    weight, x = random(0, dtype, 2 * features, width), random(1, dtype, 9, width)
    bias = random(2, dtype, 2 * features) if biased else None
    x[0] *= 6
    kernels = CpuKernels()
    packed = kernels.linear(Weight(weight.float(), quantization), None).rows(torch.arange(2 * features)).double()
    both = F.linear(rounded(x, quantization), packed, bias.double() if bias is not None else None)
    gate, up = both.chunk(2, dim=1)
    got = kernels.gated_linear(Weight(weight, quantization), bias)(x)
    assert got.shape == (9, features)
    assert relative_error(got, F.silu(gate) * up) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize(("quantization", "dtype"), CASES)
def test_rows(quantization: str, dtype: torch.dtype) -> None:
    """What was packed comes out again: as it was, or off by half a step of its scale."""
    weight = random(0, dtype, 203, 66)
    numbers = torch.tensor([0, 202, 64, 63, 5, 5])
    rows = CpuKernels().linear(Weight(weight, quantization), None).rows(numbers)
    assert rows.dtype == dtype
    if quantization == "none":
        assert torch.equal(rows, weight[numbers])
    else:
        wide = weight[numbers].double()
        groups = wide.abs().amax(1, keepdim=True) / (127 if quantization != "int4" else 8 / 1.1)
        limit = groups * (0.5 if quantization != "int4" else 1.6) + wide.abs() * ROUNDING[dtype] * 2
        assert ((rows.double() - wide).abs() <= limit).all()


@pytest.mark.parametrize(("quantization", "dtype"), [each for each in CASES if torch.float32 not in each.values])
def test_wide_results_are_the_sums_before_they_are_rounded(quantization: str, dtype: torch.dtype) -> None:
    weight, bias, x = random(0, dtype, 203, 1030), random(1, dtype, 203), random(2, dtype, 65, 1030)
    dense = CpuKernels().linear(Weight(weight.float(), quantization), None).rows(torch.arange(203)).double()
    linear, wide = (CpuKernels().linear(Weight(weight, quantization), bias, each) for each in (False, True))
    expected, alone = F.linear(rounded(x, quantization), dense, bias.double()), wide(x[:1])
    for tokens in (1, 5, 65):
        result = wide(x[:tokens])
        assert result.dtype == torch.float32 and relative_error(result, expected[:tokens]) < ROUNDING[torch.float32]
        assert torch.equal(result.to(dtype), linear(x[:tokens])) and torch.equal(result[:1], alone)


@pytest.mark.parametrize(("quantization", "dtype"), CASES)
def test_a_token_s_result_depends_on_nothing_else(quantization: str, dtype: torch.dtype) -> None:
    """Equal, bit for bit, alone and among any number of others, with one thread and with several."""
    weight, bias = random(0, dtype, 1237, 1024), random(1, dtype, 1237)
    one, three = (with_threads(n).linear(Weight(weight, quantization), bias) for n in (1, 3))
    x = random(2, dtype, 300, 1024)
    alone = torch.cat([one(x[i : i + 1]) for i in range(300)])
    for tokens in (1, 4, 11, 24, 70, 300):
        for _ in range(3):
            assert torch.equal(three(x[:tokens]), alone[:tokens])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_one_large_activation_spoils_its_own_block_alone(quantization: str) -> None:
    """A scale for each block of inputs: an outlier costs precision among its neighbours and nowhere else."""
    weight, x = torch.zeros(64, 1536), random(1, torch.float32, 1, 1536) * 0.1
    weight[:, 1000:] = random(0, torch.float32, 64, 536)
    x[0, 3] = 1e4
    got = CpuKernels().linear(Weight(weight, quantization), None)(x)
    assert relative_error(got, F.linear(x.double(), weight.double())) < 1.5 * QUANTISING[quantization]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_activations_that_are_not_numbers_spoil_their_token_alone(quantization: str, bad: float) -> None:
    weight, x = random(0, torch.float32, 80, 600), random(1, torch.float32, 8, 600)
    linear = CpuKernels().linear(Weight(weight, quantization), None)
    sound = linear(x)
    x[3, 17] = bad
    got = linear(x)
    assert not got[3].isfinite().any()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(got[others], sound[others])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_zeros(quantization: str) -> None:
    """Rows and tokens of zeros have no scale of their own."""
    weight, x = random(0, torch.float32, 70, 128), random(1, torch.float32, 4, 128)
    weight[5], x[2] = 0, 0
    got = CpuKernels().linear(Weight(weight, quantization), None)(x)
    assert (got[:, 5] == 0).all() and (got[2] == 0).all() and got.isfinite().all()


def test_the_weight_s_memory_is_not_needed_afterwards() -> None:
    weight, x = random(0, torch.float32, 64, 128), random(1, torch.float32, 2, 128)
    linear = CpuKernels().linear(Weight(weight), None)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_a_slice_of_a_weight() -> None:
    weight, x = random(0, torch.float32, 64, 256), random(1, torch.float32, 3, 128)
    linear = CpuKernels().linear(Weight(weight[:, 128:]), None)
    torch.testing.assert_close(linear(x), F.linear(x, weight[:, 128:]), atol=1e-4, rtol=1e-4)


def test_strided_tokens() -> None:
    weight, wide = random(0, torch.float32, 40, 64), random(1, torch.float32, 30, 128)
    for quantization in QUANTIZATIONS:
        linear = CpuKernels().linear(Weight(weight, quantization), None)
        for tokens in (3, 30):
            assert torch.equal(linear(wide[:tokens, 64:]), linear(wide[:tokens, 64:].contiguous()))
            assert torch.equal(linear(wide[:tokens].T[:64].T), linear(wide[:tokens, :64].contiguous()))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_no_tokens(quantization: str) -> None:
    linear = CpuKernels().linear(Weight(random(0, torch.float32, 16, 64), quantization), None)
    assert linear(torch.empty(0, 64)).shape == (0, 16)
    assert linear.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 64)


@pytest.mark.parametrize(
    ("features", "permitted", "used"),
    [
        ({"amx-tile", "amx-bf16", "amx-int8", "avx512f"}, True, True),
        ({"amx-tile", "amx-bf16", "amx-int8"}, False, False),
        ({"amx-tile", "amx-int8"}, True, False),
        ({"amx-tile", "amx-bf16"}, True, False),
        (set(), True, False),
    ],
)
def test_tiles_need_the_processor_and_the_system(features: set[str], permitted: bool, used: bool) -> None:
    asked = []

    def ask() -> bool:
        asked.append(True)
        return permitted

    assert may_use_tiles(features, ask) == used
    assert bool(asked) == ({"amx-bf16", "amx-int8"} <= features)


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_bfloat16_without_tiles(out: int, width: int) -> None:
    """Some systems refuse tiles; this runs on any processor."""
    weight, x = random(0, torch.bfloat16, out, width), random(2, torch.bfloat16, 100, width)
    linear = CpuKernels(tiles=False).linear(Weight(weight), None)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(100)])
    assert relative_error(alone, F.linear(x.double(), weight.double())) < ROUNDING[torch.bfloat16]
    assert torch.equal(linear(x), alone)


@needs_tiles
@pytest.mark.parametrize("gated", [False, True])
def test_sums_on_tiles_are_in_the_order_that_is_documented(gated: bool) -> None:
    """Bit for bit; gated, to what the exponential may be off."""
    weight, bias, x = (random(i, torch.bfloat16, *shape) for i, shape in enumerate([(200, 1090), (200,), (75, 1090)]))
    if gated:
        gate, up = (torch.from_numpy(sums_of_tiles(x, part)) for part in weight.chunk(2))
        got = CpuKernels(tiles=True).gated_linear(Weight(weight), None)(x)
        torch.testing.assert_close(got, (F.silu(gate) * up).bfloat16(), rtol=8e-3, atol=1e-6)
    else:
        got = CpuKernels(tiles=True).linear(Weight(weight), bias)(x)
        assert torch.equal(got, products_of_tiles(x, weight, bias))


@needs_tiles
@pytest.mark.parametrize("scheme", ["int8", "int4", "int8-weight-only"])
def test_whole_numbers_on_tiles_come_to_what_they_come_to_on_vectors(scheme: str) -> None:
    assert check_integers(scheme)


@needs_tiles
def test_groups_on_tiles_come_to_what_they_come_to_on_vectors() -> None:
    assert check_groups()


@needs_tiles
def test_a_token_of_no_numbers_spoils_no_other_on_tiles() -> None:
    """Also where the inputs are padded and the next token follows at once."""
    weight, x = random(0, torch.bfloat16, 80, 1030), random(1, torch.bfloat16, 40, 1030)
    linear = CpuKernels(tiles=True).linear(Weight(weight), None)
    sound = linear(x)
    x[17] = float("nan")
    got = linear(x)
    assert got[17].isnan().all()
    others = [i for i in range(40) if i != 17]
    assert torch.equal(got[others], sound[others])
