"""How much memory a model takes: weights, KV cache, activations."""

from __future__ import annotations

from headway.cost.precision import Format, Precision
from headway.cost.shape import ModelShape, kv_elements_per_token
from headway.policy.cache.kv_groups import decode_blocks, group_windows, layers_per_group


def weight_bytes(shape: ModelShape, precision: Precision | None = None) -> int:
    """Bytes of all parameters, each held once, with the scales of their format."""
    p, parts, matrices = precision or Precision(), shape.matrices(), shape.projections()
    return (
        p.linear.bytes_of_matrices(matrices["linear"])
        + p.of_latent.bytes_of_matrices(matrices["latent"])
        + p.of_experts.bytes_of_matrices(matrices["experts"])
        + p.head.bytes_of_matrices(matrices["head"])
        + p.rest.bytes_of(parts["embedding"] + parts["rest"])
    )


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, kv_bits: int = 16) -> int:
    """Bytes of cache for one token in all layers: 2 * layers * KV heads * head dimension * bytes (document 000)."""
    return Format("kv", kv_bits, "").bytes_of(kv_elements_per_token(layers, kv_heads, head_dim))


def kv_cache_bytes(
    shape: ModelShape,
    tokens: int,
    precision: Precision | None = None,
    block_size: int = 1,
    sequences: int = 1,
    rolling: bool = False,
) -> int:
    """Bytes of cache for sequences of `tokens` tokens each, rounded up to whole blocks; with their recurrent states.

    Args:
        rolling: layers with a sliding window keep no more than the window (document 002), to the block, and in KV cache
            groups of one size (policy.kv_groups); otherwise they keep everything.
    """
    if rolling and any(shape.cache_windows):
        groups = group_windows(shape.cache_windows)
        blocks = sum(decode_blocks(window, tokens, block_size, shape.attention_sinks) for window in groups)
        kept = layers_per_group(shape.cache_windows) * shape.kv_elements_per_place * blocks
    else:
        kept = shape.kv_elements_per_token * -(-tokens // block_size)
    elements = kept * block_size
    return sequences * ((precision or Precision()).kv.bytes_of(elements) + shape.state_bytes)


def adapter_bytes(shape: ModelShape, slots: int, rank: int, precision: Precision | None = None) -> int:
    """Bytes of slots for low-rank adapters of all linear layers: rank * (in + out) numbers each (arXiv:2106.09685).

    Layers that are fused into one matrix have an A each, of rank * in numbers. Experts and latents have none.
    """
    if shape.kinds:
        return sum(adapter_bytes(part, slots, rank, precision) for part in shape.parts)
    widths = [shape.ffn, shape.experts.shared_width if shape.experts is not None else 0]
    fused = {(shape.ffn_matrices - 1) * width: shape.ffn_matrices - 1 for width in widths}
    fused[shape.qkv_rows] = 1 + shape.projected_kv
    linear = shape.projections()["linear"]
    numbers = sum(count * rank * (out + fused.get(out, 1) * inputs) for count, out, inputs in linear)
    return (precision or Precision()).activations.bytes_of(slots * numbers)


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    logit_rows: int = 1,
    precision: Precision | None = None,
    flash: bool = True,
    context: int = 0,
) -> int:
    """The most bytes of activations that live at once in a step of `tokens` tokens.

    They are the residual stream, and the largest of three: what attention holds (its input, queries, keys, values and
    result, and without `flash` the scores of all heads with the `context` before them); what the feed-forward layer
    holds (its input, gate, up and their product, for each of the k experts of a token); or the logits.
    """
    if shape.kinds:
        return max(activation_bytes(part, tokens, logit_rows, precision, flash, context) for part in shape.parts)
    attention = tokens * (shape.hidden + shape.qkv_rows + shape.attended)
    if not flash:
        attention += shape.heads * tokens * (context + tokens)
    widths = [shape.ffn] if shape.dense_layers else []
    if (experts := shape.experts) is not None:
        widths.append(experts.per_token * experts.width + experts.shared_width)
    ffn = tokens * (shape.hidden + shape.ffn_matrices * max(widths))
    if (state := shape.state) is not None:
        attention = max(attention, tokens * (shape.hidden + state.projected + state.channels + state.mixed))
    widest = max(attention, ffn, tokens * shape.hidden + logit_rows * shape.vocab)
    return (precision or Precision()).activations.bytes_of(tokens * shape.hidden + widest)
