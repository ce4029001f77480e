"""The names that GGUF has for a Hugging Face checkpoint's tensors, and how it stores them. No torch."""

from __future__ import annotations

import re

from headway.models.gguf.files import GGUFModel

# Files of these families rotate neighbours in queries and keys, and Hugging Face checkpoints halves of a head.
_NEIGHBOURS = ("llama", "granite", "granitemoe", "smollm3")
GEMMA, DELTA_NETS = ("gemma", "gemma2", "gemma3"), ("qwen3next", "qwen35", "qwen35moe")
# The norms of these are stored as what they are, where a Hugging Face checkpoint has one less; but for one.
_LESS_ONE, _AS_IT_IS = GEMMA + DELTA_NETS, "linear_attn.norm.weight"
# Parts of a Hugging Face checkpoint's names, and what GGUF calls them.
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "self_attn.sinks": "attn_sinks",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.heads.k_b_proj": "attn_k_b",
    "self_attn.heads.v_b_proj": "attn_v_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
# Norms that have another name in some families.
_NORMS = {
    **{
        each: {"post_attention_layernorm": "post_attention_norm"}
        for each in ("gpt-oss", "glm4moe", "seed_oss", *DELTA_NETS)
    },
    **{each: {"model.norm": "token_embd_norm"} for each in ("lfm2", "lfm2moe")},
    "gemma2": _POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"},
    "gemma3": _POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"},
    "gemma4": _POST_NORMS
    | {
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router": "ffn_gate_inp",
        "router.per_expert_scale": "ffn_down_exps",
        "layer_scalar": "layer_output_scale",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    "olmo2": _POST_NORMS,
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}
# Tensors that are taken into config.json, or that nothing needs.
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Ends of names that GGUF has, and Hugging Face's checkpoints have not.
_ENDINGS = {
    "sinks": ".weight",
    "e_score_correction_bias": ".bias",
    "expert_bias": ".bias",
    "layer_scalar": ".weight",
    "per_expert_scale": ".scale",
    "dt_bias": ".bias",
    "A_log": ".",
}
_BLOCK = re.compile(r"blk\.(\d+)\.")
_LAYER, _EXPERT = re.compile(r"model\.layers\.(\d+)\.(.+)"), re.compile(r"(experts|heads)\.(\d+)\.")


def gguf_name(name: str, family: str = "llama") -> tuple[str, int | None]:
    """The name that GGUF has for a tensor of a Hugging Face checkpoint, and the number of an expert or head in it.

    Args:
        family: GGUF's name of the architecture.
    """
    further = _ENDINGS.get(name.rpartition(".")[2], "")
    stem, _, ending = f"{name}{further}".rpartition(".")
    expert = _EXPERT.search(stem)
    stem = _EXPERT.sub(r"\1.", stem)
    layer = _LAYER.fullmatch(stem)
    part = stem if layer is None else layer[2]
    found = _NORMS.get(family, {}).get(part) or TENSORS[part]
    found = found if layer is None else f"blk.{layer[1]}.{found}"
    return f"{found}.{ending}".rstrip("."), int(expert[2]) if expert else None


def family_of(model: GGUFModel) -> str:
    """The name that GGUF gives the architecture."""
    return str(model.values.get("general.architecture"))


def turns_neighbours(model: GGUFModel) -> bool:
    """Whether rows of queries and keys stand in the order of neighbours."""
    return family_of(model) in _NEIGHBOURS


def as_stored(model: GGUFModel, name: str) -> str:
    """How a tensor of a Hugging Face checkpoint is stored: "plus one" or "less its exponential", or "" as it is."""
    if name.endswith(".A_log"):
        return "less its exponential"
    shifted = family_of(model) in _LESS_ONE and name.endswith("norm.weight") and not name.endswith(_AS_IT_IS)
    return "plus one" if shifted else ""


def left_over(model: GGUFModel, used: set[str], layers: int) -> list[str]:
    """Tensors that have no place in a model of so many layers. Tensors of further layers predict further tokens."""
    found = model.tensors.keys() - used - set(_NOT_WEIGHTS)
    if model.values.get(f"{family_of(model)}.nextn_predict_layers"):
        found = {name for name in found if not (at := _BLOCK.match(name)) or int(at[1]) < layers}
    return sorted(found)
