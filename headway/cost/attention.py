"""Which keys each query sees, and what scores, values and latents cost.

Attention counts the query-key pairs that the causal mask and the window leave, and no traffic for the scores, which
tiled attention keeps on the chip (FlashAttention, Dao et al., 2022). Without tiling the whole rectangle is multiplied
and masked afterwards, and it goes through memory four times: written, read and written by the softmax, and read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from headway.cost.layers import Latent
from headway.cost.shape import ModelShape

SCORE_PASSES = 4
COMMON_PART = 512  # tokens


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step, or that of several alike."""

    tokens: int  # tokens that are computed in this step, at least 1
    context: int = 0  # tokens that were computed in earlier steps
    # Tokens whose logits are wanted: 1 for a decode and for the end of a prompt, 0 for a prompt that goes on.
    logit_rows: int = 1
    sequences: int = 1  # how many sequences have the same part
    # Tokens at the beginning of their contexts that these have in the same blocks. Layers that see all tokens read them
    # once for all.
    common: int = 0


def append_alike(chunks: list[Chunk], chunk: Chunk) -> None:
    """Append one sequence's chunk; where it is like the last one, that one counts a sequence more."""
    if chunks and replace(chunks[-1], sequences=1) == chunk:
        chunk = replace(chunk, sequences=chunks.pop().sequences + 1)
    chunks.append(chunk)


def read_once(tokens: int) -> int:
    """How many of the tokens that sequences have in common attention reads once for all: whole parts of a context."""
    return tokens // COMMON_PART * COMMON_PART


def attended_pairs(tokens: int, context: int, window: int | None = None) -> int:
    """Query-key pairs of `tokens` new tokens after `context` others: sum of min(context + i, window), i from 1 up."""
    if window is None:
        return tokens * context + tokens * (tokens + 1) // 2
    growing = min(tokens, max(0, window - context))
    return growing * context + growing * (growing + 1) // 2 + (tokens - growing) * window


def visible_keys(tokens: int, context: int, window: int | None = None) -> int:
    """Keys that at least one of the new tokens attends to, the new ones included."""
    whole = context + tokens
    return whole if window is None else min(whole, window + tokens - 1)


class Attended(msgspec.Struct, frozen=True, gc=False):
    """What attention does in one step, over all layers and sequences."""

    # score_flops, value_flops: FLOPs of the products of queries with keys, and of weights with values.
    score_flops: int = 0
    value_flops: int = 0
    # key_elements, value_elements: elements that are read from the cache. A latent is read once, with the keys.
    key_elements: int = 0
    value_elements: int = 0
    # FLOPs that turn latents into keys and values, or queries and results into the latents' space.
    latent_flops: int = 0
    expanded_elements: int = 0  # elements of keys and values made of latents, which are written and read again
    score_elements: int = 0  # elements of the matrix of scores, where it goes through memory; 0 with tiling

    def __add__(self, other: Attended) -> Attended:
        return Attended(
            self.score_flops + other.score_flops,
            self.value_flops + other.value_flops,
            self.key_elements + other.key_elements,
            self.value_elements + other.value_elements,
            self.latent_flops + other.latent_flops,
            self.expanded_elements + other.expanded_elements,
            self.score_elements + other.score_elements,
        )


def attention(shape: ModelShape, chunks: Sequence[Chunk], flash: bool = True) -> Attended:
    """Attention of a step. Without `flash` the whole rectangle is computed, and its scores are stored."""
    whole = Attended()
    for window in set(shape.sliding_windows):
        layers = shape.sliding_windows.count(window)
        for chunk in chunks:
            whole += _of_chunk(shape, chunk, window, layers, flash)
    return whole


def _of_chunk(shape: ModelShape, chunk: Chunk, window: int | None, layers: int, flash: bool) -> Attended:
    times, keys = layers * chunk.sequences, visible_keys(chunk.tokens, chunk.context, window)
    read = times * keys - (layers * (chunk.sequences - 1) * min(chunk.common, keys) if window is None else 0)
    causal = attended_pairs(chunk.tokens, chunk.context, window)
    pairs = causal if flash else chunk.tokens * (chunk.context + chunk.tokens)
    stored = 0 if flash else times * shape.heads * pairs
    if shape.latent is not None:
        return _latent(shape.latent, shape.heads, chunk.tokens, keys, read, pairs, times, stored)
    flops = 2 * times * shape.heads * shape.head_dim * pairs
    read *= shape.kv_heads * shape.head_dim
    return Attended(flops, flops, read, read, score_elements=stored)


def _latent(
    latent: Latent, heads: int, tokens: int, keys: int, read: int, pairs: int, times: int, stored: int
) -> Attended:
    """Attention over latents by the cheaper of two ways that give the same result (DeepSeek-V2, 2024, section 2.1).

    Absorbed: queries and results are turned into the space of the latents, for each new token. Expanded: keys and
    values are made of all latents in sight, and attention goes on as usual. An engine may always do the former
    (`Latent.always_absorbed`).
    """
    read *= latent.kv_rank + latent.rope_dim
    turn = 2 * heads * latent.kv_rank * (latent.nope_dim + latent.value_dim)
    absorbed = Attended(
        2 * times * heads * (latent.kv_rank + latent.rope_dim) * pairs,
        2 * times * heads * latent.kv_rank * pairs,
        read,
        latent_flops=times * tokens * turn,
        score_elements=stored,
    )
    if latent.always_absorbed:
        return absorbed
    expanded = Attended(
        2 * times * heads * (latent.nope_dim + latent.rope_dim) * pairs,
        2 * times * heads * latent.value_dim * pairs,
        read,
        latent_flops=times * keys * turn,
        expanded_elements=times * keys * heads * (latent.nope_dim + latent.value_dim),
        score_elements=stored,
    )
    return min(absorbed, expanded, key=lambda way: way.score_flops + way.value_flops + way.latent_flops)
