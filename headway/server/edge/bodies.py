"""Receives the bodies of requests, within limits of each and of all together."""

from __future__ import annotations

from starlette.requests import Request

from headway.server.edge.edge import HEADERS
from headway.server.errors import ApiError, ClientGone, too_many

# Bodies up to here are parsed as they come: whatever is in them takes a few milliseconds.
SMALL_BYTES = 2**15
# Bodies that are being received, together, in largest bodies.
MAX_HELD = 32


class Received(bytearray):
    """A body. A large one counts until it is left, as a context.

    Attributes:
        counted: how many of its bytes count.
    """

    def __init__(self, bodies: Bodies) -> None:
        super().__init__()
        self._bodies, self.counted = bodies, 0

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held -= self.counted


class Bodies:
    """The bodies that are here.

    Args:
        most_bytes: the most bytes of one body.

    Attributes:
        held: bytes of large bodies that are here and not yet let go.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self.held = most_bytes, 0

    async def received(self, request: Request) -> Received:
        """The body of a request.

        Raises:
            ApiError: 413 when it is longer than allowed, with or without a content-length that says so; 429 when too
                many large ones come at once.
            ClientGone: the client went away before the body was complete.
        """
        stated = request.scope[HEADERS].get(b"content-length", b"")
        if stated.isdigit() and int(stated[:19]) > self._most:
            raise self._too_large(f"the body has {stated[:19].decode()} bytes")
        body, is_whole = Received(self), False
        try:
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                is_whole = not message.get("more_body", False)
                if len(body) > self._most:
                    raise self._too_large(f"the body has more than {self._most} bytes")
                if len(body) > SMALL_BYTES:
                    self.held += len(body) - body.counted
                    body.counted = len(body)
                    if self.held > MAX_HELD * self._most:
                        held = f"{self.held} bytes of large bodies are being received"
                        raise too_many(f"{held}; at most {MAX_HELD * self._most} may be", "too_many_large_bodies", 1)
        except BaseException:
            body.__exit__()
            raise
        return body

    def _too_large(self, what: str) -> ApiError:
        message = f"{what}; at most {self._most} are accepted (--max-body-size)"
        return ApiError(413, message, code="request_too_large")
