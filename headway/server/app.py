"""The ASGI application: routes, error handlers and the OpenAPI document around one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from headway import __version__
from headway.engine.client import EngineClient
from headway.server.api import responses
from headway.server.api.adapters import AdapterRoutes
from headway.server.api.api_page import api_page
from headway.server.api.responses_store import ResponseStore
from headway.server.api.routes import BODIES, Routes
from headway.server.api.translated import TranslatedRoutes
from headway.server.api.vectors import VectorRoutes
from headway.server.batches.calls import InProcess
from headway.server.batches.gaps import Gaps, batch_class
from headway.server.batches.objects import BatchBody
from headway.server.batches.routes import BatchRoutes
from headway.server.batches.store import Store
from headway.server.batches.worker import Batches
from headway.server.edge.edge import Edge, cross_origin
from headway.server.errors import install_handlers
from headway.server.service import Service
from headway.server.settings import ServerSettings
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer


def create_app(
    engine: EngineClient, tokenizer: Tokenizer, settings: ServerSettings, template: ChatTemplate | None = None
) -> FastAPI:
    """The API over an engine. Its lifespan starts and stops the engine; `app.state.service` holds the rest,
    and `app.state.batches` the batches of its data folder.

    Args:
        template: the chat template; by default the checkpoint's own.

    Raises:
        TextError: the checkpoint's template or generation_config.json is broken.
        ValueError: the journal of quotas or the store of responses cannot be kept.
        StoreError: the data folder cannot be used.
    """
    service = Service(engine, tokenizer, template or ChatTemplate.load(tokenizer), settings)
    store = ResponseStore(settings.response_store)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        keeping = asyncio.create_task(service.keep_quotas())
        try:
            if batches is not None:
                await batches.start()
            yield
        finally:
            keeping.cancel()
            if batches is not None:
                await batches.stop()
            await service.close()
            await asyncio.to_thread(store.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    # To describe the routes takes ten times as long as to make them, and few servers are asked for that.
    app.state.described = list[Callable[[FastAPI], None]]()
    routes = Routes(service)
    routes.add_to(app)
    TranslatedRoutes(service, routes.generate, store).add_to(app)
    VectorRoutes(service).add_to(app)
    AdapterRoutes(service).add_to(app)
    batches = app.state.batches = _batches(app, service)
    BatchRoutes(batches, settings, service.bodies).add_to(app)
    app.add_middleware(
        Edge,
        keys=lambda: service.keys,
        pace=service.pace,
        metrics_keys=settings.metrics_keys,
        cross_origin=cross_origin(settings),
    )
    install_handlers(app)

    made = Documents(app.state.described, lambda: bool(service.keys))
    for path, handler in (("/openapi.json", made.openapi), ("/docs", made.docs)):
        app.add_api_route(path, handler, methods=["GET"], include_in_schema=False)
    return app


class Documents:
    """What describes the API. It is written once with API keys and once without, as that takes some 100 ms.

    Args:
        described: what describes each route.
        has_keys: whether requests need one.
    """

    def __init__(self, described: list[Callable[[FastAPI], None]], has_keys: Callable[[], bool]) -> None:
        self._described, self._has_keys = described, has_keys
        self._made: dict[bool, asyncio.Future[tuple[bytes, str]]] = {}

    def _written(self, has_keys: bool) -> tuple[bytes, str]:
        app = FastAPI(title="Headway", version=__version__)
        for describe in self._described:
            describe(app)
        document = app.openapi()
        document["components"].setdefault("schemas", {}).update(responses.definitions(*BODIES, BatchBody))
        if has_keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return msgspec.json.encode(document), api_page(document)

    async def _documents(self) -> tuple[bytes, str]:
        has_keys = self._has_keys()
        if has_keys not in self._made:
            self._made[has_keys] = asyncio.ensure_future(run_in_threadpool(self._written, has_keys))
        return await asyncio.shield(self._made[has_keys])

    async def openapi(self) -> Response:
        return Response((await self._documents())[0], media_type="application/json")

    async def docs(self) -> HTMLResponse:
        return HTMLResponse((await self._documents())[1])


def _batches(app: FastAPI, service: Service) -> Batches | None:
    """The batches of the data folder; their requests go through the app itself."""
    settings = service.settings
    if settings.data_dir is None:
        return None
    post = InProcess(app, lambda: batch_class(service.classes.table)).post
    batches = Batches(Store(settings.data_dir), post, Gaps(service), service.model_names)
    service.metrics.add(batches.collect)
    return batches
