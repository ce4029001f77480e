"""/debug/live: the looks that the page's live view shows, and that they cost nothing while nobody watches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from headway.config_files.classes import ClassFile
from headway.engine.messages import EngineStats, Explain, LiveSequence
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.ledger import Phase
from headway.server import live
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually


@contextmanager
def watching(server: LiveServer, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The looks of a stream, one after the other."""
    with server.client.stream("GET", "/debug/live", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


@pytest.fixture
def asked(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """How the engine was asked."""
    told: list[tuple[int, ...]] = []
    explain = FakeEngine.explain

    async def noting(self: FakeEngine, asked: Explain) -> Any:
        if self is engine:
            assert not asked.with_words, "reasons would be made, and shown to nobody"
            told.append((asked.most, asked.after_ns, asked.most_sequences))
        return await explain(self, asked)

    monkeypatch.setattr(FakeEngine, "explain", noting)
    return told


def test_looks_have_steps_sequences_and_who_has_ended(server: LiveServer, engine: FakeEngine) -> None:
    now = time.monotonic_ns()
    phases = {"transport": 400_000, "queue_blocks": 1_000_000, "decode_compute": 5_000_000}
    engine.sequences = [LiveSequence("aa-0", 1, "batch", now, "decode_compute", phases, 12, 20, 9, 2, -3_000_000)]
    engine.stats = EngineStats(3, 2, 0.5, blocks_of_class={"batch": 5}, running_of_class={"batch": 3})
    with watching(server) as looks:
        first = next(looks)
        assert first["state"] == "ready" and first["about"]["blocks"] == engine.ready.num_blocks  # type: ignore[union-attr]
        assert [each["name"] for each in first["about"]["classes"]] == [
            each.name for each in server.service.classes.table
        ]
        (sequence,) = first["sequences"]
        assert (
            sequence["id"] == "aa-0/1" and sequence["slack_ms"] == -3.0 and sequence["phases_ms"]["queue_blocks"] == 1.0
        )
        assert len(first["steps"]) == live.MOST_STEPS
        assert {"decoding": 3, "prompt_tokens": 5, "took_ms": 2.0, "predicted_ms": 1.9}.items() <= first["steps"][
            0
        ].items()
        assert (first["running"], first["used_blocks"], first["cached_blocks"]) == (3, 5, 7)
        answer = server.post("/v1/completions", model=MODEL, prompt="x", n=2, include_timings=True).json()
        ended = [each for look in (next(looks), next(looks)) for each in look["ended"]]
    assert [each["id"].partition("-")[2] for each in ended] == ["0/0", "0/1"]
    name = answer["id"].partition("-")[2]
    for each in ended:
        assert each["id"].startswith(name) and each["reason"] == "stop" and 0 < each["ttft_ms"] <= each["e2e_ms"]
        assert sum(each["phases_ms"].values()) == pytest.approx(each["e2e_ms"])
        assert set(each["phases_ms"]) <= set(map(str, Phase))
    text = json.dumps(first) + json.dumps(ended)
    assert "Once upon" not in text


def test_nothing_is_asked_or_kept_while_nobody_watches(start_server: StartServer, asked: list[tuple[int, ...]]) -> None:
    server = start_server()
    server.post("/v1/completions", model=MODEL, prompt="x")
    assert asked == [] and server.service.when_ended == []
    with watching(server) as looks:
        for _ in range(3):
            look = next(looks)
        assert asked[0] == (live.MOST_STEPS, 0, live.MOST_SEQUENCES) and "newest_ns" not in look
        assert asked[2][1] >= asked[1][1] > 0  # only what is new
    eventually(lambda: server.service.when_ended == [])
    count = len(asked)
    time.sleep(2.5 * live.EVERY_S)
    assert len(asked) == count


def test_watchers_share_the_looks_and_are_bounded(start_server: StartServer, asked: list[tuple[int, ...]]) -> None:
    server = start_server()
    with ExitStack() as others:
        streams = [others.enter_context(watching(server)) for _ in range(live.MOST_WATCHERS - 1)]
        with watching(server) as last:
            assert all(next(looks)["state"] == "ready" for looks in (*streams, last))
            count, began = len(asked), time.monotonic()
            time.sleep(2.2 * live.EVERY_S)
            assert len(asked) - count <= (time.monotonic() - began) / live.EVERY_S + 1
            assert not _can_watch(server)
        eventually(lambda: _can_watch(server))


def _can_watch(server: LiveServer) -> bool:
    with server.client.stream("GET", "/debug/live") as answer:
        if answer.status_code == 429:
            answer.read()
            assert f"{live.MOST_WATCHERS} clients watch" in answer.json()["error"]["message"]
        return answer.status_code == 200


def test_a_stream_goes_on_while_the_engine_is_away_and_ends_with_the_server(
    start_server: StartServer, engine: FakeEngine
) -> None:
    server = start_server()
    with watching(server) as looks:
        assert next(looks)["state"] == "ready"
        engine.die()
        look = next(each for each in looks if each["state"] == "loading")
        assert look["steps"] == look["sequences"] == []
        began = time.monotonic()
        server.call(server.server.drain)
        assert [each for each in looks if "about" in each] == []
    assert time.monotonic() - began < 3


def test_classes_without_an_objective_have_none(start_server: StartServer) -> None:
    table = ClassTable((ServiceClass(name="plain"), ServiceClass(name="quick", ttft_ms=200.0)), "plain")
    with watching(start_server(service_classes=ClassFile(table))) as looks:
        assert next(looks)["about"]["classes"] == [
            {"name": "plain", "ttft_ms": None, "tpot_ms": None, "e2e_ms": None},
            {"name": "quick", "ttft_ms": 200.0, "tpot_ms": None, "e2e_ms": None},
        ]


def test_a_key_is_needed(start_server: StartServer) -> None:
    server = start_server(api_keys=["sk-one"])
    assert httpx.get(server.url + "/debug/live").status_code == 401
    with watching(server, authorization="Bearer sk-one") as looks:
        assert next(looks)["state"] == "ready"
