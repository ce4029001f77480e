"""A server without a model: it speaks the OpenAI API at the times that it is told, for tests of clients.

Tokens are words. A prompt has as many as it has words, and an answer as many as `max_tokens` says. Delays and faults
depend on the seed and the number of the request alone. Answers of one or two tokens, by which clients look at a server,
have no faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from headway.flags import Flag
from headway.load.errors import BenchError
from headway.load.workload.lengths import Distribution, parse_distribution

MODEL, WORD = "mock", " word"
MAX_HEAD, MAX_BODY = 64 * 1024, 64 * 2**20
MAX_TOKENS = 1_000_000
LOOK = 2  # tokens of answers without faults
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large", 500: "Internal Server Error"}


@dataclass(frozen=True, slots=True)
class MockOptions:
    """What a mock server does with a request.

    Args:
        ttft_ms, itl_ms: distributions in milliseconds.
    """

    host: Annotated[str, Flag("Address to listen on.", common=True)] = "127.0.0.1"
    port: Annotated[int, Flag("Port; 0 takes a free one.", min=0, max=65535, common=True)] = 8000
    ttft_ms: Annotated[
        str, Flag("Milliseconds to the first token: a number, or lognormal:mean=50,cv=0.5.", common=True)
    ] = "50"
    itl_ms: Annotated[str, Flag("Milliseconds between two tokens: a number or a distribution.", common=True)] = "10"
    max_num_seqs: Annotated[int, Flag("Requests that are answered at once; others wait.", min=1, common=True)] = 256
    error_share: Annotated[float, Flag("Share of requests that are answered with 500.", min=0, max=1, common=True)] = (
        0.0
    )
    cut_share: Annotated[
        float, Flag("Share of answers whose connection breaks halfway.", min=0, max=1, common=True)
    ] = 0.0
    seed: Annotated[int, Flag("Seed of delays and faults.", common=True)] = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """How one request is answered. Seconds."""

    ttft_s: float
    gaps_s: list[float]
    fault: str  # "error", "cut" or ""


@dataclass(slots=True)
class MockServer:
    """The server. `serve` runs it until its task is cancelled."""

    options: MockOptions
    answered: int = 0  # requests for an answer so far
    _ttft: Distribution = field(init=False)
    _itl: Distribution = field(init=False)
    _seats: asyncio.Semaphore = field(init=False)
    _numbers: Iterator[int] = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._ttft, self._itl = parse_distribution(self.options.ttft_ms), parse_distribution(self.options.itl_ms)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen inside. Yields the address. Raises BenchError where the port cannot be had."""
        asked = self.options
        self._seats = asyncio.Semaphore(asked.max_num_seqs)
        try:
            server = await asyncio.start_server(self._connection, asked.host, asked.port, limit=MAX_HEAD)
        except OSError as error:
            raise BenchError(f"cannot listen on {asked.host}:{asked.port}: {error.strerror or error}") from None
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _planned(self, tokens: int) -> _Answer:
        import numpy as np

        number = next(self._numbers)
        rng, draw = np.random.default_rng((self.options.seed, number)), random.Random(f"{self.options.seed}/{number}")
        ttft_ms, gaps_ms = self._ttft.values(1, rng), self._itl.values(max(0, tokens - 1), rng)
        if tokens <= LOOK:
            return _Answer(float(ttft_ms[0]) / 1e3, (gaps_ms / 1e3).tolist(), "")
        fault = "error" if draw.random() < self.options.error_share else ""
        fault = fault or ("cut" if draw.random() < self.options.cut_share else "")
        return _Answer(float(ttft_ms[0]) / 1e3, (gaps_ms / 1e3).tolist(), fault)

    # --- connections --------------------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection. Of one that is cancelled, asyncio would report an error."""
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)
        with contextlib.suppress(*ends, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer. Returns whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, *_ = head.split(" ", 2)
        fields = dict(line.lower().split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
        length = int(fields.get("content-length", "0"))
        if not 0 <= length <= MAX_BODY:
            await _reply(writer, 413, _error(f"the body has {length} bytes; at most {MAX_BODY} are taken"))
            return False
        body = await reader.readexactly(length)
        path = path.partition("?")[0]
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            goes_on = await self._answer(writer, path, body)
        else:
            status, content = self._look(path)
            await _reply(writer, status, content)
            goes_on = True
        return goes_on and "close" not in fields.get("connection", "")

    def _look(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "mock"}]}
        if path == "/health":
            return 200, {"status": "ok"}
        return 404, _error(f"there is no route {path}")

    # --- answers ------------------------------------------------------------------------------------

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: bytes) -> bool:
        is_chat = path.endswith("/chat/completions")
        try:
            asked = json.loads(body)
            prompt = _words(asked["messages"] if is_chat else asked["prompt"])
            tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
            if not isinstance(tokens, int) or not 1 <= tokens <= MAX_TOKENS:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            await _reply(
                writer, 400, _error("the body is no request for an answer, or max_tokens is no number above 0")
            )
            return True
        planned = self._planned(tokens)
        self.answered += 1
        async with self._seats:
            await asyncio.sleep(planned.ttft_s)
            if planned.fault == "error":
                await _reply(writer, 500, _error("the mock server fails, as --error-share says"))
                return True
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            if not asked.get("stream"):
                await asyncio.sleep(sum(planned.gaps_s))
                message: dict[str, Any] = {"role": "assistant", "content": WORD * tokens}
                choice = {"message": message} if is_chat else {"text": WORD * tokens}
                choices = [{"index": 0, **choice, "finish_reason": "length"}]
                await _reply(writer, 200, {**_about(is_chat), "choices": choices, "usage": usage})
                return True
            return await _stream(writer, is_chat, tokens, planned, usage)


async def _stream(
    writer: asyncio.StreamWriter, is_chat: bool, tokens: int, planned: _Answer, usage: dict[str, int]
) -> bool:
    """Write the events of an answer at their times, counted from its first. Returns False where it is cut."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    about, began, due = _about(is_chat), time.monotonic(), 0.0
    for at in range(tokens):
        if at:
            due += planned.gaps_s[at - 1]
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        if planned.fault == "cut" and at == tokens // 2:
            writer.transport.abort()
            return False
        said = {"delta": {"content": WORD}} if is_chat else {"text": WORD}
        done = "length" if at == tokens - 1 else None
        _write_event(writer, {**about, "choices": [{"index": 0, **said, "finish_reason": done}]})
        await writer.drain()
    _write_event(writer, {**about, "choices": [], "usage": usage})
    writer.write(_piece(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()
    return True


def _about(is_chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "mock", "object": kind, "created": 1, "model": MODEL}


def _write_event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    writer.write(_piece(b"data: " + json.dumps(content).encode() + b"\n\n"))


def _piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _reply(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def _words(prompt: Any) -> int:
    """Tokens of a prompt: words of a text or of messages, or the number of token ids."""
    if isinstance(prompt, str):
        return max(1, len(prompt.split()))
    if prompt and all(isinstance(each, int) for each in prompt):
        return len(prompt)
    return sum(_words(each["content"] if isinstance(each, dict) else each) for each in prompt)
