"""What a sampler takes of a device's memory beside a step's activations, for the memory plan of engine and planner."""

from __future__ import annotations

from headway.policy.sampling_params import MAX_LOGIT_BIAS_TOKENS, MAX_STOP_TOKEN_IDS

BLOCK = 128  # tokens that a row of logits is a multiple of
PROMPT_LOGPROB_ROWS = 64  # of a prompt's logits that are made at a time
# Of a table of penalties: rows of a width and tokens of a row at least, and entries that are penalised together, at
# some 40 bytes an entry.
LEAST_ROWS, LEAST_WIDTH = 4, 64
ENTRIES_AT_A_TIME = 1 << 20


def padded_size(vocab_size: int) -> int:
    """The least multiple of BLOCK that holds vocab_size."""
    return -(-vocab_size // BLOCK) * BLOCK


def penalty_bytes(rows: int, distinct: int) -> int:
    """What a table of so many sequences takes at most, each with up to `distinct` different tokens, as it is used.

    Three times its entries: rows that are being doubled are there twice, and the narrower ones that they came from
    may still be there.
    """
    height = 1 << (max(rows, LEAST_ROWS) - 1).bit_length()
    width = 1 << (max(distinct, LEAST_WIDTH) - 1).bit_length()
    return 3 * height * width * (8 + 4) + 40 * min(height * width, max(ENTRIES_AT_A_TIME, width))


def sampling_bytes(max_num_seqs: int, vocab_size: int, max_model_len: int) -> int:
    """What the sampler takes at most: logits, penalties, logit_bias and stop tokens of so many sequences.

    Logits are there three times: as the model gives them, in float32, and as a draw or an edit changes them.
    """
    logits = 3 * 4 * padded_size(vocab_size) * max(max_num_seqs, PROMPT_LOGPROB_ROWS)
    penalties = penalty_bytes(max_num_seqs, min(vocab_size, max_model_len))
    edits = max_num_seqs * (MAX_LOGIT_BIAS_TOKENS + MAX_STOP_TOKEN_IDS) * 2 * (8 + 8 + 8)
    return logits + penalties + edits
