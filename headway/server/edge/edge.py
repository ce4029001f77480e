"""Where a request enters: its time of arrival, its id, and whether it may come in."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from headway.config_files.tenants import Access, key_digest
from headway.server.edge.connection import ARRIVED
from headway.server.edge.http_head import request_id
from headway.server.edge.pacing import SMALL_PER_TURN, Pace
from headway.server.edge.settings import EdgeSettings
from headway.server.errors import ApiError, internal

METRICS_PATH, ADMIN_PATH = "/metrics", "/admin/"
OPEN_PATHS = frozenset({"/", "/health", "/ping", METRICS_PATH, "/version", "/openapi.json", "/docs"})
# Headers of answers that pages of other origins may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "server-timing",
    "x-headway-ignored-headers",
    "x-headway-relaxed",
    "x-headway-backend",
)
# Headers that are known, but have no effect so far. llm-d's router sets them on all traffic, so a server that refused
# them would refuse all of it.
IGNORED_HEADERS = ("x-llm-d-inference-fairness-id",)
# Keys of a request's scope: its headers by name, the names of those that were left aside, what its API key may do, and
# its id.
HEADERS, IGNORED, ACCESS, REQUEST_ID = "headway.headers", "headway.ignored", "headway.access", "headway.request_id"
_OPEN = Access()
logger = logging.getLogger("headway.server")


class Edge:
    """The outermost layer: it echoes or makes up x-request-id, names headers without effect, checks API keys, and turns
    failures into a 500.

    Args:
        keys: the API keys that it accepts, by their digests; without any it is open.
        pace: decides how many requests begin in one turn of the event loop; None where what limits reads is enough.
        metrics_keys: the keys that METRICS_PATH needs; without any it is open.
        admin_keys: the keys that ADMIN_PATH needs.
        cross_origin: wraps what checks keys and answers, so that pages of other origins may ask.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Callable[[], Mapping[bytes, Access]],
        pace: Pace | None,
        metrics_keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        cross_origin: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        self._app = app
        self._pace, self._small = pace, Pace(SMALL_PER_TURN)
        self._keys = keys
        self._metrics_keys = [key_digest(key.encode()) for key in metrics_keys]
        self._admin_keys = [key_digest(key.encode()) for key in admin_keys]
        self._enter: ASGIApp = self._admit if cross_origin is None else cross_origin(self._admit)
        trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1,::1")
        self._forwarded: Any = ProxyHeadersMiddleware(self._enter, trusted)  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault(ARRIVED, time.monotonic_ns())
        pace = self._small if scope["path"] in OPEN_PATHS else self._pace
        if pace is not None:
            await pace.turn()
        headers = scope[HEADERS] = dict(scope["headers"])
        id_ = scope[REQUEST_ID] = request_id(headers.get(b"x-request-id", b""))
        ignored = scope[IGNORED] = [name for name in IGNORED_HEADERS if name.encode() in headers]

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                answer = [*message.get("headers", ()), (b"x-request-id", id_.encode("latin-1"))]
                if message["status"] == 413:  # what still comes of the body is not wanted
                    answer.append((b"connection", b"close"))
                if ignored:
                    answer.append((b"x-headway-ignored-headers", ", ".join(ignored).encode("latin-1")))
                message["headers"] = answer
            await send(message)

        is_forwarded = b"x-forwarded-for" in headers or b"x-forwarded-proto" in headers
        try:
            await (self._forwarded if is_forwarded else self._enter)(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await internal("the server failed on this request; see its log").response()(scope, receive, send_with_id)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer a request that has the key it needs; refuse others."""
        if ACCESS not in scope:  # a request from within the server brings it
            given = _key_in(scope[HEADERS])
            access, path = self._access_of(given), scope["path"]
            scope[ACCESS] = access
            if path == METRICS_PATH and self._metrics_keys:
                if not _known(given, self._metrics_keys):
                    return await _no_key("/metrics needs a key of --metrics-key", scope)(scope, receive, send)
            elif self._admin_keys and path.startswith(ADMIN_PATH):
                if not _known(given, self._admin_keys):
                    return await _no_key(f"{ADMIN_PATH} needs a key of --admin-key", scope)(scope, receive, send)
            elif access is None and path not in OPEN_PATHS:
                return await _no_key("this server needs a valid API key", scope)(scope, receive, send)
            elif access is not None and not access.allows(path):
                return await _not_allowed(path)(scope, receive, send)
        await self._app(scope, receive, send)

    def _access_of(self, authorization: bytes) -> Access | None:
        """What the key allows; None when a key is needed and this is none."""
        keys = self._keys()
        if not keys:
            return _OPEN
        known = _known(authorization, keys)
        return keys[known] if known else None


def _known(authorization: bytes, digests: Iterable[bytes]) -> bytes:
    """The digest of the given key; empty where it is none of them."""
    scheme, _, key = authorization.partition(b" ")
    given = key_digest(key.strip())
    # Every key is compared, so that the time it takes tells nothing.
    matches = [digest for digest in digests if hmac.compare_digest(given, digest)]
    return matches[0] if matches and scheme.lower() == b"bearer" else b""


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    """A request's key, as the value of the header authorization; clients of Anthropic's API send x-api-key."""
    other = headers.get(b"x-api-key")
    return headers.get(b"authorization") or (b"Bearer " + other if other else b"")


def _no_key(reason: str, scope: Scope) -> Response:
    message, headers = f"{reason}, as Authorization: Bearer KEY", {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers).response(scope["path"])


def _not_allowed(path: str) -> Response:
    message = f"this API key may not be used for {path[:200]}; it has scopes, or models, which batches do not look at"
    return ApiError(403, message, code="scope_not_allowed").response(path)


class CrossOrigin(CORSMiddleware):
    """Starlette's middleware, but with an error object for an origin that is not allowed."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser's question whether a page may ask."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        reason = bytes(answer.body).decode().lower()
        return ApiError(400, f"{reason} (--allowed-origins and the flags beside it)", code="cross_origin").response()


def cross_origin(settings: EdgeSettings) -> Callable[[ASGIApp], ASGIApp] | None:
    """The layer that lets pages of other origins in; None where no other origin is allowed."""
    if not settings.allowed_origins:
        return None
    return partial(
        CrossOrigin,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods or ("*",),
        allow_headers=settings.allowed_headers or ("*",),
        allow_credentials=settings.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )
