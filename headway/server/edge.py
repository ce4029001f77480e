"""Where a request enters: its time of arrival, its id, and whether it may come in."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.connection import ARRIVED
from headway.server.errors import ApiError, internal
from headway.server.http_head import request_id
from headway.server.pacing import Pace
from headway.tenant_file import Access, key_digest

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs"})
# Known, but without effect so far. llm-d's router sets them on all traffic, so refusing them would refuse all of it.
IGNORED_HEADERS = ("x-llm-d-inference-fairness-id",)
# In a request's scope: names of its headers that were left aside, and what comes with its API key.
IGNORED, ACCESS = "headway.ignored_headers", "headway.access"
logger = logging.getLogger("headway.server")


class Edge:
    """The outermost layer: it echoes or makes up x-request-id, names headers without effect, checks API keys, and turns
    failures into a 500.

    Args:
        keys: the API keys that it accepts, by their digests; without any it is open.
    """

    def __init__(self, app: ASGIApp, keys: Callable[[], Mapping[bytes, Access]], pace: Pace) -> None:
        self._app = app
        self._pace = pace
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault(ARRIVED, time.monotonic_ns())
        if scope["path"] not in OPEN_PATHS:
            await self._pace.turn()
        headers = dict(scope["headers"])
        id_ = request_id(headers.get(b"x-request-id", b""))
        ignored = scope[IGNORED] = [name for name in IGNORED_HEADERS if name.encode() in headers]

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = id_
                if message["status"] == 413:  # what still comes of the body is not wanted
                    answer["connection"] = "close"
                if ignored:
                    answer["x-headway-ignored-headers"] = ", ".join(ignored)
            await send(message)

        if ACCESS not in scope:  # a request from within the server brings it
            scope[ACCESS] = self._access_of(headers.get(b"authorization", b""))
        if scope[ACCESS] is None and scope["path"] not in OPEN_PATHS:
            refusal = ApiError(
                401,
                "this server needs a valid API key, as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            return await refusal.response()(scope, receive, send_with_id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await internal("the server failed on this request; see its log").response()(scope, receive, send_with_id)

    def _access_of(self, authorization: bytes) -> Access | None:
        """What comes with the key; None when a key is needed and this is not one."""
        keys = self._keys()
        if not keys:
            return Access()
        scheme, _, key = authorization.partition(b" ")
        given = key_digest(key.strip())
        # Every key is compared, so that the time it takes tells nothing.
        matches = [access for known, access in keys.items() if hmac.compare_digest(given, known)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None
