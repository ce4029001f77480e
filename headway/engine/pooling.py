"""Makes one vector of the hidden states that the steps of a prompt compute.

Sums are in float64, so that the chunks of a prompt make no difference to the vector, which is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.models.decoder import Decoder
from headway.policy.step.plan import ScheduledSequence, SequenceState
from headway.policy.step.pooling import PoolingParams

Part = NDArray[np.float64]


def pooled_parts(
    model: Decoder, hidden: Tensor, scheduled: Sequence[ScheduledSequence], sequences: Sequence[SequenceState]
) -> dict[int, Part]:
    """What a step adds to the vectors that are asked for, by seq_id. `hidden` is [T, hidden], of all its tokens."""
    scale = 1 / model.config.multipliers.logits  # the last norm has multiplied by it
    found: dict[int, Tensor] = {}
    scored: list[tuple[int, tuple[int, ...], int]] = []
    end = 0
    for item, sequence in zip(scheduled, sequences, strict=True):
        first, end = end, end + item.num_tokens
        params = sequence.pooling
        if params is None:
            continue
        if params.takes_all:
            found[item.seq_id] = hidden[first:end].double().sum(0) * scale
        elif item.start + item.num_tokens == sequence.prompt_len:
            if params.token_ids:
                scored.append((item.seq_id, params.token_ids, end - 1))
            else:
                found[item.seq_id] = hidden[end - 1].double() * scale
    if scored:
        logits = model.logits(hidden[torch.tensor([row for *_, row in scored], device=hidden.device)])
        found |= {seq_id: line[list(ids)].double() for (seq_id, ids, _), line in zip(scored, logits, strict=True)}
    return {seq_id: part.cpu().numpy() for seq_id, part in found.items()}


def vector_of(params: PoolingParams, pooled: Part, num_tokens: int) -> bytes:
    """The vector as float32, from the sum of the parts of a prompt of so many tokens."""
    if params.token_ids:
        return pooled.astype("<f4").tobytes()
    if params.takes_all:
        pooled = pooled / num_tokens
    pooled = pooled[: params.dimensions]
    if params.normalize:
        pooled = pooled / max(float(np.linalg.norm(pooled)), 1e-12)
    return pooled.astype("<f4").tobytes()
