"""The sampler's definition, slowly: one row at a time, float64, plain sorting."""

from __future__ import annotations

import math

import numpy as np
import torch

from headway.engine import tensor_sampling
from headway.policy.step.plan import SequenceState
from headway.policy.step.sampling_params import SamplingParams


def make_sequence(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    **params: object,
) -> SequenceState:
    prompt = prompt or [0]
    return SequenceState(
        seq_id=seed,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        stop_ids=frozenset(stop_ids),
        prompt_len=len(prompt),
        tokens=prompt + (output or []),
        block_table=[],
    )


def logits_of(rows: int, vocab_size: int, seed: int, scale: float = 3.0, step: float = 0.0) -> torch.Tensor:
    """Normal logits; with a step they are rounded to its multiples, so that many are equal."""
    values = np.random.default_rng(seed).normal(0.0, scale, (rows, vocab_size)).astype(np.float32)
    return torch.from_numpy(np.round(values / step).astype(np.float32) * step if step else values)


def edited(logits: np.ndarray, sequence: SequenceState) -> np.ndarray:
    """Logits [V] after logit_bias, min_tokens, penalties and what is allowed, in float32 so that ties are the same."""
    params = sequence.params
    x = logits.astype(np.float32)
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    if len(sequence.tokens) - sequence.prompt_len < params.min_tokens:
        for token in (token for token in sequence.stop_ids if token < len(x)):
            x[token] = -math.inf
    output = sequence.tokens[sequence.prompt_len :]
    repetition = np.float32(params.repetition_penalty)
    for token in set(sequence.tokens):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        x[token] -= np.float32(params.presence_penalty) * np.float32(token in output)
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = -math.inf
    return x


def ranked(logits: np.ndarray, sequence: SequenceState) -> tuple[list[int], list[float]]:
    """Ids, likeliest first, and their probabilities relative to the likeliest token's; of a greedy sequence, that."""
    x = edited(logits, sequence)
    order = np.lexsort((np.arange(len(x)), -x)).tolist()
    if sequence.params.temperature < 1e-5:
        return order[:1], [1.0]
    best, temperature = float(x[order[0]]), sequence.params.temperature
    return order, [math.exp((value - best) / temperature) for value in x[order].tolist()]


def kept(
    order: list[int], weights: list[float], sequence: SequenceState, nudge: float = 0.0
) -> tuple[list[int], np.ndarray]:
    """The ranked tokens that are kept, and their weights.

    nudge moves top_p and min_p by this share, to find out what rounding may decide.
    """
    params = sequence.params
    count = sum(1 for weight in weights if weight > 0.0 and weight >= min(1.0, params.min_p * (1 + nudge)))
    if params.top_k > 0:
        count = min(count, params.top_k)
    total, mass = sum(weights[:count]), 0.0
    for place in range(count if params.top_p < 1.0 else 0):
        mass += weights[place]
        if mass >= params.top_p * (1 + nudge) * total:
            count = place + 1
            break
    return order[:count], np.array(weights[:count])


def uniform_of(sequence: SequenceState) -> float:
    streams = tensor_sampling.streams_of([sequence.seed])
    return float(tensor_sampling.uniforms(streams, np.array([len(sequence.tokens)]))[0])


def distribution(logits: np.ndarray, sequence: SequenceState) -> np.ndarray:
    """Probability [V] of each token."""
    ids, weights = kept(*ranked(logits, sequence), sequence)
    result = np.zeros(len(logits))
    result[ids] = weights / weights.sum()
    return result


def acceptable(logits: np.ndarray, sequence: SequenceState, slack: float = 1e-5) -> set[int]:
    """The token that inverting the cumulative distribution gives, and those that rounding may give instead.

    The kept tokens stand in order of rank when top_k or top_p cuts, and in order of their ids when neither does; a
    top_p that rounding may make one does or does not.
    """
    params, u = sequence.params, uniform_of(sequence)
    found, all_ranked = set[int](), ranked(logits, sequence)
    for nudge in (-slack, 0.0, slack):
        ids, weights = kept(*all_ranked, sequence, nudge)
        by_rank = 0 < params.top_k < len(logits) or params.top_p < 1.0 - max(nudge, 0.0)
        if not by_rank:
            order = np.argsort(ids)
            ids, weights = [ids[i] for i in order], weights[order]
        ends = np.cumsum(weights) / weights.sum()
        first, last = np.searchsorted(ends, [u - slack, u + slack], side="right")
        found.update(ids[first : last + 1])
    return found
