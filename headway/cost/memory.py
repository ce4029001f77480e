"""How much memory a model takes: weights, KV cache, activations."""

from __future__ import annotations

from headway.cost.shape import ModelShape, kv_elements_per_token
from headway.cost.work import Precision


def weight_bytes(shape: ModelShape, precision: Precision | None = None) -> int:
    """Bytes of all parameters, each held once."""
    return -(-shape.num_parameters * (precision or Precision()).weight_bits // 8)


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, kv_bits: int = 16) -> int:
    """Bytes of cache for one token in all layers: 2 * layers * KV heads * head dimension * bytes (document 000)."""
    return -(-kv_elements_per_token(layers, kv_heads, head_dim) * kv_bits // 8)


def kv_cache_bytes(
    shape: ModelShape, tokens: int, precision: Precision | None = None, block_size: int = 1, sequences: int = 1
) -> int:
    """Bytes of cache for sequences of `tokens` tokens each, rounded up to whole blocks.

    A paged cache keeps what has left a sliding window as well, and so does this count.

    Raises:
        ValueError: a negative number of tokens or sequences, or a block of no tokens.
    """
    if tokens < 0 or sequences < 0 or block_size < 1:
        raise ValueError(
            f"tokens is {tokens}, sequences {sequences}, block_size {block_size}; they can't be less than 0, 0, 1"
        )
    kept = -(-tokens // block_size) * block_size
    bits = (precision or Precision()).kv_bits
    return sequences * kept * kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, bits)


def activation_bytes(shape: ModelShape, tokens: int, logit_rows: int = 1, precision: Precision | None = None) -> int:
    """The most bytes of activations that live at once in a step of `tokens` tokens.

    The residual stream, and either what attention holds (its input, queries, keys, values and result), or the
    feed-forward layer (its input, gate, up and their product), or the logits.
    """
    attention = shape.hidden + shape.qkv_rows + shape.heads * shape.head_dim
    ffn = shape.hidden + 3 * shape.ffn
    widest = max(tokens * max(attention, ffn), tokens * shape.hidden + logit_rows * shape.vocab)
    return -(-(tokens * shape.hidden + widest) * (precision or Precision()).activation_bits // 8)
