"""Tiny random Hugging Face models with experts, latents, sinks or GPT-J's layout: what the cost model is held to."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    GPTJForCausalLM,
    GptOssForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
)

FAMILIES: dict[str, type[PreTrainedModel]] = {
    "mixtral": MixtralForCausalLM,
    "qwen2_moe": Qwen2MoeForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "deepseek_v2": DeepseekV2ForCausalLM,
    "deepseek_v3": DeepseekV3ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "gpt_j": GPTJForCausalLM,
}

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# The rank is large, so that latents are expanded and not absorbed over the short prompts of these tests.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 18,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
QWEN = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "head_dim": 10}
QWEN_SHARED = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
}
OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 10, "sliding_window": 3}
GPT_J = {"vocab_size": 53, "n_positions": 64, "n_embd": 24, "n_layer": 3, "n_head": 4, "rotary_dim": 4}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_tied": (
        "mixtral",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "mixtral_window": ("mixtral", SIZES | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5}),
    "qwen2_moe": ("qwen2_moe", SIZES | QWEN_SHARED),
    "qwen2_moe_some_dense": ("qwen2_moe", SIZES | QWEN_SHARED | {"mlp_only_layers": [2], "qkv_bias": False}),
    "qwen3_moe": ("qwen3_moe", SIZES | QWEN),
    "qwen3_moe_bias": ("qwen3_moe", SIZES | QWEN | {"attention_bias": True}),
    "qwen3_moe_every_second": ("qwen3_moe", SIZES | QWEN | {"decoder_sparse_step": 2}),
    "qwen3_moe_some_dense": ("qwen3_moe", SIZES | QWEN | {"mlp_only_layers": [0, 2], "decoder_sparse_step": 1}),
    "qwen3_moe_third": ("qwen3_moe", SIZES | QWEN | {"mlp_only_layers": [1], "decoder_sparse_step": 3}),
    "qwen3_moe_both": ("qwen3_moe", SIZES | QWEN | {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "qwen3_moe_all_dense": ("qwen3_moe", SIZES | QWEN | {"mlp_only_layers": [0, 1, 2, 3]}),
    "deepseek_v2": ("deepseek_v2", SIZES | LATENT),
    "deepseek_v2_q_rank": ("deepseek_v2", SIZES | LATENT | {"q_lora_rank": 9, "first_k_dense_replace": 0}),
    "deepseek_v3": ("deepseek_v3", SIZES | LATENT | {"q_lora_rank": 9}),
    "deepseek_v3_two_dense": ("deepseek_v3", SIZES | LATENT | {"first_k_dense_replace": 2, "n_shared_experts": 1}),
    "gpt_oss": ("gpt_oss", SIZES | OSS),
    "gpt_oss_no_bias": ("gpt_oss", SIZES | OSS | {"attention_bias": False, "layer_types": ["full_attention"] * 4}),
    "gpt_j": ("gpt_j", GPT_J),
    "gpt_j_tied": ("gpt_j", GPT_J | {"tie_word_embeddings": True}),
    "gpt_j_inner": ("gpt_j", GPT_J | {"n_inner": 40}),
}


@functools.cache
def build(case: str) -> PreTrainedModel:
    """A float32 model in eval mode, whose experts run one after the other and whose attention is not fused."""
    family, settings = CASES[case]
    model_class = FAMILIES[family]
    config = model_class.config_class(**settings, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def config_json(model: PreTrainedModel) -> dict[str, Any]:
    """What its config.json would hold."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name, with DeepSeek-V3's expert biases: published checkpoints hold them, here they are buffers."""
    yield from model.named_parameters()
    yield from (
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
    )
