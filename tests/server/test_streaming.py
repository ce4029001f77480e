"""The writer of server-sent events, without a network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.server.edge.streaming import EventWriter, SlowReader
from headway.server.errors import unavailable


class Pipe:
    """A connection whose far end takes bytes only while `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.bodies: list[bytes] = []
        self.ended = False
        self.status = 0

    def write_now(self, data: bytes) -> bool:
        if self.reads.is_set():
            self.bodies.append(data)
        return self.reads.is_set()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        assert self.status, "a body before its head"
        self.bodies.append(message["body"])
        self.ended = not message["more_body"]


async def test_everything_arrives_in_order() -> None:
    pipe = Pipe()
    writer = EventWriter(pipe.send, [], 1000, 5)
    running = asyncio.create_task(writer.run())
    for number in range(5):
        writer.push(b"%d" % number)
        await asyncio.sleep(0)
    await writer.drained()
    assert b"".join(pipe.bodies) == b"01234"
    assert not running.done()
    writer.push(b"5")
    writer.close()
    await running
    assert b"".join(pipe.bodies) == b"012345"
    assert pipe.ended


async def test_what_waits_goes_out_together() -> None:
    pipe = Pipe()
    writer = EventWriter(pipe.send, [], 1000, 5)
    running = asyncio.create_task(writer.run())
    pipe.reads.clear()
    for _ in range(10):
        writer.push(b"x")
        await asyncio.sleep(0)
    assert not writer.is_drained
    pipe.reads.set()
    writer.close()
    await running
    assert [each for each in pipe.bodies if each] == [b"x", b"x" * 9] and pipe.ended


async def test_an_error_before_the_first_event_has_its_own_status() -> None:
    pipe = Pipe()
    writer = EventWriter(pipe.send, [], 1000, 5)
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    assert pipe.status == 0
    writer.refuse(unavailable("too late", "queue_timeout", 1))
    writer.close()
    await running
    assert pipe.status == 503
    assert b"too late" in b"".join(pipe.bodies) and pipe.ended


async def test_buffer_is_bounded() -> None:
    pipe = Pipe()
    pipe.reads.clear()
    writer = EventWriter(pipe.send, [], 100, 5)
    running = asyncio.create_task(writer.run())
    for _ in range(11):
        writer.push(b"0123456789")
        await asyncio.sleep(0)
    with pytest.raises(SlowReader, match="more than 100"):
        writer.push(b"0123456789" * 10)
    assert writer.overflow.done()
    running.cancel()


async def test_write_does_not_wait_for_ever() -> None:
    pipe = Pipe()
    pipe.reads.clear()
    writer = EventWriter(pipe.send, [], 100, 0.02)
    writer.push(b"x")
    with pytest.raises(SlowReader, match=r"0\.02 s"):
        await writer.run()


async def test_what_the_connection_takes_at_once_is_sent_at_once() -> None:
    """The head goes out by run(); later events without a turn of the loop, but behind all that waits."""
    pipe, sent = Pipe(), []
    writer = EventWriter(pipe.send, [], 1000, 5, pipe.write_now)
    running = asyncio.create_task(writer.run())
    writer.push(b"0")
    assert pipe.bodies == []
    await writer.drained()
    writer.when_sent(sent.append)
    writer.push(b"1")
    assert pipe.bodies == [b"0", b"1"] and len(sent) == 1 and writer.is_drained
    pipe.reads.clear()
    writer.push(b"2")
    await asyncio.sleep(0)
    pipe.reads.set()
    writer.push(b"3")
    assert pipe.bodies == [b"0", b"1"] and not writer.is_drained
    await writer.drained()
    writer.push(b"4")
    writer.close()
    await running
    assert b"".join(pipe.bodies) == b"01234" and pipe.ended
