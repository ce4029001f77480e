"""What config.json says, in its old and new spellings, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from headway.cost.layers import CacheSpec
from headway.engine.memory import bytes_per_block
from headway.models import ModelConfig, ModelError
from headway.models.tensors import expected_tensors

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN3_MOE = LLAMA | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]}
QWEN2_MOE = QWEN3_MOE | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 48}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(raw: dict, **changes) -> ModelConfig:
    return ModelConfig.from_dict({**raw, **changes}, "folder/config.json")


def without(raw: dict, key: str) -> dict:
    return {name: value for name, value in raw.items() if name != key}


def test_sizes_and_cache():
    config = read(LLAMA)
    shape = config.shape
    assert (shape.head_dim, shape.layers, shape.heads, shape.kv_heads) == (8, 4, 8, 2)
    assert config.caches == (CacheSpec(2, 8, 8),) * 4
    assert config.dtype == "bfloat16"


def test_qwen2_5_7b_needs_57344_bytes_of_cache_per_token():
    """28 layers, 4 KV heads of 128, bf16: the formula's figure for this model."""
    config = read(QWEN2, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, num_hidden_layers=28)
    assert bytes_per_block(config.caches, 1, torch.bfloat16) == 57_344


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (LLAMA, (False, False, False, False)),
        (LLAMA | {"attention_bias": True}, (True, True, False, False)),
        (LLAMA | {"mlp_bias": True}, (False, False, True, False)),
        (MISTRAL | {"attention_bias": True}, (False, False, False, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        (QWEN3 | {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_a_family(raw, expected):
    shape = read(raw).shape
    assert (shape.qkv_bias, shape.o_bias, shape.mlp_bias, shape.qk_norm) == expected


@pytest.mark.parametrize(
    ("raw", "head_dim", "num_kv_heads"),
    [
        (LLAMA | {"head_dim": 24}, 24, 2),
        (LLAMA | {"head_dim": None, "num_key_value_heads": None}, 8, 8),
        (without(LLAMA, "num_key_value_heads"), 8, 8),
        (QWEN3, 128, 2),
    ],
)
def test_heads_that_are_left_out(raw, head_dim, num_kv_heads):
    assert (read(raw).shape.head_dim, read(raw).shape.kv_heads) == (head_dim, num_kv_heads)


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (LLAMA | {"sliding_window": 32}, (None,) * 4),
        (MISTRAL | {"sliding_window": 32}, (32,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL, (4096,) * 4),
        (QWEN2 | {"sliding_window": 32}, (None,) * 4),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, (None, None, None, 32)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 32}, (None,) * 4),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
            (None, 32, None, 32),
        ),
    ],
)
def test_sliding_windows_by_layer(raw, windows):
    assert tuple(cache.window for cache in read(raw).caches) == windows


@pytest.mark.parametrize(
    ("raw", "layers", "normalized"),
    [
        (QWEN3_MOE, (0, 1, 2, 3), False),
        (QWEN3_MOE | {"norm_topk_prob": True}, (0, 1, 2, 3), True),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, (1, 3), False),
        (QWEN3_MOE | {"mlp_only_layers": [0, 3]}, (1, 2), False),
        (QWEN2_MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2}, (3,), False),
        (MIXTRAL, (0, 1, 2, 3), True),
    ],
)
def test_layers_with_experts(raw, layers, normalized):
    routing = read(raw).routing
    assert (routing.layers, routing.normalized) == (layers, normalized)
    assert read(raw).shape.experts.layers == len(layers)


@pytest.mark.parametrize("raw", [LLAMA, QWEN3_MOE | {"mlp_only_layers": [0, 1, 2, 3]}])
def test_a_model_without_experts_has_no_routing(raw):
    assert read(raw).routing is None and read(raw).shape.experts is None


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 2.0}),
        ("llama3", LLAMA3_SCALING),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128}),
    ],
)
def test_old_and_new_rope_keys_mean_the_same(kind, scaling, kind_key):
    old = read(LLAMA, rope_theta=5e5, rope_scaling={kind_key: kind, **scaling})
    new = read(LLAMA, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **scaling})
    assert old == new
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == (kind, 5e5, scaling["factor"])


def test_rope_without_any_key():
    assert (read(LLAMA).rope.kind, read(LLAMA).rope.theta) == ("default", 10_000.0)
    assert read(LLAMA, rope_scaling=None, rope_theta=500).rope.theta == 500.0


@pytest.mark.parametrize("where", [{}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}])
def test_partial_rotation(where):
    assert read(LLAMA, **(where or {"partial_rotary_factor": 0.5})).rope.dim == 4


def test_llama3_original_length_beside_the_scaling_wins():
    config = read(LLAMA, rope_scaling={"rope_type": "llama3", **LLAMA3_SCALING}, original_max_position_embeddings=256)
    assert config.rope.original_max_position == 256


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    config = read(LLAMA, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 128, "factor": None})
    assert config.rope.factor == 4.0


@pytest.mark.parametrize(
    ("scaling", "served", "longest"),
    [
        (None, 512, 512),
        ({"rope_type": "llama3", **LLAMA3_SCALING}, 512, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 512, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
    ],
)
def test_context_that_scaling_gives(scaling, served, longest):
    config = read(LLAMA, rope_scaling=scaling)
    assert (config.max_model_len, config.longest_model_len) == (served, longest)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, "float32"), ({"torch_dtype": None}, None)],
)
def test_dtype_in_both_spellings(changes, dtype):
    assert read(LLAMA, **changes).dtype == dtype


def published(architecture: str, sizes: tuple[int, ...], **rest) -> dict:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    raw = dict(zip(names, sizes, strict=True))
    return {"architectures": [architecture], "rms_norm_eps": 1e-5, "hidden_act": "silu", **raw, **rest}


@pytest.mark.parametrize(
    ("raw", "num_parameters", "context"),
    [
        (  # Llama 2 7B
            published("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, 32, 4096), rope_scaling=None, pretraining_tp=1),
            6_738_415_616,
            4096,
        ),
        (  # Llama 3.1 8B
            published(
                "LlamaForCausalLM",
                (128256, 4096, 14336, 32, 32, 8, 131072),
                rope_theta=500000.0,
                rope_scaling=LLAMA3_SCALING | {"original_max_position_embeddings": 8192, "rope_type": "llama3"},
                eos_token_id=[128001, 128008, 128009],
            ),
            8_030_261_248,
            131072,
        ),
        (  # Mistral 7B v0.1
            published("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 32768), sliding_window=4096),
            7_241_732_096,
            32768,
        ),
        (  # Qwen2.5 0.5B
            published(
                "Qwen2ForCausalLM",
                (151936, 896, 4864, 24, 14, 2, 32768),
                tie_word_embeddings=True,
                use_sliding_window=False,
                sliding_window=32768,
                max_window_layers=21,
                rope_theta=1000000.0,
            ),
            494_032_768,
            32768,
        ),
        (  # Qwen3 0.6B
            published(
                "Qwen3ForCausalLM",
                (151936, 1024, 3072, 28, 16, 8, 40960),
                head_dim=128,
                tie_word_embeddings=True,
                use_sliding_window=False,
                sliding_window=None,
                max_window_layers=28,
                attention_bias=False,
                rope_scaling=None,
                rope_theta=1000000,
            ),
            596_049_920,
            40960,
        ),
        (  # Mixtral 8x7B
            published(
                "MixtralForCausalLM",
                (32000, 4096, 14336, 32, 32, 8, 32768),
                num_local_experts=8,
                num_experts_per_tok=2,
                sliding_window=None,
                rope_theta=1000000.0,
            ),
            46_702_792_704,
            32768,
        ),
        (  # Qwen3 30B A3B
            published(
                "Qwen3MoeForCausalLM",
                (151936, 2048, 6144, 48, 32, 4, 40960),
                head_dim=128,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=768,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                use_sliding_window=False,
                sliding_window=None,
                attention_bias=False,
            ),
            30_532_122_624,
            40960,
        ),
        (  # Qwen1.5 MoE A2.7B
            published(
                "Qwen2MoeForCausalLM",
                (151936, 2048, 5632, 24, 16, 16, 8192),
                num_experts=60,
                num_experts_per_tok=4,
                moe_intermediate_size=1408,
                shared_expert_intermediate_size=5632,
                norm_topk_prob=False,
                decoder_sparse_step=1,
                use_sliding_window=False,
                sliding_window=32768,
                max_window_layers=21,
            ),
            14_315_784_192,
            8192,
        ),
    ],
)
def test_published_models_have_their_published_size(raw, num_parameters, context):
    config = ModelConfig.from_dict(raw)
    assert sum(math.prod(shape) for shape in expected_tensors(config).values()) == num_parameters
    assert config.max_model_len == context


def sliding(**changes) -> dict:
    return {"use_sliding_window": True, "sliding_window": 32, **changes}


REFUSED = [
    (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "architectures", "GPT2LMHeadModel"),
    (LLAMA, {"architectures": [[], {}]}, "architectures", "must name one of LlamaForCausalLM"),
    (LLAMA, {"architectures": []}, "architectures", "must name one of LlamaForCausalLM, MistralForCausalLM, Mixtral"),
    (without(LLAMA, "architectures"), {}, "architectures", "must name one of"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts", "a mixture of experts"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act", "gelu"),
    (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, "quantization_config", "hqq"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads", "8"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers", "0"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers", "True"),
    (LLAMA, {"vocab_size": "100"}, "vocab_size", "'100'"),
    (LLAMA, {"hidden_size": 60}, "hidden_size", "num_attention_heads"),
    (LLAMA, {"head_dim": 7}, "head_dim", "even"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps", "above 0"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps", "above 0"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'"),
    (LLAMA, {"attention_bias": 1}, "attention_bias", "1"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype", "float8_e4m3fn"),
    (LLAMA, {"rope_theta": -1}, "rope_theta", "-1"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling", "linear"),
    (LLAMA, {"rope_scaling": {"rope_type": "axial"}}, "rope_scaling.rope_type", "axial"),
    (LLAMA, {"rope_scaling": LONG | {"short_factor": [1.0]}}, "rope_scaling.short_factor", "4 numbers"),
    (LLAMA, {"rope_scaling": LONG | {"long_factor": [0.0] * 4}}, "rope_scaling.long_factor", "above 0"),
    (LLAMA, {"rope_scaling": LONG | {"long_mscale": 1.0}}, "rope_scaling.long_mscale", "longrope"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "missing"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor", "0.5"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor", "'4'"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling.low_freq_factor", "missing"),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor",
        "low_freq_factor",
    ),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section", "default"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters", "by layer"),
    (LLAMA, {"partial_rotary_factor": 0.4}, "partial_rotary_factor", "0.4"),
    (LLAMA, {"partial_rotary_factor": 2}, "partial_rotary_factor", "2"),
    (MISTRAL, {"sliding_window": -1}, "sliding_window", "-1"),
    (QWEN2, sliding(max_window_layers=-1), "max_window_layers", "-1"),
    (QWEN2, sliding(layer_types=["full_attention"]), "layer_types", "4"),
    (QWEN2, sliding(layer_types=["chunked_attention"] * 4), "layer_types", "chunked_attention"),
    (QWEN2, {"layer_types": ["sliding_attention"] * 4}, "layer_types", "use_sliding_window"),
    *[
        (without(LLAMA, key), {}, key, "missing")
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "rms_norm_eps",
        )
    ],
    (without(QWEN2, "num_key_value_heads"), {}, "num_key_value_heads", "missing"),
    (QWEN3_MOE, {"scoring_func": "sigmoid"}, "scoring_func", "only 'softmax' is"),
    (QWEN3_MOE, {"n_group": 8}, "n_group", "8"),
    (QWEN3_MOE, {"routed_scaling_factor": 2.5}, "routed_scaling_factor", "2.5"),
    (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob", "'yes'"),
    (QWEN3_MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok", "more than num_experts, 6"),
    (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers", "not a list"),
    (without(QWEN3_MOE, "moe_intermediate_size"), {}, "moe_intermediate_size", "missing"),
    (QWEN2_MOE, {"use_sliding_window": True}, "use_sliding_window", "not supported for Qwen2MoeForCausalLM"),
    (without(QWEN2_MOE, "shared_expert_intermediate_size"), {}, "shared_expert_intermediate_size", "missing"),
    (without(MIXTRAL, "num_local_experts"), {}, "num_local_experts", "missing"),
]


@pytest.mark.parametrize(("raw", "changes", "key", "detail"), REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(raw, changes, key, detail):
    with pytest.raises(ModelError) as caught:
        read(raw, **changes)
    message = str(caught.value)
    assert message.startswith("folder/config.json: ")
    assert key in message
    assert detail in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "not found"), ("{", "not valid JSON"), ("[]", "not a JSON object"), (b"\xff", "JSON")],
)
def test_a_config_file_that_cannot_be_read(tmp_path, content, problem):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=problem) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(path) in str(caught.value)


def test_reading_a_config_needs_no_torch():
    """The API process and the cost model read configs, and torch takes seconds to import."""
    check = "import sys, headway.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
