"""The ASGI application: routes, error handlers and the OpenAPI document around one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

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
from headway.server.batches.metrics import of_batches
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

    def openapi() -> dict[str, Any]:
        described = FastAPI(title="Headway", version=__version__)
        for describe in app.state.described:
            describe(described)
        document = described.openapi()
        document["components"].setdefault("schemas", {}).update(responses.definitions(*BODIES, BatchBody))
        if service.keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document

    def written() -> tuple[bytes, str]:
        document = app.openapi()
        return msgspec.json.encode(document), api_page(document)

    # Both are written once with API keys and once without, as that takes some 100 ms.
    made: dict[bool, asyncio.Future[tuple[bytes, str]]] = {}

    async def documents() -> tuple[bytes, str]:
        has_keys = bool(service.keys)
        if has_keys not in made:
            made[has_keys] = asyncio.ensure_future(run_in_threadpool(written))
        return await asyncio.shield(made[has_keys])

    async def openapi_json() -> Response:
        return Response((await documents())[0], media_type="application/json")

    async def docs() -> HTMLResponse:
        return HTMLResponse((await documents())[1])

    app.openapi = openapi  # type: ignore[method-assign]
    for path, handler in (("/openapi.json", openapi_json), ("/docs", docs)):
        app.add_api_route(path, handler, methods=["GET"], include_in_schema=False)
    return app


def _batches(app: FastAPI, service: Service) -> Batches | None:
    """The batches of the data folder; their requests go through the app itself."""
    settings = service.settings
    if settings.data_dir is None:
        return None
    post = InProcess(app, lambda: batch_class(service.classes.table)).post
    batches = Batches(Store(settings.data_dir), post, Gaps(service), service.model_names)
    service.metrics.add(lambda families: of_batches(families, batches))
    return batches
