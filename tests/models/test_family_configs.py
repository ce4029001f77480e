"""Families with traits of their own: their configs as they are published, and what of them is refused."""

from __future__ import annotations

import math

import pytest
import torch

from headway.cost.layers import CacheSpec
from headway.engine.memory import bytes_per_block
from headway.models import ModelConfig, ModelError
from headway.models.tensors import expected_tensors
from tests.cost.published import DEEPSEEK_V2_LITE, DEEPSEEK_V3, GPT_OSS_20B

# Configs as they are published; Gemma 3 has the old keys of its two kinds of positions.
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100278,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
V3 = DEEPSEEK_V3 | {
    "hidden_act": "silu",
    "n_group": 8,
    "norm_topk_prob": True,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}
V2_LITE = DEEPSEEK_V2_LITE | {
    "hidden_act": "silu",
    "n_group": 1,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
}
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GPT_OSS = GPT_OSS_20B | {
    "hidden_act": "silu",
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "swiglu_limit": 7.0,
}

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "quantization_config": FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
LFM2_8B_A1B = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "use_expert_bias": True,
    "vocab_size": 65536,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def read(raw: dict, **changes) -> ModelConfig:
    return ModelConfig.from_dict({**raw, **changes}, "folder/config.json")


def test_gemma_3_1b():
    """Five layers with a window and positions of their own, then one without; the sizes that the hub shows."""
    config = read(GEMMA3)
    assert config.shape.num_parameters == 999_885_952
    assert [cache.window for cache in config.caches[:7]] == [512] * 5 + [None, 512]
    assert (config.rope.theta, config.local_rope and config.local_rope.theta) == (1e6, 1e4)
    assert config.multipliers.embedding == 1152**0.5 and config.multipliers.attention == 1 / 16
    assert config.residual_eps == pytest.approx(1e-6 / 1152)


def test_gemma_2_2b():
    """A window in every second layer, the first among them, and one theta for all."""
    config = read(GEMMA2)
    assert config.shape.num_parameters == 2_614_341_888
    assert [cache.window for cache in config.caches[:4]] == [4096, None] * 2
    assert config.softcaps == (50.0, 30.0) and config.local_rope is None
    assert config.multipliers.embedding == 48 and config.multipliers.attention == 1 / 16
    assert expected_tensors(config)["model.layers.0.pre_feedforward_layernorm.weight"] == (2304,)


def test_olmo_3_7b():
    """Norms behind the parts alone, and of all heads together; only layers without a window have scaled positions."""
    config = read(OLMO3)
    assert config.shape.num_parameters == 7_298_011_136
    assert [cache.window for cache in config.caches[:5]] == [4096] * 3 + [None, 4096]
    assert (config.rope.kind, config.rope.attention_factor) == ("yarn", 1.2079441541679836)
    assert config.local_rope is not None and (config.local_rope.kind, config.local_rope.theta) == ("default", 5e5)
    expected = expected_tensors(config)
    assert expected["model.layers.0.self_attn.q_norm.weight"] == (4096,)
    assert not any("input_layernorm" in name for name in expected)


def test_deepseek_v3():
    """A latent and a key of 576 numbers for each token and layer, in blocks of 18 KB; FP8 but for router and norms."""
    config = read(V3)
    assert config.shape.num_parameters == 671_026_419_200
    assert config.caches == (CacheSpec(1, 576, 0, latent=512),) * 61
    assert bytes_per_block(config.caches, 16, torch.bfloat16) == 61 * 16 * 576 * 2
    assert (config.rope.dim, config.rope.attention_factor, config.max_model_len) == (64, 1.0, 163840)
    assert config.multipliers.attention == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    routing = config.routing
    assert routing is not None and routing.layers == tuple(range(3, 61)) and routing.normalized and routing.sigmoid
    assert (routing.groups, routing.best_groups, routing.factor) == (8, 4, 2.5)
    assert config.left_out == ("model.layers.61.",)
    expected = expected_tensors(config)
    assert expected["model.layers.3.mlp.gate.e_score_correction_bias"] == (256,)
    assert expected["model.layers.3.mlp.shared_experts.up_proj.weight_scale_inv"] == (16, 56)
    assert expected["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)
    assert "model.layers.3.mlp.gate.weight_scale_inv" not in expected


def test_deepseek_v2_lite():
    config = read(V2_LITE)
    assert config.shape.num_parameters == 15_706_484_224
    routing = config.routing
    assert routing is not None and (routing.sigmoid, routing.groups, routing.bias) == (False, 1, None)
    assert config.multipliers.attention == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert "model.layers.0.self_attn.q_proj.weight" in expected_tensors(config)


def test_glm_4_7_flash_and_4_5_air():
    """One with latents, one with 8 key/value heads of which half is turned; routers as DeepSeek-V3's."""
    flash, air = read(GLM_4_7_FLASH), read(GLM_4_5_AIR)
    assert 29.9e9 < flash.shape.num_parameters < 30.1e9 and flash.caches[0] == CacheSpec(1, 576, 0, latent=512)
    assert 106.8e9 < air.shape.num_parameters < 106.9e9 and air.caches[0] == CacheSpec(8, 128, 128)
    assert (air.rope.dim, air.traits.turns_neighbours, flash.traits.turns_neighbours) == (64, False, True)
    assert all(each.routing is not None and each.routing.sigmoid for each in (flash, air))


def test_gpt_oss_20b():
    """bfloat16 but for the experts, though config.json does not say so."""
    config = read(GPT_OSS)
    assert (config.dtype, config.rope.kind, config.rope.truncate, config.traits.gate) == (
        "bfloat16",
        "yarn",
        False,
        "clamped",
    )
    assert config.packed is not None and config.packed.scheme == "float4-weight-only"
    expected = expected_tensors(config)
    assert expected["model.layers.3.mlp.experts.gate_up_proj_blocks"] == (32, 5760, 90, 16)
    assert expected["model.layers.3.mlp.experts.down_proj_scales"] == (32, 2880, 90)
    assert expected["model.layers.3.self_attn.sinks"] == (64,)


def test_minimax_m2():
    """Half of a head of 128 is turned; norms of all heads together; 230 billion parameters, 10 of them active."""
    config = read(MINIMAX_M2)
    assert 228.5e9 < config.shape.num_parameters < 229.5e9 and 9.5e9 < config.shape.active_parameters < 10.5e9
    assert config.rope.dim == 64 and config.max_model_len == 196608
    expected = expected_tensors(config)
    assert expected["model.layers.0.block_sparse_moe.e_score_correction_bias"] == (256,)
    assert expected["model.layers.0.block_sparse_moe.experts.255.w1.weight_scale_inv"] == (12, 24)
    assert expected["model.layers.0.self_attn.q_norm.weight"] == (6144,)
    assert "model.layers.0.block_sparse_moe.gate.weight_scale_inv" not in expected


def test_lfm2_8b_a1b():
    config = read(LFM2_8B_A1B)
    assert 8.3e9 < config.shape.num_parameters < 8.4e9 and 1.4e9 < config.shape.active_parameters < 1.6e9
    assert config.routing is not None and config.routing.layers == tuple(range(2, 24)) and config.routing.sigmoid


def test_gemma_3_4b_without_its_eyes():
    """What its config.json leaves out is what the family has."""
    config = read(GEMMA3_4B)
    assert config.shape.num_parameters == 3_880_263_168
    assert (config.shape.heads, config.shape.kv_heads, config.rope.factor, config.dtype) == (8, 4, 8.0, "bfloat16")


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (V3, {"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM needs a sparse indexer, which"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax', which is not supported, only 'sigmoid' is"),
        (V3, {"n_group": 7}, "n_group is 7, which does not divide 256 experts into groups of several"),
        (V3, {"topk_group": 9}, "topk_group is 9, which of 8 groups of 32 experts does not fit num_experts_per_tok, 8"),
        (V3, {"kv_lora_rank": 511}, "kv_lora_rank is 511, which is not supported; it must be even"),
        (V3, {"attention_bias": True}, "attention_bias is True, which is not supported for DeepseekV3ForCausalLM"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True, which is not supported, only False is"),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of num_hidden_layers, 47"),
        (GEMMA3, {"architectures": [[], {}]}, "must name one of LlamaForCausalLM"),
        (GEMMA2, {"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0, which is not a number"),
        (GEMMA3, {"hidden_activation": "silu"}, "hidden_activation is 'silu', which is not supported; only gelu_pyt"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
        (LFM2_8B_A1B, {"architectures": ["NemotronHForCausalLM"]}, "NemotronHForCausalLM needs layers of Mamba, which"),
        (
            GEMMA3,
            {"architectures": ["Llama4ForConditionalGeneration"]},
            "needs attention in chunks, which this version",
        ),
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func is 'softmax', which is not supported, only 'sigmoid'"),
        (GPT_OSS, {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5, which is not supported, only 1.702 is"),
    ],
)
def test_what_is_lacking_is_said_in_one_line(raw, changes, said):
    with pytest.raises(ModelError, match=said) as refused:
        read(raw, **changes)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("folder/config.json: ")
