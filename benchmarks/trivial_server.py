"""A server that costs next to nothing: whatever a client measures of it above a fraction of a millisecond is its own.

    python -m benchmarks.trivial_server [--gap-ms 50]

It prints its URL, streams `max_tokens` chunks to each request, and ends when its standard input does. Each chunk's text
is the time at which it was sent, by time.monotonic_ns(), and a blank. Without a gap an answer is one write; with one, a
chunk is written to each stream every `--gap-ms` milliseconds, the streams spread evenly over that time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time

import httptools
import msgspec
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Body(msgspec.Struct):
    max_tokens: int


decode_body = msgspec.json.Decoder(Body).decode


def piece(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk() -> bytes:
    text = b"%d " % time.monotonic_ns()
    start = (
        b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"trivial","choices":[{"index":0,"text":"'
    )
    return piece(start + text + b'","logprobs":null,"finish_reason":null}]}\n\n')


def ending(tokens: int) -> bytes:
    start = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"trivial","choices":'
    finish = start + b'[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    usage = start + b'[],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
        tokens,
        tokens + 1,
    )
    return piece(finish + usage + b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Ticker:
    """Writes a chunk to each stream once in `gap_ms` ticks of a millisecond."""

    def __init__(self, gap_ms: int) -> None:
        self.gap_ms = gap_ms
        self.streams: list[list[Connection]] = [[] for _ in range(gap_ms)]
        self.count = self.tick = 0
        self.next_s = time.monotonic()

    def add(self, connection: Connection) -> None:
        self.streams[self.count % self.gap_ms].append(connection)
        self.count += 1

    def run(self) -> None:
        while self.next_s <= time.monotonic():
            place = self.tick % self.gap_ms
            self.streams[place] = [each for each in self.streams[place] if each.write_next()]
            self.tick += 1
            self.next_s += 0.001
        asyncio.get_running_loop().call_later(max(0.0, self.next_s - time.monotonic()), self.run)


class Connection(asyncio.Protocol):
    def __init__(self, ticker: Ticker | None) -> None:
        self.ticker = ticker
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""
        self.tokens = self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.tokens = self.left = decode_body(self.body).max_tokens
        self.body = b""
        if self.ticker is None:
            self.transport.write(HEAD + b"".join(chunk() for _ in range(self.tokens)) + ending(self.tokens))
        else:
            self.transport.write(HEAD)
            self.ticker.add(self)

    def write_next(self) -> bool:
        """Whether there is more to come."""
        if self.transport.is_closing():
            return False
        self.left -= 1
        self.transport.write(chunk() if self.left else chunk() + ending(self.tokens))
        return self.left > 0


async def serve(gap_ms: int) -> None:
    loop = asyncio.get_running_loop()
    ticker = Ticker(gap_ms) if gap_ms else None
    server = await loop.create_server(lambda: Connection(ticker), "127.0.0.1", 0, backlog=4096)
    if ticker is not None:
        ticker.run()
    gc.collect()
    gc.disable()
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap-ms", type=int, default=0, help="between two chunks of a stream")
    uvloop.run(serve(parser.parse_args().gap_ms))


if __name__ == "__main__":
    main()
