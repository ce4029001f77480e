"""The pool is as large as it is useful, fits beside a step, and holds the longest sequence."""

from __future__ import annotations

from typing import Any

import pytest

from headway.policy.cache.sizing import PoolSize, cpu_pool_bytes, default_batched_tokens, pool_size, shared_pool_bytes

GIB, MIB = 2**30, 2**20


def size(pool_bytes: int, **changes: Any) -> PoolSize:
    settings = {"block_bytes": MIB, "block_size": 16, "max_num_seqs": 4, "max_model_len": 100, "may_shrink": False}
    return pool_size(pool_bytes, **(settings | changes))


def test_a_step_has_a_token_for_each_sequence() -> None:
    assert default_batched_tokens("cpu", 256) == 512
    assert default_batched_tokens("cpu", 2000) == 2000


def test_the_pool_leaves_room_for_a_step_and_for_others() -> None:
    assert cpu_pool_bytes(8 * GIB, GIB) == 4 * GIB
    assert cpu_pool_bytes(8 * GIB, 6 * GIB) == 2 * GIB
    assert cpu_pool_bytes(8 * GIB, 9 * GIB) == 0
    assert shared_pool_bytes(60 * GIB, 80 * GIB, 0.9, 2 * GIB) == 72 * GIB - 20 * GIB - 2 * GIB
    assert shared_pool_bytes(10 * GIB, 80 * GIB, 0.5, 0) == 0


def test_no_more_blocks_are_made_than_sequences_can_fill() -> None:
    assert size(GIB) == PoolSize(4 * 7 + 1, 100)
    assert size(20 * MIB) == PoolSize(20, 100)


def test_the_context_shrinks_to_the_pool_unless_it_was_asked_for() -> None:
    assert size(5 * MIB, may_shrink=True) == PoolSize(5, 80)
    for pool, may_shrink in ((5, False), (0, True)):
        needed = f"one sequence of 100 tokens needs 7 MiB of KV cache, the pool has {pool} MiB; raise --kv-cache-memory"
        with pytest.raises(ValueError, match=needed):
            size(pool * MIB, may_shrink=may_shrink)
