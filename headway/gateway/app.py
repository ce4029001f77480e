"""The gateway's application: its own routes, and those that are passed on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headway import __version__
from headway.gateway.admin import Admin
from headway.gateway.asked import OF_BATCHES, POSTS, Api, Body, body_of
from headway.gateway.exchange import Exchange
from headway.gateway.gateway import Gateway
from headway.gateway.member import Member
from headway.gateway.metrics import CONTENT_TYPE
from headway.gateway.relay import Relay
from headway.gateway.stored import IS_ID, STORED, model_of_upload
from headway.server.classes import TTFT_HEADER, Terms, objective, terms_of
from headway.server.edge.edge import ACCESS, ADMIN_PATH, HEADERS, IGNORED, Edge, cross_origin
from headway.server.edge.pacing import Shared
from headway.server.edge.probes import health
from headway.server.edge.streaming import WHEN_GONE
from headway.server.errors import ApiError, ClientGone, json_response, not_found

EXPOSITION_EVERY_S = 0.1
Answer = Response | Relay


class Application:
    """An ASGI application over a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        exposition = partial(gateway.metrics.exposition, bool(gateway.settings.metrics_keys))
        self._admin = Admin(gateway) if gateway.settings.admin_keys else None
        self._exposition = Shared(exposition, EXPOSITION_EVERY_S)
        self._gets: dict[str, Callable[[], Response]] = {
            "/": self._root,
            "/health": lambda: health(gateway.check_ready),
            "/ping": lambda: health(gateway.check_ready),
            "/version": lambda: json_response({"version": __version__}),
            "/load": lambda: json_response({"server_load": gateway.in_flight}),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        try:
            answer: Answer = await self._answer(Request(scope, receive), scope["method"], path)
        except ApiError as error:
            self._gateway.metrics.count("requests_refused", error.code or str(error.status))
            answer = error.response(path)
        except ClientGone:
            answer = Response(status_code=499)
        await answer(scope, receive, send)

    async def _answer(self, request: Request, method: str, path: str) -> Answer:
        api = POSTS.get(path)
        if api is not None and method == "GET" and api.stores in OF_BATCHES:
            self._gateway.check_up()
            listed = self._gateway.homes.listed(api.stores, request.scope[ACCESS].tenant, request.query_params)
            return Response(await listed, media_type="application/json")
        if api is not None:
            return await self._pass_on(request, path, api) if method == "POST" else _not_allowed(method, path, "POST")
        if stored := STORED.fullmatch(path):
            return await self._pass_on_stored(request, path, stored[1], stored[2])
        if self._admin is not None and path.startswith(ADMIN_PATH):
            return await self._admin.answer(request, method, path)
        if path == "/metrics" and method == "GET":
            return Response(await self._exposition.get(), media_type=CONTENT_TYPE)
        if make := self._gets.get(path):
            is_ping = path == "/ping" and method == "POST"  # SageMaker may use either
            return make() if method in ("GET", "HEAD") or is_ping else _not_allowed(method, path, "GET")
        if path == "/v1/models":
            return self._models(request) if method in ("GET", "HEAD") else _not_allowed(method, path, "GET")
        if path.startswith("/v1/models/"):
            return self._model(request, path.removeprefix("/v1/models/"))
        raise not_found(f"there is no {method} {path[:200]}")

    # --- requests that are passed on ----------------------------------------------------------------------

    async def _pass_on(self, request: Request, path: str, api: Api) -> Answer:
        gateway, access = self._gateway, request.scope[ACCESS]
        gateway.check_up()
        if api.is_work:
            gateway.admission.refuse_if_full()
            if gateway.quotas is not None:
                gateway.quotas.refuse_if_over(access.tenant)
        with await gateway.bodies.received(request) as received:
            raw = bytes(received)
            body = Body(model=model_of_upload(raw)) if api.stores == "files" else body_of(received)
        home = await self._home_of(body, api, access.tenant) if api.stores else None
        exchange = Exchange(gateway, request, path, api, body, raw, self._terms(request, body), self._end, home)
        return await self._run(request, exchange, api)

    async def _home_of(self, body: Body, api: Api, tenant: str) -> Member | None:
        """The backend that has what a request goes on with. Raises ApiError."""
        homes = self._gateway.homes
        if api.stores == "responses" and (response_id := body.previous_response_id):
            home = await homes.of("responses", response_id, tenant) if IS_ID.fullmatch(response_id) else None
            if home is None:
                message = f"no response {response_id[:60]!r} is known here"
                raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
            return home
        if api.stores != "batches":
            return None
        if self._gateway.has_limit(tenant):
            what = "has limits, and what batches use is not charged here; send requests themselves"
            raise ApiError(403, f"tenant {tenant!r} {what}", code="batches_not_charged")
        file_id = body.input_file_id or ""
        home = await homes.of("files", file_id, tenant) if IS_ID.fullmatch(file_id) else None
        if home is None:
            raise not_found(f"no file {file_id[:60]!r} is known here", "file_not_found", "input_file_id")
        return home

    async def _pass_on_stored(self, request: Request, path: str, kind: str, object_id: str) -> Answer:
        gateway, tenant = self._gateway, request.scope[ACCESS].tenant
        gateway.check_up()
        home = await gateway.homes.of(kind, object_id, tenant)
        if home is None:
            raise gateway.homes.not_found(kind, object_id)
        api = Api(is_work=False, stores=kind, is_json=not path.endswith("/content"))
        with await gateway.bodies.received(request) as received:
            raw = bytes(received)
        terms = Terms(gateway.classes.table.default_class, tenant=tenant)
        return await self._run(request, Exchange(gateway, request, path, api, Body(), raw, terms, self._end, home), api)

    async def _run(self, request: Request, exchange: Exchange, api: Api) -> Answer:
        gateway = self._gateway
        gateway.begin()
        request.scope[WHEN_GONE](exchange.leave)
        streams = False
        try:
            gateway.enlist(exchange)
            if api.is_work:
                await exchange.enter()
            answer = await exchange.answer()
            streams = isinstance(answer, Relay)
            return answer
        finally:
            if not streams:
                self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        exchange.release()
        self._gateway.end()

    def _terms(self, request: Request, body: Body) -> Terms:
        """What a request is promised: without files of classes or tenants no more than it asks for itself."""
        gateway, scope = self._gateway, request.scope
        if gateway.has_files:
            return terms_of(gateway.classes.table, scope[ACCESS], body, request.headers, scope[IGNORED])
        ttft_ms = math.inf
        if TTFT_HEADER.encode() in scope[HEADERS]:
            ttft_ms = objective(request.headers, TTFT_HEADER, math.inf, scope[IGNORED])
        return Terms(gateway.classes.table.default_class, ttft_ms=ttft_ms, tenant=scope[ACCESS].tenant)

    # --- what the gateway says itself ---------------------------------------------------------------------

    def _root(self) -> Response:
        places = {"models": "/v1/models", "health": "/health", "metrics": "/metrics"}
        return json_response({"server": f"headway gateway {__version__}"} | places)

    def _cards(self, request: Request) -> dict[str, Any]:
        """The models that the request's key may use."""
        found: dict[str, Any] = {}
        allowed = request.scope[ACCESS].models
        for member in self._gateway.members.values():
            for name in (each for each in member.models if not allowed or each in allowed):
                plain = {"id": name, "object": "model", "created": 0, "owned_by": member.entry.name}
                found.setdefault(name, member.cards.get(name, plain))
        return found

    def _models(self, request: Request) -> Response:
        self._gateway.check_up()
        return json_response({"object": "list", "data": list(self._cards(request).values())})

    def _model(self, request: Request, name: str) -> Response:
        card = self._cards(request).get(name)
        if card is None:
            raise not_found(f"model {name[:200]!r} is not served here", "model_not_found", "model")
        return json_response(card)


def _not_allowed(method: str, path: str, allowed: str) -> Response:
    message = f"{method} {path} is not allowed; use {allowed}"
    raise ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})


def create_gateway_app(gateway: Gateway) -> ASGIApp:
    """The application with the edge in front of it."""
    settings = gateway.settings
    return Edge(
        Application(gateway),
        keys=lambda: gateway.keys,
        pace=None,
        metrics_keys=settings.metrics_keys,
        admin_keys=settings.admin_keys,
        cross_origin=cross_origin(settings),
    )
