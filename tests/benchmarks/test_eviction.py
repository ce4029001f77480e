"""What is given up from the cache: system prompts stay, conversations outlast a flood, and LRU finds no more."""

from __future__ import annotations

import random

import pytest

from benchmarks.eviction import Prompt, measure, sessions


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


@pytest.mark.parametrize("part", [0.3, 0.2, 0.1])
def test_documents_that_a_few_questions_are_asked_about_are_kept_no_longer_than_by_lru(part: float) -> None:
    rng, prompts = random.Random(7), list[Prompt]()
    for number in range(400):
        document = [1000 * number + at for at in range(rng.randint(5, 20))]
        questions = [Prompt("interactive", [*document, 1000 * number + 500 + at]) for at in range(rng.randint(3, 5))]
        for at in range(len(questions)):  # beside those about other documents
            prompts.insert(max(0, len(prompts) - rng.randint(0, 60)), questions[at])
    rows = measure(prompts, part)
    assert rows["classes"].all >= rows["lru"].all > 0.1
