"""When a choice ends, and what its `stop_reason` is.

Stop strings are found where tokens become text, and end a choice by an abort of its sequence.
"""

from __future__ import annotations

from collections.abc import Collection

from headway.policy.step.request import FinishReason, Sequence
from headway.policy.step.sampling_params import SamplingParams


def stop_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end a choice: those that the request names, and the model's eos unless the request ignores it.

    Nothing can follow the end of a structured output, so eos ends that in any case.
    """
    ignores = params.ignore_eos and params.structured_outputs is None
    return frozenset(params.stop_token_ids if ignores else (*eos_token_ids, *params.stop_token_ids))


def finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    """Why a sequence ends with `token` as its newest, or None when it goes on."""
    params = sequence.params
    if token in sequence.stop_ids and (sequence.output_len > params.min_tokens or params.structured_outputs):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.tokens) >= sequence.max_len else None


def stop_reason(token: int | None, params: SamplingParams, eos_token_ids: Collection[int]) -> int | None:
    """The `stop_reason` of a choice that `token` ended: the token, None for an eos that was not ignored, as in vLLM."""
    ignores = params.ignore_eos and params.structured_outputs is None
    return None if token in eos_token_ids and not ignores else token
