"""A server that costs next to nothing: whatever a client measures of it above a fraction of a millisecond is its own.

    python -m benchmarks.trivial_server [--gap-ms 50]

It prints its URL, streams `max_tokens` chunks of a completion or a chat to each request (16 where it does not say), and
ends when its standard input does. Each chunk's text is the time at which it was sent, by time.monotonic_ns(), and a
blank. Without a gap an answer is one write; with one, a chunk is written to each stream every `--gap-ms` milliseconds,
the streams spread evenly over that time. An answer that is not streamed is one write in both cases.
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
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
MODELS = b'{"object":"list","data":[{"id":"trivial","object":"model","created":1,"owned_by":"trivial"}]}'
USAGE = b'{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}'


class Body(msgspec.Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None

    @property
    def tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 16


decode_body = msgspec.json.Decoder(Body).decode


class Kind:
    """How answers of one route are written.

    Args:
        id, name: of the answer, and what it calls itself in a stream and as a whole.
        part, whole: how it writes a text in a stream, and as a whole; %b is the text.
    """

    def __init__(self, id: bytes, name: bytes, whole_name: bytes, part: bytes, whole: bytes) -> None:
        start = b'{"id":"%b","object":"%b","created":1,"model":"trivial","choices":'
        self._start, self._whole_start = start % (id, name), start % (id, whole_name)
        self._part = b"data: " + self._start + b'[{"index":0,' + part + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._last = b'[{"index":0,' + part % b"" + b',"finish_reason":"length"}]}\n\n'
        self._whole = b'[{"index":0,' + whole + b',"logprobs":null,"finish_reason":"length"}],"usage":'

    def chunk(self, text: bytes = b"") -> bytes:
        """A chunk of this text, or the time."""
        return piece(self._part % (text or b"%d " % time.monotonic_ns()))

    def ending(self, tokens: int) -> bytes:
        usage = b"data: " + self._start + b'[],"usage":' + USAGE % (tokens, tokens + 1) + b"}\n\n"
        return piece(b"data: " + self._start + self._last + usage + b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def whole(self, tokens: int) -> bytes:
        text = b"%d " % time.monotonic_ns() * tokens
        body = self._whole_start + self._whole % text + USAGE % (tokens, tokens + 1) + b"}"
        return WHOLE % (len(body), body)


COMPLETION = Kind(b"cmpl-1", b"text_completion", b"text_completion", b'"text":"%b"', b'"text":"%b"')
CHAT = Kind(
    b"chatcmpl-1",
    b"chat.completion.chunk",
    b"chat.completion",
    b'"delta":{"role":"assistant","content":"%b"}',
    b'"message":{"role":"assistant","content":"%b"}',
)


def piece(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


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
        self.body = self.target = b""
        self.tokens = self.left = 0
        self.kind = COMPLETION

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        target, body, self.target, self.body = self.target, self.body, b"", b""
        if not body:
            self.transport.write(WHOLE % (len(MODELS), MODELS))
            return
        self.kind, asked = CHAT if b"chat" in target else COMPLETION, decode_body(body)
        self.tokens = self.left = asked.tokens
        if not asked.stream:
            self.transport.write(self.kind.whole(self.tokens))
        elif self.ticker is None:
            chunks = b"".join(self.kind.chunk() for _ in range(self.tokens))
            self.transport.write(HEAD + chunks + self.kind.ending(self.tokens))
        else:
            self.transport.write(HEAD)
            self.ticker.add(self)

    def write_next(self) -> bool:
        """Whether there is more to come."""
        if self.transport.is_closing():
            return False
        self.left -= 1
        chunk = self.kind.chunk()
        self.transport.write(chunk if self.left else chunk + self.kind.ending(self.tokens))
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
