"""Gemma 4's layers, which are not alike: those with a window, those without, and the last ones without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.cost.layers import LayerInputs, LayerKind
from headway.cost.shape import ModelShape
from headway.cost.values import ConfigValues, ModelError


def with_kinds(values: ConfigValues, shape: ModelShape) -> ModelShape:
    """The shape with the sizes of each of its layers, of which the last has no window.

    Raises:
        ModelError: a key has a value that is not supported.
    """
    windows = (*shape.sliding_windows[:-1], None)
    own = shape.layers - _borrowing(values, shape.layers)
    kinds = []
    for is_own, window in sorted({(at < own, each) for at, each in enumerate(windows)}, key=str):
        layers = tuple(at for at, each in enumerate(windows) if (at < own, each) == (is_own, window))
        kind = _global(values, shape) if window is None else _local(shape)
        if not is_own:
            wide = 1 + values.boolean("use_double_wide_mlp")
            kind = replace(kind, ffn=wide * kind.ffn, source=_source(values, windows[:own], window))
        kinds.append(replace(kind, layers=layers, window=window))
    width = values.non_negative_int("hidden_size_per_layer_input", 0)
    if width and values.positive_int("vocab_size_per_layer_input") < shape.vocab:
        raise values.error("vocab_size_per_layer_input", f"is less than the vocabulary, {shape.vocab}")
    experts = shape.experts
    return replace(
        shape,
        sliding_windows=windows,
        kinds=tuple(kinds),
        inputs=LayerInputs(width, values.positive_int("vocab_size_per_layer_input")) if width else None,
        layer_scalars=True,
        # The plain feed-forward layer beside the experts is one that every token goes through. Both have norms of
        # their own around them, and the router has one too.
        experts=replace(experts, shared_width=shape.ffn) if experts else None,
        layer_norms=8 if experts else 4,
    )


def _borrowing(values: ConfigValues, layers: int) -> int:
    """How many of the last layers attend to keys and values of earlier ones."""
    count = values.non_negative_int("num_kv_shared_layers", 0)
    if count >= layers:
        raise values.error("num_kv_shared_layers", f"is not less than num_hidden_layers, {layers}")
    return count


def _source(values: ConfigValues, windows: tuple[int | None, ...], window: int | None) -> int:
    """The last layer of the same kind that has a cache."""
    found = [layer for layer, each in enumerate(windows) if each == window]
    if not found:
        raise values.error("num_kv_shared_layers", "leaves no layer of some kind with keys and values of its own")
    return found[-1]


def _local(shape: ModelShape) -> LayerKind:
    return LayerKind((), shape.kv_heads, shape.head_dim, shape.ffn)


def _global(values: ConfigValues, shape: ModelShape) -> LayerKind:
    """The sizes of a layer without a window.

    They stand in keys of their own, or since transformers 5 in those of a layer.
    """
    stated = values.get("per_layer_config")
    of_last = stated.get(str(shape.layers - 1)) if isinstance(stated, Mapping) else None
    if isinstance(of_last, Mapping):
        own = ConfigValues(of_last, values.source, prefix="per_layer_config.")
        kv_heads = own.positive_int("num_key_value_heads", shape.kv_heads)
        head_dim = own.positive_int("head_dim", shape.head_dim)
    else:
        head_dim = values.positive_int("global_head_dim")
        has_own = values.boolean("attention_k_eq_v")
        kv_heads = values.positive_int("num_global_key_value_heads", shape.kv_heads) if has_own else shape.kv_heads
    if shape.heads % kv_heads:
        raise ModelError(
            f"{values.source}: num_attention_heads is {shape.heads}, which is not a multiple of the "
            f"{kv_heads} key/value heads of layers without a window"
        )
    return LayerKind((), kv_heads, head_dim, shape.ffn, keys_are_values=values.boolean("attention_k_eq_v"))
