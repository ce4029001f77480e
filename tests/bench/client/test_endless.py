"""A server that never ends what it sends: a client believes nothing of an endpoint, and has an end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest

from headway.bench.client import asker, connection
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.client.probe import probe
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.record import FailureKind
from tests.bench.client.sending import send

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\nContent-Type: %b\r\n\r\n"
EVENTS = CHUNKED % b"text/event-stream"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
SECONDS = 20.0  # machines are shared; it takes a fraction of one


@asynccontextmanager
async def serving(first: bytes, then: bytes) -> AsyncIterator[str]:
    """A server that answers every request with `first`, and then with `then` again and again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in itertools.chain([first], itertools.repeat(then)):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.contextmanager
def bounded(most_bytes: int) -> Iterator[None]:
    """Check that the block takes at most SECONDS and `most_bytes` of memory."""
    began = time.monotonic()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
        assert time.monotonic() - began < SECONDS
    finally:
        tracemalloc.stop()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "a body": (CHUNKED % b"application/json" + chunk(b'{"data": "'), chunk(b"a" * 65000)),
    "a body until the end": (OK + b"\r\n", b"a" * 65000),
    "a header": (OK + b"X: ", b"a" * 65000),
    "a header's name": (OK, b"a" * 65000),
    "headers": (OK, b"X-a: b\r\n" * 5000),
    "a status line": (b"HTTP/1.1 200 ", b"a" * 65000),
    "a chunk's extension": (CHUNKED % b"application/json" + b"1;", b"a" * 65000),
    "trailers": (CHUNKED % b"application/json" + b"0\r\n", b"X-a: b\r\n" * 5000),
    "words before the answer": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_the_probe_of_a_server_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker, "MAX_REPLY_BYTES", 2**20)
    async with serving(*ENDLESS[name]) as url:
        with bounded(16 * 2**20), pytest.raises(BenchError, match=r"gives no answer that can be read .*more than"):
            await probe(Endpoint(url))


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        (EVENTS, chunk(EVENT * 1000), "the response has more than"),
        (EVENTS, chunk(b"data: " + b"a" * 60000), "the response has more than|an event has more than"),
        (EVENTS + b"1;", b"a" * 65000, "of the body's framing"),
        (OK, b"X-a: b\r\n" * 5000, "of headers"),
    ],
)
async def test_a_stream_of_a_run_ends(first: bytes, then: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", 2**20)
    async with serving(first, then) as url, OpenAIClient(Endpoint(url, model="scripted")) as client:
        with bounded(32 * 2**20):
            record = await send(client)
    assert record.failure is not None and record.failure.kind is FailureKind.MALFORMED
    assert any(each in record.failure.message for each in says.split("|"))


async def test_a_reply_in_many_pieces_is_put_together_in_linear_time() -> None:
    """It was copied with each piece: 64 MB took a minute."""
    reply = asker.Reply()
    pieces: Iterable[bytes] = itertools.repeat(b"a" * 1000, 60_000)
    began = time.process_time()
    for piece in pieces:
        reply.body(piece, 1)
    assert len(reply.raw) == 60_000_000
    assert time.process_time() - began < 5
