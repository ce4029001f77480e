"""An attack, and the messages that attacks are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

from benchmarks.hostile.client import Answer, Talk

MB = 1 << 20
BODY_BYTES = 8 * MB  # what the server takes by default (--max-body-size)
CONTEXT = 1024  # the bundled model's context
# The template of Llama 3 does this with tools: each value is on a line of its own, behind its indentation.
INDENTED = "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
# Templates are files of a checkpoint, which others have written.
TEMPLATES = {
    "indented": INDENTED,
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}",
    "lipsum": "{{ lipsum(n=99999) }}{{ messages[0].content }}",
    "indentation": "{{ messages | tojson(indent=100000000) }}",
    "multiplication": "{{ 'a' * (4000000000 + messages | length) }}",
    "a constant": "{{ 'a' * 4000000000 }}",  # which Jinja computes as it compiles
}
PLAIN = "plain"


@dataclass(frozen=True)
class Attack:
    """One kind of what is sent.

    Args:
        expect: statuses that may come; 0 where a connection may end without an answer.
        talks: makes what is sent, before the clock starts.
        seconds: until it is broken off.
        server: a name in TEMPLATES, or PLAIN.
        judge: what else is wrong with an answer; nothing by default.
        short: is among those of `make test`.
    """

    name: str
    group: str
    expect: frozenset[int]
    talks: Callable[[], list[Talk]]
    seconds: float = 8.0
    server: str = PLAIN
    judge: Callable[[Answer], str] = field(default=lambda _: "")
    at_once: int = 4096
    short: bool = False

    def __str__(self) -> str:
        return self.name


def head(path: str, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: 127.0.0.1", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(path: str, body: bytes | str, *headers: str, version: str = "1.1") -> bytes:
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    stated = (f"Content-Length: {len(raw)}", "Content-Type: application/json", "Connection: close", *headers)
    return head(path, *stated, version=version) + raw


def get(path: str, *headers: str) -> bytes:
    return head(path, "Connection: close", *headers, method="GET")


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "Once", "max_tokens": 1}
PLAIN_BODY = json.dumps(HELLO)
CHUNKED = "Transfer-Encoding: chunked"


def listed(item: str, size: int = BODY_BYTES - 4096) -> str:
    """A JSON array of so many bytes, with one item again and again."""
    count = size // (len(item.encode()) + 1)
    return "[" + ",".join([item] * count) + "]"


def keyed(count: int, value: str = "1") -> str:
    return ",".join(f'"{number}":{value}' for number in range(count))


def chat(fields: str = "", content: str = '"Hello"') -> str:
    return f'{{"messages":[{{"role":"user","content":{content}}}],"max_tokens":1{fields}}}'


def nested(depth: int, inside: str = "") -> str:
    return "[" * depth + inside + "]" * depth


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def error_object(answer: Answer) -> str:
    """An error that is not what the documents promise: an error object, and the request's id."""
    if not any(status >= 400 for status in answer.statuses):
        return ""
    if b"x-request-id:" not in answer.head.lower():
        return "no x-request-id"
    try:
        iserror_object = isinstance(json.loads(answer.body)["error"]["message"], str)
    except (ValueError, LookupError, TypeError):
        iserror_object = False
    return "" if iserror_object else "no error object"


def endless(first: bytes, piece: bytes, size: int) -> Iterator[bytes]:
    return chain([first], repeat(piece, size // len(piece)))
