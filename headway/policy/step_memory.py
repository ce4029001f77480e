"""What a sampler takes of a device's memory beside a step's activations, for the memory plan of engine and planner."""

from __future__ import annotations

from headway.policy.sampling_params import MAX_LOGIT_BIAS_TOKENS, MAX_STOP_TOKEN_IDS

BLOCK = 128  # tokens that a row of logits is a multiple of
PROMPT_LOGPROB_ROWS = 64  # of a prompt's logits that are made at a time
ENTRIES_AT_A_TIME = 1 << 20  # tokens of sequences that are penalised together, at some 64 bytes each


def padded_size(vocab_size: int) -> int:
    """The least multiple of BLOCK that holds vocab_size."""
    return -(-vocab_size // BLOCK) * BLOCK


def penalty_bytes(rows: int, distinct: int) -> int:
    """What so many sequences take at most, each with up to `distinct` different tokens, as they are penalised."""
    # An array that grows has an eighth to spare, and is there twice for a moment.
    return 14 * (rows + 1) * distinct + 64 * min(rows * distinct, max(ENTRIES_AT_A_TIME, distinct))


def sampling_bytes(max_num_seqs: int, vocab_size: int, max_model_len: int) -> int:
    """What the sampler takes at most: logits, penalties, logit_bias and stop tokens of so many sequences.

    Logits are there three times: as the model gives them, in float32, and as a draw or an edit changes them.
    """
    logits = 3 * 4 * padded_size(vocab_size) * max(max_num_seqs, PROMPT_LOGPROB_ROWS)
    penalties = penalty_bytes(max_num_seqs, min(vocab_size, max_model_len))
    edits = max_num_seqs * (MAX_LOGIT_BIAS_TOKENS + MAX_STOP_TOKEN_IDS) * 2 * (8 + 8 + 8)
    return logits + penalties + edits
