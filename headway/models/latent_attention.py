"""Attention over latents (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token keeps one short vector for all heads: the latent, of which each head's keys and values are products, and a key
with positions. Here no keys and values are made of latents: a head's query is multiplied with its matrix of keys
instead, and what it finds with its matrix of values, which gives the same (absorbed projections). Then prompts and
decodes do the same operations, and how the work is cut into steps changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headway.cost.layers import CacheSpec
from headway.kernels.interface import HeadLinear, Kernels, LayerCache, Linear, SinkQueries, StepGeometry
from headway.models.config import ModelConfig

_EPS = 1e-6  # the epsilon of its two norms, whatever config.json says of others


@dataclass(slots=True)
class LatentWeights:
    """Symbols: C the rank of latents, R the dimensions with positions, N those of a head without, V of its values."""

    lowered: Linear  # hidden -> queries or, with a norm of them, what they are made of; then the latent, and R
    query_norm: Tensor | None  # the norm of what queries are made of; None where they are made at once
    raised: Linear | None  # what queries are made of -> queries: N of all heads, then R of all heads. None likewise.
    latent_norm: Tensor  # [C]
    # to_keys, to_values: the products of each head, N -> C and C -> V.
    to_keys: HeadLinear
    to_values: HeadLinear
    o: Callable[[Tensor], Tensor]
    cache: CacheSpec


class LatentAttention:
    """The mixer of a layer that keeps latents.

    Args:
        rope: tables of cosines and sines.
    """

    def __init__(
        self, weights: LatentWeights, config: ModelConfig, kernels: Kernels, rope: tuple[Tensor, Tensor]
    ) -> None:
        shape, latent = config.shape, config.shape.latent
        assert latent is not None and config.multipliers.attention is not None
        self._weights, self._kernels, self._rope, self._latent = weights, kernels, rope, latent
        self._heads, self._scale = shape.heads, config.multipliers.attention
        self._sink_rope = rope[0][: weights.cache.window], rope[1][: weights.cache.window]

    def __call__(self, x: Tensor, cache: LayerCache, step: StepGeometry) -> Tensor:
        """x [T, hidden] -> [T, hidden]; its latents are stored."""
        weights, kernels, latent, heads, tokens = self._weights, self._kernels, self._latent, self._heads, len(x)
        lowered = weights.lowered(x)
        of_queries = lowered.shape[1] - latent.kv_rank - latent.rope_dim
        queries, kept, key = lowered.split([of_queries, latent.kv_rank, latent.rope_dim], 1)
        if weights.query_norm is not None and weights.raised is not None:
            normed = kernels.rms_norm(queries.unsqueeze(1), weights.query_norm, _EPS)
            queries = weights.raised(normed.squeeze(1))
        plain, turned = queries.split([heads * latent.nope_dim, heads * latent.rope_dim], 1)
        turned, key = turned.view(tokens, heads, latent.rope_dim), key.view(tokens, 1, latent.rope_dim)
        of_first = kernels.join(turned, turned[..., :0]) if weights.cache.sinks else None  # a copy
        kernels.rotate(turned, key, *self._rope, step.positions)
        key = kernels.join(kernels.rms_norm(kept.unsqueeze(1), weights.latent_norm, _EPS), key)
        kernels.store(key, key[..., : latent.kv_rank], cache, step.slots)
        unturned = weights.to_keys(plain.view(tokens, heads, latent.nope_dim))
        query, first = kernels.join(unturned, turned), None
        if of_first is not None:
            kernels.rotate(of_first, of_first[:, :0], *self._sink_rope, step.positions)
            first = SinkQueries(kernels.join(unturned, of_first), weights.cache.sinks)
        found = kernels.attention(query, cache, step, self._scale, weights.cache.recent, first=first)
        return weights.o(kernels.join(weights.to_values(found)).flatten(1))
