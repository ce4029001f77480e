"""GGUF files of tiny Hugging Face models, written by the package gguf, as llama.cpp's converter would."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel

from headway.models import families
from headway.models.gguf.config import ARCHITECTURES
from headway.models.gguf.names import gguf_name

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Where the two bytes of a block's float16 stand.
_SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
# The largest of a block's numbers, so that weights are about as large as those of tiny models.
_LARGEST = {"Q6_K": 32 * 127, "IQ4_NL": 127, "IQ4_XS": 127 * 32, "Q8_0": 127, "Q3_K": 4 * 32, "MXFP4": 1}


def random_blocks(kind: str, rows: int, width: int, seed: int, size: float = 0.1) -> np.ndarray:
    """Blocks of random bytes, with scales such that weights are no larger than about `size`."""
    generator = np.random.default_rng(seed)
    inputs, block = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = generator.integers(0, 256, (rows, width // inputs, block), dtype=np.uint8)
    largest = _LARGEST.get(kind, 31 * 63 if kind.endswith("K") else 31)
    for at in _SCALES[kind]:
        scales = generator.normal(size=(rows, width // inputs, 1)).astype(np.float16) * np.float16(size / largest)
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(rows, -1, 2)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(119, 124, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def dequantized(kind: str, blocks: np.ndarray) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, Kind[kind]))


def neighbours(rows: Any, heads: int) -> Any:
    """Rows in llama.cpp's order: neighbours where a Hugging Face checkpoint has halves of a head."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def halves(rows: Tensor, heads: int) -> Tensor:
    """The other way round."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write(
    path: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], str],
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    given: Mapping[str, Tensor] | None = None,
    fused_experts: bool = False,
    head: Mapping[str, Tensor] | None = None,
    **writer_options: Any,
) -> dict[str, Tensor]:
    """Write a model whose matrices become random blocks of the types that kind_of names; return them dequantised.

    F32, F16 and BF16 keep the model's own numbers, or those that are given. With fused_experts, gates and what they let
    through are one tensor. The last layer is that of a head for multi-token prediction, if there are tensors of one.
    """
    config = model.config
    architecture = type(model).__name__.replace("DeepseekV3", "DeepseekV2")
    family = next(ours for ours, theirs in ARCHITECTURES.items() if theirs == architecture)
    writer = gguf.GGUFWriter(path, family, **writer_options)
    if family == "gemma4":  # whose layers have sizes of their own
        config.allow_global_per_layer_attribute_access = True
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head:
        writer.add_nextn_predict_layers(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or []
    gate = model.model.layers[0].feed_forward.w1 if "conv" in kinds else None
    writer.add_head_count(config.num_attention_heads)
    latent = getattr(config, "kv_lora_rank", 0)
    if family == "gemma4":
        _unlike_layers(writer, model)
    else:
        of_layers = [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]
        writer.add_feed_forward_length(config.intermediate_size if gate is None else gate.out_features)
        writer.add_head_count_kv(of_layers if "conv" in kinds else 1 if latent else config.num_key_value_heads)
        writer.add_key_length(latent + config.qk_rope_head_dim if latent else head_dim)
        writer.add_value_length(latent or head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps if "conv" in kinds else config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    counts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    experts = next(filter(None, (getattr(config, each, None) for each in counts)), None)
    if experts:
        used = ("moe_k", "top_k_experts", "num_experts_per_tok")
        writer.add_expert_count(experts)
        writer.add_expert_used_count(next(getattr(config, each) for each in used if hasattr(config, each)))
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if family in ("phi3", "glm4", "glm4moe", "minimax-m2", "qwen3next", "qwen35", "qwen35moe"):
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    if family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for kind in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if family == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if family in ("granite", "granitemoe"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
    if family == "deepseek2":
        _latent(writer, config)
    if family == "glm4moe":
        _router(writer, config)
    if "linear_attention" in kinds:
        _delta_net(writer, config)
    if "conv" in kinds:
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if family == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if family == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    fused_experts |= family == "gemma4"
    (tokenizer or byte_tokenizer)(writer)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]}
    known |= {name for name in gguf.TENSOR_NAMES.values() if ".nextn." in name}  # newer converters have it of all heads
    plain: dict[str, Tensor] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for seed, (name, tensor) in enumerate((_tensors(model) | dict(head or {})).items()):
        theirs, expert = gguf_name(name, family)
        stem = re.sub(r"\.\d+\.", ".{bid}.", theirs)
        if family == "gemma4":
            stem = re.sub("ffn_(gate|up)_exps", "ffn_gate_up_exps", stem)
        assert re.sub(r"\.(weight|bias|scale)$", "", stem) in known
        if ".conv.conv." in name:
            tensor = tensor.squeeze(1)
        is_plain = "gate." in name.replace("_gate.", ".") or ".conv" in name
        kind = kind_of(name) if tensor.dim() == 2 and not is_plain else "F32"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
        heads = heads if family in ("llama", "granite", "granitemoe", "smollm3") else 0
        less_one = (family.startswith("gemma") and family != "gemma4") or (
            "qwen3" in family and "linear_attention" in kinds
        )
        if less_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        tensor = (given or {}).get(name, tensor)
        if kind in _SCALES:
            stored = random_blocks(kind, len(tensor), tensor.shape[1], seed)
            plain[name] = dequantized(kind, stored)
            plain[name] = halves(plain[name], heads) if heads else plain[name]
        else:
            plain[name] = tensor.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]).float()
            stored = gguf.quants.quantize(plain[name].numpy(), Kind[kind])
            stored = neighbours(stored, heads) if heads else stored
        if expert is not None:
            stacks.setdefault(theirs, []).append(stored)
            stored = np.stack(stacks[theirs])
            if len(stored) < (config.num_attention_heads if ".heads." in name else experts):
                continue
            if fused_experts and "ffn_gate_exps" in theirs:
                continue
            if fused_experts and "ffn_up_exps" in theirs:
                stored = np.concatenate([np.stack(stacks[theirs.replace("ffn_up", "ffn_gate")]), stored], axis=1)
                theirs = theirs.replace("ffn_up", "ffn_gate_up")
        writer.add_tensor(theirs, stored, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def _unlike_layers(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Write the keys of Gemma 4 like the converter."""
    config, layers = model.config, model.model.layers
    of_layers = [config.per_layer_config[number] for number in range(len(layers))]
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_key_length(of_layers[-1].head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_feed_forward_length([layer.mlp.intermediate_size for layer in layers])
    writer.add_head_count_kv([each.num_key_value_heads for each in of_layers])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    pairs = of_layers[-1].head_dim // 2
    turned = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32))
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _latent(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the keys of DeepSeek-V2 or V3 like the converter. Only V3 has a bias of scores."""
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    _router(writer, config)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _router(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    is_v2 = config.model_type == "deepseek_v2"
    writer.add_expert_weights_norm(not is_v2)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if is_v2 else gguf.ExpertGatingFuncType.SIGMOID)
    if config.n_group > 1 and getattr(config, "topk_method", "") != "greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _delta_net(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the keys of Qwen3-Next or Qwen3.5 like converters. One of every so many layers has attention."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if getattr(config, "shared_expert_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _of_delta_net(config: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Qwen3-Next's first projection in two; of Qwen3.5 heads of values with the same keys that many heads apart."""
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    block, _, part = name.partition(".linear_attn.")
    block += ".linear_attn"
    if part == "A_log":
        tensor = -tensor.exp()
    if part == "in_proj_qkvz.weight":
        sizes = [key_dim, key_dim, each * value_dim, each * value_dim]
        query, key, value, gate = (rows.flatten(0, 1) for rows in tensor.view(keys, sum(sizes), -1).split(sizes, 1))
        return {
            f"{block}.in_proj_qkv.weight": torch.cat([query, key, value]),
            f"{block}.in_proj_z.weight": gate,
        }
    if config.model_type == "qwen3_next":
        return {name: tensor.squeeze(1)} if "conv1d" in part else {name: tensor}

    def by_turns(rows: Tensor, size: int) -> Tensor:
        return rows.reshape(keys, each, size, -1).transpose(0, 1).reshape(rows.shape)

    if part in ("A_log", "dt_bias") or part.startswith(("in_proj_a.", "in_proj_b.")):
        tensor = by_turns(tensor, 1)
    elif part.startswith("in_proj_z."):
        tensor = by_turns(tensor, value_dim)
    elif part.startswith("out_proj."):
        tensor = by_turns(tensor.T.contiguous(), value_dim).T.contiguous()
    elif part.startswith(("in_proj_qkv.", "conv1d.")):
        tensor = tensor.squeeze(1)
        others = 2 * keys * key_dim
        tensor = torch.cat([tensor[:others], by_turns(tensor[others:], value_dim)])
    return {name: tensor}


def _by_heads(config: Any, name: str, matrix: Tensor) -> dict[str, Tensor]:
    """Split a matrix by heads: from queries to latents, and from latents to values."""
    block, found = name.removesuffix(".kv_b_proj.weight"), {}
    for number, head in enumerate(matrix.view(config.num_attention_heads, -1, config.kv_lora_rank)):
        keys, values = head.split([config.qk_nope_head_dim, config.v_head_dim])
        found[f"{block}.heads.{number}.k_b_proj.weight"] = keys.T.contiguous()
        found[f"{block}.heads.{number}.v_b_proj.weight"] = values.contiguous()
    return found


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors as a checkpoint has them: experts one by one, a tied head once."""
    found = {_published(model, name): each.detach() for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    for name in [name for name in found if ".linear_attn." in name]:
        found |= _of_delta_net(model.config, name, found.pop(name))
    if "conv_L_cache" in vars(model.config):
        renamed = families.ARCHITECTURES["Lfm2ForCausalLM"].stored
        for ours, theirs in renamed:
            found = {name.replace(theirs, ours): each for name, each in found.items()}
    for name in [name for name in found if name.endswith(".kv_b_proj.weight")]:
        found |= _by_heads(model.config, name, found.pop(name))
    for name in [name for name in found if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stacked, block = found.pop(name), name.rpartition(".")[0]
        by_number = "feed_forward" in name or "block_sparse_moe" in name
        gate_name, up_name, down_name = ("w1", "w3", "w2") if by_number else _PROJECTIONS
        if (biases := found.pop(f"{name}_bias", None)) is not None:
            found |= _by_turns(name, stacked, biases)
            continue
        for number, expert in enumerate(stacked):
            if name.endswith("gate_up_proj"):
                gate, up = expert.chunk(2)
                found |= {f"{block}.{number}.{gate_name}.weight": gate, f"{block}.{number}.{up_name}.weight": up}
            else:
                found[f"{block}.{number}.{down_name}.weight"] = expert
    return found


def _published(model: PreTrainedModel, name: str) -> str:
    """What checkpoints call a tensor that transformers has under another name."""
    if model.config.model_type == "minimax_m2":
        return name.replace(".mlp.", ".block_sparse_moe.")
    if model.config.model_type == "gemma4_text":
        return name.replace(".experts.", ".mlp.experts.").replace(".router.proj.", ".mlp.gate.")
    name = name.replace("mlp.router", "mlp.gate").replace("gate.moe_statics", "moe_statics")
    return name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe.experts", "mlp.experts")


def _by_turns(name: str, stacked: Tensor, biases: Tensor) -> dict[str, Tensor]:
    """gpt-oss's experts one by one: [in, out], gate and up outputs by turns."""
    block, parts = name.rpartition(".")[0], turns(name)
    found: dict[str, Tensor] = {}
    for number, (matrix, bias) in enumerate(zip(stacked, biases, strict=True)):
        for first, part in enumerate(parts):
            found[f"{block}.{number}.{part}.weight"] = matrix.T[first :: len(parts)].contiguous()
            found[f"{block}.{number}.{part}.bias"] = bias[first :: len(parts)].contiguous()
    return found


def turns(name: str) -> tuple[str, ...]:
    """The projections that a tensor of gpt-oss's experts holds, by turns."""
    return ("gate_proj", "up_proj") if "gate_up_proj" in name else ("down_proj",)


def byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """131 tokens of single bytes and two merges."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    tokens = ["<|begin|>", "<|end|>", *letters, "Ġ", "he", "hel"]
    tokens += [f"<unused{number}>" for number in range(131 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(letters) + 3), *[5] * (131 - len(letters) - 5)])
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT)
