"""Many clients, clients that go away, a killed engine, a server that is told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import httpx

from tests.live.conftest import Served


async def stream(client: httpx.AsyncClient, url: str, leave_after: int | None, **body: Any) -> dict[str, Any] | None:
    """Read a streamed completion; leave it after so many chunks. Returns its timings when it was read to its end."""
    timings = None
    async with client.stream("POST", f"{url}/v1/completions", json={"stream": True, **body}) as answer:
        assert answer.status_code == 200
        count = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return timings
            event = json.loads(line[6:])
            assert "error" not in event, event
            timings = event.get("timings", timings)
            count += 1
            if count == leave_after:
                return None
    raise AssertionError("the stream ended without [DONE]")


async def test_64_clients_of_whom_a_third_leave_and_every_block_comes_back(served: Served) -> None:
    rng = random.Random(1)
    finished_before = served.metric("request_success_total")
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def one(number: int) -> dict[str, Any] | None:
            await asyncio.sleep(rng.random())
            leave = rng.randrange(1, 25) if number % 3 == 0 else None
            body = {
                "prompt": f"Chapter {number}. " + "The road went on and on. " * rng.randrange(1, 30),
                "max_tokens": rng.randrange(30, 60),
                "ignore_eos": True,
                "include_timings": True,
                "n": 2 if number % 7 == 0 else 1,
            }
            return await stream(client, served.url, leave, **body)

        results = await asyncio.gather(*(one(number) for number in range(64)))
    closed = [timings for timings in results if timings is not None]
    assert len(closed) == 64 - 22
    for timings in closed:
        assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
        assert timings["tokens"] > 0 and timings["steps"] > 0
    served.until_idle()
    assert served.metric("engine_restarts") == 0  # the idle engine checks its pool, and would have died of a leak
    assert served.metric("request_success_total") >= finished_before + len(closed)


async def test_a_killed_engine_is_an_error_in_the_stream_and_then_serves_again(serve: Callable[..., Served]) -> None:
    server = serve().until_ready()
    events: list[dict[str, Any]] = []
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if len(events) == 5:
                        os.kill(server.engine_pid(), signal.SIGKILL)
    assert "error" in events[-1] and "died" in events[-1]["error"]["message"]
    assert server.health() == 503
    server.until_ready()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert server.metric("engine_restarts") == 1


async def test_sigterm_lets_a_stream_finish_and_refuses_others(serve: Callable[..., Served]) -> None:
    server = serve("--shutdown-timeout", "30").until_ready()
    async with httpx.AsyncClient(timeout=60) as client:
        refused = 0
        body = {"prompt": "Once", "max_tokens": 300, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            pid = server.engine_pid()
            server.popen.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            try:
                refused = (await client.post(f"{server.url}/v1/completions", json={"prompt": "a"})).status_code
            except httpx.TransportError:
                refused = 503  # it no longer listens
            rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert refused == 503
    assert server.popen.wait(timeout=30) == 0
    assert not os.path.exists(f"/proc/{pid}")


async def test_the_engine_ends_when_its_server_is_killed(serve: Callable[..., Served]) -> None:
    server = serve().until_ready()
    pid = server.engine_pid()
    server.popen.kill()
    server.popen.wait()
    async with asyncio.timeout(15):
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.1)
