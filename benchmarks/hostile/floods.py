"""Much at once, queries, uploads, and templates that never end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

from benchmarks.hostile.client import Talk
from benchmarks.hostile.messages import (
    BODY_BYTES,
    CHAT,
    COMPLETIONS,
    MB,
    TEMPLATES,
    Attack,
    chat,
    endless,
    error_object,
    get,
    head,
    keyed,
    post,
)


def of_floods() -> Iterator[Attack]:
    def flood(
        name: str,
        expect: set[int],
        talks: Callable[[], list[Talk]],
        seconds: float = 12.0,
        at_once: int = 4096,
        short: bool = False,
    ) -> Attack:
        return Attack(name, "floods", frozenset(expect), talks, seconds, at_once=at_once, short=short)

    def asked(stream: bool = False, **fields: object) -> bytes:
        return post(COMPLETIONS, json.dumps({"prompt": "Once upon a time", "stream": stream, **fields}))

    half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    kept = head("/health", method="GET")
    tokenize = json.dumps({"prompt": "a"}).encode()
    tokenized = head("/tokenize", f"Content-Length: {len(tokenize)}") + tokenize
    yield flood("2,000 connections that say nothing", {0}, lambda: [Talk([b""]) for _ in range(2000)], 4)
    yield flood("2,000 connections with half a header", {0, 408}, lambda: [Talk([half]) for _ in range(2000)], 5)
    yield flood(
        "500 connections that trickle",
        {0, 408},
        lambda: [Talk(endless(half, b"a: b\r\n", 600), 0.2) for _ in range(500)],
        6,
    )
    yield flood(
        "2,000 connections reset at once",
        {0, 200, 400, 429},
        lambda: [Talk([asked(max_tokens=1)], leaves_after=1) for _ in range(2000)],
    )
    yield flood("5,000 pipelined requests", {200, 429, 503}, lambda: [Talk([kept * 5000], answers=5000)], 12)
    yield flood(
        "2,000 pipelined requests to tokenize", {200, 429, 503}, lambda: [Talk([tokenized * 2000], answers=2000)], 12
    )
    yield flood(
        "pipelined requests, answers never read",
        {0, 200},
        lambda: [Talk([kept * 20_000], reads=False) for _ in range(8)],
        5,
    )
    yield flood(
        "64 streams left in the middle",
        {200, 429},
        lambda: [Talk([asked(True, max_tokens=200)], leaves_after=2000) for _ in range(64)],
        short=True,
    )
    yield flood(
        "64 streams never read",
        {0, 200, 429},
        lambda: [Talk([asked(True, max_tokens=900, logprobs=5)], reads=False) for _ in range(64)],
        6,
    )
    yield flood(
        "1,000 requests left before their answer",
        {0, 200, 429},
        lambda: [Talk([asked(max_tokens=900)], half_closes=True) for _ in range(1000)],
        3,
    )
    yield flood("2,000 requests", {200, 429}, lambda: [Talk([asked(max_tokens=1)]) for _ in range(2000)], 12)
    yield flood(
        "16 times 8 MB of prompt together",
        {400, 413, 429},
        lambda: [Talk([post(COMPLETIONS, json.dumps({"prompt": "the cat " * 1_000_000}))])] * 16,
        20,
    )
    yield flood(
        "16 times 600,000 unknown fields together",
        {400, 413, 429},
        lambda: [Talk([post(COMPLETIONS, f'{{"prompt":"a",{keyed(600_000)}}}')])] * 16,
        20,
    )
    yield flood(
        "32 bodies of 8 MB that stop before the end",
        {0, 408, 413, 429, 503},
        lambda: [Talk([head(COMPLETIONS, f"Content-Length: {BODY_BYTES}") + b" " * (BODY_BYTES - 9)])] * 32,
        5,
    )
    yield flood(
        "3,000 unknown routes", {404, 429}, lambda: [Talk([get(f"/{number:x}")]) for number in range(3000)], 10, 256
    )
    yield flood(
        "2,000 unknown models",
        {404, 429},
        lambda: [
            Talk([post(COMPLETIONS, json.dumps({"prompt": "a", "model": f"m{number}"}))]) for number in range(2000)
        ],
        10,
        256,
    )
    yield flood(
        "300 longest answers with log-probabilities",
        {0, 200, 429},
        lambda: [Talk([asked(max_tokens=900, logprobs=20, n=4)]) for _ in range(300)],
        6,
    )
    yield flood(
        "64 prompts of which every part is new",
        {200, 429},
        lambda: [Talk([asked(prompt=_noise(number), max_tokens=1)]) for number in range(64)],
        10,
    )


def of_crowds() -> Iterator[Attack]:
    """Many at once who each ask for something that is allowed, and single requests as large as they may be."""

    def crowd(name: str, message: bytes, count: int = 2000, expect: tuple[int, ...] = (200, 429)) -> Attack:
        # A client that still waits when the attack is broken off has no answer.
        return Attack(name, "crowds", frozenset({0, *expect}), lambda: [Talk([message]) for _ in range(count)], 8.0)

    def one(name: str, path: str, expect: tuple[int, ...] = (200, 400, 429), **body: object) -> Attack:
        talks = lambda: [Talk([post(path, json.dumps(body))])]  # noqa: E731
        return Attack(name, "crowds", frozenset(expect), talks, 15.0)

    text = "the cat sat on a mat "
    message = {"role": "user", "content": text * 10}
    yield crowd("2,000 times /health", get("/health"))
    yield crowd("2,000 times /metrics", get("/metrics"))
    yield crowd("2,000 times /docs", get("/docs"))
    yield crowd("2,000 times /openapi.json", get("/openapi.json"))
    yield crowd("2,000 times /debug/schedule", get("/debug/schedule?steps=100"))
    yield crowd("2,000 texts to tokenize", post("/tokenize", json.dumps({"prompt": text * 90})))
    yield crowd("2,000 embeddings", post("/v1/embeddings", json.dumps({"input": text * 10})))
    yield crowd("2,000 chats", post(CHAT, json.dumps({"messages": [message], "max_tokens": 1})))
    yield crowd("100 requests of 1,000 prompts", post(COMPLETIONS, json.dumps({"prompt": ["a"] * 1000})), 100)
    headers = head("/health", *(f"X-{number}: a" for number in range(90)), method="GET")
    yield Attack(
        "200 connections with 60 pipelined requests of 90 headers",
        "crowds",
        frozenset({0, 200, 429}),
        lambda: [Talk([headers * 60], answers=60) for _ in range(200)],
    )
    yield one("/detokenize: 1.3 million ids of 4 digits", "/detokenize", tokens=[3333] * 1_300_000)
    yield one("/tokenize: 4 MB, with strings", "/tokenize", prompt=text * 199_000, return_token_strs=True)
    yield one("a request of 1,024 prompts, 4 choices each", COMPLETIONS, prompt=["a"] * 1024, n=4, max_tokens=1)
    yield one("2,000 inputs of /v1/embeddings", "/v1/embeddings", input=["a"] * 2000)
    yield one("1,000 documents to /v1/rerank", "/v1/rerank", query="a", documents=["a"] * 1000)
    bias = {str(number): 1 for number in range(1024)}
    yield one("logit_bias with 1,024 entries, 128 choices", COMPLETIONS, prompt="a", n=128, logit_bias=bias)


def _noise(seed: int) -> str:
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefghij", k=3)) for _ in range(300))


def of_queries() -> Iterator[Attack]:
    digits = "9" * 4500
    for name, target in {
        "?steps= of ten digits": "/debug/schedule?steps=9999999999",
        "?steps= of 400 digits": f"/debug/schedule?steps={'9' * 400}",
        "?steps= of 4,500 digits": f"/debug/schedule?steps={digits}",
        "?steps= of zeros, then 40 digits": f"/debug/schedule?steps={'0' * 9}{'9' * 40}",
        "?steps= of 1, then 30 zeros": f"/debug/schedule?steps=1{'0' * 30}",
        "?limit= of zeros, then 40 digits": f"/v1/files?limit={'0' * 9}{'9' * 40}",
        "?steps= in other digits": "/debug/schedule?steps=%D9%A3%D9%A3",
        "?limit= of ten digits": "/v1/files?limit=9999999999",
        "?limit= of 4,500 digits": f"/v1/batches?limit={digits}",
        "?after= of 8 KB": f"/v1/batches?after={'a' * 8000}",
        "a file's id that climbs": "/v1/files/..%2f..%2fetc%2fpasswd/content",
        "a model's id of 16 KB": f"/v1/models/{'m' * 16000}",
    }.items():
        talks = lambda target=target: [Talk([get(target)])]  # noqa: E731
        yield Attack(name, "queries", frozenset({400, 404, 414}), talks, judge=error_object, short="steps" in name)


def of_uploads() -> Iterator[Attack]:
    def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
        raw = b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end
        stated = (f"Content-Length: {len(raw)}", "Content-Type: multipart/form-data; boundary=b", "Connection: close")
        return head("/v1/files", *stated) + raw

    purpose = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
    file = b'Content-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b'
    stated = "Content-Length: 3", "Connection: close"
    unbound = head("/v1/files", *stated, "Content-Type: multipart/form-data") + b"abc"
    long = head("/v1/files", *stated, f"Content-Type: multipart/form-data; boundary={'b' * 8000}") + b"abc"
    field = b'Content-Disposition: form-data; name="purpose"\r\n\r\n'
    many = b"".join(b"X-%d: a\r\n" % number for number in range(100_000)) + b"\r\na"
    refused, large, either = {400, 413, 415}, {400, 413, 431}, {200, 400, 413, 431}
    for name, sent, expect in (
        ("no boundary", unbound, refused),
        ("a boundary of 8 KB", long, refused),
        ("100,000 parts", form(*[field + b"a"] * 100_000), large),
        ("a part with 100,000 headers", form(many), large),
        ("a part's header of 8 MB", form(b"X: " + b"a" * (8 * MB) + b"\r\n\r\na"), large),
        ("a field of 8 MB", form(field + b"a" * (8 * MB)), large),
        ("a form without its end", form(purpose, file % (b"a", b"{}"), end=b""), refused),
        ("a file's name of 1 MB", form(purpose, file % (b"n" * MB, b"{}")), either),
        ("a file's name that climbs", form(purpose, file % (b"../../../tmp/x", b"{}")), either),
        ("NUL in a file's name", form(purpose, file % (b"a\0b", b"{}")), either),
        ("8 MB without a line", form(purpose, file % (b"a", b"{" * (8 * MB))), either),
        ("two million empty lines", form(purpose, file % (b"a", b"\n" * (2 * MB))), either),
    ):
        talks = lambda sent=sent: [Talk([sent])]  # noqa: E731
        yield Attack(name, "uploads", frozenset(expect), talks, short=name == "100,000 parts")


def of_templates() -> Iterator[Attack]:
    """Templates that loop, or write without end. What else they may answer is an error that says so."""
    expect = frozenset({400, 413, 500, 503, 504})
    for name in (each for each in TEMPLATES if each != "indented"):
        talks = lambda: [Talk([post(CHAT, chat())])]  # noqa: E731
        yield Attack(f"a template with {name}", "templates", expect, talks, 8.0, name, short=name == "a loop")
