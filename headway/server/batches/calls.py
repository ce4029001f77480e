"""Requests that do not come through a socket: they go the way of all others from the edge on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message

from headway.config_files.tenants import Access
from headway.server.classes import CLASS_HEADER
from headway.server.edge.edge import ACCESS


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request was answered with."""

    status: int
    headers: Mapping[str, str]
    body: bytes


# Sends a request to a path, with a JSON body, for a tenant.
Post = Callable[[str, bytes, str], Awaitable[Reply]]


class Gate(Protocol):
    """Says when a request may be sent."""

    inside: int

    async def enter(self) -> None:
        """Wait for a place. leave() gives it back."""

    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """Calls the application in this process."""

    app: ASGIApp
    service_class: Callable[[], str]  # gives the name of the requests' class

    async def post(self, path: str, body: bytes, tenant: str) -> Reply:
        """POST a JSON body for a tenant. Cancelling it has the effect of a client that goes away."""
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            CLASS_HEADER: self.service_class(),
        }
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            ACCESS: Access(tenant),
        }
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answer: list[Message] = []

        async def receive() -> Message:
            if request:
                return request.pop()
            return await asyncio.get_running_loop().create_future()  # there is nobody who could go away

        async def send(message: Message) -> None:
            answer.append(message)

        await self.app(scope, receive, send)
        start, *parts = answer
        told = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
        return Reply(start["status"], told, b"".join(part.get("body", b"") for part in parts))
