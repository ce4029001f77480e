"""Shapes are read as the decoder reads them, and their parameters are the published ones."""

from __future__ import annotations

import json

import pytest
import torch

from headway.cost.config import read_shape
from headway.cost.shape import ModelShape, ShapeError
from headway.kernels.reference import ReferenceKernels
from headway.models.config import ModelConfig
from headway.models.loading import load_model
from tests.cost import published
from tests.models import tiny


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (published.QWEN2_5_05B, 494_032_768),
        (published.QWEN2_5_7B, 7_615_616_512),
        (published.LLAMA_3_1_8B, 8_030_261_248),
        (published.QWEN3_8B, 8_190_735_360),
        (published.MISTRAL_7B, 7_241_732_096),
    ],
)
def test_parameters_are_the_published_ones(config, parameters):
    """Published: the safetensors index of each model on the Hugging Face hub."""
    assert read_shape(config).num_parameters == parameters


@pytest.mark.parametrize("case", tiny.CASES)
def test_shape_and_parameters_are_those_of_the_decoder(case, tmp_path):
    model = tiny.save(case, tmp_path)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    config = ModelConfig.from_folder(tmp_path)
    same = {
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "tied_embeddings": config.tie_word_embeddings,
        "qkv_bias": config.qkv_bias,
        "o_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm,
        "sliding_windows": config.sliding_windows,
        "max_positions": config.max_position_embeddings,
    }
    assert {name: getattr(shape, name) for name in same} == same
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.kv_elements_per_token * 2 == config.kv_bytes_per_token(2)
    assert shape.parameters() == parameters_of(load_model(tmp_path, torch.float32, ReferenceKernels()))


def parameters_of(decoder):
    """Parameters by component, counted over the decoder's own tensors."""
    weights = decoder.weights

    def linear(part):
        return part.weight.numel() + (0 if part.bias is None else part.bias.numel())

    def norms(layer):
        parts = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        return sum(part.numel() for part in parts if part is not None)

    tied = weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()
    return {
        "embedding": weights.embedding.numel(),
        "attention": sum(linear(layer.qkv) + linear(layer.o) for layer in weights.layers),
        "ffn": sum(linear(layer.gate_up) + linear(layer.down) for layer in weights.layers),
        "norms": sum(norms(layer) for layer in weights.layers) + weights.final_norm.numel(),
        "head": 0 if tied else linear(weights.lm_head),
    }


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (published.LLAMA_3_1_8B, "num_key_value_heads"),
        (published.MISTRAL_7B, "sliding_window"),
        (published.QWEN2_5_05B, "sliding_window"),
        (published.QWEN2_5_7B, "max_window_layers"),
        (published.QWEN3_8B, "head_dim"),
    ],
)
def test_a_missing_key_has_the_architecture_s_default(config, missing):
    raw = {key: value for key, value in config.items() if key != missing}
    raw |= {"rms_norm_eps": 1e-5, "use_sliding_window": True}
    theirs, ours = ModelConfig.from_dict(raw), read_shape(raw)
    assert (ours.kv_heads, ours.head_dim, ours.sliding_windows) == (
        theirs.num_kv_heads,
        theirs.head_dim,
        theirs.sliding_windows,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["MptForCausalLM"]}, "architectures is ['MptForCausalLM']; known are LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"num_local_experts": 8}, "num_local_experts says that the model has a mixture of experts"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0, which is not a whole number of at least 1"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32, which is not a multiple of num_key_value_heads, 5"),
        ({"hidden_size": 4100}, "hidden_size is 4100, which is not a multiple"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', which is neither true nor false"),
    ],
)
def test_a_bad_config_is_refused_in_one_line(change, said):
    with pytest.raises(ShapeError) as error:
        read_shape({**published.LLAMA_3_1_8B, **change}, "models/x/config.json")
    assert said in str(error.value) and "models/x/config.json" in str(error.value) and "\n" not in str(error.value)


def test_a_shape_made_by_hand_is_checked():
    with pytest.raises(ShapeError, match="heads is 6, which is not a multiple of kv_heads, 4"):
        ModelShape(layers=1, hidden=8, heads=6, kv_heads=4, head_dim=2, ffn=8, vocab=8)
    with pytest.raises(ShapeError, match="layers is 0"):
        ModelShape(layers=0, hidden=8, heads=4, kv_heads=4, head_dim=2, ffn=8, vocab=8)
