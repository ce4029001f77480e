"""Shapes are read as the decoder reads them, and their parameters are the published ones."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from headway.cost.config import read_shape
from headway.cost.layers import CacheSpec, StateSpec
from headway.cost.values import ModelError
from headway.kernels.reference import ReferenceKernels
from headway.models.config import ModelConfig
from headway.models.decoder import DenseMLP, MixtureMLP
from headway.models.latent_attention import LatentWeights
from headway.models.layer_inputs import MLPBesideExperts
from headway.models.loading import load_model
from headway.models.recurrent import DeltaNet
from headway.models.weights import AttentionWeights
from tests.cost import published, tiny_families
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
    config = ModelConfig.from_folder(tmp_path)
    shape = config.shape
    assert shape == read_shape(json.loads((tmp_path / "config.json").read_text()))
    assert shape.num_parameters == sum(p.numel() for _, p in tiny_families.tensors(model))
    assert shape.kv_elements_per_token == sum(each.elements for each in config.caches if isinstance(each, CacheSpec))
    assert shape.state_bytes == 4 * sum(each.elements for each in config.caches if isinstance(each, StateSpec))
    assert shape.parameters() == parameters_of(load_model(tmp_path, torch.float32, ReferenceKernels()))


def parameters_of(decoder):
    """Parameters by component, counted over the decoder's own tensors."""
    weights = decoder.weights

    def linear(part):
        return part.weight.numel() + (0 if part.bias is None else part.bias.numel())

    def sinks(mixer):
        return 0 if mixer.sinks is None else mixer.sinks.numel()

    def attention(mixer):
        if isinstance(mixer, LatentWeights):
            linears = [each for each in (mixer.lowered, mixer.raised, mixer.o) if each is not None]
            return sum(map(linear, linears)) + mixer.to_keys.weight.numel() + mixer.to_values.weight.numel()
        return linear(mixer.qkv) + linear(mixer.o) + sinks(mixer)

    def recurrent(mixer):
        parts = [mixer.taps]
        if isinstance(mixer, DeltaNet):
            parts += [mixer.rule.rate, mixer.rule.offset, mixer.rule.norm]
            products = [mixer.projection, mixer.heads_projection, mixer.o]
        else:
            parts += [mixer.bias] if mixer.bias is not None else []
            products = [mixer.projection, mixer.o]
        return sum(part.numel() for part in parts) + sum(map(linear, products))

    def norms(layer):
        mixer = layer.mixer
        parts = (layer.mixer_norm, layer.mlp_norm)
        if isinstance(mixer, LatentWeights):
            parts += (mixer.query_norm, mixer.latent_norm)
        elif isinstance(mixer, AttentionWeights):
            parts += (mixer.query_norm, mixer.key_norm)
        parts += (layer.mixed_norm, layer.mlp_out_norm)
        if isinstance(layer.mlp, MLPBesideExperts):
            parts += (*layer.mlp.norms, layer.mlp.router_norm)
        return sum(part.numel() for part in parts if part is not None) + (layer.end is not None)  # its scalar

    def per_expert(mixture):
        if isinstance(mixture, MLPBesideExperts):
            return [torch.empty(len(mixture.experts.experts))]  # which experts' products are multiplied with
        return [] if mixture.scores.bias is None else [mixture.scores.bias]

    def shared(mixture):
        return mixture.dense if isinstance(mixture, MLPBesideExperts) else mixture.shared

    def inputs():
        ends = [part for layer in weights.layers for part in (layer.end.gate, layer.end.projection)]
        norms = [weights.inputs.norm, *(layer.end.norm for layer in weights.layers)]
        whole = weights.inputs.table.args[0].numel() + linear(weights.inputs.projection)
        return whole + sum(map(linear, ends)) + sum(norm.numel() for norm in norms)

    def dense(mlp):
        return linear(mlp.gate_up.linear) + linear(mlp.down)

    mixers = [layer.mixer for layer in weights.layers]
    attending = [mixer for mixer in mixers if isinstance(mixer, AttentionWeights | LatentWeights)]
    others = [mixer for mixer in mixers if not isinstance(mixer, AttentionWeights | LatentWeights)]
    mixtures = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MixtureMLP | MLPBesideExperts)]
    tied = weights.embedding == weights.lm_head.rows
    table = weights.lm_head.weight if tied else weights.embedding.args[0]
    return {
        "embedding": table.numel(),
        "attention": sum(map(attention, attending)),
        **({"recurrent": sum(map(recurrent, others))} if others else {}),
        "ffn": sum(dense(layer.mlp) for layer in weights.layers if isinstance(layer.mlp, DenseMLP)),
        "norms": sum(norms(layer) for layer in weights.layers) + weights.final_norm.numel(),
        # Cohere2 has its one matrix twice: the rows that are looked up get a mean of 0.
        "head": 0 if decoder.config.shape.tied_embeddings else linear(weights.lm_head),
        **({"inputs": inputs()} if weights.inputs is not None else {}),
    } | (
        {
            "router": sum(
                linear(mixture.router) + sum(part.numel() for part in per_expert(mixture)) for mixture in mixtures
            ),
            "shared_experts": sum(map(dense, filter(None, map(shared, mixtures)))),
            "experts": sum(
                linear(gate_up.linear) + linear(down)
                for mixture in mixtures
                for gate_up, down in mixture.experts.experts
            ),
        }
        if mixtures
        else {}
    )


@pytest.mark.parametrize(
    ("config", "missing", "hugging_face"),
    [
        (published.LLAMA_3_1_8B, "num_key_value_heads", LlamaConfig),
        (published.MISTRAL_7B, "sliding_window", MistralConfig),
        (published.QWEN2_5_05B, "sliding_window", Qwen2Config),
        (published.QWEN2_5_7B, "max_window_layers", Qwen2Config),
        (published.QWEN3_8B, "head_dim", Qwen3Config),
        (published.GPT_OSS_20B, "sliding_window", GptOssConfig),
    ],
)
def test_a_missing_key_has_the_architecture_s_default(config, missing, hugging_face):
    raw = {key: value for key, value in config.items() if key != missing} | {"use_sliding_window": True}
    theirs, ours = hugging_face(**raw), read_shape(raw)
    default = {
        "num_key_value_heads": ours.kv_heads,
        "head_dim": ours.head_dim,
        "sliding_window": max((window for window in ours.sliding_windows if window), default=None),
        "max_window_layers": ours.sliding_windows.count(None),
    }
    assert default[missing] == getattr(theirs, missing)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architectures": ["MptForCausalLM"]},
            "architectures is ['MptForCausalLM']; it must name one of LlamaForCausalLM",
        ),
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
    with pytest.raises(ModelError) as error:
        read_shape({**published.LLAMA_3_1_8B, **change}, "models/x/config.json")
    assert said in str(error.value) and "models/x/config.json" in str(error.value) and "\n" not in str(error.value)


FAMILY_PARTS = {
    "lm_head": "head",
    "embed_tokens": "embedding",
    "wte": "embedding",
    "norm": "norms",
    "ln_": "norms",
    "shared_experts": "shared_experts",
    "mlp.experts": "experts",
    "mlp.gate.": "router",
    "shared_expert_gate": "router",
    "shared_expert.": "shared_experts",
    "mlp.router": "router",
    "attn": "attention",
    "mlp": "ffn",
}


def parts_of_hugging_face(model):
    """Parameters by component, by the names of Hugging Face's tensors; the first part of a name that fits decides."""
    parts = Counter()
    for name, tensor in tiny_families.tensors(model):
        parts[next(part for key, part in FAMILY_PARTS.items() if key in name)] += tensor.numel()
    return parts


@pytest.mark.parametrize("case", tiny_families.CASES)
def test_experts_and_latents_are_counted_as_hugging_face_has_them(case):
    model = tiny_families.build(case)
    shape = read_shape(tiny_families.config_json(model))
    theirs = parts_of_hugging_face(model)
    assert Counter({name: count for name, count in shape.parameters().items() if count}) == theirs
    assert shape.num_parameters == sum(theirs.values())


@pytest.mark.parametrize("case", tiny_families.CASES)
def test_active_parameters_are_those_that_one_token_goes_through(case):
    """All but the experts that are not chosen, and the embedding's table unless it is the head as well."""
    model = tiny_families.build(case)
    shape = read_shape(tiny_families.config_json(model))
    parts = parts_of_hugging_face(model)
    if shape.experts is not None:
        parts["experts"] = parts["experts"] * shape.experts.per_token // shape.experts.count
    assert shape.active_parameters == sum(parts.values()) - (0 if shape.tied_embeddings else parts["embedding"])


@pytest.mark.parametrize("case", tiny_families.CASES)
def test_every_parameter_is_kept_in_some_format(case):
    """Matrices by how they are kept: two dimensions and more apart from tables and routers; the rest is vectors."""
    model = tiny_families.build(case)
    shape = read_shape(tiny_families.config_json(model))
    kept = Counter()
    for name, tensor in tiny_families.tensors(model):
        is_router = any(part in name for part in ("mlp.gate.", "mlp.router", "shared_expert_gate"))
        if tensor.dim() < 2 or is_router or name.endswith("_bias"):
            kept["rest"] += tensor.numel()
        elif "embed_tokens" in name or "wte" in name:
            kept["head" if shape.tied_embeddings else "embedding"] += tensor.numel()
        else:
            parts = {"lm_head": "head", "mlp.experts": "experts", "kv_b_proj": "latent"}
            kind = next((kind for part, kind in parts.items() if part in name), "linear")
            kept[kind] += tensor.numel()
    assert Counter({name: count for name, count in shape.matrices().items() if count}) == kept


@pytest.mark.parametrize("case", tiny_families.CASES)
def test_the_cache_holds_what_hugging_face_s_cache_holds(case):
    """Elements of all keys and values, or of latents and their positions, after a prompt of 3 tokens."""
    model = tiny_families.build(case)
    shape = read_shape(tiny_families.config_json(model))
    with torch.inference_mode():
        cache = model(torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
    elements = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    windowed = sum(window is not None and window <= 3 for window in shape.sliding_windows)
    assert elements == 3 * shape.kv_elements_per_token - windowed * shape.kv_elements_per_layer


@pytest.mark.parametrize("case", [each for each in tiny_families.CASES if each.startswith("deepseek")])
def test_heads_of_latent_attention_are_as_wide_as_hugging_face_s(case):
    model = tiny_families.build(case)
    shape, attention = read_shape(tiny_families.config_json(model)), model.model.layers[0].self_attn
    assert (shape.heads, shape.head_dim) == (attention.num_heads, attention.qk_head_dim)
    assert (shape.attended, shape.kv_heads) == (attention.o_proj.in_features, attention.num_heads)


def test_layers_with_experts_of_deepseek():
    """Every n-th from the k-th on, by moe_layer_freq and first_k_dense_replace; null stands for none."""
    config = tiny_families.config_json(tiny_families.build("deepseek_v2"))
    nulls = read_shape({**config, "first_k_dense_replace": None, "n_shared_experts": None})
    assert (nulls.experts.layers, nulls.experts.shared_width) == (4, 0)
    for first, step, layers in ((0, 1, 4), (1, 1, 3), (0, 2, 2), (1, 2, 1), (3, 3, 1), (3, 2, 0), (4, 1, 0)):
        experts = read_shape({**config, "first_k_dense_replace": first, "moe_layer_freq": step}).experts
        assert (experts.layers if experts else 0) == layers


@pytest.mark.parametrize(
    ("case", "windows"),
    [("mixtral", [None] * 4), ("mixtral_window", [5] * 4), ("gpt_oss", [3, None, 3, None]), ("gpt_j", [None] * 3)],
)
def test_windows_are_read(case, windows):
    config = tiny_families.config_json(tiny_families.build(case))
    assert list(read_shape(config).sliding_windows) == windows
    config.pop("layer_types", None)
    assert list(read_shape(config).sliding_windows) == windows


def test_every_layer_of_a_mixture_of_qwen_s_has_the_window():
    """Unlike the dense ones it knows no max_window_layers: in Hugging Face's model the mask is one for all layers."""
    config = tiny_families.config_json(tiny_families.build("qwen3_moe"))
    windowed = read_shape({**config, "use_sliding_window": True, "sliding_window": 6})
    assert windowed.sliding_windows == (6, 6, 6, 6)
    assert read_shape({**config, "use_sliding_window": False, "sliding_window": 6}).sliding_windows == (None,) * 4


def test_a_missing_bias_key_of_gpt_oss_means_biases():
    config = tiny_families.config_json(tiny_families.build("gpt_oss"))
    without = {key: value for key, value in config.items() if key != "attention_bias"}
    assert read_shape(without) == read_shape(config)
    assert read_shape(config).qkv_bias and read_shape(config).o_bias


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, which is more than num_local_experts, 5"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
        ("mixtral", {"kv_lora_rank": 8}, "kv_lora_rank says that the model has multi-head latent attention"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3, which is not a list of layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, which is not a whole number of at least"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek_v2", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, which is not a whole number"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias is True"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers, 4, names"),
        ("gpt_j", {"n_head": 5}, "n_embd is 24, which is not a multiple of n_head, 5"),
    ],
)
def test_a_bad_config_of_a_mixture_is_refused_in_one_line(case, change, said):
    config = tiny_families.config_json(tiny_families.build(case))
    with pytest.raises(ModelError) as error:
        read_shape({**config, **change}, "models/x/config.json")
    assert said in str(error.value) and "models/x/config.json" in str(error.value) and "\n" not in str(error.value)
