"""The tensors of a checkpoint by name and shape. No torch: their size is needed before it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headway.cost.layers import CacheSpec, Experts, Latent, StateSpec
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
    """Names of the linear layers of a mixture of experts."""

    block: str  # what the mixture is called
    router: tuple[str, ...]  # what makes the logits of the experts, and of the shared one where there is one
    experts: tuple[Parts, ...]  # those to choose from; none where they are stacked
    shared: Parts | None  # the one that every token goes through


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
    prefixes = (f"{block}.experts.{number}" for number in range(0 if stacked else experts.here))
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
    c, tensors = config.shape, _Tensors(config, stacked)
    shapes = tensors.shapes
    shapes["model.embed_tokens.weight"] = (c.vocab, c.hidden)
    for index, cache in enumerate(config.caches):
        tensors.layer(index, cache)
    if c.inputs is not None:
        whole = c.layers * c.inputs.width
        shapes["model.embed_tokens_per_layer.weight"] = (c.inputs.vocab, whole)
        tensors.linear("model.per_layer_model_projection", whole, c.hidden)
        shapes["model.per_layer_projection_norm.weight"] = (c.inputs.width,)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied_embeddings:
        tensors.linear("lm_head", c.vocab, c.hidden)
    return shapes


def plain_tensors(config: ModelConfig) -> Shapes:
    """The same with all matrices as if they were not packed; experts both one by one and stacked."""
    config = replace(config, packed=None)
    stacked = {} if config.routing is None else expected_tensors(config, stacked=True)
    return stacked | expected_tensors(config)


def layer_tensors(config: ModelConfig, index: int, stacked: bool) -> Shapes:
    """Name and shape of every tensor of a layer; see expected_tensors()."""
    tensors = _Tensors(config, stacked)
    tensors.layer(index, config.caches[index])
    return tensors.shapes


class _Tensors:
    """The tensors named so far; each method adds those of one part."""

    def __init__(self, config: ModelConfig, stacked: bool) -> None:
        self.shapes: Shapes = {}
        self._config = config
        self._stacked = stacked

    def linear(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        packed = self._config.packed
        is_packed = packed is not None and packed.covers(name)
        parts = packed.tensors(rows, columns) if packed and is_packed else {"weight": (rows, columns)}
        self.shapes.update({f"{name}.{part}": shape for part, shape in parts.items()})
        if bias:
            self.shapes[f"{name}.bias"] = (rows,)

    def layer(self, index: int, cache: CacheSpec | StateSpec) -> None:
        c, layer = self._config.shape, f"model.layers.{index}"
        for norm in filter(None, self._config.traits.norms):
            self.shapes[f"{layer}.{norm}.weight"] = (c.hidden,)
        if isinstance(cache, StateSpec):
            self._recurrent(index, cache)
        else:
            self._attention(index, cache)
        if c.layer_scalars:
            self.shapes[f"{layer}.layer_scalar"] = (1,)
        if c.inputs is not None:
            self.linear(f"{layer}.per_layer_input_gate", c.inputs.width, c.hidden)
            self.linear(f"{layer}.per_layer_projection", c.hidden, c.inputs.width)
            self.shapes[f"{layer}.post_per_layer_input_norm.weight"] = (c.hidden,)
        mixture = mixture_names(self._config, index, self._stacked)
        if mixture is None:
            width = c.kind_of(index).ffn if c.kinds else c.ffn
            self._feed_forward(dense_names(f"{layer}.mlp", self._config.traits.fused), width, c.mlp_bias)
        else:
            self._mixture(layer, mixture)

    def _feed_forward(self, parts: Parts, width: int, bias: bool) -> None:
        hidden = self._config.shape.hidden
        *gated, down = parts
        for name in gated:
            self.linear(name, 2 * width // len(gated), hidden, bias)
        self.linear(down, hidden, width, bias)

    def _recurrent(self, index: int, state: StateSpec) -> None:
        names, layer = recurrent_names(self._config, index), f"model.layers.{index}"
        hidden = self._config.shape.hidden
        for name, rows in zip((*names[0], *names[1]), _recurrent_rows(state, *map(len, names)), strict=True):
            self.linear(name, rows, hidden, state.bias)
        if not state.heads:
            self.shapes[f"{layer}.conv.conv.weight"] = (state.channels, 1, state.width)
            if state.bias:
                self.shapes[f"{layer}.conv.conv.bias"] = (state.channels,)
            self.linear(f"{layer}.conv.out_proj", hidden, state.mixed, state.bias)
            return
        block = f"{layer}.linear_attn"
        self.shapes[f"{block}.conv1d.weight"] = (state.channels, 1, state.width)
        self.shapes.update({f"{block}.A_log": (state.heads,), f"{block}.dt_bias": (state.heads,)})
        self.shapes[f"{block}.norm.weight"] = (state.value_dim,)
        self.linear(f"{block}.out_proj", hidden, state.mixed)

    def _attention(self, index: int, cache: CacheSpec) -> None:
        c, block = self._config.shape, f"model.layers.{index}.self_attn"
        names = attention_names(self._config, index)
        for name, rows in zip(names, _attention_rows(c, cache, len(names)), strict=True):
            self.linear(name, rows, c.hidden, c.qkv_bias)
        if c.latent is not None:
            self._latent(block, c.latent)
        if c.sinks:
            self.shapes[f"{block}.sinks"] = (c.heads,)
        if c.qk_norm:
            whole = c.qk_norm == "whole"
            self.shapes[f"{block}.q_norm.weight"] = ((c.heads if whole else 1) * cache.key_dim,)
            if cache.source is None:
                self.shapes[f"{block}.k_norm.weight"] = ((cache.heads if whole else 1) * cache.key_dim,)
        self.linear(f"{block}.o_proj", c.hidden, c.attended if c.latent else c.heads * cache.value_dim, c.o_bias)

    def _latent(self, block: str, latent: Latent) -> None:
        c = self._config.shape
        self.shapes[f"{block}.kv_a_layernorm.weight"] = (latent.kv_rank,)
        if self._config.by_heads:
            for head in range(c.heads):
                self.linear(f"{block}.heads.{head}.k_b_proj", latent.kv_rank, latent.nope_dim)
                self.linear(f"{block}.heads.{head}.v_b_proj", latent.value_dim, latent.kv_rank)
        else:
            self.linear(f"{block}.kv_b_proj", c.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
        if latent.q_rank is not None:
            self.shapes[f"{block}.q_a_layernorm.weight"] = (latent.q_rank,)
            self.linear(f"{block}.q_b_proj", c.heads * c.head_dim, latent.q_rank)

    def _mixture(self, layer: str, mixture: MixtureNames) -> None:
        hidden, experts, routing = self._config.shape.hidden, self._config.shape.experts, self._config.routing
        assert experts is not None and routing is not None, "a mixture has both"
        if routing.beside:
            self.shapes.update({f"{layer}.{norm}.weight": (hidden,) for norm in NORMS_BESIDE})
            self.shapes[f"{layer}.router.scale"] = (hidden,)
            self.shapes[f"{layer}.router.per_expert_scale"] = (experts.count,)
        for name, rows in zip(mixture.router, (experts.count, 1), strict=False):
            self.linear(name, rows, hidden, experts.router_bias and routing.bias is None and not routing.beside)
        if routing.bias is not None:
            self.shapes[f"{mixture.block}.{routing.bias}"] = (experts.count,)
        if routing.by_turns:
            self.shapes.update(_experts_by_turns(layer, experts, hidden, self._config.packed is not None))
        elif self._stacked:
            for name, shape in zip(STACKED, ((2 * experts.width, hidden), (hidden, experts.width)), strict=True):
                turned = shape[::-1] if self._config.traits.inputs_first else shape
                self.shapes[f"{layer}.{name}"] = (experts.here, *turned)
        for parts in mixture.experts:
            self._feed_forward(parts, experts.width, experts.bias)
        if mixture.shared is not None:
            self._feed_forward(mixture.shared, experts.shared_width, bias=False)


def _attention_rows(shape: ModelShape, cache: CacheSpec, parts: int) -> tuple[int, ...]:
    """The numbers of rows of the linear layers that attention_names() names."""
    width = shape.head_dim if shape.latent else cache.key_dim
    queries, keys, values = shape.heads * width, cache.heads * cache.key_dim, cache.heads * cache.value_dim
    if shape.latent is not None:
        return shape.latent.q_rank or queries, keys
    queries *= 1 + shape.output_gate
    if parts == 1 and not shape.kinds:
        return (queries + keys + values,)
    return (queries, keys, values)[:parts]


def _recurrent_rows(state: StateSpec, mixed: int, rest: int) -> tuple[int, ...]:
    """The numbers of rows of the linear layers that recurrent_names() names, `mixed` and `rest` many of each kind."""
    of_heads = (2 * state.heads // rest,) * rest if rest else ()
    first = state.projected - 2 * state.heads
    return (first, *of_heads) if mixed == 1 else (state.channels, state.mixed, *of_heads)


def _experts_by_turns(layer: str, experts: Experts, hidden: int, packed: bool) -> Shapes:
    """gpt-oss's: [E, in, out], gate and up outputs by turns; packed [E, out, groups, bytes], and a scale for each."""
    shapes: Shapes = {}
    sizes = ((2 * experts.width, hidden), (hidden, experts.width))
    for name, (rows, inputs) in zip(STACKED, sizes, strict=True):
        shapes[f"{layer}.{name}_bias"] = (experts.here, rows)
        if packed:
            shapes[f"{layer}.{name}_blocks"] = (experts.here, rows, inputs // 32, 16)
            shapes[f"{layer}.{name}_scales"] = (experts.here, rows, inputs // 32)
        else:
            shapes[f"{layer}.{name}"] = (experts.here, inputs, rows)
    return shapes
