"""Rounding: as compressed-tensors rounds, and better than that for inputs that are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.cost.values import ConfigValues
from headway.models.grouped import expanded
from headway.models.packed_layers import packed_layer
from headway.models.quantization import read_packed
from headway.quantize.folder import packed_tensors
from headway.quantize.rounding import Rounded, awq_scales, gptq, nearest
from headway.quantize.schemes import SCHEMES, Recipe

ROWS, INPUTS = 48, 256
FOUR_BITS = ["W4A16", "W4A16_ASYM"]


def random_weight() -> Tensor:
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0))


def known_inputs() -> Tensor:
    """Correlated, some of them large: [T, in]."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(600, 64, generator=generator) @ torch.randn(64, INPUTS, generator=generator)
    sizes = torch.exp(1.5 * torch.randn(INPUTS, generator=generator))
    return (mixed + torch.randn(600, INPUTS, generator=generator)) * sizes


def error(weight: Tensor, dense: Tensor, x: Tensor) -> float:
    """The relative error of products."""
    return ((x @ (weight - dense).T).norm() / (x @ weight.T).norm()).item()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_what_compressed_tensors_makes_and_reads(name: str, dtype: torch.dtype) -> None:
    """Scales, zero points and codes of its own package; and both read the same numbers from the tensors."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    theirs = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams

    recipe, weight = Recipe.of(name, "rtn", None), random_weight().to(dtype)
    if recipe.scheme.floats and recipe.scheme.bits == 4:
        return  # test_four_bits_of_float
    said = recipe.quantization_config(["lm_head"])
    group = said["config_groups"]["group_0"]
    args = theirs.QuantizationArgs(**group["weights"])
    grouped = weight.float().view(ROWS, -1, recipe.scheme.group_size or INPUTS)
    scales, zeros = calculate_qparams(grouped.amin(2), grouped.amax(2), args)
    rounded = nearest(weight.float(), recipe.scheme, dtype)
    if not recipe.scheme.in_steps:
        assert torch.equal(rounded.scales, scales.to(dtype))
    if rounded.zeros is not None:
        assert ((rounded.zeros - zeros).abs() <= 1).all()  # theirs of scales that are not rounded yet
    layer = {"weight": weight.float(), "weight_scale": rounded.scales.float()}
    if rounded.zeros is not None:
        layer["weight_zero_point"] = rounded.zeros
    scheme = theirs.QuantizationScheme(targets=["Linear"], weights=args)
    by_format = {
        "pack-quantized": compressors.PackedQuantizationCompressor,
        "int-quantized": compressors.IntQuantizationCompressor,
        "float-quantized": compressors.FloatQuantizationCompressor,
    }
    compressor = by_format[recipe.scheme.format]
    packed = read_packed(ConfigValues({"quantization_config": said}, "config.json"))
    assert packed is not None
    stored = packed_tensors(rounded, packed)
    for part, tensor in compressor.compress(layer, scheme).items():
        assert torch.equal(stored[part].float(), tensor.float()), part
    read = compressor.decompress(dict(stored) | {"weight_scale": rounded.scales.float()}, scheme)["weight"]
    assert torch.equal(read.float(), rounded.dense)
    assert {part: tuple(tensor.shape) for part, tensor in stored.items()} == packed.tensors(ROWS, INPUTS)
    if packed.in_groups:  # in float32, products of zero points are rounded by themselves
        ours = expanded(packed_layer(packed, "layer", stored, torch.float32))
        torch.testing.assert_close(ours, rounded.dense, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16"])
def test_four_bits_of_float(name: str) -> None:
    """Scales and codes are those of compressed-tensors' own package."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    theirs = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    recipe, weight = Recipe.of(name, "rtn", None), random_weight()
    said = recipe.quantization_config(["lm_head"])
    args = theirs.QuantizationArgs(**said["config_groups"]["group_0"]["weights"])
    rounded = nearest(weight, recipe.scheme, torch.float32)
    grouped = weight.view(ROWS, -1, recipe.scheme.group_size)
    of_all = generate_gparam(weight.min(), weight.max()) if name == "NVFP4A16" else None
    scales, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), args, global_scale=of_all)
    expected = scales if of_all is None else scales.float() / of_all
    assert torch.equal(rounded.scales, expected.float())
    layer = {"weight": weight, "weight_scale": rounded.scales * (1 if of_all is None else of_all)}
    if of_all is not None:
        assert torch.equal(rounded.of_all, of_all.view(1))
        layer["weight_global_scale"] = of_all
    compressor = getattr(compressors, f"{name[:5]}PackedCompressor")
    scheme = theirs.QuantizationScheme(targets=["Linear"], weights=args)
    packed = read_packed(ConfigValues({"quantization_config": said}, "config.json"))
    assert packed is not None
    stored = packed_tensors(rounded, packed)
    for part, tensor in compressor.compress(layer, scheme).items():
        assert torch.equal(stored[part].view(-1).float(), tensor.view(-1).float()), part
    assert torch.equal(expanded(packed_layer(packed, "layer", stored, torch.float32)), rounded.dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_in_steps_lose_less_than_those_of_the_largest_weights(dtype: torch.dtype) -> None:
    """They are multiples of a row's as they are stored, in any dtype, of rows of any size."""
    weight = random_weight() * torch.logspace(-3, 1, ROWS).unsqueeze(1)
    found = nearest(weight, SCHEMES["W4A8"], dtype)
    largest = found.scales.float().amax(1, keepdim=True)
    units = torch.stack([largest / steps for steps in range(1, 17)])
    multiples = found.scales.float() / units
    assert ((multiples - multiples.round()).abs().amax(2) == 0).any(0).all()
    plain = nearest(weight, Recipe.of("W4A16", "rtn", 32).scheme, dtype)
    lost = [(each.dense - weight).square().sum(1) for each in (found, plain)]
    assert (lost[0] < 1.02 * lost[1]).all() and (lost[0] / lost[1]).mean() < 0.97


@pytest.mark.parametrize("name", [*FOUR_BITS, "W4A8"])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_makes_products_with_known_inputs_better(name: str, act_order: bool) -> None:
    scheme, weight, x = SCHEMES[name], random_weight(), known_inputs()
    plain = nearest(weight, scheme, torch.float32)
    found = gptq(weight, x.T @ x, scheme, torch.float32, act_order)
    assert error(weight, found.dense, x) < 0.6 * error(weight, plain.dense, x)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_awq_makes_products_with_known_inputs_better(name: str) -> None:
    scheme, weight, x = SCHEMES[name], random_weight(), known_inputs()
    plain = nearest(weight, scheme, torch.float32)
    moments = x.T @ x
    scales = awq_scales(weight, moments, scheme, torch.float32, lambda sizes: sizes)
    found = nearest(weight * scales, scheme, torch.float32)
    assert error(weight, found.dense / scales, x) < 0.85 * error(weight, plain.dense, x)
    assert scales.std() > 0.1


@pytest.mark.parametrize("moments", [torch.eye(INPUTS), torch.zeros(INPUTS, INPUTS)])
def test_without_correlations_gptq_has_nothing_to_make_up_for(moments: Tensor) -> None:
    """Inputs of one size, or none at all: each weight is rounded by itself."""
    scheme, weight = SCHEMES["W4A16"], random_weight()
    found = gptq(weight, moments, scheme, torch.float32, act_order=True)
    plain = nearest(weight, scheme, torch.float32)
    assert torch.equal(found.codes, plain.codes)
    assert torch.equal(found.scales, plain.scales)


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name: str) -> None:
    found: Rounded = nearest(torch.zeros(8, INPUTS), SCHEMES[name], torch.float16)
    assert torch.equal(found.dense, torch.zeros(8, INPUTS))


def test_a_recipe_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--method awq: FP8_DYNAMIC has only rtn"):
        Recipe.of("FP8_DYNAMIC", "awq", None)
    with pytest.raises(ValueError, match=r"--method awq: W4A8 has only rtn and gptq"):
        Recipe.of("W4A8", "awq", None)
    with pytest.raises(ValueError, match=r"--group-size 64: W8A16 has one scale for each row"):
        Recipe.of("W8A16", "rtn", 64)
