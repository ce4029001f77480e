"""What is given up from the cache: system prompts stay, conversations outlast a flood, and LRU finds no more."""

from __future__ import annotations

import pytest

from benchmarks.eviction import measure, sessions


@pytest.mark.parametrize("seed", [1, 2])
def test_with_a_working_set_of_twice_the_pool_system_prompts_stay_and_lru_finds_no_more(seed: int) -> None:
    rows = measure(sessions(seed, 1500), 0.5)
    assert rows["classes"].protected > 0.95
    assert rows["classes"].all >= rows["lru"].all
    assert rows["classes"].all > 0.9 * rows["classes"].ideal


def test_conversations_outlast_a_flood_of_offline_documents() -> None:
    rows = measure(sessions(3, 1000, flood=1.0), 0.1, ("lru", "classes", "share"))
    lru, classes, share = (rows[decides] for decides in ("lru", "classes", "share"))
    assert classes.protected > 0.95 > lru.protected
    assert classes.of_class["interactive"] > 1.1 * lru.of_class["interactive"]
    assert share.of_class["interactive"] >= 0.97 * classes.of_class["interactive"]
