"""Writes what a GGUF file says of its model as a config.json, in a folder that is made of the file.

A folder is made of a file, once, which has what a checkpoint's folder has: config.json, the tokenizer's files, and
links to the GGUF files as its weights. So whoever reads a model's folder reads a GGUF file too. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.cost.values import ConfigValues, ModelError
from headway.files import cache_folder
from headway.models.gguf.files import GGUFModel, GGUFTensor, parts_of, read_gguf
from headway.models.gguf.gemma4 import gemma4_config
from headway.models.gguf.names import DELTA_NETS, GEMMA
from headway.models.gguf.tokenizer import tokenizer_files

# GGUF's names of architectures, and config.json's.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
}
# Families in which only a part of each head is rotated; a key says how much.
_TURNED_IN_PART = ("phi3", "glm4", "glm4moe", "minimax-m2", *DELTA_NETS)
# Weights of experts that are chosen sum to 1 unless a key says otherwise.
_NORMALIZED = ("qwen3moe", "qwen3next", "qwen35moe", "lfm2moe")
_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
}
# For deepseek2: the sizes of its heads have their own keys, beside those of what is cached.
_LATENT_FIELDS = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length_mla",
}
# For deepseek2, and for others with routers like its own.
_DEEPSEEK_FIELDS = {
    "first_k_dense_replace": "leading_dense_block_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_ERNIE_FIELDS = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "moe_layer_start_index": "leading_dense_block_count",
}
_LOCAL_EXPERTS = ("MixtralForCausalLM", "GptOssForCausalLM", "GraniteMoeForCausalLM", "MiniMaxM2ForCausalLM")
_SIGMOID = 2  # a value of expert_gating_func


def gguf_files(folder: Path) -> list[Path]:
    """The files of the GGUF model in a folder, in their order; none where there are safetensors, which go first.

    Raises:
        ModelError: there are several models, or a part of one is missing.
    """
    if next(folder.glob("*.safetensors"), None) is not None:
        return []
    models = sorted({tuple(parts_of(path)) for path in folder.glob("*.gguf")})
    if len(models) > 1:
        names = ", ".join(parts[0].name for parts in models)
        raise ModelError(
            f"{folder}: holds several models, {names}; give the file of one, or what tells it apart, as {folder}:Q4_K_M"
        )
    return list(models[0]) if models else []


def gguf_file(folder: Path, tag: str) -> Path:
    """The GGUF model in a folder, or below it, whose name has a part like Q4_K_M, in capitals or not.

    Raises:
        ModelError: there is none, or there are several, or a part of it is missing.
    """
    wanted = re.compile(rf"(.*[-._])?{re.escape(tag)}([-.].*)?", re.IGNORECASE)
    files = {parts_of(path)[0] for path in folder.rglob("*.gguf") if wanted.fullmatch(path.stem)}
    if len(files) != 1:
        there = ", ".join(sorted(path.name for path in files or folder.rglob("*.gguf"))) or "no GGUF file"
        raise ModelError(f"{folder}: {len(files) or 'no'} models have {tag} in their name; there is {there}")
    return files.pop()


def folder_of(path: Path) -> Path:
    """The folder of a GGUF file, below $XDG_CACHE_HOME/headway (~/.cache/headway), made where it is not there yet.

    Raises:
        ModelError: the file or one of its other parts is missing or damaged, or the folder cannot be written.
    """
    parts = [part.resolve() for part in parts_of(path.absolute())]
    described = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    digest = hashlib.sha256(json.dumps([_VERSION, described]).encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem[:100]}-{digest}"
    if (folder / "config.json").is_file():
        return folder
    model = read_gguf(path)
    config = config_of(model)
    contents = {"config.json": config, **tokenizer_files(model.values, str(model.path))}
    tokens = len(model.values["tokenizer.ggml.tokens"])
    if tokens > config["vocab_size"]:
        raise ModelError(f"{path}: its tokenizer has {tokens:,} tokens, but the model has {config['vocab_size']:,}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in parts:
            with suppress(FileExistsError):
                (folder / part.name).symlink_to(part)
        for name in sorted(contents, key="config.json".__eq__):  # last, as who finds it finds all
            draft = folder / f".{name}.{os.getpid()}"
            draft.write_text(json.dumps(contents[name], ensure_ascii=False), encoding="utf-8")
            draft.replace(folder / name)
    except OSError as error:
        raise ModelError(
            f"{folder}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to another folder"
        ) from error
    return folder


_VERSION = 3  # version of what is written into a folder


def config_of(model: GGUFModel) -> dict[str, Any]:
    """config.json of a GGUF file. Raises ModelError: its architecture is not supported, or a key is missing."""
    source, values, tensors = str(model.path), model.values, model.tensors
    family = values.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ModelError(
            f"{source}: general.architecture is {family!r}, which is not supported; "
            f"it must be one of {', '.join(ARCHITECTURES)}"
        )
    config = _stated(values, family, _FIELDS)
    _rename(family, config)
    if family == "gemma4":
        factors = tensors.get("rope_freqs.weight")
        divided = [1.0] if factors is None else _floats("rope_freqs.weight", factors, factors.size)
        config |= gemma4_config(values, tensors, divided, source)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{source}: tensor token_embd.weight is missing; use a file that holds a whole model")
    heads = ConfigValues(config, source).positive_int("num_attention_heads")
    biased = "blk.0.attn_q.bias" in tensors
    config |= {
        "head_dim": config.get("head_dim") or config.get("hidden_size", 0) // heads,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": biased,
        "use_bias": biased,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "norm_topk_prob": bool(values.get(f"{family}.expert_weights_norm", family in _NORMALIZED)),
        "use_sliding_window": False,
        "dtype": _dtype(tensors),
        "pooling_type": values.get(f"{family}.pooling_type"),
    }
    config |= _family_fields(model, family, config, heads)
    if any(tensor.kind not in _PLAIN for tensor in tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    scaling = _rope_scaling(model, family, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rename(family: str, config: dict[str, Any]) -> None:
    """Put config.json's names and counts in place of GGUF's, and the architecture that they tell."""
    architecture = ARCHITECTURES[family]
    if family == "llama" and config.get("num_experts"):
        architecture = "MixtralForCausalLM"
    if architecture in _LOCAL_EXPERTS and "num_experts" in config:
        config["num_local_experts"] = config.pop("num_experts")
    if family == "gpt-oss":
        config |= {"intermediate_size": config.get("moe_intermediate_size"), "experts_one_by_one": True}
    if config.get("num_nextn_predict_layers"):  # they count as layers
        config["num_hidden_layers"] = config.get("num_hidden_layers", 0) - config["num_nextn_predict_layers"]
    if not config.get("sliding_window"):
        config["sliding_window"] = None
    elif family == "olmo2":  # converters take both for one family
        architecture = "Olmo3ForCausalLM"
    for name in ("num_experts", "num_experts_per_tok"):
        if not config.get(name):
            config.pop(name, None)
    config["architectures"] = [architecture]


def _family_fields(model: GGUFModel, family: str, config: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """The keys of config.json that only this family has."""
    values, tensors, found = model.values, model.tensors, dict[str, Any]()
    turned = values.get(f"{family}.rope.dimension_count")
    if family in _TURNED_IN_PART and isinstance(turned, int):
        found["partial_rotary_factor"] = turned / config["head_dim"]
    if family in GEMMA:  # the largest of each have another scale than their heads' size
        is_largest = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}.get(family)
        found["query_pre_attn_scalar"] = config.get("hidden_size", 0) // heads if is_largest else config["head_dim"]
    if family == "deepseek2":
        found |= _latent(model, config)
    if family == "glm4moe":
        found |= _stated(values, family, _DEEPSEEK_FIELDS)
        found |= {"num_experts": None, "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}
    if family == "ernie4_5-moe":
        found |= _stated(values, family, _ERNIE_FIELDS) | {"num_experts": None}
    if family == "minimax-m2":  # all layers have experts of the one width
        found["intermediate_size"] = config.get("moe_intermediate_size")
    if family in DELTA_NETS:
        found |= _delta_net(values, family, str(model.path))
    if family in ("lfm2", "lfm2moe"):
        found |= _short_convolutions(config, tensors, str(model.path))
    return found


def _latent(model: GGUFModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that only deepseek2 has. It is DeepSeek-V2 or V3, which differ in their routers."""
    values = model.values
    if "blk.0.attn_k_b.weight" not in model.tensors:
        raise ModelError(f"{model.path}: tensor blk.0.attn_k_b.weight is missing; use a file of a newer converter")
    found = _stated(values, "deepseek2", _LATENT_FIELDS | _DEEPSEEK_FIELDS)
    whole = values.get("deepseek2.attention.key_length_mla")
    if isinstance(whole, int) and isinstance(found.get("qk_rope_head_dim"), int):
        found["qk_nope_head_dim"] = whole - found["qk_rope_head_dim"]
    is_v3 = values.get("deepseek2.expert_gating_func") == _SIGMOID
    found["architectures"] = ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"]
    if not is_v3 and found.get("n_group", 1) > 1:
        found["topk_method"] = "group_limited_greedy"
    return found | {"num_experts": None, "kv_b_by_heads": True, "norm_topk_prob": bool(config["norm_topk_prob"])}


def _stated(values: Mapping[str, Any], family: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """The fields of config.json that the family's keys in the file give."""
    return {name: values[f"{family}.{key}"] for name, key in fields.items() if f"{family}.{key}" in values}


def _delta_net(values: Mapping[str, Any], family: str, source: str) -> dict[str, Any]:
    """Converters put heads of values with the same keys apart for Qwen3.5, and one tensor in two for Qwen3-Next."""
    heads, inner = values.get(f"{family}.ssm.time_step_rank"), values.get(f"{family}.ssm.inner_size")
    if not isinstance(heads, int) or not isinstance(inner, int) or heads < 1 or inner % heads:
        raise ModelError(f"{source}: {family}.ssm.inner_size is {inner!r}, not a multiple of time_step_rank, {heads!r}")
    is_next = family == "qwen3next"
    apart = {"linear_gate_apart": True} if is_next else {"linear_value_heads_by_turns": True}
    return {"linear_value_head_dim": inner // heads, **apart}


def _short_convolutions(config: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str) -> dict[str, Any]:
    """LFM2: layers without heads of keys and values have a convolution."""
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list) or not heads or not all(isinstance(each, int) for each in heads):
        raise ModelError(f"{source}: attention.head_count_kv is {heads!r}; it must have a number for each layer")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in tensors),
        "use_expert_bias": any(".exp_probs_b." in name for name in tensors),
    }


_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The dtype of the matrices if all have the same, else bfloat16."""
    kinds = {tensor.kind for tensor in tensors.values() if len(tensor.shape) > 1}
    return _PLAIN.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope_scaling(model: GGUFModel, family: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Llama 3.1's scaling stands in a tensor, by how much each frequency is divided; Phi-3's in two."""
    if family == "gemma4":
        return None
    values, factors = model.values, model.tensors.get("rope_freqs.weight")
    kinds = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    if family == "phi3" and all(each in model.tensors for each in kinds.values()):
        pairs = config["head_dim"] // 2
        stated = {key: _floats(each, model.tensors[each], pairs) for key, each in kinds.items()}
        original = values.get(f"{family}.rope.scaling.original_context_length")
        return {"rope_type": "longrope", **stated, "original_max_position_embeddings": original}
    if factors is not None:
        numbers = _floats("rope_freqs.weight", factors, config["head_dim"] // 2)
        original = config.get("max_position_embeddings", 1)
        return {
            "rope_type": "longrope",
            "short_factor": numbers,
            "long_factor": numbers,
            "original_max_position_embeddings": original,
            "attention_factor": 1.0,
        }
    kind = values.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": values.get(f"{family}.rope.scaling.factor")}
    original = values.get(f"{family}.rope.scaling.original_context_length")
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    multiplier = values.get(f"{family}.rope.scaling.yarn_log_multiplier")
    if multiplier:  # it multiplies the logarithm of the factor: a tenth of what config.json has
        scaling |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    return scaling | ({"truncate": False} if family == "gpt-oss" else {})


def _floats(name: str, tensor: GGUFTensor, most: int) -> list[float]:
    import numpy as np

    if tensor.kind != "F32" or not 1 <= tensor.size // 4 <= most:
        raise ModelError(f"{tensor.path}: {name} has {tensor.kind} {list(tensor.shape)}; {most} F32 are needed")
    found: list[float] = np.fromfile(tensor.path, "<f4", tensor.size // 4, offset=tensor.first).tolist()
    return found
