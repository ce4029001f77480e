"""Rotary position embedding tables.

Positions are static in a paged server: a key is rotated once, when it is stored, and other sequences may
reuse it from the prefix cache. So a model's tables are fixed for the life of the server.

That decides the kinds of scaling that depend on the length of the text. Dynamic NTK (kind "dynamic")
derives its base from the length L of the sequence at hand, L > max_position_embeddings; recomputed while
a sequence grows, it leaves keys of different bases side by side in the cache, and the tokens would depend
on how the work was cut into steps. Here L is the context that the server was started with:

- up to max_position_embeddings, which is the default, the tables are the unscaled ones, and every output
  equals Hugging Face's;
- beyond, all positions use the base of L = the served context. That equals Hugging Face's output for a
  prompt of exactly that length computed in one forward pass; shorter prompts see the same stretched base,
  as in vLLM.

In the same way the factors of longrope are the long ones where the served context is longer than the one in training.
With attention sinks L is what a query sees: no distance is longer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.models.rope_config import RopeConfig

_MOST_BYTES = 2 << 30


def rope_tables(
    rope: RopeConfig, context_len: int, device: torch.device | str = "cpu", seen: int | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each float32 [context_len, rope.dim // 2], times the attention factor of yarn and longrope.

    Args:
        seen: positions that a query sees, where that is less than the context, which then may be long: so angles are
            in float64.

    Raises:
        ValueError: they would take more than _MOST_BYTES, as of a damaged max_position_embeddings.
    """
    if (size := 4 * context_len * rope.dim) > _MOST_BYTES:
        raise ValueError(
            f"a context of {context_len:,} tokens takes {size / 1e9:.1f} GB for the angles of its positions, more than "
            f"{_MOST_BYTES / 1e9:.1f}; give --max-model-len, or correct max_position_embeddings in config.json"
        )
    frequencies = inverse_frequencies(rope, seen or context_len).to(device, torch.float64 if seen else torch.float32)
    angles = torch.outer(torch.arange(context_len, dtype=frequencies.dtype, device=device), frequencies)
    cos, sin = angles.cos().float(), angles.sin_().float()
    if rope.attention_factor != 1.0:
        cos.mul_(rope.attention_factor)
        sin.mul_(rope.attention_factor)
    return cos, sin


def query_factors(rope: RopeConfig, context_len: int, device: torch.device | str = "cpu") -> Tensor | None:
    """The factors of queries (RopeConfig.query_growth), float32 [context_len, 1]; None if all are 1."""
    if not rope.query_growth or context_len <= rope.original_max_position:
        return None
    times = torch.arange(context_len, device=device) // rope.original_max_position
    return (1 + rope.query_growth * torch.log1p(times.float())).view(-1, 1)


def inverse_frequencies(rope: RopeConfig, context_len: int) -> Tensor:
    """Radians per position of each rotated pair, float32 [rope.dim // 2]; context_len is for dynamic and longrope."""
    if rope.kind == "dynamic":
        return _unscaled(_dynamic_theta(rope, context_len), rope.dim)
    unscaled = _unscaled(rope.theta, rope.dim)
    if rope.kind == "proportional":
        turned = len(unscaled) - rope.still
        return torch.cat([unscaled[:turned] / rope.factor, torch.zeros(rope.still)])
    if rope.kind == "linear":
        return unscaled / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, unscaled)
    if rope.kind == "yarn":
        return _yarn(rope, unscaled)
    if rope.kind == "longrope":
        is_long = context_len > rope.original_max_position
        return unscaled / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    return unscaled


def _unscaled(theta: float, dim: int) -> Tensor:
    """theta^(-2i / dim) (RoFormer, arXiv:2104.09864)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_theta(rope: RopeConfig, context_len: int) -> float:
    """theta * (factor * L / M - (factor - 1))^(dim / (dim - 2)), with M the length up to which nothing is scaled."""
    length = max(context_len, rope.original_max_position)
    stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    return rope.theta * stretch ** (rope.dim / (rope.dim - 2))


def _llama3(rope: RopeConfig, unscaled: Tensor) -> Tensor:
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept, those between blended by wavelength."""
    turns = rope.original_max_position * unscaled / (2 * math.pi)  # full turns over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * unscaled / rope.factor + kept * unscaled


def _yarn(rope: RopeConfig, unscaled: Tensor) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a ramp over the pairs from keeping to dividing by the factor."""
    low = _pair_with_turns(rope, rope.beta_fast)
    high = _pair_with_turns(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001  # a ramp of no width is a step
    divided = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return unscaled / rope.factor * divided + unscaled * (1 - divided)


def _pair_with_turns(rope: RopeConfig, turns: float) -> float:
    """Index of the pair that makes this many full turns over the original context, as a real number."""
    return rope.dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
