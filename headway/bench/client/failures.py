"""What goes wrong with a request, in one kind and one line."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headway.load.record import Failure, FailureKind

SHOWN_CHARS = 300
LATE = ("deadline_unreachable", "queue_timeout")  # codes of a 503 by which a class refuses what would be late
KIND_OF_STATUS = {
    401: FailureKind.AUTH,
    403: FailureKind.AUTH,
    404: FailureKind.NOT_FOUND,
    429: FailureKind.RATE_LIMITED,
}


class RequestFailed(Exception):
    """A request gave no answer, or only part of one."""

    def __init__(self, kind: FailureKind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind, one_line(message), status)


def one_line(text: str) -> str:
    """Text of any origin as one printable line of bounded length."""
    flat = " ".join(text.split())
    flat = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in flat)
    return flat if len(flat) <= SHOWN_CHARS else flat[: SHOWN_CHARS - 3] + "..."


def error_text(content: object) -> str:
    """The message of an OpenAI error object, in its several spellings; "" when `content` is none."""
    if not isinstance(content, Mapping):
        return ""
    error = content.get("error")
    if isinstance(error, Mapping):
        return str(error.get("message") or error)
    if error:
        return str(error)
    return str(content.get("message") or content.get("detail") or "")


def failure_of_status(status: int, headers: Mapping[bytes, bytes], body: bytes) -> Failure:
    """The failure that a response with another status than 2xx means. `headers` have lower-case names."""
    if 300 <= status < 400:
        location = headers.get(b"location", b"").decode("latin-1") or "nowhere"
        message = f"HTTP {status}: redirected to {location}; redirects are not followed, give that base URL"
        return Failure(FailureKind.CLIENT_ERROR, one_line(message), status)
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        content = None
    said = error_text(content) or body[:SHOWN_CHARS].decode(errors="replace")
    message = f"HTTP {status}: {said}" if said else f"HTTP {status}"
    if b"retry-after" in headers:
        message += f" (Retry-After: {headers[b'retry-after'].decode('latin-1')})"
    kind = KIND_OF_STATUS.get(status) or (FailureKind.SERVER_ERROR if status >= 500 else FailureKind.CLIENT_ERROR)
    if b"retry-after" in headers and _is_meant(status, content):
        kind = FailureKind.REFUSED
    return Failure(kind, one_line(message), status)


def _is_meant(status: int, content: object) -> bool:
    """Whether a typed error says that a limit was reached which the server keeps on purpose."""
    error = content.get("error") if isinstance(content, Mapping) else None
    if not isinstance(error, Mapping):
        return False
    return (status == 429 and bool(error.get("type"))) or (status == 503 and error.get("code") in LATE)
