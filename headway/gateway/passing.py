"""What the gateway passes on of a request and of an answer: bodies as they are, and some headers."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from headway.gateway.attempt import Head
from headway.gateway.member import Member
from headway.server.edge.edge import REQUEST_ID

# Headers that are passed on, each way; of others only those that begin like these.
PASSED = frozenset((b"accept", b"content-type", b"user-agent", b"traceparent", b"tracestate"))
PASSED_LIKE = (b"anthropic-", b"openai-", b"x-headway-", b"x-llm-d-", b"x-session-id", b"x-stainless-")
RETURNED = frozenset((b"content-type", b"content-disposition", b"retry-after", b"retry-after-ms"))
RETURNED_LIKE = (b"anthropic-", b"openai-", b"x-headway-", b"x-llm-d-")
_OWN = (b"x-headway-backend", b"x-headway-ignored-headers")

Headers = list[tuple[bytes, bytes]]


def request_to(member: Member, request: Request, path: str, own: Mapping[bytes, bytes], body: bytes) -> bytes:
    """The bytes that a backend is sent.

    Args:
        own: headers that say what the gateway has decided, in place of the client's; empty ones are left out.
    """
    scope = request.scope
    query: bytes = scope["query_string"]
    lines = [
        f"{scope['method']} {member.entry.prefix}{path}".encode(),
        b"?%b HTTP/1.1\r\n" % query if query else b" HTTP/1.1\r\n",
        member.head,
        b"x-request-id: %b\r\n" % scope[REQUEST_ID].encode(),
    ]
    lines += [
        b"%b: %b\r\n" % pair
        for pair in scope["headers"]
        if (pair[0] in PASSED or pair[0].startswith(PASSED_LIKE)) and pair[0] not in own
    ]
    if own:
        lines += [b"%b: %b\r\n" % pair for pair in own.items() if pair[1]]
    if body or scope["method"] == "POST":
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body])


def returned(head: Head, member: Member) -> Headers:
    """The headers of a backend's answer that the client gets."""
    found = [
        pair
        for pair in head.headers.items()
        if (pair[0] in RETURNED or pair[0].startswith(RETURNED_LIKE)) and pair[0] not in _OWN
    ]
    found.append((b"x-headway-backend", member.label.encode()))
    return found
