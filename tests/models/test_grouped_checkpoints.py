"""AWQ, GPTQ, compressed-tensors and FP8 checkpoints: their numbers to the bit, and the logits of these numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.cost.values import ConfigValues
from headway.engine.config import EngineConfig
from headway.engine.start import packed_bytes
from headway.kernels import kernels_for
from headway.kernels.cpu.linear import PackedLinear
from headway.models.checkpoint import SINGLE_FILE
from headway.models.config import ModelConfig, ModelError
from headway.models.decoder import Decoder
from headway.models.grouped import expanded
from headway.models.loading import load_model
from headway.models.packed_layers import packed_layer
from headway.models.quantization import read_packed
from tests.kernels.test_cpu_linear import relative_error
from tests.models import packed_files, tiny
from tests.models.packed_files import Format
from tests.models.paging import whole
from tests.models.test_gguf import ROUNDING, WIDE, with_weights

pytestmark = pytest.mark.timeout(600)

PROMPTS = tiny.prompts([29, 1, 17])
FORMATS = {
    "awq": packed_files.awq(16),
    "awq_symmetric": packed_files.awq(16, zero_point=False),
    "awq_but": packed_files.awq(16, modules_to_not_convert=["self_attn", "down"]),
    "gptq": packed_files.gptq(4, 16),
    "gptq_ordered": packed_files.gptq(4, 16, ordered=True),
    "gptq_rows": packed_files.gptq(4, -1),
    "gptq_8_bits": packed_files.gptq(8, 16, ordered=True),
    "gptq_v2": packed_files.gptq(4, 16, form="gptq_v2"),
    "packed": packed_files.pack_quantized(4, 16),
    "packed_zeros": packed_files.pack_quantized(4, 16, symmetric=False),
    "packed_ordered": packed_files.pack_quantized(4, 16, symmetric=False, actorder="group"),
    "packed_8_bits": packed_files.pack_quantized(8, 16),
    "packed_rows": packed_files.pack_quantized(8, None),
    "int_groups": packed_files.int_quantized(16),
    "int_rows": packed_files.int_quantized(None),
    "float_tensor": packed_files.float_quantized("tensor", dynamic=False),
    "float_rows": packed_files.float_quantized("channel"),
    "float_blocks": packed_files.float_quantized("block"),
    "fp8": packed_files.fp8(None),
    "fp8_null": packed_files.fp8(None, weight_block_size=None),
    "fp8_blocks": packed_files.fp8((32, 32)),
    "fp8_but": packed_files.fp8((16, 16), modules_to_not_convert=["model.layers.1", "q_proj"]),
    "nf4": packed_files.bitsandbytes("nf4"),
    "nf4_nested": packed_files.bitsandbytes("nf4", nested=True),
    "fp4": packed_files.bitsandbytes("fp4"),
    "llm_int8": packed_files.llm_int8(),
    "nvfp4": packed_files.nvfp4(),
    "nvfp4_modelopt": packed_files.nvfp4(modelopt=True),
    "nvfp4_but": packed_files.nvfp4(modelopt=True, ignore=["lm_head", "model.layers.1*", "*down_proj"]),
}
STEPS = {size: packed_files.int_quantized(size, steps=True) for size in (32, 64)}
# Whose experts have 24 inputs.
MIXTURES = {
    "gptq": packed_files.gptq(4, 8, ordered=True),
    "fp8": packed_files.fp8((32, 32)),
    "packed": packed_files.pack_quantized(4, 8, symmetric=False),
    "nf4": packed_files.bitsandbytes("nf4", nested=True),
}


def read(said: dict[str, Any]) -> Any:
    return read_packed(ConfigValues({"quantization_config": said}, "config.json"))


def save(
    folder: Path, form: Format, case: str = "qwen2", sizes: dict[str, int] | None = None, **more: Tensor
) -> dict[str, Tensor]:
    """A tiny model whose linear layers are packed where the format packs them; its dense matrices."""
    tiny.save(case, folder, sizes)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": form.said}
    packed, dense, stored = read(form.said), {}, dict(more)
    for seed, (name, tensor) in enumerate(load_file(folder / SINGLE_FILE).items()):
        layer = name.removesuffix(".weight")
        if tensor.dim() == 2 and "_proj" in layer and packed.covers(layer):
            parts, dense[name] = form.layer(*tensor.shape, seed)
            stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
        else:
            dense[name] = stored[name] = tensor
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / SINGLE_FILE)
    return dense


def load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, torch.float32, kernels_for("cpu", torch.float32), **options)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_definition_to_the_bit(name: str) -> None:
    """Groups have 128 inputs, as they are published. Rows and inputs are no whole number of blocks."""
    form = FORMATS[name]
    stored, dense = form.layer(72, 272, 0)
    weight = packed_layer(read(form.said), "layer", stored, torch.float32)
    assert torch.equal(expanded(weight), dense)
    linear = kernels_for("cpu", torch.float32).linear(weight, None)
    assert torch.equal(linear.rows(torch.arange(72)), dense)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dense_matrices(name: str, tmp_path: Path) -> None:
    dense = save(tmp_path, FORMATS[name])
    decoder = load(tmp_path)
    ours = torch.cat(whole(decoder, PROMPTS))
    model = with_weights(tiny.build("qwen2"), dense)
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    assert relative_error(ours, expected) < ROUNDING
    down = decoder.weights.layers[0].mlp.down
    assert isinstance(down, PackedLinear)
    assert torch.equal(down.rows(torch.arange(48)), dense["model.layers.0.mlp.down_proj.weight"])
    if name not in ("awq_but", "nvfp4_but"):  # rows of a panel, and two bytes for each 16 inputs
        assert down._packed.nbytes == 64 * 80 * (read(FORMATS[name].said).bits + 1) // 8


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_may_be_packed(name: str, tmp_path: Path) -> None:
    dense = save(tmp_path, MIXTURES[name], "qwen2_moe")
    ours = torch.cat(whole(load(tmp_path), PROMPTS))
    model = with_weights(tiny.build("qwen2_moe"), dense)
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    assert relative_error(ours, expected) < ROUNDING


@pytest.mark.parametrize("size", STEPS)
def test_scales_in_steps_are_kept_as_int4_keeps_its_own(size: int) -> None:
    """The numbers to the bit, whatever group and row they are of; products as exact as int4's, which round inputs."""
    form = STEPS[size]
    stored, dense = form.layer(200, 320, 0)
    weight = packed_layer(read(form.said), "layer", stored, torch.float32)
    assert weight.scheme == "int4" and torch.equal(expanded(weight), dense)
    kernels, x = kernels_for("cpu", torch.float32), torch.randn(20, 320, generator=torch.Generator().manual_seed(1))
    linear, gated = kernels.linear(weight, None), kernels.gated_linear(weight, None)
    assert torch.equal(linear.rows(torch.arange(200)), dense)
    assert relative_error(linear(x), x @ dense.T) < 0.01
    gate, up = (x @ dense.T).chunk(2, 1)
    assert relative_error(gated(x), torch.nn.functional.silu(gate) * up) < 0.02
    alone = [linear(each) for each in x.split(1)]
    assert torch.equal(torch.cat(alone), linear(x))


@pytest.mark.parametrize("case", ["llama", "qwen2_moe"])
def test_a_model_with_scales_in_steps(case: str, tmp_path: Path) -> None:
    sizes = WIDE | ({"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96} if "moe" in case else {})
    dense = save(tmp_path, STEPS[32], case, sizes)
    decoder = load(tmp_path)
    ours = torch.cat(whole(decoder, PROMPTS))
    expected = torch.cat([tiny.logits(with_weights(tiny.build(case, **sizes), dense), prompt) for prompt in PROMPTS])
    assert relative_error(ours, expected) < 0.03  # of activations in eight bits
    o = decoder.weights.layers[0].mixer.o
    assert o._packed.nbytes == 256 * o.in_features * 17 // 32


def test_scales_that_are_not_in_steps_are_refused(tmp_path: Path) -> None:
    form = STEPS[32]
    stored, _ = form.layer(64, 64, 0)
    for wrong in (
        stored["weight_scale"] * torch.tensor([1, 1.0078125]),
        -stored["weight_scale"],
        stored["weight_scale"] / 0,
    ):
        with pytest.raises(
            ModelError, match=r"layer\.weight_scale is not made of whole multiples up to 16 of one scale"
        ):
            packed_layer(read(form.said), "layer", stored | {"weight_scale": wrong}, torch.float32)


@pytest.mark.parametrize("name", MIXTURES)
def test_what_latents_are_made_of_may_be_packed(name: str, tmp_path: Path) -> None:
    """Beside them the layer that predicts further tokens, as DeepSeek-V3's checkpoints have it, is left out."""
    sizes = {"kv_lora_rank": 40, "q_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 16}
    further = {"model.layers.3.eh_proj.weight": torch.ones(48, 96), "model.layers.3.enorm.weight": torch.ones(48)}
    dense = save(tmp_path, MIXTURES[name], "deepseek_v3", sizes, **further)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    ours = torch.cat(whole(load(tmp_path), PROMPTS))
    model = with_weights(tiny.build("deepseek_v3", **sizes), dense)
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    assert relative_error(ours, expected) < ROUNDING
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.3\.e\w+\.weight has no place in the model"):
        load(tmp_path)


def test_a_bias_of_zeros_beside_packed_matrices_is_nothing(tmp_path: Path) -> None:
    """GPTQ's tools write some; any other bias that the model has no place for is refused."""
    name = "model.layers.0.mlp.up_proj.bias"
    save(tmp_path, FORMATS["gptq"], **{name: torch.zeros(80)})
    plain = whole(load(tmp_path), PROMPTS)
    assert all(each.isfinite().all() for each in plain)
    save(tmp_path, FORMATS["gptq"], **{name: torch.ones(80)})
    with pytest.raises(ModelError, match=f"tensor {name} has no place in the model"):
        load(tmp_path)


def test_dummy_weights_need_no_packed_tensors(tmp_path: Path) -> None:
    save(tmp_path, FORMATS["awq"])
    (tmp_path / SINGLE_FILE).unlink()
    assert all(each.isfinite().all() for each in whole(load(tmp_path, load_format="dummy"), PROMPTS))


@pytest.mark.parametrize("name", ["awq", "nvfp4"])
def test_the_memory_that_is_prepared_is_that_of_the_bits(name: str, tmp_path: Path) -> None:
    dense = save(tmp_path, FORMATS[name], "qwen2_tied")
    matrices = sum(each.numel() for each in dense.values() if each.dim() == 2)
    config = EngineConfig(str(tmp_path), dtype="float32")
    assert packed_bytes(config, ModelConfig.from_folder(tmp_path)) == matrices // 2


@pytest.mark.parametrize(
    ("form", "strategy"), [("packed", "group"), ("packed", "channel"), ("float", "channel"), ("float", "tensor")]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_compressed_tensors_writes(form: str, strategy: str, symmetric: bool) -> None:
    """The format's own package packs, and says what the numbers are."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    if form == "float" and not symmetric:
        pytest.skip("there are no zero points")
    kind, bits = ("int", 4) if form == "packed" else ("float", 8)
    described = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    described |= {"group_size": 32} if strategy == "group" else {}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**described))
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    groups = 4 if strategy == "group" else 1
    largest = weight.view(64, groups, -1).abs().amax(2) / (7 if kind == "int" else 448)
    scales = largest.max().view(1) if strategy == "tensor" else largest
    zeros = torch.randint(-8, 8, scales.shape, generator=torch.Generator().manual_seed(1)).to(torch.int8)
    layer = {"weight": weight, "weight_scale": scales.bfloat16().float()}
    if not symmetric:
        layer["weight_zero_point"] = zeros
    compressor = (
        compressors.PackedQuantizationCompressor if form == "packed" else compressors.FloatQuantizationCompressor
    )
    stored = compressor.compress(layer, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    packed = read(packed_files.compressed(f"{form.replace('packed', 'pack')}-quantized", described))
    assert {name: tuple(each.shape) for name, each in stored.items() if name != "weight_shape"} == {
        name: shape for name, shape in packed.tensors(64, 128).items() if name != "weight_shape"
    } or strategy == "tensor"
    assert torch.equal(expanded(packed_layer(packed, "layer", stored, torch.float32)), expected.float())


@pytest.mark.parametrize(("form", "size"), [("nvfp4", 16), ("mxfp4", 32)])
def test_what_compressed_tensors_writes_in_four_bits_of_float(form: str, size: int) -> None:
    """Its package makes bfloat16 of the numbers."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    described = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": size}
    described["strategy"] = "tensor_group" if form == "nvfp4" else "group"
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    largest = weight.view(64, -1, size).abs().amax(2)
    layer = {"weight": weight, "weight_scale": torch.exp2((largest / 6).log2().ceil())}
    if form == "nvfp4":
        layer["weight_global_scale"] = torch.tensor([6 * 448 / weight.abs().max()])
        layer["weight_scale"] = (largest / 6 * layer["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**described))
    compressor = {
        "nvfp4": compressors.NVFP4PackedCompressor, "mxfp4": compressors.MXFP4PackedCompressor,
    }[form]  # fmt: skip
    stored = compressor.compress(layer, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    packed = read(packed_files.compressed(f"{form}-pack-quantized", described))
    assert {name: tuple(each.shape) for name, each in stored.items()} == packed.tensors(64, 128)
    ours = packed_layer(packed, "layer", stored, torch.float32)
    torch.testing.assert_close(expanded(ours), expected.float(), rtol=2**-7, atol=0)
    linear = kernels_for("cpu", torch.float32).linear(ours, None)
    assert torch.equal(linear.rows(torch.arange(64)), expanded(ours))
    stored["weight_scale"] = torch.full_like(stored["weight_scale"].view(torch.uint8), 127).view(
        stored["weight_scale"].dtype
    )
    if form == "nvfp4":
        with pytest.raises(ModelError, match=r"layer\.weight_scale holds what is not a number"):
            packed_layer(packed, "layer", stored, torch.float32)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "llm_int8"])
def test_what_bitsandbytes_writes(kind: str) -> None:
    """Its own package packs, and says what the numbers are; of what it divides in the end, to the last bit."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    if kind == "llm_int8":
        values, largest, _ = functional.int8_vectorwise_quant(weight.half())
        stored = {"weight": values, "SCB": largest}
        expected = functional.int8_vectorwise_dequant(values, largest)
        ours = packed_layer(read(FORMATS[kind].said), "layer", stored, torch.float32)
        torch.testing.assert_close(expanded(ours), expected.float(), rtol=2**-22, atol=0)
        return
    for nested in (False, True):
        codes, state = functional.quantize_4bit(weight, compress_statistics=nested, quant_type=kind, blocksize=64)
        stored = {"weight": codes} | {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
        packed = read(packed_files.bitsandbytes(kind, nested).said)
        assert set(stored) == set(packed.tensors(48, 128))
        ours = packed_layer(packed, "layer", stored, torch.float32)
        expected = functional.dequantize_4bit(codes, state)
        torch.testing.assert_close(expanded(ours), expected, rtol=0 if kind == "nf4" else 2**-22, atol=0)


def test_which_matrices_bitsandbytes_packed_its_files_say(tmp_path: Path) -> None:
    """Not config.json, where there may be no names, or beginnings, ends and parts of some."""
    name = "model.layers.1.mlp.up_proj"
    dense = save(tmp_path, FORMATS["nf4_nested"])
    tensors = load_file(tmp_path / SINGLE_FILE)
    plain = {each: tensor for each, tensor in tensors.items() if not each.startswith(name)}
    save_file(plain | {f"{name}.weight": dense[f"{name}.weight"]}, tmp_path / SINGLE_FILE)
    ours = torch.cat(whole(load(tmp_path), PROMPTS))
    expected = torch.cat([tiny.logits(with_weights(tiny.build("qwen2"), dense), prompt) for prompt in PROMPTS])
    assert relative_error(ours, expected) < ROUNDING
    state = f"{name}.weight.quant_state.bitsandbytes__nf4"
    for changed, said in (
        ({state: torch.tensor(list(b"{"), dtype=torch.uint8)}, r"bitsandbytes__nf4 is damaged \(.*\); download"),
        (
            {state: torch.tensor(list(b'{"shape": [80, 48], "blocksize": 128}'), dtype=torch.uint8)},
            "blocksize 128 and nested_blocksize 256, which are not supported, only 64 and 256 are",
        ),
        (
            {state: torch.tensor(list(b'{"shape": [48, 80], "blocksize": 64}'), dtype=torch.uint8)},
            r"bitsandbytes__nf4 has shape \[48, 80\], but config.json asks for \[80, 48\]",
        ),
        ({f"{name}.weight.quant_map": torch.ones(16)}, "quant_map is not that of nf4; download the checkpoint again"),
    ):
        save_file(tensors | changed, tmp_path / SINGLE_FILE)
        with pytest.raises(ModelError, match=said):
            load(tmp_path)


def test_an_order_that_leaves_groups_uneven_is_refused() -> None:
    form = FORMATS["gptq_ordered"]
    stored, _ = form.layer(16, 64, 0)
    stored["g_idx"][0] = (stored["g_idx"][0] + 1) % 4
    with pytest.raises(ModelError, match="layer: its g_idx does not have 16 inputs in each group"):
        packed_layer(read(form.said), "layer", stored, torch.float32)
    form = FORMATS["fp8"]
    stored, _ = form.layer(16, 64, 0)
    stored["weight"].view(torch.uint8)[3, 3] = 127
    with pytest.raises(ModelError, match=r"layer\.weight holds what is not a number"):
        packed_layer(read(form.said), "layer", stored, torch.float32)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("awq", "bits", 3),
        ("awq", "version", "gemv"),
        ("awq", "modules_to_not_convert", "lm_head"),
        ("awq", "group_size", 0),
        ("gptq", "bits", 2),
        ("gptq", "checkpoint_format", "marlin"),
        ("gptq", "dynamic", {"-:.*": {}}),
        ("gptq", "desc_act", "yes"),
        ("fp8", "fmt", "e5m2"),
        ("fp8_blocks", "weight_block_size", [128]),
        ("packed", "config_groups.group_0.weights.num_bits", 2),
        ("packed", "config_groups.group_0.weights.strategy", "tensor"),
        ("packed", "config_groups.group_0.weights.group_size", -1),
        ("packed", "config_groups.group_0.input_activations", {"num_bits": 8}),
        ("packed", "config_groups.group_0.weights.actorder", "other"),
        ("packed", "format", "mxfp8-quantized"),
        ("int_groups", "config_groups.group_0.weights.symmetric", False),
        ("int_groups", "config_groups.group_0.weights.actorder", "group"),
        ("int_groups", "scale_steps", 16),
        ("nf4", "bnb_4bit_quant_type", "af4"),
        ("nf4", "bnb_4bit_quant_storage", "bfloat16"),
        ("nf4", "load_in_4bit", False),
        ("nvfp4", "config_groups.group_0.weights.group_size", 32),
        ("nvfp4_modelopt", "quant_algo", "FP8"),
        ("float_rows", "config_groups.group_0.weights.strategy", "group"),
        ("float_rows", "config_groups.group_0.weights.num_bits", 4),
    ],
)
def test_what_is_packed_in_another_way_is_refused_by_its_key(name: str, path: str, value: Any, tmp_path: Path) -> None:
    said = copy.deepcopy(FORMATS[name].said)
    *parents, last = path.split(".")
    section: dict[str, Any] = said
    for key in parents:
        section = section[key]
    section[last] = value
    with pytest.raises(ModelError) as caught:
        read(said)
    message = str(caught.value)
    assert message.startswith(f"config.json: quantization_config.{path} is {value!r}, which is ")
    assert "\n" not in message


def test_a_group_size_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save(tmp_path, FORMATS["awq"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="group_size 32, which does not fit a matrix of 48 rows and 48 inputs"):
        load(tmp_path)
    save(tmp_path, FORMATS["fp8"])
    config["quantization_config"] = FORMATS["float_rows"].said
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tensor .*weight_scale has shape \[1\], but config.json asks for \[48, 1\]"):
        load(tmp_path)
