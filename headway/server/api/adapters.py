"""The routes that load and unload adapters while the server runs, with vLLM's names. Only keys of --api-key may."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from headway.config_files.tenants import Access
from headway.server.api import responses
from headway.server.api.fields import Body, said
from headway.server.api.request_body import check_body
from headway.server.edge.edge import ACCESS
from headway.server.errors import ApiError, bad_request, json_response
from headway.server.service import Service

_Name = Annotated[str, Field(min_length=1, max_length=500)]


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: _Name = said("The name by which requests choose the adapter, as `model`.", ...)
    lora_path: _Name = said("Its folder on the server, in peft's format.", ...)
    load_inplace: bool = said("Whether a name that is there takes the adapter; default false.", False)


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: _Name = said("The adapter's name.", ...)
    lora_int_id: int | None = said("The number that vLLM gives it; not needed here.")


class AdapterRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        add, failures = partial(responses.add_route, app), responses.errors(400, 401, 403, 404, 503)
        body = responses.json_body
        add("POST", "/v1/load_lora_adapter", self.load, responses.ModelCard, failures, body(LoadAdapterBody))
        add("POST", "/v1/unload_lora_adapter", self.unload, responses.Unloaded, failures, body(UnloadAdapterBody))

    async def load(self, request: Request) -> Response:
        """Load an adapter under a name. Steps go on meanwhile."""
        body = await self._read(request, LoadAdapterBody)
        service = self._service
        if body.lora_name in service.settings.known_names:
            raise bad_request(f"{body.lora_name[:200]!r} is the base model; choose another name", "lora_name")
        if body.lora_name in service.engine.adapters and not body.load_inplace:
            raise bad_request(
                f"adapter {body.lora_name[:200]!r} is loaded; unload it first, or say load_inplace", "lora_name"
            )
        return json_response(service.card(await service.load_adapter(body.lora_name, body.lora_path)))

    async def unload(self, request: Request) -> Response:
        """Forget an adapter's name. What is in flight ends as --lora-unload says."""
        body = await self._read(request, UnloadAdapterBody)
        self._service.unload_adapter(body.lora_name)
        return json_response({"id": body.lora_name, "object": "model", "deleted": True})

    async def _read(self, request: Request, model: type[Any]) -> Any:
        """The checked body of a request that may change adapters. Raises ApiError."""
        service = self._service
        if request.scope[ACCESS] != Access() or not service.settings.api_keys:
            why = "with a key of --api-key alone, which this request has not"
            if not service.settings.api_keys:
                why = "by whoever has a key; start the server with --api-key"
            raise ApiError(403, f"adapters are loaded and unloaded {why}", code="adapters_need_key")
        body = check_body(model, await service.bodies.read(request))
        service.check_ready()
        if not service.engine.config.lora_slots:
            raise bad_request("adapters are not served; start the server with --enable-lora or --lora-modules")
        return body
