"""Turns the bytes of a request into a checked body. Whatever is wrong is a 400 or 413 that names it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from headway.server.errors import ApiError, ClientGone, bad_request
from headway.server.schemas import UNSUPPORTED, Body

B = TypeVar("B", bound=Body)
SHOWN_CHARS = 60


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body, but no more than `limit` bytes.

    Raises:
        ApiError: 413 when it is longer, with or without a content-length that says so.
        ClientGone: the client went away before the body was complete.
    """
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limit:
        raise _too_large(f"the body has {int(stated)} bytes", limit)
    received = bytearray()
    try:
        async for chunk in request.stream():
            received += chunk
            if len(received) > limit:
                raise _too_large(f"the body has more than {limit} bytes", limit)
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(received)


def _too_large(what: str, limit: int) -> ApiError:
    return ApiError(413, f"{what}; at most {limit} are accepted (--max-body-size)", code="request_too_large")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`: strict JSON in UTF-8, without NaN and Infinity.

    Raises:
        ApiError: 400.
    """
    try:
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise bad_request(f"the body is a JSON {_kind(content)}; an object is needed")
    return content


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), "object")


def check_body(model: type[B], content: dict[str, Any]) -> B:
    """The checked body.

    Raises:
        ApiError: 400 naming the first field at fault.
    """
    for name, field in UNSUPPORTED.items():
        if name in content and name not in model.model_fields:
            if (value := content[name]) is not None and not field.no_op(value):
                raise bad_request(f"{name} is {_shown(value)}, which is not supported: {field.reason}", name)
            content = {key: value for key, value in content.items() if key != name}
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _of_validation(error.errors(include_url=False)[0], model.model_fields) from None


def _of_validation(detail: ErrorDetails, fields: Iterable[str]) -> ApiError:
    name = _path(detail["loc"])
    kind, message, given = detail["type"], detail["msg"], detail["input"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
        return bad_request(f"unknown field {name}" + (f"; did you mean {near[0]}?" if near else ""), name)
    if kind == "missing":
        return bad_request(f"{name} is missing", name)
    reason = re.sub(r"^(Value error, |Input should |List should |String should )", "", message)
    reason = reason.removeprefix("must ").partition(" after validation")[0]
    return bad_request(f"{name} is {_shown(given)}; it must {reason}", name)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"a JSON {_kind(value)}"
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARS else value[:SHOWN_CHARS] + "...")
    names = {None: "null", True: "true", False: "false"}
    shown = names.get(value, "") if value is None or isinstance(value, bool) else _number(value)
    return shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + "..."


def _number(value: Any) -> str:
    # Python refuses to print integers of thousands of digits.
    return "a huge number" if isinstance(value, int) and abs(value) >= 10**SHOWN_CHARS else str(value)
