"""The routes of files and batches, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import FileResponse, Response

from headway.server import responses
from headway.server.batches.objects import Batch, BatchBody, Deleted, FileObject, Page
from headway.server.batches.store import FULL_ERRORS, DiskFull, InUse, Store
from headway.server.batches.uploads import read_upload
from headway.server.batches.worker import Batches
from headway.server.edge import ACCESS
from headway.server.errors import ApiError, bad_request
from headway.server.request_body import check_body, parse_object, read_body
from headway.server.settings import ServerSettings
from headway.tenant_file import Access

P = ParamSpec("P")
T = TypeVar("T")
MOST_FILES_LISTED, MOST_BATCHES_LISTED, BATCHES_LISTED = 10_000, 100, 20
_COMMON = responses.errors(400, 401, 507)
_OF_ONE = _COMMON | responses.errors(404)
_UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}


def _json(content: BaseModel) -> Response:
    return Response(content.model_dump_json(), media_type="application/json")


def _no_file(file_id: str) -> ApiError:
    return ApiError(404, f"there is no file {file_id[:60]!r}", param="file_id", code="file_not_found")


def _no_batch(batch_id: str) -> ApiError:
    return ApiError(404, f"there is no batch {batch_id[:60]!r}", param="batch_id", code="batch_not_found")


def _raise_full(reason: str) -> NoReturn:
    message = f"{reason}; no data is lost, and the request may be sent again when there is space"
    raise ApiError(507, message, code="disk_full", kind="server_error") from None


def _owner(request: Request) -> str:
    """The tenant whose files and batches a request sees."""
    access: Access = request.scope[ACCESS]
    return access.tenant


class BatchRoutes:
    """The handlers.

    Args:
        batches: None where the server has no data folder.
    """

    def __init__(self, batches: Batches | None, settings: ServerSettings) -> None:
        self._given = batches
        self._settings = settings

    def add_to(self, app: FastAPI) -> None:
        def add(
            path: str, handler: Any, method: str, model: Any, errors: dict[int | str, dict[str, Any]], **more: Any
        ) -> None:
            told = {200: model if isinstance(model, dict) else {"model": model}, **errors}
            app.add_api_route(path, handler, methods=[method], responses=told, openapi_extra=more or None)

        upload = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
        content = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
        of_upload = _COMMON | responses.errors(408, 413)
        add("/v1/files", self.upload, "POST", FileObject, of_upload, requestBody=upload)
        listing = [*_paging(MOST_FILES_LISTED), _query("order", enum=["asc", "desc"]), _query("purpose")]
        add("/v1/files", self.files, "GET", Page[FileObject], _COMMON, parameters=listing)
        one = {"parameters": [_in_path("file_id")]}
        add("/v1/files/{file_id}", self.file, "GET", FileObject, _OF_ONE, **one)
        add("/v1/files/{file_id}", self.delete_file, "DELETE", Deleted, _OF_ONE | responses.errors(409), **one)
        add("/v1/files/{file_id}/content", self.content, "GET", content, _OF_ONE, **one)
        of_body = _OF_ONE | responses.errors(408, 413, 503)
        add("/v1/batches", self.create, "POST", Batch, of_body, **responses.json_body(BatchBody))
        add("/v1/batches", self.batches, "GET", Page[Batch], _COMMON, parameters=_paging(MOST_BATCHES_LISTED))
        one = {"parameters": [_in_path("batch_id")]}
        add("/v1/batches/{batch_id}", self.batch, "GET", Batch, _OF_ONE, **one)
        add("/v1/batches/{batch_id}/cancel", self.cancel, "POST", Batch, _OF_ONE | responses.errors(409), **one)

    def _opened(self) -> Batches:
        """Raises ApiError 400 where there is no data folder."""
        if self._given is None:
            message = "files and batches need a data folder; start the server with --data-dir DIR"
            raise ApiError(400, message, code="no_data_dir")
        return self._given

    async def _run(self, method: Callable[Concatenate[Store, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._opened().run(method, *args, **kwargs)
        except DiskFull as error:
            _raise_full(str(error))

    # --- files --------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        self._opened()
        try:
            upload = await read_upload(request, self._settings.max_file_size)
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            _raise_full(f"no space is left for uploads in the temporary folder: {error.strerror}")
        try:
            return _json(
                await self._run(
                    Store.add_file, _owner(request), upload.file.file, upload.filename, "batch", upload.expiry_s
                )
            )
        finally:
            await upload.file.close()

    async def files(self, request: Request) -> Response:
        query = request.query_params
        limit, order = _limit(request, MOST_FILES_LISTED, MOST_FILES_LISTED), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request(f"order is {order[:60]!r}; it must be asc or desc", "order")
        after = query.get("after")
        found = await self._run(Store.files, _owner(request), query.get("purpose"), after, limit, order == "desc")
        if found is None:
            raise _unknown_cursor(after)
        return _json(Page[FileObject].of(*found))

    async def file(self, request: Request) -> Response:
        return _json(await self._found(request))

    async def _found(self, request: Request) -> FileObject:
        file_id = request.path_params["file_id"]
        found = await self._run(Store.file, _owner(request), file_id)
        if found is None:
            raise _no_file(file_id)
        return found

    async def content(self, request: Request) -> Response:
        found = await self._found(request)
        path = self._opened().path(found.id)
        return FileResponse(path, media_type="application/octet-stream", filename=found.filename)

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        try:
            if not await self._run(Store.delete_file, _owner(request), file_id):
                raise _no_file(file_id)
        except InUse:
            message = f"file {file_id} is the input of a batch that is not finished; cancel the batch, or wait"
            raise ApiError(409, message, param="file_id", code="file_in_use") from None
        return _json(Deleted(id=file_id))

    # --- batches ------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        batches = self._opened()
        body = check_body(BatchBody, parse_object(await read_body(request, self._settings.max_body_size)))
        found = await self._run(Store.file, _owner(request), body.input_file_id)
        if found is not None and found.purpose != "batch":
            message = f"file {found.id} has the purpose {found.purpose!r}; a batch's input has 'batch'"
            raise bad_request(message, "input_file_id")
        try:
            batch = await batches.create(_owner(request), body)
        except DiskFull as error:
            _raise_full(str(error))
        if batch is None:
            raise ApiError(
                404, f"there is no file {body.input_file_id[:60]!r}", param="input_file_id", code="file_not_found"
            )
        return _json(batch)

    async def batches(self, request: Request) -> Response:
        after = request.query_params.get("after")
        limit = _limit(request, MOST_BATCHES_LISTED, BATCHES_LISTED)
        found = await self._run(Store.batches, _owner(request), after, limit)
        if found is None:
            raise _unknown_cursor(after)
        return _json(Page[Batch].of(*found))

    async def batch(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        found = await self._run(Store.batch, _owner(request), batch_id)
        if found is None:
            raise _no_batch(batch_id)
        return _json(found)

    async def cancel(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        try:
            found = await self._opened().cancel(_owner(request), batch_id)
        except DiskFull as error:
            _raise_full(str(error))
        if found is None:
            raise _no_batch(batch_id)
        if found.status not in ("cancelling", "cancelled"):
            message = f"batch {batch_id} is {found.status}; it cannot be cancelled any more"
            raise ApiError(409, message, param="batch_id", code="batch_not_cancellable")
        return _json(found)


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "string", **schema}}


def _paging(most: int) -> list[dict[str, Any]]:
    return [_query("after"), _query("limit", type="integer", minimum=1, maximum=most)]


def _limit(request: Request, most: int, default: int) -> int:
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= most):
        raise bad_request(f"limit is {given[:60]!r}; it must be a number from 1 to {most}", "limit")
    return int(given)


def _unknown_cursor(after: str | None) -> ApiError:
    return bad_request(f"after is {(after or '')[:60]!r}, which is not in the list", "after")
