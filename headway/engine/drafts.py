"""Draws after drafts, and keeps those drafts that were right."""

from __future__ import annotations

from torch import Tensor

from headway.engine.messages import TokenLogprobs
from headway.engine.sampler import BAD_TOKEN, Mask, Sampler
from headway.policy.step.plan import ScheduledSequence, SequenceState


def try_drafts(
    sampler: Sampler,
    logits: Tensor,
    sampling: list[tuple[SequenceState, ScheduledSequence]],
    masks: list[Mask | None] | None,
) -> tuple[dict[int, list[int] | None], dict[int, list[TokenLogprobs]]]:
    """Draw after each sequence's newest token and after each of its drafts; accept drafts until one differs.

    A draw depends on the logits, the seed and the position alone. So the tokens are the same as without drafts.

    Returns:
        The new tokens of each sequence, by its seq_id, None for bad logits; and the log-probabilities of those.
    """
    sequences = [sequence for sequence, item in sampling for _ in range(item.samples)]
    ends = [item.start + item.num_tokens for _, item in sampling for _ in range(item.samples)]
    drafts_after = [each for _, item in sampling for each in range(item.samples - 1, -1, -1)]
    positions = [end - each for end, each in zip(ends, drafts_after, strict=True)]
    sampled = sampler.sample(logits, sequences, positions, masks)
    tokens: dict[int, list[int] | None] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    row = 0
    for sequence, item in sampling:
        drafts = item.token_ids[item.num_tokens - item.samples + 1 :]
        drawn = sampled.token_ids[row : row + item.samples]
        refused = next((at for at, draft in enumerate(drafts) if drawn[at] != draft), len(drafts))
        new = drawn[: refused + 1] if drawn[refused] != BAD_TOKEN else drawn[:refused]
        tokens[sequence.seq_id] = new or None
        entries = [entry for entry in sampled.logprobs[row : row + len(new)] if entry is not None]
        if entries:
            logprobs[sequence.seq_id] = entries
        row += item.samples
    return tokens, logprobs
