"""One decoder for every supported family.

Each layer: RMS norm, a mixer of tokens, RMS norm, gated MLP or several as experts, each pair added to a residual
stream. The mixer is attention with rotary positions over the paged cache, of keys and values or of latents, or a part
with a state (`recurrent`). What differs between families (biases, further norms, windows, sinks, RoPE, gates) is data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.cost.layers import CacheSpec
from headway.kernels.interface import (
    AttentionShape,
    Chain,
    Kernels,
    LayerCache,
    LayerState,
    Linear,
    Mixture,
    RMSNorm,
    SinkQueries,
    StepGeometry,
)
from headway.kernels.weights import SOFTMAX, Scores
from headway.models.config import ModelConfig
from headway.models.latent_attention import LatentAttention, LatentWeights
from headway.models.rope import query_factors, rope_tables
from headway.models.weights import AttentionWeights, DecoderWeights, LayerWeights


@dataclass(slots=True)
class DenseMLP:
    """The gated MLP that every token goes through."""

    gate_up: Callable[[Tensor], Tensor]  # gate and up rows stacked, with the gate applied
    down: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(self.gate_up(x))


@dataclass(slots=True)
class MixtureMLP:
    """Experts of which each token goes through some, and where there is a shared one, through that one too."""

    kernels: Kernels
    router: Linear  # rows of the experts, then one of the shared expert if it is gated
    experts: Mixture
    per_token: int  # experts that are chosen for a token
    normalized: bool  # their weights sum to 1
    shared: DenseMLP | None  # the one that every token goes through; None where there is none
    scores: Scores = SOFTMAX  # what logits of the router become

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        has_shared = self.shared is not None
        chosen, weights = self.kernels.route(self.router(x), self.per_token, self.normalized, has_shared, self.scores)
        return self.experts(x, chosen, weights, None if self.shared is None else self.shared(x))


class Attention:
    """The mixer of a layer that keeps keys and values.

    Args:
        rope: tables of cosines and sines.
        factors: what queries are multiplied with, by position (see `rope.query_factors`); all of a head is turned then.

    Raises:
        ValueError: it cannot attend to a cache of that kind.
    """

    def __init__(
        self,
        weights: AttentionWeights,
        config: ModelConfig,
        kernels: Kernels,
        rope: tuple[Tensor, Tensor],
        factors: Tensor | None = None,
    ) -> None:
        self._weights, self._kernels, self._rope = weights, kernels, rope
        self._query_rope = None if factors is None else (rope[0] * factors, rope[1] * factors)
        # Sinks are at most as far away as what a query sees is long, whatever their position.
        self._sink_rope = rope[0][: weights.cache.window], rope[1][: weights.cache.window]
        self._query_rms, self._key_rms = weights.norms or (kernels.rms_norm, kernels.rms_norm)
        self._eps, self._window = config.rms_norm_eps, weights.cache.recent
        self._scale = config.multipliers.attention or weights.cache.key_dim**-0.5
        self._softcap = config.softcaps.attention
        self._heads = _head_split(config.shape.heads, weights.cache)[: 1 + weights.projected_kv]
        if config.shape.output_gate:
            self._heads.append(config.shape.heads)

    def __call__(self, x: Tensor, cache: LayerCache, step: StepGeometry) -> Tensor:
        """x [T, hidden] -> [T, hidden]; its keys and values are stored."""
        weights, kernels, heads = self._weights, self._kernels, self._heads
        query, *rest = weights.qkv(x).view(len(x), sum(heads), weights.cache.key_dim).split(heads, 1)
        if not weights.norms_behind:
            query = self._normed(query, weights.query_norm, self._query_rms)
        key = rest[0] if weights.projected_kv else query[:, :0]
        value, gate = (rest[1], rest[2:]) if weights.projected_kv == 2 else (key, rest[1:])
        value = self._normed(value, weights.value_norm, kernels.rms_norm)
        if not weights.norms_behind:
            key = self._normed(key, weights.key_norm, self._key_rms)
        first = self._sink_queries(query, step) if weights.cache.sinks else None
        if weights.rotated and self._query_rope is None:
            kernels.rotate(query, key, *self._rope, step.positions)
        elif self._query_rope is not None:
            kernels.rotate(query, query[:, :0], *self._query_rope, step.positions)
            kernels.rotate(key, key[:, :0], *self._rope, step.positions)
        if weights.norms_behind:
            query = self._normed(query, weights.query_norm, self._query_rms)
            key = self._normed(key, weights.key_norm, self._key_rms)
        if weights.projected_kv:
            kernels.store(key, value, cache, step.slots)
        attended = kernels.attention(query, cache, step, self._scale, self._window, weights.sinks, self._softcap, first)
        if gate:
            attended = kernels.sigmoid_gate(attended, gate[0])
        return weights.o(attended.flatten(1))

    def _sink_queries(self, query: Tensor, step: StepGeometry) -> SinkQueries:
        """The queries for the first keys, from queries [T, H, D] without positions."""
        weights, rows = self._weights, self._kernels.join(query, query[..., :0])  # a copy
        if weights.rotated:
            self._kernels.rotate(rows, rows[:, :0], *self._sink_rope, step.positions)
        if weights.norms_behind:
            rows = self._normed(rows, weights.query_norm, self._query_rms)
        return SinkQueries(rows, weights.cache.sinks)

    def _normed(self, x: Tensor, weight: Tensor | None, rms_norm: RMSNorm) -> Tensor:
        """x [T, H, D] with each head normed by itself or all together, as the weight is long; x where there is none."""
        if weight is None:
            return x
        return rms_norm(x.view(len(x), -1, len(weight)), weight, self._eps).view(x.shape)


class Decoder:
    """A model on a device: token ids in, hidden states out, and logits for the rows that need them.

    It holds no sequence state: keys and values live in the caches that the caller passes. Shapes and addresses depend
    only on the sizes of a step, and nothing waits for the device but the mixtures of the reference kernels, so a step
    can be captured in a graph where the kernels allow it. Under torch.inference_mode() dispatch takes least time.

    Attributes:
        taps: layers whose results, as they enter the next layer, are kept of each step; none by default.
        tapped: those of the last step, [T, hidden] each. They hold until the next step.

    Args:
        max_model_len: positions to prepare tables for; None takes the config's max_model_len. Without attention sinks,
            it also fixes the base of dynamic RoPE scaling (see rope.py).

    Raises:
        ValueError: a layer's cache is one that it cannot attend to.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str,
        weights: DecoderWeights,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = torch.device(device)
        self.weights = weights
        self.max_model_len = max_model_len or config.max_model_len
        self._eps, self._residual_eps = config.rms_norm_eps, config.residual_eps
        self._add_rms_norm = weights.add_rms_norm or kernels.add_rms_norm
        self._identity = object()
        self.taps: tuple[int, ...] = ()
        self.tapped: list[Tensor] = []
        self._tapped_of: dict[int, list[Tensor]] = {}  # of steps that are repeated, by their tokens
        sinks = config.shape.attention_sinks
        of_tables = self.max_model_len, self.device, None if sinks is None else sinks.window
        self._tables = rope_tables(config.rope, *of_tables)
        self._factors = query_factors(config.rope, self.max_model_len, self.device)
        local = config.local_rope
        self._local = self._tables if local is None else rope_tables(local, *of_tables)
        self._prepare(weights)

    def _prepare(self, weights: DecoderWeights) -> None:
        """Make the mixers of layers with these weights."""
        config, kernels = self.config, self.kernels
        given: list[Any] = [layer.mixer for layer in weights.layers]
        if config.shape.attention_sinks is not None:  # weights are the same without, and all are of attention
            given = [replace(mixer, cache=cache) for mixer, cache in zip(given, config.caches, strict=True)]
        attending = [mixer for mixer in given if isinstance(mixer, AttentionWeights | LatentWeights)]
        mixers: list[Callable[[Tensor, Any, StepGeometry], Tensor]] = [
            _attention(mixer, config, kernels, self._tables if mixer.cache.sees_all else self._local, self._factors)
            if isinstance(mixer, AttentionWeights | LatentWeights)
            else mixer
            for mixer in given
        ]
        # Each layer with the norm that follows it: a layer's closing residual addition is fused with the next norm.
        next_norms = [layer.mixer_norm for layer in weights.layers[1:]] + [weights.final_norm]
        self._layers = list(zip(weights.layers, mixers, next_norms, strict=True))
        kinds = [(config.shape.heads, each.cache.heads, each.cache.key_dim, each.cache.recent) for each in attending]
        self._attentions = [AttentionShape(*kind) for kind in dict.fromkeys(kinds)]

    @property
    def own_layers(self) -> list[LayerWeights]:
        """The layers, as far as this process has them."""
        return self.weights.layers if self.weights.shared is None else self.weights.shared.layers

    def with_layers(self, layers: list[LayerWeights]) -> Decoder:
        """A decoder with others as its own layers; it shares all else with this one."""
        if self.weights.shared is not None:
            layers = self.weights.shared.join(layers)
        other = copy.copy(self)
        other.weights, other._identity = replace(self.weights, layers=layers), object()
        other._prepare(other.weights)
        return other

    def forward(self, token_ids: Tensor, step: StepGeometry, caches: Sequence[LayerCache | LayerState]) -> Tensor:
        """Run token_ids [T] int64 through all layers, storing their keys and values -> [T, hidden], final norm applied.

        Args:
            step: where each token stands; positions are below max_model_len. Where it is repeatable, token_ids has
                its address too, the caches are always the same, and the result holds until the next step.
            caches: one for each layer, of the size that ModelConfig.caches says.
        """
        if not step.repeatable:
            return self._layers_of(token_ids, step, caches)
        key = (self._identity, len(token_ids))
        hidden = self.kernels.repeat(key, step, self._attentions, lambda: self._layers_of(token_ids, step, caches))
        self.tapped = self._tapped_of.get(len(token_ids), self.tapped)
        return hidden

    def chain(
        self, token_ids: Tensor, step: StepGeometry, caches: Sequence[LayerCache | LayerState], chain: Chain
    ) -> list[list[tuple[int, float]]]:
        """Drafts behind the tokens of a repeatable step, one of each sequence; see Kernels.chain()."""
        key = (self._identity, "chain", len(token_ids))
        of_step = token_ids, step, caches
        return self.kernels.chain(
            key, step, self._attentions, token_ids, lambda: self.logits(self._layers_of(*of_step)), chain
        )

    def _layers_of(self, token_ids: Tensor, step: StepGeometry, caches: Sequence[LayerCache | LayerState]) -> Tensor:
        rms_norm, eps, steps = self.kernels.rms_norm, self._eps, step.groups
        tapped: list[Tensor] = []
        residual = self.weights.embedding(token_ids)
        inputs = None if self.weights.inputs is None else self.weights.inputs(token_ids, residual)
        first = self.weights.layers[0].mixer_norm
        hidden = residual if first is None else rms_norm(residual, first, self._residual_eps)
        for number, ((layer, mixer, next_norm), cache) in enumerate(zip(self._layers, caches, strict=True)):
            added = mixer(hidden, cache, steps[cache.group] if steps else step)
            if layer.mixed_norm is not None:
                added = rms_norm(added, layer.mixed_norm, eps)
            if layer.beside:
                added = self.kernels.add(layer.mlp(hidden), added)
            else:
                hidden, residual = self._joined(added, residual, layer.mlp_norm)
                added = layer.mlp(hidden)
            if layer.mlp_out_norm is not None:
                added = rms_norm(added, layer.mlp_out_norm, eps)
            if layer.end is None:
                hidden, residual = self._joined(added, residual, next_norm)
            else:
                residual = layer.end(added, residual, None if inputs is None else inputs[:, number])
                hidden = residual if next_norm is None else rms_norm(residual, next_norm, self._residual_eps)
            if number in self.taps:
                tapped.append(self.kernels.join(residual[:, None], residual[:, None, :0])[:, 0])  # a copy
        if self.taps:
            self.tapped = tapped
            if step.repeatable:
                self._tapped_of[len(token_ids)] = tapped
        return hidden

    def _joined(self, added: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of the next part, and the residual stream with what the last part adds."""
        if norm is not None:
            return self._add_rms_norm(added, residual, norm, self._residual_eps)
        residual = self.kernels.add(added, residual)
        return residual, residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the chosen rows of forward's result: [R, hidden] -> [R, vocab].

        They are float32, in which their sums are, where the kernels give these; else in the model's dtype.
        """
        logits, cap = self.weights.lm_head(hidden), self.config.softcaps.logits
        return logits if cap is None else self.kernels.soft_cap(logits, cap)


def _attention(
    weights: AttentionWeights | LatentWeights,
    config: ModelConfig,
    kernels: Kernels,
    rope: tuple[Tensor, Tensor],
    factors: Tensor | None,
) -> Attention | LatentAttention:
    if isinstance(weights, LatentWeights):
        return LatentAttention(weights, config, kernels, rope)
    return Attention(weights, config, kernels, rope, factors)


def _head_split(heads: int, cache: CacheSpec) -> list[int]:
    """Query, key and value heads of a layer."""
    if cache.key_dim != cache.value_dim or heads % cache.heads:
        raise ValueError(
            f"{heads} query heads cannot attend to {cache}: keys and values must be alike, heads a multiple"
        )
    return [heads, cache.heads, cache.heads]
