"""Tiny random checkpoints for engine tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": 1,
}


# Beside TINY_LLAMA: a mixture with a shared expert.
TINY_MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
}

# Beside TINY_LLAMA: windows in every second layer, and what else these have of their own.
TINY_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    "sliding_window": 20,
}
TINY_GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 20,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
TINY_LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
# The last two layers have no cache of their own, and those without a window have larger heads.
TINY_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 512,
    "use_double_wide_mlp": True,
    "rope_theta": None,
    "tie_word_embeddings": True,
}
TINY_OLMO: dict[str, Any] = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 20, "sliding_window_pattern": 2}
TINY_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 20,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}


def write_config(folder: Path, **changes: Any) -> str:
    """A folder that `--load-format dummy` can serve; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
    return str(folder)
