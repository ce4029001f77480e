"""Headers and the protocol: what comes before a body is looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain

from benchmarks.hostile.client import Answer, Talk
from benchmarks.hostile.messages import (
    CHUNKED,
    COMPLETIONS,
    MB,
    PLAIN_BODY,
    Attack,
    chunk,
    endless,
    error_object,
    get,
    head,
    post,
)


def of_headers() -> Iterator[Attack]:
    start = head("/v1/models", method="GET")[:-2]
    filler = b"X-Filler: " + b"a" * 8000 + b"\r\n"
    small = b"".join(b"X-%d: a\r\n" % number for number in range(500_000))
    too_large, gone = frozenset({400, 431}), frozenset({400, 408, 431})

    def add(
        name: str,
        expect: frozenset[int],
        pieces: Callable[[], Iterator[bytes] | list[bytes]],
        seconds: float = 12.0,
        short: bool = False,
        every_s: float = 0.0,
    ) -> Attack:
        talks = lambda: [Talk(pieces(), every_s)]  # noqa: E731
        return Attack(name, "headers", expect, talks, seconds, judge=error_object, short=short)

    yield add("48 MB of headers", too_large, lambda: chain(endless(start, filler, 48 * MB), [b"\r\n"]), short=True)
    yield add(
        "one header of 64 MB, unfinished", too_large, lambda: endless(start + b"X: ", b"a" * MB, 64 * MB), short=True
    )
    yield add("a header name of 64 MB, unfinished", too_large, lambda: endless(start, b"a" * MB, 64 * MB))
    yield add("500,000 headers", too_large, lambda: [start, small, b"\r\n"], short=True)
    yield add("100,000 times the same header", too_large, lambda: [start, b"Authorization: a\r\n" * 100_000, b"\r\n"])
    yield add(
        "a target of 16 MB", frozenset({400, 414, 431}), lambda: endless(b"GET /", b"a" * MB, 16 * MB), short=True
    )
    yield add(
        "a query of 16 MB", frozenset({400, 414, 431}), lambda: endless(b"GET /health?", b"a=b&" * (MB // 4), 16 * MB)
    )
    yield add("a method of 1 MB", frozenset({400, 405, 431, 501}), lambda: [b"A" * MB, b" / HTTP/1.1\r\n\r\n"])
    yield add(
        "8 MB of empty lines first", frozenset({0, 200, 400, 408, 431}), lambda: [b"\r\n" * (4 * MB), get("/health")]
    )
    yield add("a header that trickles", gone, lambda: endless(start, b"X-a: b\r\n", 8000), 8.0, every_s=0.1)
    yield add("one byte of a header at a time", gone, lambda: endless(start, b"a", 8000), 8.0, every_s=0.05)
    yield add("a header that stops", gone, lambda: [start], 8.0)
    for name, odd in {
        "a header without a colon": b"nonsense\r\n",
        "a space before the colon": b"X-a : b\r\n",
        "NUL in a header": b"X-a: \0\r\n",
        "a folded header": b"X-a: b\r\n c\r\n",
        "a lone CR": b"X-a: b\rX-b: c\r\n",
        "an empty header name": b": b\r\n",
    }.items():
        talks = lambda odd=odd: [Talk([start + odd + b"Connection: close\r\n\r\n"])]  # noqa: E731
        yield Attack(name, "headers", frozenset({200, 400}), talks, judge=error_object)


def _not_chunked(answer: Answer) -> str:
    return "chunked to HTTP/1.0" if b"transfer-encoding: chunked" in answer.head.lower() else ""


def of_protocol() -> Iterator[Attack]:
    streamed = json.dumps({"prompt": "Once", "max_tokens": 8, "stream": True})
    body = PLAIN_BODY.encode()

    def one(
        name: str,
        expect: set[int],
        *pieces: bytes,
        judge: Callable[[Answer], str] = error_object,
        short: bool = False,
        half_closes: bool = False,
        seconds: float = 12.0,
    ) -> Attack:
        talks = lambda: [Talk(pieces, half_closes=half_closes)]  # noqa: E731
        return Attack(name, "protocol", frozenset(expect), talks, seconds, judge=judge, short=short)

    def fine(_: Answer) -> str:
        return ""

    def post_with(*headers: str, raw: bytes = body) -> bytes:
        return head(COMPLETIONS, "Content-Type: application/json", "Connection: close", *headers) + raw

    length = f"Content-Length: {len(body)}"
    yield one("HTTP/1.0, a stream", {200}, post(COMPLETIONS, streamed, version="1.0"), judge=_not_chunked, short=True)
    yield one("HTTP/1.0, an answer", {200}, post(COMPLETIONS, PLAIN_BODY, version="1.0"), judge=_not_chunked)
    yield one("nonsense", {400}, b"\x80\x81 nonsense\r\n\r\n", short=True)
    yield one("HTTP/0.9", {400, 505, 0}, b"GET /health\r\n\r\n", judge=fine, seconds=8)
    yield one("HTTP/2's preface", {400, 505}, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    yield one("a TLS hello", {400, 0}, bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(505), judge=fine)
    yield one("HTTP/9.9", {400, 505}, b"GET /v1/models HTTP/9.9\r\nHost: a\r\n\r\n")
    yield one("no Host", {200, 400}, b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n", judge=fine)
    yield one(
        "CONNECT", {400, 404, 405, 501}, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", judge=fine
    )
    yield one("TRACE", {404, 405, 501}, head("/v1/models", "Connection: close", method="TRACE"))
    yield one("OPTIONS *", {200, 204, 400, 404, 405}, head("*", "Connection: close", method="OPTIONS"), judge=fine)
    yield one(
        "an absolute target",
        {200, 400, 404},
        head("http://evil/v1/models", "Connection: close", method="GET"),
        judge=fine,
    )
    yield one("NUL in the target", {400, 404}, b"GET /v1/\0models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    yield one("a target that is not UTF-8", {400, 404}, get("/v1/%ff%fe"))
    yield one("an upgrade to websocket", {400, 404, 426}, get("/v1/x", "Upgrade: websocket", "Sec-WebSocket-Key: a"))
    yield one(
        "Transfer-Encoding: gzip, chunked",
        {501, 400},
        post_with("Transfer-Encoding: gzip, chunked", raw=chunk(body) + b"0\r\n\r\n"),
        short=True,
    )
    yield one("Content-Encoding: gzip", {415}, post_with("Content-Encoding: gzip", length), short=True)
    yield one("two lengths", {400}, post_with(length, "Content-Length: 1"), short=True)
    yield one("a length and chunks", {400}, post_with(length, CHUNKED, raw=chunk(body) + b"0\r\n\r\n"))
    yield one("a negative length", {400}, post_with("Content-Length: -1"))
    yield one("a length of 30 digits", {400, 413}, post_with("Content-Length: " + "9" * 30))
    yield one("a length of 1 GB", {413}, post_with("Content-Length: 1000000000"), short=True)
    yield one("a length in hexadecimal", {400}, post_with("Content-Length: 0x10"))
    yield one(
        "Expect: 100-continue, and nothing",
        {400, 408, 417},
        post_with(length, "Expect: 100-continue", raw=b""),
        judge=fine,
        seconds=8,
    )
    yield one("a body that stops", {408}, post_with(length, raw=body[:5]), seconds=8)
    yield one(
        "half-closed after a whole request",
        {200},
        post(COMPLETIONS, PLAIN_BODY),
        judge=fine,
        half_closes=True,
        short=True,
    )
    yield one("half-closed in a header", {0, 400, 408}, b"GET /health HTTP/1.1\r\nHo", judge=fine, half_closes=True)
    yield one("half-closed in a body", {0, 400, 408}, post_with(length, raw=body[:5]), judge=fine, half_closes=True)
    yield one("a chunk's size of 20 digits", {400, 413}, post_with(CHUNKED, raw=b"fffffffffffffffffff\r\nabc"))
    yield one("a chunk's size that is none", {400}, post_with(CHUNKED, raw=b"xyz\r\nabc\r\n"))
    yield one("a negative chunk", {400}, post_with(CHUNKED, raw=b"-1\r\nabc\r\n"))

    def flood(name: str, expect: set[int], pieces: Callable[[], Iterator[bytes]], seconds: float = 12.0) -> Attack:
        return Attack(name, "protocol", frozenset(expect), lambda: [Talk(pieces())], seconds, judge=error_object)

    start = post_with(CHUNKED, raw=b"")
    yield flood("chunks without an end", {413}, lambda: endless(start, chunk(b" " * 65536), 64 * MB))
    yield flood("chunks of one byte, 2 MB of them", {400, 413}, lambda: endless(start, chunk(b" ") * 4096, 12 * MB))
    yield flood("64 MB of chunk extension", {400, 413, 431}, lambda: endless(start + b"1;", b"a" * MB, 64 * MB))
    yield flood(
        "200,000 chunks with extensions",
        {400, 413},
        lambda: endless(start, chunk(b" ", b";a=" + b"b" * 200) * 100, 44 * MB),
    )
    yield flood(
        "48 MB of trailers",
        {400, 413, 431},
        lambda: chain(endless(start + chunk(body) + b"0\r\n", b"X-a: " + b"a" * 8000 + b"\r\n", 48 * MB), [b"\r\n"]),
    )
    slow = lambda: [Talk(endless(head(COMPLETIONS, "Content-Length: 8000"), b" ", 8000), 0.05)]  # noqa: E731
    yield Attack("a body that trickles", "protocol", frozenset({408}), slow, 8.0, judge=error_object)
