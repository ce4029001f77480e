"""Families with traits of their own: their configs as they are published, and what of them is refused."""

from __future__ import annotations

import pytest

from headway.models import ModelConfig, ModelError
from headway.models.tensors import expected_tensors
from tests.cost.published import GPT_OSS_20B

# As they are published; Gemma 3 with the old keys of its two kinds of positions.
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


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (GEMMA3, {"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM needs attention over a latent"),
        (GEMMA3, {"architectures": [[], {}]}, "must name one of LlamaForCausalLM"),
        (GEMMA2, {"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0, which is not a number"),
        (GEMMA3, {"hidden_activation": "silu"}, "hidden_activation is 'silu', which is not supported; only gelu_pyt"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
        (GPT_OSS, {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5, which is not supported, only 1.702 is"),
    ],
)
def test_what_is_lacking_is_said_in_one_line(raw, changes, said):
    with pytest.raises(ModelError, match=said) as refused:
        read(raw, **changes)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("folder/config.json: ")
