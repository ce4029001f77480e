"""The planner's bytes of quantised weights are those that the engine packs, and its defaults are the engine's own."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.cost.attention import Chunk
from headway.cost.config import read_shape
from headway.cost.memory import kv_cache_bytes, weight_bytes
from headway.cost.precision import ENGINE_CHECKPOINTS, ENGINE_QUANTIZATIONS, Precision
from headway.cost.values import ConfigValues
from headway.cost.work import Operation, step_work
from headway.engine.memory import bytes_per_block, zero_caches
from headway.kernels import kernels_for
from headway.kernels.cpu import choice as cpu_choice
from headway.kernels.cpu import packed_weight
from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.simd import BFLOAT16
from headway.kernels.cpu.team import Team
from headway.kernels.weights import Weight
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder, MixtureMLP
from headway.models.loading import QUANTIZATIONS, load_model
from headway.models.packed_layers import packed_layer
from headway.models.quantization import read_packed
from tests.kernels.grouped import random_weight
from tests.models import tiny
from tests.models.packed_files import float_quantized, int_quantized, pack_quantized
from tests.models.test_grouped_checkpoints import save


@pytest.fixture(autouse=True)
def on_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for matrix tiles are filled up to whole tiles, which plans do not count; in real models most are whole."""
    monkeypatch.setattr(cpu_choice, "has_matrix_tiles", lambda: False)
    monkeypatch.setattr(
        packed_weight, "product_job", lambda *kinds: 0
    )  # nothing is multiplied, and compiling takes long


# Sizes that fill neither panels of 64 rows nor groups of 32 inputs.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


EXPERTS = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 68,
    "mlp_only_layers": [1],
}


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 40,
    "q_lora_rank": 36,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "first_k_dense_replace": 1,
    "n_group": 1,
}


def bytes_of(linear: PackedLinear) -> int:
    """Bytes that a product reads: panels, the scales of rows and of groups, and minima that are no scales."""
    size, groups = linear._packed.nbytes + linear._row_scales.nbytes, linear._groups
    if groups is not None:
        size += groups.scales.nbytes
        size += 0 if groups.minima is groups.scales or groups.minima.dim() == 1 else groups.minima.nbytes
    return size


def products(part: Any, seen: set[int]) -> Iterator[PackedLinear]:
    """All matrices that are part of a decoder's weights, each once."""
    if id(part) in seen or isinstance(part, torch.Tensor | CpuKernels | str | int | float | None):
        return
    seen.add(id(part))
    if isinstance(part, PackedLinear):
        yield part
        return
    inner = part if isinstance(part, list | tuple) else [getattr(part, name, None) for name in fields_of(part)]
    for each in inner:
        yield from products(each, seen)


def fields_of(part: Any) -> list[str]:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(part, "__dict__", ())] if type(part).__module__.startswith("headway.") else []


def matrices_of(model: Decoder) -> tuple[list[PackedLinear], list[PackedLinear]]:
    """The matrices that are packed in some scheme, and the others."""
    found = list(products([model.weights.layers, model.weights.lm_head], set()))
    plain = [linear for linear in found if linear._kind is BFLOAT16]
    return [linear for linear in found if linear._kind is not BFLOAT16], plain


@functools.cache
def family(case: str) -> dict[str, Any]:
    name, settings = tiny.CASES[case]
    model_class = tiny.FAMILIES[name]
    described = model_class.config_class(**{**tiny.BASE, **settings}).to_dict()
    return {**described, "architectures": [model_class.__name__], "torch_dtype": "bfloat16"}


# One row of each kind: another attention, mixture, recurrent layer, or norms, gates and biases.
ROWS = [
    "llama_tied", "llama_mlp_bias", "qwen2", "qwen3", "mixtral", "qwen2_moe_every_second", "qwen3_moe_some_dense",
    "granite", "phi3", "smollm3", "gemma2", "gemma3", "olmo2", "olmo3", "deepseek_v2", "deepseek_v2_lite",
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm4", "gpt_oss", "qwen3_next", "qwen3_next_other_sizes", "qwen3_5",
    "qwen3_5_moe", "lfm2", "lfm2_biases",
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", ["sizes", "experts", "latent", *ROWS])
@pytest.mark.parametrize("quantization", [each for each in ENGINE_QUANTIZATIONS if each != "none"])
def test_the_planner_counts_what_the_engine_packs(tmp_path: Path, quantization: str, case: str) -> None:
    """Panels, groups and the scales of both; norms, routers, and an embedding beside a head stay in bfloat16.

    A decode of one token reads all of it, but for the rows of an embedding and the experts of other tokens.
    """
    own = {"sizes": CONFIG, "experts": CONFIG | EXPERTS, "latent": CONFIG | LATENT}
    config = own.get(case) or family(case)
    (tmp_path / "config.json").write_text(json.dumps(config))
    kernels = kernels_for("cpu", torch.bfloat16)
    model = load_model(tmp_path, torch.bfloat16, kernels, load_format="dummy", quantization=quantization)
    packed = sum(map(bytes_of, matrices_of(model)[0]))
    shape = read_shape(config)
    parts = shape.matrices()
    precision = Precision.of_engine("bfloat16", quantization, "auto", shape.head_dim)
    whole = weight_bytes(shape, precision)
    assert whole == packed + 2 * (parts["rest"] + parts["embedding"])
    read = sum(part.weight_bytes for part in step_work(shape, [Chunk(1)], precision).values())
    left = 2 * parts["embedding"] - 2 * shape.hidden
    if (experts := shape.experts) is not None:
        biases = (
            experts.layers
            * experts.count
            * (shape.expert_parameters() - shape.ffn_matrices * shape.hidden * experts.width)
        )
        held = precision.of_experts.bytes_of_matrices(shape.projections()["experts"]) + 2 * biases
        left += held * (experts.count - experts.per_token) // experts.count
    assert read == pytest.approx(whole - left, abs=len(ROWS))


@pytest.mark.parametrize("scheme", ["int4-weight-only", "fp8-weight-only"])
def test_a_packed_checkpoint_of_latents_is_counted_as_the_engine_keeps_it(tmp_path: Path, scheme: str) -> None:
    """Matrices between latents and heads are divided by heads, and plain from then on."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128}
    sizes |= {"kv_lora_rank": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 32}
    save(
        tmp_path,
        pack_quantized(4, 128) if scheme == "int4-weight-only" else float_quantized("channel"),
        "deepseek_v3",
        sizes,
    )
    model = load_model(tmp_path, torch.bfloat16, kernels_for("cpu", torch.bfloat16))
    packed, plain = matrices_of(model)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    precision = Precision.of_engine("bfloat16", scheme, "auto", shape.head_dim)
    kept, parts = shape.projections(), shape.matrices()
    in_groups = sum(map(bytes_of, packed))
    assert in_groups == precision.linear.bytes_of_matrices(kept["linear"] + kept["experts"])
    rest = sum(parts[each] for each in ("latent", "head", "embedding", "rest"))
    assert weight_bytes(shape, precision) == in_groups + 2 * rest
    assert {linear.in_features for linear in plain} == {12, 128, 256}, "of keys, of values, and of routers and head"


def test_the_planner_knows_the_engine_s_schemes() -> None:
    assert tuple(ENGINE_QUANTIZATIONS) == tuple(QUANTIZATIONS)


def test_a_block_of_an_int8_cache_is_counted_as_the_engine_takes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    theirs = bytes_per_block(ModelConfig.from_folder(tmp_path).caches, 16, torch.int8)
    assert kv_cache_bytes(read_shape(CONFIG), 16, Precision.of_engine("bfloat16", "none", "int8", 24), 16) == theirs


def test_a_block_of_latents_is_counted_as_the_engine_takes_it(tmp_path: Path) -> None:
    """Once, however many heads read it: 40 numbers and a key of 12 for each token and layer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | LATENT))
    caches = ModelConfig.from_folder(tmp_path).caches
    theirs = bytes_per_block(caches, 16, torch.bfloat16)
    tensors = [t for cache in zero_caches(caches, 1, 16, torch.bfloat16, torch.device("cpu")) for t in cache.tensors]
    assert theirs == sum(tensor.nbytes for tensor in tensors) == 3 * 16 * 52 * 2
    assert kv_cache_bytes(read_shape(CONFIG | LATENT), 16, Precision(), 16) == theirs
    read = step_work(read_shape(CONFIG | LATENT), [Chunk(1, 15)]).values()
    assert sum(part.kv_read_bytes for part in read) == theirs


def test_llama_3_2_1b_in_int4_takes_780_mb() -> None:
    from headway.cost.catalogue import find_model

    precision = Precision.of_engine("bfloat16", "int4", "auto", 64)
    assert weight_bytes(find_model("llama-3.2-1b").shape, precision) == pytest.approx(780e6, rel=0.005)


# How random weights of a scheme come, and the exact format that the cost model has for it.
GROUPED = {
    "int4-weight-only": ("int4-weight-only", 128, 1),
    "fp8-weight-only": ("float8-weight-only", 128, 3),
    "fp8-block": ("float8-weight-only", 128, 1),
    "mxfp4": ("float4-weight-only", 32, 1),
    "nvfp4": ("float4-weight-only", 16, 1),
    "nf4": ("normal4-weight-only", 64, 1),
    "q4_k": ("int4-weight-only", 32, 8),
    "q6_k": ("int8-weight-only", 16, 16),
    "q8_0": ("int8-weight-only", 32, 1),
}


def random_checkpoint(name: str) -> Weight:
    """A matrix of 100 rows in groups, as a checkpoint of this name has them."""
    if name == "w4a8":
        form = int_quantized(32, steps=True)
        stored, _ = form.layer(100, 512, 0)
        packed = read_packed(ConfigValues({"quantization_config": form.said}, ""))
        assert packed is not None
        return packed_layer(packed, "layer", stored, torch.bfloat16)
    scheme, size, run = GROUPED[name]
    weight = random_weight(scheme, 100, 384 if name == "fp8-weight-only" else 512, size, run, dtype=torch.bfloat16)
    groups = weight.groups
    assert groups is not None
    if name != "q4_k":  # its minima are its own; others have none, or the scales
        groups = replace(groups, minima=None)
    if name in ("mxfp4", "nvfp4", "q6_k", "q8_0"):
        groups = replace(groups, offsets=groups.offsets * 0)
    if name not in ("q4_k", "q6_k"):
        groups = replace(groups, factors=torch.ones_like(groups.factors))
    if name in ("fp8-weight-only", "fp8-block", "nvfp4", "nf4"):  # products, or of float32
        groups = replace(groups, scales=groups.scales * torch.pi)
    return replace(weight, groups=groups)


@pytest.mark.parametrize("name", [*ENGINE_CHECKPOINTS, *(each for each in ENGINE_QUANTIZATIONS if each != "none")])
def test_the_planner_counts_what_lies_on_a_gpu(name: str) -> None:
    """The layout of one matrix, and of four experts, is that of cuda.packed, which needs no GPU."""
    pack = pytest.importorskip("headway.kernels.cuda.packed").pack
    if name in ENGINE_CHECKPOINTS:
        weight = random_checkpoint(name)
    else:
        weight = Weight(torch.randn(100, 320, generator=torch.Generator().manual_seed(0)).bfloat16(), name)
    inputs = weight.parts[0].shape[1]
    kept = Precision.of_engine("bfloat16", name, "auto", 24, "gpu").linear
    for count in (1, 4):
        assert pack([(weight, None)] * count, count).nbytes == kept.bytes_of_matrices([(count, 100, inputs)])
    filled_up = Weight(torch.ones(100, 40).bfloat16(), "int8")
    assert pack([(filled_up, None)], 1).numbers.numel() == kept.filled_up((1, 100, 40))[2] * 100


@pytest.mark.parametrize("name", ENGINE_CHECKPOINTS)
def test_the_planner_counts_checkpoints_as_the_engine_keeps_them(name: str) -> None:
    """A matrix of rows that fill no panel, read whole by a product; four experts of a mixture, of which two are."""
    weights = [random_checkpoint(name) for _ in range(4)]
    inputs = weights[0].parts[0].shape[1]
    team, memory = Team(), LargePages()
    one = PackedLinear([(weights[0], None)], team, memory)
    experts = PackedLinear([(each, None) for each in weights], team, memory, count=4)
    kept = Precision.of_engine("bfloat16", name, "auto", 24).linear
    assert bytes_of(one) == kept.bytes_of_matrices([(1, 100, inputs)])
    assert bytes_of(experts) == 4 * bytes_of(one)


def test_a_decode_of_a_mixture_is_counted_with_the_experts_of_its_token(tmp_path: Path) -> None:
    """A decode reads two of five experts in each layer, in whole panels."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    kernels = kernels_for("cpu", torch.bfloat16)
    model = load_model(tmp_path, torch.bfloat16, kernels, load_format="dummy", quantization="int4")
    mixtures = [layer.mlp.experts for layer in model.weights.layers if isinstance(layer.mlp, MixtureMLP)]
    read = sum((bytes_of(each.gate_up) + bytes_of(each.down)) * 2 // 5 for each in mixtures)  # type: ignore[attr-defined]
    precision = Precision.of_engine("bfloat16", "int4", "auto", 24)
    assert step_work(read_shape(CONFIG | EXPERTS), [Chunk(1)], precision)[Operation.EXPERTS].weight_bytes == read
