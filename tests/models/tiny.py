"""Tiny random Hugging Face models, one for each branch of each family's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cohere2ForCausalLM,
    CohereForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
    GemmaForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    GlmForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    GraniteMoeForCausalLM,
    GraniteMoeHybridForCausalLM,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1ForCausalLM,
    Lfm2ForCausalLM,
    Lfm2MoeForCausalLM,
    LlamaForCausalLM,
    MiniMaxM2ForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    OlmoeForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
    SeedOssForCausalLM,
    SmolLM3ForCausalLM,
)

FAMILIES: dict[str, type[PreTrainedModel]] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "mixtral": MixtralForCausalLM,
    "qwen2_moe": Qwen2MoeForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "granite": GraniteForCausalLM,
    "phi3": Phi3ForCausalLM,
    "smollm3": SmolLM3ForCausalLM,
    "gemma": GemmaForCausalLM,
    "gemma2": Gemma2ForCausalLM,
    "gemma3": Gemma3ForCausalLM,
    "gemma4": Gemma4ForCausalLM,
    "olmo2": Olmo2ForCausalLM,
    "olmo3": Olmo3ForCausalLM,
    "deepseek_v2": DeepseekV2ForCausalLM,
    "deepseek_v3": DeepseekV3ForCausalLM,
    "glm4_moe": Glm4MoeForCausalLM,
    "glm4_moe_lite": Glm4MoeLiteForCausalLM,
    "glm": GlmForCausalLM,
    "glm4": Glm4ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "qwen3_next": Qwen3NextForCausalLM,
    "qwen3_5": Qwen3_5ForCausalLM,
    "qwen3_5_moe": Qwen3_5MoeForCausalLM,
    "lfm2": Lfm2ForCausalLM,
    "lfm2_moe": Lfm2MoeForCausalLM,
    "granite_moe": GraniteMoeForCausalLM,
    "granite_hybrid": GraniteMoeHybridForCausalLM,
    "olmoe": OlmoeForCausalLM,
    "minimax_m2": MiniMaxM2ForCausalLM,
    "ministral3": Ministral3ForCausalLM,
    "ernie4_5": Ernie4_5ForCausalLM,
    "ernie4_5_moe": Ernie4_5_MoeForCausalLM,
    "seed_oss": SeedOssForCausalLM,
    "cohere": CohereForCausalLM,
    "cohere2": Cohere2ForCausalLM,
    "hunyuan": HunYuanDenseV1ForCausalLM,
    "hunyuan_moe": HunYuanMoEV1ForCausalLM,
}

BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"head_dim": 16, "rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LONG_FACTORS = [1.0 + 0.3 * pair for pair in range(8)]
LONG = rope("longrope", short_factor=LONG_FACTORS, long_factor=LONG_FACTORS, original_max_position_embeddings=16)
DYNAMIC = rope("dynamic", factor=2.0) | {"max_position_embeddings": 32}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 6}
MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
}
# Half of a head of 24 is turned, of which LongRoPE has a factor for each pair.
PARTIAL = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
        "original_max_position_embeddings": 16,
    },
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 40}

GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6} | rope("default")

# Caps that products and logits come near to.
GEMMA2 = {
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
OLMO3 = {
    "pad_token_id": 0,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.2,
        },
    },
}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    },
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 131,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    },
}
GEMMA4_SHARED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
    + ["sliding_attention"] * 2
    + ["full_attention"],
}
# Latents of more words than a vector has, and of a rest.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 36,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-6,
}
LATENT_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.5,
        "mscale_all_dim": 0.7,
    }
}
GLM_MOE = {each: size for each, size in LATENT.items() if not each.startswith(("kv_", "q_", "qk_", "v_", "num_key"))}
GLM = {"head_dim": 16, "attention_bias": True, "pad_token_id": 0} | rope("default", partial_rotary_factor=0.5)

DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8}
GRANITE_4 = MULTIPLIERS | {
    "num_local_experts": 0,
    "shared_intermediate_size": 56,
    "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 6,
    "mamba_expand": 2,
}
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
ERNIE_MOE = {
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_all_heads": ("llama", {"num_key_value_heads": 4}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_mlp_bias": ("llama", {"mlp_bias": True}),
    "llama_wide_head": ("llama", {"head_dim": 20}),
    "llama_theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama_llama3": ("llama", LLAMA3),
    "llama_linear": ("llama", rope("linear", factor=3.0)),
    "llama_dynamic": ("llama", DYNAMIC),
    "llama_yarn": ("llama", YARN),
    "llama_yarn_tuned": (
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=3.0,
            beta_slow=0.5,
            attention_factor=0.8,
            truncate=False,
        ),
    ),
    "llama_yarn_mscale": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.5, mscale_all_dim=0.5),
    ),
    "llama_longrope": ("llama", LONG),
    "llama_longrope_tuned": (
        "llama",
        rope(
            "longrope",
            short_factor=LONG_FACTORS,
            long_factor=[1.0] * 8,
            original_max_position_embeddings=64,
            attention_factor=1.2,
        ),
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 6, "head_dim": 8}),
    "mistral_tied": ("mistral", {"sliding_window": 9, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window_from_layer_1": ("qwen2", QWEN_WINDOW | {"max_window_layers": 1}),
    "qwen2_window_by_layer_types": (
        "qwen2",
        QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2_window_unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 6, "max_window_layers": 0}),
    "qwen2_yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3_attention_bias": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3_tied_window": (
        "qwen3",
        QWEN_WINDOW | {"head_dim": 16, "tie_word_embeddings": True, "max_window_layers": 2, "num_key_value_heads": 1},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 6}),
    "qwen2_moe": ("qwen2_moe", SHARED),
    "qwen2_moe_normalized": ("qwen2_moe", SHARED | {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe_every_second": ("qwen2_moe", SHARED | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe_all_of_few": ("qwen3_moe", EXPERTS | {"num_experts": 3, "num_experts_per_tok": 3}),
    "gemma": ("gemma", {"head_dim": 20, "tie_word_embeddings": True, "pad_token_id": 0}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2_uncapped": ("gemma2", GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "olmo2": ("olmo2", {"pad_token_id": 0}),
    "olmo2_biases": ("olmo2", {"pad_token_id": 0, "attention_bias": True, "num_key_value_heads": None}),
    "olmo3": ("olmo3", OLMO3),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3_untied": ("gemma3", GEMMA3 | {"sliding_window_pattern": 2, "tie_word_embeddings": False}),
    "gemma4": ("gemma4", GEMMA4 | {"final_logit_softcapping": 8.0}),
    "gemma4_shared": ("gemma4", GEMMA4 | GEMMA4_SHARED),
    "gemma4_keys_are_values": (
        "gemma4",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_experts": (
        "gemma4",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "tie_word_embeddings": False},
    ),
    "deepseek_v2": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2_lite": ("deepseek_v2", LATENT | LATENT_YARN | {"q_lora_rank": None, "num_hidden_layers": 2}),
    "deepseek_v3": ("deepseek_v3", LATENT | LATENT_YARN),
    "deepseek_v3_dense": ("deepseek_v3", LATENT | LATENT_YARN | {"first_k_dense_replace": 3}),
    "deepseek_v3_one_group": (
        "deepseek_v3",
        LATENT | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False},
    ),
    "glm4_moe": ("glm4_moe", GLM_MOE | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_plain": ("glm4_moe", GLM_MOE | {"head_dim": 16, "n_group": 1, "topk_group": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "glm": ("glm", GLM),
    "glm4": ("glm4", GLM),
    "glm4_turned_whole": ("glm4", GLM | rope("default", partial_rotary_factor=1.0) | {"attention_bias": False}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss_scaled": ("gpt_oss", GPT_OSS | YARN | {"head_dim": 8, "layer_types": ["full_attention"] * 3}),
    "granite": ("granite", MULTIPLIERS | {"tie_word_embeddings": True}),
    "granite_biases": ("granite", MULTIPLIERS | {"attention_bias": True, "mlp_bias": True}),
    "qwen3_next": ("qwen3_next", DELTA_NET | SHARED),
    "qwen3_next_other_sizes": (
        "qwen3_next",
        DELTA_NET
        | SHARED
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1]},
    ),
    "qwen3_5": ("qwen3_5", DELTA_NET),
    "qwen3_5_tied": ("qwen3_5", DELTA_NET | {"tie_word_embeddings": True, "layer_types": None, "attention_bias": True}),
    "qwen3_5_moe": ("qwen3_5_moe", DELTA_NET | SHARED),
    "lfm2": ("lfm2", LFM2),
    "lfm2_biases": ("lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", LFM2 | EXPERTS | {"num_dense_layers": 1}),
    "lfm2_moe_scaled": (
        "lfm2_moe",
        LFM2 | EXPERTS | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
    ),
    "granite_moe": ("granite_moe", MULTIPLIERS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_4": ("granite_hybrid", GRANITE_4 | {"position_embedding_type": "rope"}),
    "granite_4_unturned": ("granite_hybrid", GRANITE_4 | {"tie_word_embeddings": True}),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "eos_token_id": 2}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE_MOE),
    "ernie4_5_moe_one": ("ernie4_5_moe", ERNIE_MOE | {"moe_layer_end_index": 1, "moe_num_shared_experts": 0}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "pad_token_id": 0}),
    "seed_oss_biases": ("seed_oss", {"head_dim": 16, "pad_token_id": 0, "attention_out_bias": True, "mlp_bias": True}),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": None}),
    "phi3_long_window": ("phi3", PARTIAL | {"pad_token_id": 0, "sliding_window": 6}),
    "smollm3": ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "smollm3_listed": ("smollm3", {"pad_token_id": 0, "no_rope_layers": [0, 1, 0], "tie_word_embeddings": True}),
    "cohere": ("cohere", {"logit_scale": 0.3, "layer_norm_eps": 1e-4, "attention_bias": True}),
    "cohere2": ("cohere2", GEMMA2 | {"layer_types": OLMO3["layer_types"], "logit_scale": 0.3}),
    "hunyuan": ("hunyuan", rope("dynamic", alpha=50.0, factor=1.0) | {"tie_word_embeddings": True}),
    "hunyuan_moe": ("hunyuan_moe", {"head_dim": 16, "num_experts": 5, "moe_topk": 2}),
    "qwen3_moe_some_dense": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0, 2], "attention_bias": True}),
}


def build(case: str, **changes: Any) -> PreTrainedModel:
    """A float32 model in eval mode whose weights are large enough for each part of it to matter."""
    family, settings = CASES[case]
    model_class = FAMILIES[family]
    config = model_class.config_class(**{**BASE, **settings, **changes})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.6 * torch.rand(buffer.shape, generator=generator))
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                centre = 0 if family.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in name else 1
                parameter.copy_(centre + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 1)
            elif name.endswith(("conv1d.weight", "conv.weight")):
                parameter.copy_(0.5 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(2 * noise)
            elif name.endswith("experts.gate_up_proj"):  # large enough to be cut
                parameter.copy_(noise * 5 / parameter.shape[-2] ** 0.5)
            elif name.endswith(("_bias", ".bias")) or "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
    return model


def save(case: str, folder: Path, changes: dict[str, Any] | None = None, **save_options: Any) -> PreTrainedModel:
    model = build(case, **(changes or {}))
    model.save_pretrained(folder, **save_options)
    return model


def logits(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Hugging Face's own logits [len(prompt), vocab] of a prompt in one forward pass."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float()


def prompts(lengths: list[int], vocab_size: int = BASE["vocab_size"]) -> list[list[int]]:  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
