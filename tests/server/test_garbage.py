"""Full garbage collections run when they are short, and at last in any case."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from headway.server import garbage
from headway.server.garbage import FullCollections


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The generations that were collected on purpose; Python's own settings are put back."""
    before, done = gc.get_threshold(), []
    monkeypatch.setattr("headway.server.garbage.gc.collect", lambda: done.append(2))
    monkeypatch.setattr("headway.server.garbage.gc.freeze", lambda: None)
    yield done
    gc.set_threshold(*before)


def test_a_full_collection_waits_until_few_requests_are_in_flight(collections: list[int]) -> None:
    full = FullCollections()
    full.start()
    assert gc.get_threshold()[2] > 10**9
    for _ in range(garbage.ENDED_BETWEEN + 5):
        full.on_end(garbage.FEW_IN_FLIGHT + 1)
    assert collections == []
    for _ in range(3):
        full.on_end(garbage.FEW_IN_FLIGHT)
    assert collections == [2]


def test_it_does_not_wait_for_ever(collections: list[int]) -> None:
    full = FullCollections()
    full.start()
    for _ in range(2 * garbage.MOST_ENDED_BETWEEN):
        full.on_end(10_000)
    assert collections == [2, 2]


def test_without_a_server_nothing_changes(collections: list[int]) -> None:
    full = FullCollections()
    for _ in range(2 * garbage.ENDED_BETWEEN):
        full.on_end(0)
    assert collections == [] and gc.get_threshold()[2] < 10**9
