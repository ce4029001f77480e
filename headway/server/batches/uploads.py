"""Reads an upload: a form with a file and what it is for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from headway.server.api.request_body import check_body
from headway.server.batches.objects import KEPT_S, ExpiresAfter
from headway.server.errors import ApiError, ClientGone, bad_request

# The most bytes of a form beside its file.
MOST_FORM_BYTES = 2**16
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that has come. Its content lies in the system's temporary folder until it is closed."""

    file: UploadFile
    filename: str
    expiry_s: int


async def read_upload(request: Request, most_bytes: int) -> Upload:
    """Read the form of POST /v1/files.

    Raises:
        ApiError: 400 naming the field at fault; 413 for a file of more than `most_bytes`.
        ClientGone: the client went away before it was complete.
        OSError: there is no room for it.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise bad_request("an upload must be of type multipart/form-data, with the fields file and purpose")
    stream = _bounded(request, most_bytes)
    try:
        form = await MultiPartParser(
            request.headers, stream, max_files=1, max_fields=len(_FIELDS), max_part_size=MOST_FORM_BYTES
        ).parse()
    except MultiPartException as error:
        raise bad_request(f"the upload is not a valid form: {error.message}") from None
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        await stream.aclose()
    try:
        return _checked(dict(form), most_bytes)
    except BaseException:
        await form.close()
        raise


async def _bounded(request: Request, most_bytes: int) -> AsyncGenerator[bytes, None]:
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > most_bytes + MOST_FORM_BYTES:
            raise _too_large(most_bytes)
        yield chunk


def _too_large(most_bytes: int) -> ApiError:
    message = f"the file has more than {most_bytes} bytes, the limit of --max-file-size"
    return ApiError(413, message, param="file", code="file_too_large")


def _checked(form: dict[str, UploadFile | str], most_bytes: int) -> Upload:
    unknown = next((name for name in form if name not in _FIELDS), None)
    if unknown is not None:
        raise bad_request(f"unknown field {unknown[:60]}", unknown[:60])
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise bad_request("file is missing; it must be a part of the form with a file name", "file")
    if purpose != "batch":
        given = repr(purpose[:60]) if isinstance(purpose, str) else "missing"
        raise bad_request(f"purpose is {given}; it must be 'batch'", "purpose")
    if (file.size or 0) > most_bytes:
        raise _too_large(most_bytes)
    filename = file.filename or "file"
    if len(filename) > LONGEST_NAME:
        raise bad_request(f"the file's name has {len(filename)} characters; at most {LONGEST_NAME} are allowed", "file")
    expiry = {name[14:-1]: value for name, value in form.items() if name.startswith("expires_after")}
    if not expiry:
        return Upload(file, filename, KEPT_S)
    seconds = expiry.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10:
        expiry["seconds"] = int(seconds)  # type: ignore[assignment]
    return Upload(file, filename, check_body(ExpiresAfter, expiry).seconds)
