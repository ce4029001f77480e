"""One decoder for every supported family.

Each layer: RMS norm, attention with rotary positions over the paged cache, RMS norm, gated MLP or several as experts,
each pair added to a residual stream. What differs between families (biases, further norms, windows, sinks, RoPE, gates)
is data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.cost.shape import CacheSpec
from headway.kernels.interface import Kernels, LayerCache, Linear, Mixture, StepGeometry
from headway.models.config import ModelConfig
from headway.models.rope import rope_tables


@dataclass(slots=True)
class DenseMLP:
    """The gated MLP that every token goes through."""

    gate_up: Callable[[Tensor], Tensor]  # gate and up rows stacked, with the gate applied
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(self.gate_up(x))


@dataclass(slots=True)
class MixtureMLP:
    """Experts of which each token goes through some, and where there is a shared one, through that one too.

    Args:
        router: rows of the experts, then one of the shared expert.
        per_token: experts that are chosen for a token.
        normalized: their weights sum to 1.
        shared: the one that every token goes through; None where there is none.
    """

    kernels: Kernels
    router: Linear
    experts: Mixture
    per_token: int
    normalized: bool
    shared: DenseMLP | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        has_shared = self.shared is not None
        chosen, weights = self.kernels.route(self.router(x), self.per_token, self.normalized, has_shared)
        return self.experts(x, chosen, weights, None if self.shared is None else self.shared(x))


@dataclass(slots=True)
class LayerWeights:
    """One layer, laid out by the device's kernels; qkv stacks query, key and value rows."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    o: Linear
    mlp_norm: Tensor  # [hidden]
    mlp: Callable[[Tensor], Tensor]  # [T, hidden] -> [T, hidden]
    cache: CacheSpec
    rotated: bool = True  # whether queries and keys have rotary positions
    sinks: Tensor | None = None  # [heads] float32
    attended_norm: Tensor | None = None  # [hidden], of what attention adds to the residual stream
    mlp_out_norm: Tensor | None = None  # [hidden], of what the MLP adds to it


@dataclass(slots=True)
class DecoderWeights:
    """All weights of a decoder; with tied embeddings `embedding` takes rows of lm_head's weight."""

    embedding: Callable[[Tensor], Tensor]  # [T] int64 -> [T, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    lm_head: Linear


class Decoder:
    """A model on a device: token ids in, hidden states out, and logits for the rows that need them.

    It holds no sequence state: keys and values live in the caches that the caller passes. Shapes and addresses depend
    only on the sizes of a step, and nothing but a mixture of experts on a GPU waits for the device, so a step can be
    captured in a graph where the kernels allow it. Call under torch.inference_mode() for the least dispatch time.

    Args:
        max_model_len: positions to prepare tables for; None takes the config's max_model_len. It also fixes the
            base of dynamic RoPE scaling (see rope.py).

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
        self._identity = object()
        tables = rope_tables(config.rope, self.max_model_len, self.device)
        local = tables if config.local_rope is None else rope_tables(config.local_rope, self.max_model_len, self.device)
        by_layer = [tables if layer.cache.window is None else local for layer in weights.layers]
        # Each layer with the norm that follows it: a layer's closing residual addition is fused with the next norm.
        next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        heads = config.shape.heads
        splits = [_head_split(heads, layer.cache) for layer in weights.layers]
        self._layers = list(zip(weights.layers, next_norms, splits, by_layer, strict=True))
        self._attentions = sorted({(heads, layer.cache.heads, layer.cache.key_dim) for layer in weights.layers})

    def forward(self, token_ids: Tensor, step: StepGeometry, caches: list[LayerCache]) -> Tensor:
        """Run token_ids [T] int64 through all layers, storing their keys and values -> [T, hidden], final norm applied.

        Args:
            step: where each token stands; positions are below max_model_len. Where it is repeatable, token_ids has
                its address too, the caches are always the same, and the result holds until the next step.
            caches: one for each layer, of the size that ModelConfig.caches says.
        """
        if not step.repeatable:
            return self._layers_of(token_ids, step, caches)
        key = (self._identity, len(token_ids))
        return self.kernels.repeat(key, step, self._attentions, lambda: self._layers_of(token_ids, step, caches))

    def _layers_of(self, token_ids: Tensor, step: StepGeometry, caches: list[LayerCache]) -> Tensor:
        kernels = self.kernels
        rms_norm, add_rms_norm, attention = kernels.rms_norm, kernels.add_rms_norm, kernels.attention
        rotate, store = kernels.rotate, kernels.store
        eps, residual_eps, scale = self.config.rms_norm_eps, self.config.residual_eps, self.config.multipliers.attention
        positions, slots = step.positions, step.slots

        residual = self.weights.embedding(token_ids)
        num_tokens = residual.shape[0]
        hidden = rms_norm(residual, self._layers[0][0].attention_norm, residual_eps)
        for (layer, next_norm, head_split, (cos, sin)), cache in zip(self._layers, caches, strict=True):
            width = layer.cache.key_dim
            query, key, value = layer.qkv(hidden).view(num_tokens, sum(head_split), width).split(head_split, 1)
            if layer.query_norm is not None and layer.key_norm is not None:
                query = rms_norm(query, layer.query_norm, eps)
                key = rms_norm(key, layer.key_norm, eps)
            if layer.rotated:
                rotate(query, key, cos, sin, positions)
            store(key, value, cache, slots)
            attended = attention(query, cache, step, scale or width**-0.5, layer.cache.window, layer.sinks)
            added = layer.o(attended.flatten(1))
            if layer.attended_norm is not None:
                added = rms_norm(added, layer.attended_norm, eps)
            hidden, residual = add_rms_norm(added, residual, layer.mlp_norm, residual_eps)
            added = layer.mlp(hidden)
            if layer.mlp_out_norm is not None:
                added = rms_norm(added, layer.mlp_out_norm, eps)
            hidden, residual = add_rms_norm(added, residual, next_norm, residual_eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the chosen rows of forward's result: [R, hidden] -> [R, vocab], in the model's dtype."""
        return self.weights.lm_head(hidden)


def _head_split(heads: int, cache: CacheSpec) -> list[int]:
    """Query, key and value heads of a layer."""
    if cache.key_dim != cache.value_dim or heads % cache.heads:
        raise ValueError(
            f"{heads} query heads cannot attend to {cache}: keys and values must be alike, heads a multiple"
        )
    return [heads, cache.heads, cache.heads]
