"""The API of who runs the gateway: makes, lists and revokes API keys. The keys themselves are stored nowhere."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.config_files.key_file import SHOWN_DIGITS, add_key, revoke_key
from headway.config_files.tenants import Access, TenantFile
from headway.gateway.gateway import Gateway
from headway.server.errors import ApiError, bad_request, json_response, not_found

KEYS = "/admin/keys"
logger = logging.getLogger("headway.server")


class _NewKey(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    new_tenant: bool = False
    default: str = ""
    best: str = ""
    note: str = ""
    models: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()


class Admin:
    """Answers requests with a key of --admin-key."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._editing = asyncio.Lock()

    async def answer(self, request: Request, method: str, path: str) -> Response:
        """Answer a request to KEYS, or to one key. Raises ApiError."""
        name = path.removeprefix(KEYS).removeprefix("/")
        if method == "GET" and not name:
            keys = self._gateway.tenants.keys.items()
            return json_response({"object": "list", "data": [_shown(digest, access) for digest, access in keys]})
        if method == "POST" and not name:
            return await self._add(request)
        if method == "DELETE" and name:
            return await self._revoke(name)
        raise not_found(f"there is no {method} {path[:200]}")

    async def _add(self, request: Request) -> Response:
        with await self._gateway.bodies.received(request) as received:
            try:
                wanted = msgspec.json.decode(received, type=_NewKey)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise bad_request(f"the body is not as it should be: {error}") from None
        access = Access(
            wanted.tenant, wanted.default, wanted.best, note=wanted.note, models=wanted.models, scopes=wanted.scopes
        )
        try:  # before anything is written
            TenantFile(keys={b"": access}, path=KEYS).check_classes(self._gateway.classes.table)
        except ValueError as error:
            raise bad_request(str(error).partition(": ")[2]) from None
        key, file = await self._edited(add_key, access, wanted.new_tenant)
        digest = next(reversed(file.keys))
        self._take(f"made key {digest.hex()[:SHOWN_DIGITS]} of tenant {wanted.tenant}")
        return json_response(_shown(digest, file.keys[digest]) | {"key": key}, 201)

    async def _revoke(self, name: str) -> Response:
        digest, _ = await self._edited(revoke_key, name, not self._gateway.settings.api_keys)
        self._take(f"revoked key {digest.hex()[:SHOWN_DIGITS]}")
        return json_response({"id": digest.hex()[:SHOWN_DIGITS], "object": "api_key", "deleted": True})

    async def _edited(self, edit: Any, *arguments: Any) -> Any:
        path = self._gateway.tenants.path
        if not path:
            raise not_found("there is no file of tenants to keep keys in; give --tenants FILE", "no_tenants")
        async with self._editing:
            try:
                return await asyncio.to_thread(edit, Path(path), *arguments)
            except ValueError as error:
                raise bad_request(str(error)) from None
            except OSError as error:
                message = f"cannot write {path}: {error.strerror}"
                raise ApiError(507, message, code="disk_full") from None

    def _take(self, what: str) -> None:
        logger.info("the admin API %s", what)
        self._gateway.reload_keys()


def _shown(digest: bytes, access: Access) -> dict[str, Any]:
    told = {
        name: getattr(access, name) for name in ("tenant", "created", "default", "best", "models", "scopes", "note")
    }
    return {"id": digest.hex()[:SHOWN_DIGITS], "object": "api_key", **told}
