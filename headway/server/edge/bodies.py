"""Receives the bodies of requests, within limits of each and of all together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from headway.server.errors import ApiError, ClientGone, too_many

# Bodies up to here are parsed as they come: whatever is in them takes a few milliseconds.
SMALL_BYTES = 2**15
# Bodies that are being received, together, in largest bodies.
MAX_HELD = 32


class Bodies:
    """The bodies that are here.

    Args:
        most_bytes: the most bytes of one body.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held = 0  # bytes of large bodies that are here and not yet let go

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of a request, which counts until it is left.

        Raises:
            ApiError: 413 when it is longer than allowed, with or without a content-length that says so; 429 when too
                many large ones come at once.
            ClientGone: the client went away before the body was complete.
        """
        stated = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:19]) > self._most:
            raise self._too_large(f"the body has {stated[:19]} bytes")
        received, held = bytearray(), 0
        try:
            is_whole = False
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                received += message.get("body", b"")
                is_whole = not message.get("more_body", False)
                if len(received) > self._most:
                    raise self._too_large(f"the body has more than {self._most} bytes")
                if len(received) > SMALL_BYTES:
                    self._held += len(received) - held
                    held = len(received)
                    self._check_held()
            yield received
        finally:
            self._held -= held

    def _too_large(self, what: str) -> ApiError:
        message = f"{what}; at most {self._most} are accepted (--max-body-size)"
        return ApiError(413, message, code="request_too_large")

    def _check_held(self) -> None:
        if self._held > MAX_HELD * self._most:
            message = f"{self._held} bytes of large bodies are being received; at most {MAX_HELD * self._most} may be"
            raise too_many(message, "too_many_large_bodies", 1)
