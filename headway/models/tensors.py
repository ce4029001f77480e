"""The tensors of a checkpoint by name and shape. No torch: their size is needed before it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.cost.layers import CacheSpec, Experts, StateSpec
from headway.cost.shape import ModelShape
from headway.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
Parts = tuple[str, ...]  # the gate, up and down projection of a feed-forward layer; or gate and up in one, and down
# Norms around a feed-forward layer and experts beside it: before the one and behind it, and so with the others.
NORMS_BESIDE = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
# How the names of stacked experts end, in newer checkpoints: gate rows above up rows, and down.
STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class MixtureNames(NamedTuple):
    """Names of the linear layers of a mixture of experts.

    Args:
        block: what the mixture is called.
        router: what makes the logits of the experts, and of the shared one where there is one.
        experts: those to choose from; none where they are stacked.
        shared: the one that every token goes through.
    """

    block: str
    router: tuple[str, ...]
    experts: tuple[Parts, ...]
    shared: Parts | None


def dense_names(block: str, fused: Sequence[str] = ()) -> Parts:
    """Names of the linear layers of a feed-forward layer."""
    gated = ("gate_up_proj",) if "gate_up_proj" in fused else ("gate_proj", "up_proj")
    return tuple(f"{block}.{part}" for part in (*gated, "down_proj"))


def attention_names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of the linear layers that make queries, keys and values; or what is compressed of them."""
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")[: 1 + projected_kv(config.shape, layer)]
    if "qkv_proj" in config.traits.fused:
        parts = ("qkv_proj",)
    if config.shape.latent is not None:
        parts = ("q_proj" if config.shape.latent.q_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
    return tuple(f"model.layers.{layer}.self_attn.{part}" for part in parts)


def projected_kv(shape: ModelShape, layer: int) -> int:
    """Projections of a layer beside that of queries (see ModelShape)."""
    if not shape.kinds:
        return 2
    kind = shape.kind_of(layer)
    return 0 if kind.source is not None else 2 - kind.keys_are_values


def recurrent_names(config: ModelConfig, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the linear layers at the beginning of a recurrent layer: of what is mixed and its gate, and of the rest.

    The rest are two numbers for each head of a delta net: how much it writes, and how much it forgets.
    """
    if config.shape.state is None or not config.shape.state.heads:
        return (f"model.layers.{layer}.conv.in_proj",), ()
    fused = config.traits.fused
    parts = (
        ("in_proj_qkvz",) if "in_proj_qkvz" in fused else ("in_proj_qkv", "in_proj_z"),
        ("in_proj_ba",) if "in_proj_ba" in fused else ("in_proj_b", "in_proj_a"),
    )
    mixed, rest = (tuple(f"model.layers.{layer}.linear_attn.{part}" for part in each) for each in parts)
    return mixed, rest


def mixture_names(config: ModelConfig, layer: int, stacked: bool) -> MixtureNames | None:
    """The names of a layer's mixture; None where it has no experts."""
    experts, routing = config.shape.experts, config.routing
    if experts is None or routing is None or layer not in routing.layers:
        return None
    if routing.by_turns:
        block = f"model.layers.{layer}.mlp"
        return MixtureNames(block, (f"{block}.router",), (), None)
    block = f"model.layers.{layer}.{'mlp' if stacked else routing.block}"
    prefixes = (f"{block}.experts.{number}" for number in range(0 if stacked else experts.count))
    gate, up, down = routing.parts
    named = tuple((f"{prefix}.{gate}", f"{prefix}.{up}", f"{prefix}.{down}") for prefix in prefixes)
    shared = dense_names(f"{block}.{routing.shared}".rstrip(".")) if experts.shared_width else None
    gates = ("gate", "shared_expert_gate") if experts.shared_gate else ("gate",)
    return MixtureNames(block, tuple(f"{block}.{each}" for each in gates), named, shared)


def expected_tensors(config: ModelConfig, stacked: bool = False) -> Shapes:
    """Name and shape of every tensor that a checkpoint of this config holds, in the order of use.

    A matrix that is packed has the tensors that PackedMatrices names in place of its weight.

    Args:
        stacked: the experts of a layer are one tensor (transformers 5), and not one each.
    """
    c = config.shape
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab, c.hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        is_packed = config.packed is not None and config.packed.covers(name)
        parts = config.packed.tensors(rows, columns) if config.packed and is_packed else {"weight": (rows, columns)}
        shapes.update({f"{name}.{part}": shape for part, shape in parts.items()})
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def feed_forward(parts: Parts, width: int, bias: bool) -> None:
        *gated, down = parts
        for name in gated:
            linear(name, 2 * width // len(gated), c.hidden, bias)
        linear(down, c.hidden, width, bias)

    def recurrent(index: int, state: StateSpec) -> None:
        names, layer = recurrent_names(config, index), f"model.layers.{index}"
        for name, rows in zip((*names[0], *names[1]), _recurrent_rows(state, *map(len, names)), strict=True):
            linear(name, rows, c.hidden, state.bias)
        if not state.heads:
            shapes[f"{layer}.conv.conv.weight"] = (state.channels, 1, state.width)
            if state.bias:
                shapes[f"{layer}.conv.conv.bias"] = (state.channels,)
            linear(f"{layer}.conv.out_proj", c.hidden, state.mixed, state.bias)
            return
        block = f"{layer}.linear_attn"
        shapes[f"{block}.conv1d.weight"] = (state.channels, 1, state.width)
        shapes.update({f"{block}.A_log": (state.heads,), f"{block}.dt_bias": (state.heads,)})
        shapes[f"{block}.norm.weight"] = (state.value_dim,)
        linear(f"{block}.out_proj", c.hidden, state.mixed, bias=False)

    def attention(index: int, cache: CacheSpec) -> None:
        names, block = attention_names(config, index), f"model.layers.{index}.self_attn"
        for name, rows in zip(names, _attention_rows(c, cache, len(names)), strict=True):
            linear(name, rows, c.hidden, c.qkv_bias)
        if (latent := c.latent) is not None:
            shapes[f"{block}.kv_a_layernorm.weight"] = (latent.kv_rank,)
            if config.by_heads:
                for head in range(c.heads):
                    linear(f"{block}.heads.{head}.k_b_proj", latent.kv_rank, latent.nope_dim, False)
                    linear(f"{block}.heads.{head}.v_b_proj", latent.value_dim, latent.kv_rank, False)
            else:
                linear(f"{block}.kv_b_proj", c.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank, False)
            if latent.q_rank is not None:
                shapes[f"{block}.q_a_layernorm.weight"] = (latent.q_rank,)
                linear(f"{block}.q_b_proj", c.heads * c.head_dim, latent.q_rank, False)
        if c.sinks:
            shapes[f"{block}.sinks"] = (c.heads,)
        if c.qk_norm:
            whole = c.qk_norm == "whole"
            shapes[f"{block}.q_norm.weight"] = ((c.heads if whole else 1) * cache.key_dim,)
            if cache.source is None:
                shapes[f"{block}.k_norm.weight"] = ((cache.heads if whole else 1) * cache.key_dim,)
        linear(f"{block}.o_proj", c.hidden, c.attended if c.latent else c.heads * cache.value_dim, c.o_bias)

    for i, cache in enumerate(config.caches):
        layer = f"model.layers.{i}"
        for norm in filter(None, config.traits.norms):
            shapes[f"{layer}.{norm}.weight"] = (c.hidden,)
        if isinstance(cache, StateSpec):
            recurrent(i, cache)
        else:
            attention(i, cache)
        if c.layer_scalars:
            shapes[f"{layer}.layer_scalar"] = (1,)
        if c.inputs is not None:
            linear(f"{layer}.per_layer_input_gate", c.inputs.width, c.hidden, False)
            linear(f"{layer}.per_layer_projection", c.hidden, c.inputs.width, False)
            shapes[f"{layer}.post_per_layer_input_norm.weight"] = (c.hidden,)
        mixture = mixture_names(config, i, stacked)
        if mixture is None or c.experts is None:
            width = c.kind_of(i).ffn if c.kinds else c.ffn
            feed_forward(dense_names(f"{layer}.mlp", config.traits.fused), width, c.mlp_bias)
            continue
        if config.routing and config.routing.beside:
            for norm in NORMS_BESIDE:
                shapes[f"{layer}.{norm}.weight"] = (c.hidden,)
            shapes.update(
                {f"{layer}.router.scale": (c.hidden,), f"{layer}.router.per_expert_scale": (c.experts.count,)}
            )
        bias, beside = (config.routing.bias, config.routing.beside) if config.routing else (None, False)
        for name, rows in zip(mixture.router, (c.experts.count, 1), strict=False):
            linear(name, rows, c.hidden, c.experts.router_bias and bias is None and not beside)
        if bias is not None:
            shapes[f"{mixture.block}.{bias}"] = (c.experts.count,)
        if config.routing and config.routing.by_turns:
            shapes.update(_experts_by_turns(layer, c.experts, c.hidden, config.packed is not None))
        elif stacked:
            shapes[f"{layer}.{STACKED[0]}"] = (c.experts.count, 2 * c.experts.width, c.hidden)
            shapes[f"{layer}.{STACKED[1]}"] = (c.experts.count, c.hidden, c.experts.width)
        for parts in mixture.experts:
            feed_forward(parts, c.experts.width, c.experts.bias)
        if mixture.shared is not None:
            feed_forward(mixture.shared, c.experts.shared_width, bias=False)
    if c.inputs is not None:
        whole = c.layers * c.inputs.width
        shapes["model.embed_tokens_per_layer.weight"] = (c.inputs.vocab, whole)
        linear("model.per_layer_model_projection", whole, c.hidden, False)
        shapes["model.per_layer_projection_norm.weight"] = (c.inputs.width,)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied_embeddings:
        linear("lm_head", c.vocab, c.hidden, bias=False)
    return shapes


def _attention_rows(shape: ModelShape, cache: CacheSpec, parts: int) -> tuple[int, ...]:
    """Of the linear layers that attention_names() names."""
    width = shape.head_dim if shape.latent else cache.key_dim
    queries, keys, values = shape.heads * width, cache.heads * cache.key_dim, cache.heads * cache.value_dim
    if shape.latent is not None:
        return shape.latent.q_rank or queries, keys
    queries *= 1 + shape.output_gate
    if parts == 1 and not shape.kinds:
        return (queries + keys + values,)
    return (queries, keys, values)[:parts]


def _recurrent_rows(state: StateSpec, mixed: int, rest: int) -> tuple[int, ...]:
    """Of the linear layers that recurrent_names() names, so many of both kinds."""
    of_heads = (2 * state.heads // rest,) * rest if rest else ()
    first = state.projected - 2 * state.heads
    return (first, *of_heads) if mixed == 1 else (state.channels, state.mixed, *of_heads)


def _experts_by_turns(layer: str, experts: Experts, hidden: int, packed: bool) -> Shapes:
    """gpt-oss's: [E, in, out], gate and up outputs by turns; packed [E, out, groups, bytes], and a scale for each."""
    shapes: Shapes = {}
    sizes = ((2 * experts.width, hidden), (hidden, experts.width))
    for name, (rows, inputs) in zip(STACKED, sizes, strict=True):
        shapes[f"{layer}.{name}_bias"] = (experts.count, rows)
        if packed:
            shapes[f"{layer}.{name}_blocks"] = (experts.count, rows, inputs // 32, 16)
            shapes[f"{layer}.{name}_scales"] = (experts.count, rows, inputs // 32)
        else:
            shapes[f"{layer}.{name}"] = (experts.count, inputs, rows)
    return shapes
