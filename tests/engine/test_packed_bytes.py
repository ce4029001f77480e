"""The planner's bytes of quantised weights are those that the engine packs, and its defaults are the engine's own."""

from __future__ import annotations

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
from headway.cost.work import Operation, step_work
from headway.engine.memory import bytes_per_block, zero_caches
from headway.kernels import kernels_for
from headway.kernels.cpu_experts import PackedExperts
from headway.kernels.cpu_linear import PackedLinear
from headway.kernels.cpu_memory import LargePages
from headway.kernels.cpu_team import Team
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder, DenseMLP, MixtureMLP
from headway.models.latent_attention import LatentWeights
from headway.models.loading import QUANTIZATIONS, load_model
from tests.kernels.grouped import random_weight

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
    """Of what a product reads: panels, the scales of rows and of groups, and minima that are no scales."""
    size, groups = linear._packed.nbytes + linear._row_scales.nbytes, linear._groups
    if groups is not None:
        size += groups.scales.nbytes
        size += 0 if groups.minima is groups.scales or groups.minima.dim() == 1 else groups.minima.nbytes
    return size


def attention(mixer: Any) -> list[Any]:
    if isinstance(mixer, LatentWeights):
        return [mixer.lowered, mixer.raised, mixer.o, mixer.to_keys.linear, mixer.to_values.linear]
    return [mixer.qkv, mixer.o]


def packed(model: Decoder) -> Iterator[PackedLinear]:
    linears: list[Any] = [model.weights.lm_head]
    for layer in model.weights.layers:
        linears += attention(layer.mixer)
        mlps = [layer.mlp.experts, layer.mlp.shared] if isinstance(layer.mlp, MixtureMLP) else [layer.mlp]
        for mlp in mlps:
            assert isinstance(mlp, DenseMLP | PackedExperts)
            linears += [mlp.gate_up, mlp.down]
    for linear in linears:
        assert isinstance(linear, PackedLinear)
        yield linear


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, EXPERTS, LATENT],
    ids=["tied", "untied", "experts", "latent"],
)
@pytest.mark.parametrize("quantization", [each for each in ENGINE_QUANTIZATIONS if each != "none"])
def test_the_planner_counts_what_the_engine_packs(tmp_path: Path, quantization: str, changes: dict[str, Any]) -> None:
    """Panels, groups and the scales of both; norms, routers, and an embedding beside a head stay in bfloat16."""
    config = CONFIG | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    kernels = kernels_for("cpu", torch.bfloat16)
    model = load_model(tmp_path, torch.bfloat16, kernels, load_format="dummy", quantization=quantization)
    weights = sum(map(bytes_of, packed(model)))
    shape = read_shape(config)
    parts = shape.matrices()
    plain = 2 * (parts["rest"] + parts["embedding"])
    assert weight_bytes(shape, Precision.of_engine("bfloat16", quantization, "auto", 24)) == weights + plain


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
    "mxfp4": ("float4-weight-only", 32, 1),
    "q4_k": ("int4-weight-only", 32, 8),
    "q6_k": ("int8-weight-only", 16, 16),
    "q8_0": ("int8-weight-only", 32, 1),
}


@pytest.mark.parametrize("name", ENGINE_CHECKPOINTS)
def test_the_planner_counts_checkpoints_as_the_engine_keeps_them(name: str) -> None:
    """A matrix of rows that fill no panel, read whole by a product; four experts of a mixture, of which two are."""
    scheme, size, run = GROUPED[name]
    inputs = 384 if name == "fp8-weight-only" else 512
    weights = [random_weight(scheme, 100, inputs, size, run, dtype=torch.bfloat16) for _ in range(4)]
    if name != "q4_k":  # its minima are its own; others have none, or the scales
        weights = [replace(each, groups=replace(each.groups, minima=None)) for each in weights]
    if name in ("mxfp4", "q6_k", "q8_0"):
        weights = [replace(each, groups=replace(each.groups, offsets=each.groups.offsets * 0)) for each in weights]
    team, memory = Team(), LargePages()
    one = PackedLinear([(weights[0], None)], team, memory)
    experts = PackedLinear([(each, None) for each in weights], team, memory, count=4)
    kept = Precision.of_engine("bfloat16", name, "auto", 24).linear
    assert bytes_of(one) == kept.bytes_of_matrices([(1, 100, inputs)])
    assert bytes_of(experts) == 4 * bytes_of(one)


def test_a_decode_of_a_mixture_is_counted_with_the_experts_of_its_token(tmp_path: Path) -> None:
    """In a layer each, two of five experts, whole panels of them."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    kernels = kernels_for("cpu", torch.bfloat16)
    model = load_model(tmp_path, torch.bfloat16, kernels, load_format="dummy", quantization="int4")
    mixtures = [layer.mlp.experts for layer in model.weights.layers if isinstance(layer.mlp, MixtureMLP)]
    read = sum((bytes_of(each.gate_up) + bytes_of(each.down)) * 2 // 5 for each in mixtures)  # type: ignore[attr-defined]
    precision = Precision.of_engine("bfloat16", "int4", "auto", 24)
    assert step_work(read_shape(CONFIG | EXPERTS), [Chunk(1)], precision)[Operation.EXPERTS].weight_bytes == read
