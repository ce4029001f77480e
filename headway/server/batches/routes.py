"""The routes of files and batches, as OpenAI has them."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.datastructures import QueryParams
from starlette.responses import FileResponse, Response

from headway.config_files.tenants import Access
from headway.server.api import responses
from headway.server.api.request_body import BodyReader, check_body
from headway.server.batches.objects import Batch, BatchBody, Deleted, FileObject, Page
from headway.server.batches.store import FULL_ERRORS, DiskFull, InUse, Store
from headway.server.batches.uploads import read_upload
from headway.server.batches.worker import Batches
from headway.server.edge.edge import ACCESS
from headway.server.edge.http_head import is_newest_first, query_number
from headway.server.errors import ApiError, bad_request, not_found
from headway.server.settings import ServerSettings

T = TypeVar("T")
MOST_FILES_LISTED, MOST_BATCHES_LISTED, BATCHES_LISTED = 10_000, 100, 20
_COMMON = responses.errors(400, 401, 507)
_OF_ONE = _COMMON | responses.errors(404)
_UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Requests, one in a line, as JSON."},
        "purpose": {"type": "string", "enum": ["batch"], "description": "What the file is for."},
        "expires_after[anchor]": {
            "type": "string",
            "enum": ["created_at"],
            "description": "From when expires_after[seconds] counts.",
        },
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": 3600,
            "maximum": 2_592_000,
            "description": "Seconds after which the file is deleted; default never.",
        },
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


def _no_file(file_id: str, param: str = "file_id") -> ApiError:
    return not_found(f"there is no file {file_id[:60]!r}", "file_not_found", param)


def _no_batch(batch_id: str) -> ApiError:
    return not_found(f"there is no batch {batch_id[:60]!r}", "batch_not_found", "batch_id")


def _full(reason: str) -> ApiError:
    message = f"{reason}; no data is lost, and the request may be sent again when there is space"
    return ApiError(507, message, code="disk_full")


async def _of_full_disk(request: Request, error: Exception) -> Response:
    return _full(str(error)).response()


def _owner(request: Request) -> str:
    """The tenant whose files and batches a request sees."""
    access: Access = request.scope[ACCESS]
    return access.tenant


class BatchRoutes:
    """The handlers.

    Args:
        batches: None where the server has no data folder.
    """

    def __init__(self, batches: Batches | None, settings: ServerSettings, bodies: BodyReader) -> None:
        self._given, self._settings, self._bodies = batches, settings, bodies

    def add_to(self, app: FastAPI) -> None:
        app.add_exception_handler(DiskFull, _of_full_disk)
        add = partial(responses.add_route, app)
        upload = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
        content = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
        of_upload = _COMMON | responses.errors(408, 413)
        add("POST", "/v1/files", self.upload, FileObject, of_upload, {"requestBody": upload})
        listing = [
            *_paging(MOST_FILES_LISTED),
            responses.query("order", "The oldest or the newest first; default the newest.", enum=["asc", "desc"]),
            responses.query("purpose", "Only files of this purpose."),
        ]
        add("GET", "/v1/files", self.files, Page[FileObject], _COMMON, {"parameters": listing})
        one = {"parameters": [responses.in_path("file_id")]}
        add("GET", "/v1/files/{file_id}", self.file, FileObject, _OF_ONE, one)
        add("DELETE", "/v1/files/{file_id}", self.delete_file, Deleted, _OF_ONE | responses.errors(409), one)
        add("GET", "/v1/files/{file_id}/content", self.content, content, _OF_ONE, one)
        of_body = _OF_ONE | responses.errors(408, 413, 503)
        add("POST", "/v1/batches", self.create, Batch, of_body, responses.json_body(BatchBody))
        add("GET", "/v1/batches", self.batches, Page[Batch], _COMMON, {"parameters": _paging(MOST_BATCHES_LISTED)})
        one = {"parameters": [responses.in_path("batch_id")]}
        add("GET", "/v1/batches/{batch_id}", self.batch, Batch, _OF_ONE, one)
        add("POST", "/v1/batches/{batch_id}/cancel", self.cancel, Batch, _OF_ONE | responses.errors(409), one)

    def _opened(self) -> Batches:
        """Raises ApiError 400 where there is no data folder."""
        if self._given is None:
            message = "files and batches need a data folder; start the server with --data-dir DIR"
            raise ApiError(400, message, code="no_data_dir")
        return self._given

    # --- files --------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        self._opened()
        try:
            upload = await read_upload(request, self._settings.max_file_size)
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            raise _full(f"no space is left for uploads in the temporary folder: {error.strerror}") from None
        try:
            given = _owner(request), upload.file.file, upload.filename, "batch", upload.expiry_s
            return _json(await self._opened().run(Store.add_file, *given))
        finally:
            await upload.file.close()

    async def files(self, request: Request) -> Response:
        query = request.query_params
        limit = query_number(query, "limit", MOST_FILES_LISTED, MOST_FILES_LISTED)
        asked = query.get("purpose"), query.get("after"), limit, is_newest_first(query)
        found = await self._opened().run(Store.files, _owner(request), *asked)
        return _json(Page[FileObject].of(*_there(found, _unknown_cursor(query))))

    async def file(self, request: Request) -> Response:
        return _json(await self._found(request))

    async def _found(self, request: Request) -> FileObject:
        file_id = request.path_params["file_id"]
        found = await self._opened().run(Store.file, _owner(request), file_id)
        return _there(found, _no_file(file_id))

    async def content(self, request: Request) -> Response:
        found = await self._found(request)
        path = self._opened().path(found.id)
        return FileResponse(path, media_type="application/octet-stream", filename=found.filename)

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        try:
            if not await self._opened().run(Store.delete_file, _owner(request), file_id):
                raise _no_file(file_id)
        except InUse:
            message = f"file {file_id} is the input of a batch that is not finished; cancel the batch, or wait"
            raise ApiError(409, message, param="file_id", code="file_in_use") from None
        return _json(Deleted(id=file_id))

    # --- batches ------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        batches = self._opened()
        body = check_body(BatchBody, await self._bodies.read(request))
        found = await self._opened().run(Store.file, _owner(request), body.input_file_id)
        if found is not None and found.purpose != "batch":
            message = f"file {found.id} has the purpose {found.purpose!r}; a batch's input has 'batch'"
            raise bad_request(message, "input_file_id")
        batch = await batches.create(_owner(request), body)
        return _json(_there(batch, _no_file(body.input_file_id, "input_file_id")))

    async def batches(self, request: Request) -> Response:
        query = request.query_params
        limit = query_number(query, "limit", BATCHES_LISTED, MOST_BATCHES_LISTED)
        found = await self._opened().run(Store.batches, _owner(request), query.get("after"), limit)
        return _json(Page[Batch].of(*_there(found, _unknown_cursor(query))))

    async def batch(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        found = await self._opened().run(Store.batch, _owner(request), batch_id)
        return _json(_there(found, _no_batch(batch_id)))

    async def cancel(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        found = _there(await self._opened().cancel(_owner(request), batch_id), _no_batch(batch_id))
        if found.status not in ("cancelling", "cancelled"):
            message = f"batch {batch_id} is {found.status}; it cannot be cancelled any more"
            raise ApiError(409, message, param="batch_id", code="batch_not_cancellable")
        return _json(found)


def _paging(most: int) -> list[dict[str, Any]]:
    return [
        responses.query("after", "The id of the last one of the part before."),
        responses.query("limit", "How many are listed at most.", type="integer", minimum=1, maximum=most),
    ]


def _unknown_cursor(query: QueryParams) -> ApiError:
    return bad_request(f"after is {query.get('after', '')[:60]!r}, which is not in the list", "after")


def _there(found: T | None, missing: ApiError) -> T:
    """What was found; raises the error where there is nothing."""
    if found is None:
        raise missing
    return found
