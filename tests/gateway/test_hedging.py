"""A request whose first backend is slow is asked of a second one, and the first answer counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from tests.gateway.live_gateway import Handler, LiveGateway, events_of, file_text, raw_backend, whole
from tests.server.live_server import eventually

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
END = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
FAST = "[timeouts]\nfirst_byte_s = 5\nstall_s = 5\n[health]\nevery_s = 30\nfailures = 100\n"


def named(name: str, wait_s: float, status: bytes = b"200 OK") -> Handler:
    """Answers with its name after a while, as a stream where that is wanted."""

    async def handler(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        is_stream = b'"stream":true' in body.replace(b" ", b"")
        if is_stream:
            writer.write(HEAD)
        await asyncio.sleep(wait_s)
        if is_stream:
            writer.write(b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % name.encode() + END)
            return writer.close()
        writer.write(whole(b'{"choices":[{"text":"%b"}]}' % name.encode()).replace(b"200 OK", status))

    return handler


@contextlib.contextmanager
def running(first: Handler, second: Handler, top: str = "hedge_after_ms = 100\n") -> Iterator[LiveGateway]:
    with raw_backend(first) as a, raw_backend(second) as b:
        text = file_text({"a": a, "b": b}, 'routing = "round-robin"\n' + top, FAST, models=["m"])
        with LiveGateway(text) as gateway:
            yield gateway


def ask(gateway: LiveGateway, stream: bool = False) -> tuple[str, float]:
    """The backend that answered, and after how many seconds."""
    began = time.monotonic()
    answer = gateway.client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert answer.status_code == 200, answer.text
    said = events_of(answer)[0] if stream else answer.text
    named = "slow" if "slow" in said else "fast"
    assert answer.headers["x-headway-backend"] == {"slow": "a", "fast": "b"}[named]
    return named, time.monotonic() - began


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_answer_counts(stream: bool) -> None:
    with running(named("slow", 1.5), named("fast", 0.0)) as gateway:
        name, took_s = ask(gateway, stream)
        assert name == "fast" and 0.1 <= took_s < 1.4
        eventually(lambda: gateway.outcomes() == {"a": {"hedged": 1}, "b": {"ok": 1}})
        assert all(each.in_flight == 0 for each in gateway.gateway.members.values())
        assert gateway.gateway.hedges.left == 19
        assert gateway.gateway.members["a"].breaker.state(0) == "closed"


def test_the_slow_one_may_still_be_the_first() -> None:
    with running(named("slow", 0.4), named("fast", 3.0)) as gateway:
        assert ask(gateway)[0] == "slow"
        eventually(lambda: gateway.outcomes() == {"a": {"ok": 1}, "b": {"hedged": 1}})


def test_one_that_fails_leaves_it_to_the_other() -> None:
    with running(named("slow", 0.6), named("busy", 0.0, b"503 Service Unavailable")) as gateway:
        assert ask(gateway)[0] == "slow"
        eventually(lambda: gateway.outcomes() == {"a": {"ok": 1}, "b": {"status_503": 1}})


def test_where_both_fail_the_request_fails_once() -> None:
    async def cut(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.close()

    with running(cut, cut, "hedge_after_ms = 100\nretries = 0\n") as gateway:
        answer = gateway.client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "backend_failed"
        eventually(lambda: gateway.outcomes() == {"a": {"cut": 1}, "b": {"cut": 1}})


def test_a_quick_one_is_not_hedged_and_without_the_key_nothing_is() -> None:
    with running(named("slow", 0.0), named("fast", 0.0)) as gateway:
        ask(gateway)
        assert gateway.outcomes()["b"] == {}
    with running(named("slow", 0.3), named("fast", 0.0), "") as gateway:
        assert ask(gateway)[0] == "slow" and gateway.outcomes()["b"] == {}


def test_only_some_are_hedged() -> None:
    with running(named("slow", 0.15), named("fast", 0.15), "hedge_after_ms = 1\n") as gateway:
        for _ in range(26):
            gateway.client.post("/v1/completions", json={"prompt": "x"})
        eventually(lambda: not gateway.gateway.in_flight)
        hedged = sum(each.get("hedged", 0) for each in gateway.outcomes().values())
        assert hedged == 21  # twenty that were saved up, and one that the first twenty earned


def test_a_client_that_goes_leaves_nothing_behind() -> None:
    with running(named("slow", 3.0), named("fast", 3.0)) as gateway:
        with contextlib.suppress(Exception):
            gateway.client.post("/v1/completions", json={"prompt": "x"}, timeout=0.4)
        eventually(lambda: gateway.outcomes() == {"a": {"cancelled": 1}, "b": {"cancelled": 1}})
        assert all(each.pool.num_open == 0 for each in gateway.gateway.members.values())
