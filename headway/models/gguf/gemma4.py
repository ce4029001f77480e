"""Reads the keys of config.json for Gemma 4, whose layers are not alike, from a GGUF file. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.cost.values import ModelError
from headway.models.gguf.files import GGUFTensor

_KEYS = {
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def gemma4_config(
    values: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], turned: list[float], source: str
) -> dict[str, Any]:
    """Keys beside those that all families have.

    Args:
        turned: the divisor of the frequency of each pair in a head without a window: 1, or so much that the pair is not
            rotated.

    Raises:
        ModelError: a key is missing or of another kind.
    """
    said = {name.removeprefix("gemma4."): value for name, value in values.items() if name.startswith("gemma4.")}
    is_local, layers = said.get("attention.sliding_window_pattern"), said.get("block_count")
    if not isinstance(is_local, list) or not isinstance(layers, int) or not 0 < len(is_local) == layers:
        raise ModelError(f"{source}: gemma4.attention.sliding_window_pattern is not one for each of {layers} layers")
    widths, heads = (_each(said, key, layers, source) for key in ("feed_forward_length", "attention.head_count_kv"))
    found: dict[str, Any] = {name: said.get(key) for name, key in _KEYS.items() if said.get(key) is not None}
    if said.get("expert_count"):
        found |= {"enable_moe_block": True} | {name: said.get(key) for name, key in _EXPERTS.items()}
    last, first_local = layers - 1, is_local.index(True) if True in is_local else layers - 1
    whole = {"head_dim": said.get("attention.key_length"), "num_key_value_heads": heads[last]}
    own = [layer for layer in range(layers - (found.get("num_kv_shared_layers") or 0)) if not is_local[layer]]
    table = tensors.get("per_layer_token_embd.weight")
    return found | {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in is_local],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[last] != widths[0],
        "num_key_value_heads": heads[first_local],
        "head_dim": said.get("attention.key_length_swa"),
        "per_layer_config": {str(last): whole},
        "attention_k_eq_v": bool(own) and f"blk.{own[-1]}.attn_v.weight" not in tensors,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": said.get("rope.freq_base"),
                "partial_rotary_factor": sum(each < 2 for each in turned) / len(turned),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": said.get("rope.freq_base_swa", 10_000.0)},
        },
    }


def _each(said: Mapping[str, Any], key: str, layers: int, source: str) -> list[int]:
    """A number of each layer: one for all, or a list."""
    value = said.get(key)
    numbers: list[Any] = value if isinstance(value, list) else [value] * layers
    if len(numbers) != layers or not all(isinstance(each, int) and each > 0 for each in numbers):
        raise ModelError(f"{source}: gemma4.{key} is not a number above 0, or one for each of {layers} layers")
    return numbers
