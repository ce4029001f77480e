"""Log-probabilities of chosen tokens and of their likeliest alternatives.

They are those of the model's own distribution, before bias, penalties, temperature and cuts, which is
vLLM's default (`logprobs_mode="raw_logprobs"`), and computed in float32 whatever the logits are in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.engine.draws import as_float, block_peaks, block_sums, likeliest, padded
from headway.engine.messages import PromptLogprobs, TokenLogprobs
from headway.models.decoder import Decoder
from headway.policy.cache.sizing import PROMPT_LOGPROB_ROWS
from headway.policy.step.plan import ScheduledSequence, SequenceState
from headway.policy.step.sampling_params import MAX_LOGPROBS

# More than are ever returned (beams may want more), so that tokens tied with the last one are in the order of their
# ids too.
CANDIDATES = 3 * MAX_LOGPROBS
ROWS_AT_A_TIME = 16  # bounds the memory that large vocabularies take, in float32
RANK, LOGPROB, ALTERNATIVES = 0, 1, 2


def logprob_table(x: Tensor, token_ids: Tensor, top: int) -> Tensor:
    """The contents of TokenLogprobs as one float64 tensor [L, 2 + 2 * top], so that they are read in one go.

    x [L, V] float32 logits padded as by `draws.padded`, token_ids [L]. Columns: rank, logprob, then the
    ids and the logprobs of the likeliest. A rank is one more than the number of strictly likelier tokens.
    """
    pieces = zip(x.split(ROWS_AT_A_TIME), token_ids.split(ROWS_AT_A_TIME), strict=True)
    return torch.cat([_logprob_table(logits, ids, top) for logits, ids in pieces])


def _logprob_table(x: Tensor, token_ids: Tensor, top: int) -> Tensor:
    logprobs = x.log_softmax(-1)
    chosen = x.gather(1, token_ids.unsqueeze(1))
    likelier = block_sums(as_float(torch.gt, x, chosen)).sum(-1, keepdim=True)
    parts = [likelier + 1, logprobs.gather(1, token_ids.unsqueeze(1))]
    if top:
        values, ids = likeliest(x, block_peaks(x), min(max(CANDIDATES, 2 * top), x.shape[1]))
        ids, by_id = ids.sort(-1)
        order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices[:, :top]
        ids = ids.gather(1, order)
        parts += [ids, logprobs.gather(1, ids)]
    return torch.cat([part.double() for part in parts], -1)


def token_logprobs(row: list[float], top: int) -> TokenLogprobs:
    """One row of `logprob_table`, cut to the `top` likeliest."""
    width = (len(row) - ALTERNATIVES) // 2
    top = min(top, width)
    return TokenLogprobs(
        logprob=row[LOGPROB],
        rank=int(row[RANK]),
        top_ids=[int(token) for token in row[ALTERNATIVES : ALTERNATIVES + top]],
        top_logprobs=row[ALTERNATIVES + width : ALTERNATIVES + width + top],
    )


def logprobs_of_prompts(
    model: Decoder, hidden: Tensor, scheduled: Sequence[ScheduledSequence], sequences: Sequence[SequenceState]
) -> dict[int, list[PromptLogprobs]]:
    """The log-probabilities of a step's prompt tokens that are asked for, by seq_id. `hidden` is [T, hidden]."""
    found: dict[int, list[PromptLogprobs]] = {}
    end = 0
    for item, sequence in zip(scheduled, sequences, strict=True):
        first, end = end, end + item.num_tokens
        for at in range(0, item.logit_rows, PROMPT_LOGPROB_ROWS):
            stop = min(item.logit_rows, at + PROMPT_LOGPROB_ROWS)
            targets = torch.tensor(sequence.tokens[item.start + at + 1 : item.start + stop + 1], device=hidden.device)
            logits, top = model.logits(hidden[first + at : first + stop]), sequence.params.prompt_logprobs or 0
            found.setdefault(item.seq_id, []).append(prompt_logprobs(logits, targets, top))
    return found


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, top: int) -> PromptLogprobs:
    """Log-probability of each prompt token given those before it, with the `top` likeliest instead.

    logits [T, V] of consecutive prompt positions, in any float dtype; next_token_ids [T] int64 the tokens
    that follow them. A row of logits with NaN or +inf has NaN log-probabilities.
    """
    top = min(top, logits.shape[1])
    table = logprob_table(padded(logits), next_token_ids, top).cpu().numpy()
    ids, values = table[:, ALTERNATIVES : ALTERNATIVES + top], table[:, ALTERNATIVES + top :]
    return PromptLogprobs(
        top,
        np.column_stack((table[:, RANK], ids)).astype(np.int32).tobytes(),
        np.column_stack((table[:, LOGPROB], values)).astype(np.float32).tobytes(),
    )
