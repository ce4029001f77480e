"""Full garbage collections run when they are short, and at last in any case."""

from __future__ import annotations

import gc
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headway.server.edge import garbage
from headway.server.edge.garbage import FullCollections
from tests.server.live_server import LiveServer, eventually


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The generations that were collected on purpose; begins without what a server before it in this process set."""
    before, done = gc.get_threshold(), []
    gc.set_threshold(700, 10, 10)
    # In this module alone: a plugin of pytest may collect in the same process, while a test runs.
    ours = {"collect": lambda: done.append(2), "freeze": lambda: None}
    monkeypatch.setattr(garbage, "gc", SimpleNamespace(**{**vars(gc), **ours}))
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


def test_a_server_that_has_ended_leaves_python_as_it_was(collections: list[int]) -> None:
    full = FullCollections()
    before = gc.get_threshold()
    for _ in range(2):  # an engine that is replaced starts it again
        full.start()
        full.start()
        full.stop()
        full.stop()
        assert gc.get_threshold() == before
    for _ in range(2 * garbage.ENDED_BETWEEN):
        full.on_end(0)
    assert collections == []


def test_without_a_server_nothing_changes(collections: list[int]) -> None:
    full = FullCollections()
    for _ in range(2 * garbage.ENDED_BETWEEN):
        full.on_end(0)
    assert collections == [] and gc.get_threshold()[2] < 10**9


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"max_tokens": -1}], ids=["whole", "stream", "refused"])
def test_what_has_ended_is_freed_without_a_collection(server: LiveServer, more: dict[str, Any]) -> None:
    """Garbage in cycles of thousands of connections would make the next full collection hold every stream up."""
    body = json.dumps({"prompt": "x", **more})

    def requests(count: int) -> None:
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("POST", "/v1/completions", body, {"connection": "close"})
            connection.getresponse().read()
        eventually(lambda: not server.server.server_state.connections and not server.service.in_flight)

    requests(3)
    gc.collect()
    gc.disable()
    try:
        requests(20)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [kind for kind, count in found.items() if count >= 20]
