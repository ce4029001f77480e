"""The shape of a decoder and its parameters, counted exactly.

Symbols used in this room: L layers, h hidden size, H query heads, G key/value heads, D head dimension, F size of
the feed-forward layer, V vocabulary, E experts of which each token takes k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headway.cost.layers import (
    AttentionSinks,
    CacheSpec,
    Experts,
    Latent,
    LayerInputs,
    LayerKind,
    Matrix,
    ShapeError,
    StateSpec,
)


def kv_elements_per_token(layers: int, kv_heads: int, head_dim: int) -> int:
    """Keys and values of one token: 2 * layers * KV heads * head dimension (document 000, KV cache formula)."""
    return 2 * layers * kv_heads * head_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. Sizes are in elements, lengths in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False  # the head is the embedding, held once
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | str = False  # queries and keys have a norm, each head by itself or, as "whole", all heads together
    # How many positions a query sees in each layer with attention, itself included; None for all.
    sliding_windows: tuple[int | None, ...] = ()
    # The sinks of layers that have their window (see `with_attention_sinks`).
    attention_sinks: AttentionSinks | None = None
    max_positions: int = 0  # what max_position_embeddings says
    gated: bool = True  # the feed-forward layer has a gate, so three matrices and not two
    layer_norms: int = 2  # norms in a layer
    norm_bias: bool = False  # norms have a bias (LayerNorm)
    head_bias: bool = False  # the output projection has one
    sinks: bool = False  # each query head has a learnt number that takes part in its softmax (gpt-oss)
    # A head's result is multiplied with the sigmoid of as many outputs of the query projection.
    output_gate: bool = False
    latent: Latent | None = None  # None for attention with G key/value heads
    experts: Experts | None = None  # None where every layer has the plain feed-forward layer
    state: StateSpec | None = None  # what each recurrent layer keeps
    recurrent: tuple[int, ...] = ()  # numbers of the recurrent layers; the others have attention
    # The kinds of all layers, where their sizes differ; empty where all are as kv_heads, head_dim and ffn say.
    kinds: tuple[LayerKind, ...] = ()
    # Projections beside that of queries: 2, 1 where keys are values, 0 where both are another layer's.
    projected_kv: int = 2
    inputs: LayerInputs | None = None  # None where layers get nothing but the residual stream
    layer_scalars: bool = False  # each layer's result is multiplied with a number

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.attention_layers)

    @property
    def attention_layers(self) -> int:
        """Layers that are not recurrent."""
        return self.layers - len(self.recurrent)

    @property
    def qkv_rows(self) -> int:
        """Outputs of the query, key and value projections, all of them: (H + 2 G) D without a latent or a gate."""
        if self.latent is not None:
            return self.heads * self.head_dim + self.latent.kv_rank + self.latent.rope_dim
        return (self.heads * (1 + self.output_gate) + self.projected_kv * self.kv_heads) * self.head_dim

    @property
    def parts(self) -> tuple[ModelShape, ...]:
        """Shapes with layers that are alike, which together are this shape's; each has the embeddings and the head."""
        if not self.kinds:
            return (self,)
        return tuple(
            replace(
                self,
                layers=len(kind.layers),
                kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
                ffn=kind.ffn,
                sliding_windows=(kind.window,) * len(kind.layers),
                experts=replace(self.experts, layers=len(kind.layers)) if self.experts else None,
                kinds=(),
                projected_kv=0 if kind.source is not None else 2 - kind.keys_are_values,
                inputs=None,
            )
            for kind in self.kinds
        )

    def kind_of(self, layer: int) -> LayerKind:
        """The sizes of a layer; ShapeError where all layers are alike."""
        found = next((kind for kind in self.kinds if layer in kind.layers), None)
        if found is None:
            raise ShapeError(f"layer {layer} has no sizes of its own")
        return found

    @property
    def attended(self) -> int:
        """Elements of attention's result for a token."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def caches(self) -> tuple[CacheSpec | StateSpec, ...]:
        """What each layer keeps."""
        if self.kinds:
            kinds = map(self.kind_of, range(self.layers))
            return tuple(CacheSpec(k.kv_heads, k.head_dim, k.head_dim, k.window, source=k.source) for k in kinds)
        windows = iter(self.sliding_windows)
        return tuple(
            self.state if self.state is not None and layer in self.recurrent else self._cache(next(windows))
            for layer in range(self.layers)
        )

    def with_attention_sinks(self, sinks: AttentionSinks) -> ModelShape:
        """The same with sinks in all layers, but for those that have a shorter window.

        Raises:
            ShapeError: it has layers that cannot have them.
        """
        lacking = (
            (bool(self.recurrent), "recurrent layers, which keep no tokens"),
            (self.sinks, "learnt sinks"),
            (bool(self.kinds), "layers of different sizes"),
        )
        if named := next((name for has, name in lacking if has), None):
            raise ShapeError(f"attention_sinks is {sinks.sinks}, but the model has {named}; leave it out")
        windows = (sinks.window if window is None else min(window, sinks.window) for window in self.sliding_windows)
        return replace(self, sliding_windows=tuple(windows), attention_sinks=sinks)

    def with_kv_heads(self, count: int) -> ModelShape:
        """The same with so many KV heads in each layer: as many as query heads are MHA, one is MQA (document 002).

        Raises:
            ShapeError: they do not divide the query heads, or layers have no KV heads of one number.
        """
        lacking = (
            (self.latent is not None, "a latent in place of KV heads"),
            (bool(self.kinds), "layers of different sizes"),
        )
        if named := next((name for has, name in lacking if has), None):
            raise ShapeError(f"kv_heads is {count}, but the model has {named}; leave it out")
        if self.heads % count:
            raise ShapeError(f"kv_heads is {count}, which does not divide the {self.heads} query heads")
        return replace(self, kv_heads=count)

    @property
    def cache_places(self) -> tuple[tuple[int, ...], ...]:
        """Layers by the places that they have in KV cache groups: one, or as many as take the memory of the largest.

        There are none for layers that keep states, or that do not divide the largest one, and for those that keep
        nothing themselves.
        """
        if self.recurrent:
            return ()
        if not self.kinds:
            return tuple((layer,) for layer in range(self.layers))
        own = [kind for kind in self.kinds if kind.source is None]
        sizes = [kind.kv_heads * kind.head_dim for kind in own]
        if any(max(sizes) % size for size in sizes):
            return ()
        places = list[tuple[int, ...]]()
        for kind, size in zip(own, sizes, strict=True):
            shared = max(sizes) // size
            places += [kind.layers[at : at + shared] for at in range(0, len(kind.layers), shared)]
        return tuple(sorted(places))

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        """The window of each place."""
        if self.kinds:
            return tuple(self.kind_of(layers[0]).window for layers in self.cache_places)
        return () if self.recurrent else self.sliding_windows

    @property
    def kv_elements_per_place(self) -> int:
        """Elements of cache for one token in one of these places: as many as the largest layer has."""
        return max(part.kv_elements_per_layer for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence in all recurrent layers."""
        return len(self.recurrent) * self.state.bytes if self.state is not None else 0

    def _cache(self, window: int | None) -> CacheSpec:
        of = self.attention_sinks
        sinks = of.sinks if of is not None and window == of.window else 0
        if self.latent is not None:
            return CacheSpec(1, self.latent.kv_rank + self.latent.rope_dim, 0, window, sinks, self.latent.kv_rank)
        return CacheSpec(self.kv_heads, self.head_dim, self.head_dim, window, sinks)

    @property
    def kv_elements_per_layer(self) -> int:
        """Elements of cache for one token in one layer."""
        return self._cache(None).elements if self.projected_kv else 0

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of cache for one token in all layers, sliding windows apart."""
        if self.kinds:
            return sum(part.kv_elements_per_token for part in self.parts)
        return self.attention_layers * self.kv_elements_per_layer

    @property
    def dense_layers(self) -> int:
        """Layers with the plain feed-forward layer."""
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    def parameters(self) -> dict[str, int]:
        """Parameters by component; a tied head has none of its own. Experts have components of their own."""
        if self.kinds:
            each = [part.parameters() for part in self.parts]
            whole = {name: sum(part[name] for part in each) for name in each[0]}
            whole |= {name: each[0][name] for name in ("embedding", "head")}
            whole["norms"] -= (len(each) - 1) * self.hidden  # the last one of all
            if self.inputs is not None:
                whole["inputs"] = self.inputs.parameters(self.layers, self.hidden)
            return whole
        parts = {
            "embedding": self.vocab * self.hidden,
            "attention": self.attention_layers * self._attention_parameters(),
            "ffn": self.dense_layers * self.ffn_parameters(self.ffn),
            "norms": self._norm_parameters(),
            "head": self.vocab * (self.hidden * (not self.tied_embeddings) + self.head_bias),
        }
        if self.state is not None:
            parts["recurrent"] = len(self.recurrent) * self.state.parameters(self.hidden)
        if (experts := self.experts) is not None:
            parts["router"] = experts.layers * experts.router_rows * (self.hidden + experts.router_bias)
            parts["shared_experts"] = experts.layers * (
                experts.shared_width and self.ffn_parameters(experts.shared_width)
            )
            parts["experts"] = experts.layers * experts.here * self.expert_parameters()
        return parts

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of the norms of queries and keys in a layer."""
        if not self.qk_norm:
            return 0
        if self.qk_norm == "whole":
            return (self.heads + self.kv_heads) * self.head_dim
        return (2 if self.projected_kv else 1) * self.head_dim

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters().values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token goes through: those of k experts in place of E, and not the embedding's table.

        A tied table counts, as the head. Published counts differ in this; gpt-oss and DeepSeek-V3 count like this.
        """
        parts = self.parameters()
        if not self.tied_embeddings:
            parts["embedding"] = 0
        if self.inputs is not None:
            parts["inputs"] -= self.inputs.vocab * self.layers * self.inputs.width
        if self.experts is not None:
            parts["experts"] = self.experts.layers * self.experts.per_token * self.expert_parameters()
        return sum(parts.values())

    def matrices(self) -> dict[str, int]:
        """Parameters by the field of `Precision` that says how they are kept.

        They are linear, latent, experts, head, embedding and rest.

        A tied embedding counts as the head.
        """
        parts = {name: sum(map(math.prod, sizes)) for name, sizes in self.projections().items()}
        parts["embedding"] = 0 if self.tied_embeddings else parts["head"]
        return parts | {"rest": self.num_parameters - sum(parts.values())}

    def projections(self) -> dict[str, list[Matrix]]:
        """The matrices that tokens are multiplied with, by linear, latent, experts and head; fused ones are one."""
        if self.kinds:
            each = [part.projections() for part in self.parts]
            whole = {name: [size for part in each for size in part[name]] for name in ("linear", "latent", "experts")}
            if self.inputs is not None:
                width = self.inputs.width
                whole["linear"].append((1, self.layers * width, self.hidden))
                whole["linear"] += [(self.layers, width, self.hidden), (self.layers, self.hidden, width)]
            return whole | {"head": each[0]["head"]}
        latent, linear, routed = self.latent, [(self.attention_layers, self.hidden, self.attended)], list[Matrix]()
        of_heads = [] if latent is None else latent.of_heads(self.layers, self.heads)
        if latent is None:
            linear.append((self.attention_layers, self.qkv_rows, self.hidden))
        else:
            linear += latent.projections(self.layers, self.hidden, self.heads)
        if (state := self.state) is not None:
            count = len(self.recurrent)
            linear += [(count, state.projected - state.numbers, self.hidden), (count, self.hidden, state.mixed)]
        linear += self._ffn_projections(self.dense_layers, self.ffn)
        if (experts := self.experts) is not None:
            linear += self._ffn_projections(experts.layers if experts.shared_width else 0, experts.shared_width)
            routed += self._ffn_projections(experts.layers * experts.here, experts.width)
        return {"linear": linear, "latent": of_heads, "experts": routed, "head": [(1, self.vocab, self.hidden)]}

    def _ffn_projections(self, count: int, width: int) -> list[Matrix]:
        return [(count, (self.ffn_matrices - 1) * width, self.hidden), (count, self.hidden, width)]

    def ffn_parameters(self, width: int) -> int:
        """Parameters of one feed-forward layer of this width."""
        rows = (self.ffn_matrices - 1) * width
        return self.ffn_matrices * self.hidden * width + (rows + self.hidden) * self.mlp_bias

    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 without experts."""
        if self.experts is None:
            return 0
        rows = (self.ffn_matrices - 1) * self.experts.width
        return self.ffn_matrices * self.hidden * self.experts.width + (rows + self.hidden) * self.experts.bias

    def _attention_parameters(self) -> int:
        output = self.attended * self.hidden + self.hidden * self.o_bias + self.heads * self.sinks
        if (latent := self.latent) is not None:
            matrices = [*latent.projections(1, self.hidden, self.heads), *latent.of_heads(1, self.heads)]
            return sum(map(math.prod, matrices)) + output
        return self.qkv_rows * (self.hidden + self.qkv_bias) + output

    def _norm_parameters(self) -> int:
        of_latent = self.latent.norm_parameters if self.latent is not None else 0
        each = self.hidden * (1 + self.norm_bias)
        inner = self.attention_layers * (self.qk_norm_parameters + of_latent)
        return self.layers * (self.layer_norms * each + self.layer_scalars) + inner + each
