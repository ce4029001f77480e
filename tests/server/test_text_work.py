"""Threads for long texts: few of them, and a queue before them that has an end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from headway.server.errors import ApiError
from headway.server.text_work import INLINE_CHARS, THREADS, TextWork
from tests.server.live_server import LiveServer, eventually

StartServer = Callable[..., LiveServer]
LONG = INLINE_CHARS + 1


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Work that waits for it ends with the test at the latest."""
    gate = threading.Event()
    yield gate
    gate.set()


async def started(count: int, running: list[int]) -> None:
    while len(running) < count:
        await asyncio.sleep(0.001)


async def test_short_work_is_done_at_once_and_long_work_in_a_thread() -> None:
    work = TextWork(LONG)
    here = threading.get_ident()
    assert await work.run(INLINE_CHARS, threading.get_ident) == here
    assert await work.run(LONG, threading.get_ident) != here
    with pytest.raises(ZeroDivisionError):
        await work.run(LONG, lambda: 1 // 0)
    assert work.waiting == 0
    work.close()


async def test_more_than_may_wait_is_refused(gate: threading.Event) -> None:
    work = TextWork(2 * LONG)
    busy = [asyncio.create_task(work.run(100 * LONG, gate.wait)) for _ in range(THREADS)]
    waiting = [asyncio.create_task(work.run(LONG, lambda: "done")) for _ in range(2)]
    await asyncio.sleep(0)
    assert work.waiting == 2 * LONG
    with pytest.raises(ApiError) as refused:
        await work.run(LONG, lambda: None)
    assert (refused.value.status, refused.value.code) == (429, "text_queue_full")
    assert refused.value.headers["retry-after"] == "1"
    assert str(2 * LONG) in refused.value.message and "--max-queued-text" in refused.value.message
    assert await work.run(1, lambda: "short") == "short"
    ending = asyncio.create_task(work.finish(50 * LONG, lambda: "answer"))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*waiting, ending, *busy) == ["done", "done", "answer", True, True]
    assert work.waiting == 0
    work.close()


async def test_one_text_longer_than_the_queue_is_taken_when_none_waits(gate: threading.Event) -> None:
    work = TextWork(LONG)
    busy = [asyncio.create_task(work.run(LONG, gate.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)
    giant = asyncio.create_task(work.run(9 * LONG, lambda: "giant"))
    await asyncio.sleep(0)
    with pytest.raises(ApiError):
        await work.run(LONG, lambda: None)
    gate.set()
    assert await giant == "giant"
    await asyncio.gather(*busy)
    work.close()


async def test_work_that_nobody_waits_for_any_more(gate: threading.Event) -> None:
    """Waiting, it makes room at once; running, it keeps its thread, and no more run than there are threads."""
    work, running = TextWork(LONG), list[int]()

    def block() -> None:
        running.append(1)
        gate.wait()

    tasks = [asyncio.create_task(work.run(LONG, block)) for _ in range(THREADS)]
    await started(THREADS, running)
    waiting = asyncio.create_task(work.run(LONG, block))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert work.waiting == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    following = asyncio.create_task(work.run(LONG, lambda: "next"))
    await asyncio.sleep(0.02)
    assert work.waiting == LONG and len(running) == THREADS
    gate.set()
    assert await following == "next"
    work.close()


def test_server_refuses_texts_when_too_many_wait(start_server: StartServer, gate: threading.Event) -> None:
    server = start_server(max_queued_text=3 * LONG)
    work = server.service.text_work
    for _ in range(THREADS):
        server.call(lambda: server.service.background(work.run(LONG, gate.wait)))
    codes: list[int] = []

    def ask() -> None:
        codes.append(httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * 2 * LONG}, timeout=20).status_code)

    asker = threading.Thread(target=ask)
    asker.start()
    eventually(lambda: work.waiting > 0)
    several = ["x" * 1000] * (2 * LONG // 1000 + 1)  # each of which might fit the context
    for path, prompt in (("/v1/completions", several), ("/tokenize", "x" * 2 * LONG)):
        refused = server.post(path, prompt=prompt)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
    assert server.post("/v1/completions", prompt="x").status_code == 200
    gate.set()
    asker.join()
    assert codes == [200]
    assert server.service.in_flight == 0
