"""What comes before a request's body: its limits, and the errors for what this server does not speak."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import httptools
from starlette.datastructures import QueryParams
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headway.server.errors import ApiError, bad_request

MAX_ID_LENGTH = 128
MAX_TARGET = 8 * 2**10
MAX_HEAD = 64 * 2**10
MAX_HEADERS = 100
_UNKNOWN_METHOD = re.compile(rb"[A-Za-z][!-~]{0,31} [!-~]")
_LOOKED_AT = frozenset((b"host", b"transfer-encoding", b"content-encoding", b"expect"))
_TLS_HELLO = b"\x16\x03"


def request_id(given: bytes) -> str:
    """A request's id: the one that the client gives, or a new one where that is none to repeat."""
    text = given.decode("latin-1")
    return text if 0 < len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable() else os.urandom(16).hex()


def query_number(query: QueryParams, name: str, default: int, most: int) -> int:
    """A number from 1 to `most` of a request's query. Raises ApiError 400."""
    given = query.get(name, str(default))
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= most):
        raise bad_request(f"{name} is {given[:60]!r}; it must be a number from 1 to {most}", name)
    return int(given)


def query_choice(query: QueryParams, name: str, default: str, choices: tuple[str, str]) -> str:
    """One of two words of a request's query. Raises ApiError 400."""
    given = query.get(name, default)
    if given not in choices:
        raise bad_request(f"{name} is {given[:60]!r}; it must be {' or '.join(choices)}", name)
    return given


def is_newest_first(query: QueryParams) -> bool:
    """How a list is ordered that a request asks for. Raises ApiError 400."""
    return query_choice(query, "order", "desc", ("asc", "desc")) == "desc"


def written(answer: Response, headers: Iterable[tuple[bytes, bytes]], is_head: bool = False) -> bytes:
    """An answer as it is sent.

    Args:
        headers: headers that every answer has.
        is_head: leave out the body.
    """
    lines = (b"%b: %b\r\n" % header for header in (*headers, *answer.raw_headers))
    return b"%b%b\r\n%b" % (STATUS_LINE[answer.status_code], b"".join(lines), b"" if is_head else bytes(answer.body))


def check_head(method: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the client holds the body back until it is asked for.

    Raises:
        ApiError: the headers ask for something that is not spoken here, or can be read in two ways.
    """
    if version not in ("1.1", "1.0"):
        raise unknown_version(f"HTTP/{version}")
    if method == b"CONNECT":
        raise unknown_method(method)
    hosts, holds_back = 0, False
    for name, value in headers:
        if name not in _LOOKED_AT:
            continue
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            if version == "1.0":
                raise malformed("HTTP/1.0 has no Transfer-Encoding")
            if value.lower() != b"chunked":
                message = f"Transfer-Encoding is {_shown(value)}; only chunked is supported"
                raise ApiError(501, message, code="unsupported_transfer_encoding")
        elif name == b"content-encoding" and value.lower() not in (b"identity", b""):
            message = f"Content-Encoding is {_shown(value)}; send the body as it is, without compression"
            takes = {"accept-encoding": "identity"}
            raise ApiError(415, message, code="unsupported_content_encoding", headers=takes)
        elif name == b"expect":
            holds_back = value.lower() == b"100-continue"
            if not holds_back:
                message = f"Expect is {_shown(value)}; only 100-continue is supported"
                raise ApiError(417, message, code="expectation_failed")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise malformed(f"the request has {hosts or 'no'} Host headers; it needs one")
    return holds_back


def _shown(value: bytes) -> str:
    return repr(value[:60].decode("latin-1"))


def malformed(reason: str) -> ApiError:
    """An error with 400, for bytes that are no valid request."""
    return ApiError(400, reason, code="malformed_request")


def unknown_method(method: bytes) -> ApiError:
    """An error with 501, for a method that is not supported."""
    return ApiError(501, f"the method {_shown(method)} is not supported", code="method_not_supported")


def unknown_version(version: str) -> ApiError:
    """An error with 505, for another version of HTTP."""
    message = f"the request is of {version}; HTTP/1.1 and HTTP/1.0 are supported"
    return ApiError(505, message, code="http_version_not_supported")


def too_long() -> ApiError:
    """An error with 414, for a target that is too long."""
    message = f"the request's target has more than {MAX_TARGET:,} bytes; send long values in the body"
    return ApiError(414, message, code="target_too_long")


def too_much(is_body: bool) -> ApiError:
    """An error for too much beside the body itself: in the headers, or with `is_body` around the body's chunks."""
    if is_body:
        return malformed("what is around the chunks of the body is longer than the body, and than 64 KiB")
    message = f"the request has more than {MAX_HEADERS} headers or {MAX_HEAD // 2**10} KiB of them"
    return ApiError(431, message, code="headers_too_large")


def unparsable(error: httptools.HttpParserError, data: bytes) -> ApiError:
    """An error that says what is wrong with bytes that the parser does not take.

    Args:
        data: the bytes in which it found the error.
    """
    if str(error) == "Invalid HTTP version":
        return unknown_version("another version")
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        if data.startswith(_TLS_HELLO):
            return malformed("this port speaks HTTP, not HTTPS")
        if _UNKNOWN_METHOD.match(data):
            return unknown_method(data.partition(b" ")[0])
    return malformed(f"this is no HTTP request: {error}")
