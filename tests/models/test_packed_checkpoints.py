"""Checkpoints that hold whole numbers and scales: the same model as their numbers multiplied out."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headway.engine.config import EngineConfig
from headway.engine.start import packed_bytes
from headway.kernels import kernels_for
from headway.kernels.cpu import choice as cpu_choice
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.reference import ReferenceKernels
from headway.models.checkpoint import SINGLE_FILE
from headway.models.config import ModelConfig, ModelError
from headway.models.decoder import Decoder
from headway.models.grouped import expanded
from headway.models.loading import load_model
from headway.models.packed_layers import mxfp4_matrix
from headway.models.quantization import PackedMatrices, scheme_of
from tests.models import tiny
from tests.models.paging import whole

# Compiling for a first run on a machine takes tens of seconds where cores are slow or shared.
pytestmark = pytest.mark.timeout(600)

PROMPTS = tiny.prompts([29, 1, 17])
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": ACTIVATIONS,
    "output_activations": None,
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
}
IGNORING_ROUTERS = {"ignore": ["lm_head", "re:.*gate$"]}
W8A16 = W8A8 | {"config_groups": {"group_0": GROUP | {"input_activations": None}}}


def in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers and scales [out, 1]: powers of two, so that rounding their products again changes nothing."""
    scales = torch.exp2((weight.abs().amax(1, keepdim=True) / 127).log2().ceil())
    whole = (weight / scales).round().clamp(-127, 127)
    whole[:, 0] = 127
    return whole.to(torch.int8), scales


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / SINGLE_FILE)


def save(folder: Path, quantization: dict[str, Any] | None, case: str = "qwen2") -> dict[str, Tensor]:
    """A tiny model whose linear layers hold 8 bits, packed or, with None, multiplied out; its plain tensors."""
    tiny.save(case, folder)
    config = json.loads((folder / "config.json").read_text())
    plain, stored = load_file(folder / SINGLE_FILE), {}
    for name in list(plain):
        stored[name] = plain[name]
        if name.endswith("_proj.weight"):
            values, scales = in_eight_bits(plain[name])
            plain[name] = values * scales
            stored |= {name: values, f"{name}_scale": scales}
    if quantization is None:
        rewrite(folder, config, plain)
    else:
        rewrite(folder, config | {"quantization_config": quantization}, stored)
    return plain


def load(folder: Path, quantization: str = "none", **options: Any) -> Decoder:
    kernels = kernels_for("cpu", torch.float32)
    return load_model(folder, torch.float32, kernels, quantization=quantization, **options)


@pytest.mark.parametrize("case", ["qwen2", "qwen2_tied", "qwen2_moe"])
def test_logits_are_those_of_hugging_face_with_the_numbers_multiplied_out(case: str, tmp_path: Path) -> None:
    """Activations have 16 bits: what rounding them adds is small."""
    save(tmp_path, W8A16 | IGNORING_ROUTERS, case)
    (tmp_path / "plain").mkdir()
    save(tmp_path / "plain", None, case)
    model = type(tiny.build(case)).from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    ours = torch.cat(whole(load(tmp_path), PROMPTS))
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    assert (ours - expected).abs().max() < 2e-3 * expected.std()


@pytest.mark.parametrize(
    ("case", "said", "scheme"),
    [
        ("qwen2", W8A8, "int8"),
        ("qwen2", W8A16, "int8-weight-only"),
        ("qwen2_moe", W8A8 | IGNORING_ROUTERS, "int8"),
    ],
)
def test_it_is_the_model_that_rounding_gives(case: str, said: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    """Bit for bit, the head rounded too as --quantization asks for; routers are not rounded."""
    folders = [tmp_path / name for name in ("packed", "plain")]
    for folder, quantization in zip(folders, (said, None), strict=True):
        folder.mkdir()
        save(folder, quantization, case)
    packed, rounded = (whole(load(folder, scheme), PROMPTS) for folder in folders)
    torch.testing.assert_close(packed, rounded, rtol=0, atol=0)


@pytest.fixture
def on_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are on vectors: rows for matrix tiles are longer."""
    monkeypatch.setattr(cpu_choice, "has_matrix_tiles", lambda: False)


@pytest.mark.usefixtures("on_vectors")
def test_what_is_ignored_stays_plain(tmp_path: Path) -> None:
    """An expression may ignore layers, too, each layer by itself."""
    said = W8A8 | {"ignore": ["lm_head", "re:model.layers.1.*down"]}
    plain = save(tmp_path, said)
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    del tensors[f"{name}_scale"]
    rewrite(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors | {name: plain[name]})
    weights = load(tmp_path).weights
    rows = torch.arange(5)
    for index, layer in enumerate(weights.layers):
        assert isinstance(layer.mlp.down, PackedLinear)
        assert (layer.mlp.down._packed.element_size(), layer.mlp.down._row_bytes) == (1, 320 if index == 1 else 80)
        assert torch.equal(layer.mlp.down.rows(rows), plain[f"model.layers.{index}.mlp.down_proj.weight"][:5])
    assert torch.equal(weights.lm_head.rows(rows), plain["lm_head.weight"][:5])


def test_the_memory_that_is_prepared_is_that_of_the_bytes(tmp_path: Path) -> None:
    plain = save(tmp_path, W8A8, "qwen2_tied")
    matrices = sum(each.numel() for name, each in plain.items() if each.dim() == 2)
    config = EngineConfig(str(tmp_path), dtype="float32")
    assert packed_bytes(config, ModelConfig.from_folder(tmp_path)) == matrices


@pytest.mark.usefixtures("on_vectors")
def test_dummy_weights_are_rounded_to_the_scheme(tmp_path: Path) -> None:
    save(tmp_path, W8A8)
    down = load(tmp_path, load_format="dummy").weights.layers[0].mlp.down
    assert isinstance(down, PackedLinear) and down._row_bytes == 80


@pytest.mark.parametrize(
    ("layer", "quantization", "packed", "scheme"),
    [
        ("lm_head", "int4", None, "int8"),
        ("model.embed_tokens", "int4", None, "int8"),
        ("model.layers.0.mlp.up_proj", "int4", None, "int4"),
        ("model.layers.0.mlp.experts.7.gate_proj", "int4", None, "int4"),
        ("model.layers.0.block_sparse_moe.gate", "int4", None, "none"),
        ("model.layers.0.mlp.shared_expert_gate", "int8", None, "none"),
        ("model.layers.0.mlp.gate", "none", PackedMatrices("int8"), "int8"),
        ("lm_head", "none", PackedMatrices("int8"), "int8"),
        ("lm_head", "none", PackedMatrices("int8", ("lm_head",)), "none"),
        ("lm_head", "int8", PackedMatrices("int8", ("lm_head",)), "int8"),
        ("model.embed_tokens", "none", PackedMatrices("int8"), "none"),
        ("model.layers.0.mlp.up_proj", "none", PackedMatrices("int8", ("re:.*up_proj",)), "none"),
        ("model.layers.10.mlp.up_proj", "none", PackedMatrices("int8", ("model.layers.1",)), "int8"),
    ],
)
def test_each_matrix_has_its_scheme(layer: str, quantization: str, packed: PackedMatrices | None, scheme: str) -> None:
    assert scheme_of(layer, quantization, packed) == scheme


def changed(path: str, value: Any) -> dict[str, Any]:
    """W8A8 with the value at a path of keys exchanged."""
    said = copy.deepcopy(W8A8)
    *parents, last = path.split(".")
    section: dict[str, Any] = said
    for key in parents:
        section = section[key]
    section[last] = value
    return said


IN_GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quant_method", "aqlm"),
        ("format", "marlin-24"),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("ignore", ["re:("]),
        ("config_groups", {}),
        ("config_groups", {"group_0": GROUP, "group_1": GROUP}),
        (f"{IN_GROUP}.targets", ["re:.*mlp.*"]),
        (f"{IN_GROUP}.weights.num_bits", 5),
        (f"{IN_GROUP}.weights.strategy", "group"),
        (f"{IN_GROUP}.weights.symmetric", False),
        (f"{IN_GROUP}.input_activations.dynamic", False),
    ],
)
def test_what_is_packed_in_another_way_is_refused_by_its_key(path: str, value: Any, tmp_path: Path) -> None:
    save(tmp_path, changed(path, value))
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/config.json: quantization_config.{path} is {value!r}, which is not ")
    assert "\n" not in message


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_proj"
    plain = save(tmp_path, W8A8)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / SINGLE_FILE)
    rewrite(tmp_path, config, tensors | {f"{name}.weight": plain[f"{name}.weight"]})
    with pytest.raises(ModelError, match=rf"tensor {name}.weight is stored as F32, which is not supported; use .* I8"):
        load(tmp_path)
    ignored = W8A8 | {"ignore": ["lm_head", name]}
    del tensors[f"{name}.weight_scale"]
    rewrite(tmp_path, config | {"quantization_config": ignored}, tensors | {f"{name}.weight": plain[f"{name}.weight"]})
    with pytest.raises(
        ModelError, match=r"quantization_config packs some of .*q_proj, .*k_proj, .*v_proj, which are one"
    ):
        load(tmp_path)


def test_another_scheme_or_kernels_without_it_are_refused(tmp_path: Path) -> None:
    save(tmp_path, W8A8)
    with pytest.raises(ModelError, match=f"quantization is int4, but the matrices in {tmp_path} are packed as int8"):
        load(tmp_path, "int4")
    with pytest.raises(ValueError, match="the reference kernels do not support weights in int8 packed in rows"):
        load_model(tmp_path, torch.float32, ReferenceKernels())
    assert math.isfinite(whole(load(tmp_path), PROMPTS)[0].sum())


def save_mxfp4(folder: Path, width: int = 32) -> PreTrainedModel:
    """A tiny gpt-oss whose experts are random MXFP4, and Hugging Face's model of the same numbers."""
    sizes = {"hidden_size": 64, "intermediate_size": width}
    tiny.save("gpt_oss", folder, sizes)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / SINGLE_FILE)
    generator, plain = torch.Generator().manual_seed(1), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), generator=generator).to(torch.uint8)
        exponents = torch.randint(123, 126, blocks.shape[:-1], generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        plain[name] = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
        each = zip(blocks, exponents, strict=True)
        dense = torch.stack([expanded(mxfp4_matrix(*expert, torch.float32)) for expert in each])
        assert torch.equal(dense.transpose(1, 2), plain[name])
    rewrite(folder, config | {"quantization_config": {"quant_method": "mxfp4"}}, tensors)
    model = tiny.build("gpt_oss", **sizes)
    assert not model.load_state_dict(plain, strict=False).unexpected_keys
    return model


def test_experts_in_mxfp4_are_those_of_hugging_face(tmp_path: Path) -> None:
    """Weights to the bit, and logits but for what 16 bits of activations add; 4 bits stay 4, with a scale for 32."""
    model = save_mxfp4(tmp_path)
    decoder = load(tmp_path)
    ours = torch.cat(whole(decoder, PROMPTS))
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    assert (ours - expected).abs().max() < 2e-3 * expected.std()
    mixture = decoder.weights.layers[0].mlp.experts
    assert mixture.down._row_bytes == 32 // 2 + 2
    assert load(tmp_path, load_format="dummy").weights.layers[0].mlp.experts.down._packed.numel() > 0


def test_what_is_not_packed_beside_mxfp4_may_be_rounded(tmp_path: Path) -> None:
    """Attention and the head as the same matrices alone are, and experts as they were."""
    save_mxfp4(tmp_path)
    plain, rounded = load(tmp_path).weights, load(tmp_path, "int8").weights
    rows, lanes = torch.arange(20), 64
    for mine, other in zip(rounded.layers, plain.layers, strict=True):
        assert torch.equal(mine.mlp.experts.down._packed, other.mlp.experts.down._packed)
        assert mine.mixer.o._packed.nbytes == mine.mixer.o._padded * lanes < other.mixer.o._packed.nbytes
        error = (mine.mixer.o.rows(rows) - other.mixer.o.rows(rows)).abs().amax(1)
        assert (error <= other.mixer.o.rows(rows).abs().amax(1) / 254 * 1.01).all()
    with pytest.raises(ModelError, match="quantization is 'int3'; it must be one of"):
        load(tmp_path, "int3")


def test_torchao_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    said = "'torchao', which is not supported; use the unquantised checkpoint, and --quantization rounds it"
    with pytest.raises(ModelError, match=said):
        ModelConfig.from_dict(config | {"quantization_config": {"quant_method": "torchao", "quant_type": {}}})


def test_mxfp4_is_refused_where_it_cannot_be_read(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    with pytest.raises(ValueError, match=r"the reference kernels .* weights in float4-weight-only packed in groups"):
        load_model(tmp_path, torch.float32, ReferenceKernels())
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value, said in (
        ("hidden_size", 72, "hidden_size is 72, which is no multiple of 32"),
        ("swiglu_limit", 5.0, "swiglu_limit is 5.0, which is not supported, only 7 is"),
    ):
        with pytest.raises(ModelError, match=said):
            ModelConfig.from_dict(config | {key: value})
