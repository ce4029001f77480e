"""How much a step computes at most, what memory it takes, and what that leaves for the KV pool."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import partial

from headway.policy.cache.kv_groups import KVCacheGroup, most_blocks
from headway.policy.step.sampling_params import MAX_LOGIT_BIAS_TOKENS, MAX_STOP_TOKEN_IDS

# Default token budget of a step, by device.
BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
# Default GiB of host memory for the KV of preempted sequences, by device: as vLLM had it, and as little as any server
# can spare. A CPU's pool is in the same memory, so that it had better be larger instead.
SWAP_SPACE = {"cpu": 0.0, "cuda": 4.0}
# The pool's share of the memory of a CPU that is free once the weights are loaded. The rest is for the page cache, the
# API process and other programs.
CPU_SHARE = 0.5
# The share of a GPU's whole memory that an engine takes.
DEVICE_SHARE = 0.9
LOGIT_BLOCK = 128  # the length of a row of logits is a multiple of this many tokens
PROMPT_LOGPROB_ROWS = 64  # rows of a prompt's logits that are made at a time
ENTRIES_AT_A_TIME = 1 << 20  # tokens of sequences that are penalised together, at some 64 bytes each


def default_batched_tokens(device: str, max_num_seqs: int) -> int:
    """The token budget of a step on cpu or cuda: at least a token for each sequence."""
    return max(BATCHED_TOKENS[device], max_num_seqs)


def padded_size(vocab_size: int) -> int:
    """The least multiple of LOGIT_BLOCK that holds vocab_size."""
    return -(-vocab_size // LOGIT_BLOCK) * LOGIT_BLOCK


def penalty_bytes(rows: int, distinct: int) -> int:
    """Bytes that penalties take at most for this many sequences, each with up to `distinct` different tokens."""
    # An array that grows has an eighth to spare, and exists twice for a moment.
    return 14 * (rows + 1) * distinct + 64 * min(rows * distinct, max(ENTRIES_AT_A_TIME, distinct))


def sampling_bytes(max_num_seqs: int, vocab_size: int, max_model_len: int) -> int:
    """Bytes that the sampler takes at most: logits, penalties, logit_bias and stop tokens of this many sequences.

    Logits exist three times: as the model gives them, in float32, and as a draw or an edit changes them.
    """
    logits = 3 * 4 * padded_size(vocab_size) * max(max_num_seqs, PROMPT_LOGPROB_ROWS)
    penalties = penalty_bytes(max_num_seqs, min(vocab_size, max_model_len))
    edits = max_num_seqs * (MAX_LOGIT_BIAS_TOKENS + MAX_STOP_TOKEN_IDS) * 2 * (8 + 8 + 8)
    return logits + penalties + edits


def cpu_pool_bytes(available: int, step_bytes: int) -> int:
    """Bytes for keys and values: half of those available, or less where a full step would not fit beside that."""
    return max(0, min(int(available * CPU_SHARE), available - step_bytes))


def shared_pool_bytes(free: int, total: int, utilization: float, step_bytes: int) -> int:
    """Bytes for keys and values: a share of all memory, less what is in use and what a full step takes."""
    return max(0, int(total * utilization) - (total - free) - step_bytes)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What the memory for keys, values and states holds."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int | None = None  # sequences that may run, where each has a state; None: as many as are configured
    checkpoints: int | None = None  # slots for states of known prefixes; None for a model without recurrent layers
    groups: tuple[KVCacheGroup, ...] = ()  # KV cache groups; empty where all layers see all tokens
    draft_states: int = 0  # slots for the states before drafts


def pool_size(
    pool_bytes: int,
    block_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    may_shrink: bool,
    state_bytes: int = 0,
    keep_checkpoints: bool = True,
    groups: tuple[KVCacheGroup, ...] = (),
    larger: str = "--kv-cache-memory",
    draft_states: int = 0,
) -> PoolSize:
    """The size of the pool: as many blocks as `pool_bytes` hold, but no more than all sequences of full length need.

    States take at most half of the bytes. Each of `max_num_seqs` sequences has one, and there are as many for
    checkpoints; where these do not fit, fewer sequences run. Where they do, as many again are for checkpoints.

    Args:
        block_bytes: bytes of one block, in all layers or those of a group.
        max_model_len: longest sequence that is wanted.
        may_shrink: max_model_len may be lowered to what the pool holds.
        state_bytes: bytes of a sequence's state in all recurrent layers; 0 without such layers.
        keep_checkpoints: whether prefixes are shared, for which checkpoints are kept.
        groups: KV cache groups. Their pool has a block more, which stays empty.
        larger: options that make the pool larger, as named in an error.
        draft_states: states before drafts that there must be room for besides, if there are states.

    Raises:
        ValueError: one such sequence does not fit; the message says what to change.
    """
    seats = checkpoints = None
    if state_bytes:
        held = pool_bytes // 2 // state_bytes
        slots = min((1 + 2 * keep_checkpoints) * max_num_seqs, max(0, held - draft_states))
        seats = min(max_num_seqs, -(-slots // (1 + keep_checkpoints)))
        checkpoints = slots - seats
        if not seats:
            beside = f", {draft_states} more are for drafts" if draft_states else ""
            raise ValueError(
                f"the state of one sequence takes {state_bytes / 2**20:.0f} MiB{beside}, and all of them half of the "
                f"pool's {pool_bytes / 2**20:.0f} MiB at most; raise {larger}"
            )
        pool_bytes -= (slots + draft_states) * state_bytes
        max_num_seqs = seats
    else:
        draft_states = 0
    runs = -(-max_model_len // block_size)
    blocks_of_one = most_blocks(groups, runs)
    num_blocks = min(max_num_seqs * blocks_of_one + 1, max(0, pool_bytes // block_bytes - bool(groups)))
    if blocks_of_one <= num_blocks:
        return PoolSize(num_blocks, max_model_len, seats, checkpoints, groups, draft_states)
    fits = block_size * (bisect.bisect_right(range(runs), num_blocks, key=partial(most_blocks, groups)) - 1)
    if may_shrink and fits >= 2:
        return PoolSize(num_blocks, fits, seats, checkpoints, groups, draft_states)
    raise ValueError(
        f"one sequence of {max_model_len} tokens needs {blocks_of_one * block_bytes / 2**20:.0f} MiB of KV cache, the "
        f"pool has {num_blocks * block_bytes / 2**20:.0f} MiB; raise {larger}, or lower --max-model-len"
    )
