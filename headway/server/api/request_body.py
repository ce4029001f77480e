"""Turns the bytes of a request into a checked body. Whatever is wrong is a 400 or 413 that names it.

A body is counted before it is made into objects, and objects are counted before they are validated: both keep the
interpreter's lock, and nothing else runs meanwhile. So no body takes more than some tens of milliseconds of it on end.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from headway.policy.step.sampling_params import MAX_LOGIT_BIAS_TOKENS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from headway.server.api.fields import Body
from headway.server.api.schemas import MAX_MESSAGES, UNSUPPORTED, TokenIds
from headway.server.api.tools import MAX_TOOLS
from headway.server.edge.bodies import SMALL_BYTES, Bodies
from headway.server.errors import ApiError, bad_request

B = TypeVar("B", bound=Body)
SHOWN_CHARS = 60
# Numbers, strings, lists and objects of one body, beside token ids. Each takes up to 1.4 us to parse.
MAX_VALUES = 2**15
# Larger pieces would keep the interpreter's lock for milliseconds; the event loop gets it between two.
PIECE_BYTES, PAUSE_S = 2**16, 2e-5
# Fields that may have millions of token ids.
_IDS = ("prompt", "input", "tokens")
_MAX_LISTS = 2**12  # lists of token ids in one body
# What lists and objects may have; fields that are not here are checked where their values are used.
_COUNTS = {
    "messages": (MAX_MESSAGES, "messages"),
    "tools": (MAX_TOOLS, "tools"),
    "logit_bias": (MAX_LOGIT_BIAS_TOKENS, "token ids"),
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "token ids"),
    "modalities": (1, "entries"),
    "metadata": (16, "keys"),
}


class BodyReader(Bodies):
    """Reads the bodies of requests.

    Args:
        most_bytes: the most bytes of one body.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        # One thread parses bodies one after the other: the event loop might wait for each of several.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object that is the body: strict JSON in UTF-8, without NaN and Infinity.

        Raises:
            ApiError: 400 for another body; and what received() raises.
            ClientGone: the client went away before the body was complete.
        """
        with await self.received(request) as raw:
            if len(raw) <= SMALL_BYTES:
                return _object_in(raw)
            return await asyncio.get_running_loop().run_in_executor(self._thread, _object_in, raw)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _object_in(raw: bytearray) -> dict[str, Any]:
    """The JSON object in a body's bytes. Raises ApiError 400."""
    try:
        if len(raw) <= SMALL_BYTES or num_marks(raw) < MAX_VALUES:
            content = from_json(raw, allow_inf_nan=False)
        else:
            content = _large_object(raw)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise bad_request(f"the body is a JSON {_kind(content)}; an object is needed")
    return content


def num_marks(raw: bytes | bytearray) -> int:
    """The commas and opening brackets of a JSON text, also within strings: it has at most one value more."""
    return len(raw) - len(raw.translate(None, b",[{"))


def _outside_strings(raw: bytes | bytearray) -> Iterator[bytes]:
    """A JSON text without its strings, in pieces."""
    rest, within = b"", 0
    for at in range(0, len(raw), PIECE_BYTES):
        piece = rest + raw[at : at + PIECE_BYTES]
        rest = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        piece = piece[: len(piece) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b"".join(parts[within::2])
        within = (within + len(parts) - 1) % 2
        time.sleep(PAUSE_S)


def _large_object(raw: bytearray) -> Any:
    """The value of a JSON text with many commas or brackets, from long strings or token ids. Raises ApiError 400."""
    values = members = 0
    for piece in _outside_strings(raw):
        values += num_marks(piece)
        members += piece.count(b":")
        if members > MAX_VALUES:
            raise _too_many_values(members)
    if values < MAX_VALUES:
        return from_json(raw, allow_inf_nan=False)
    texts = {name: bytes(text) for name, text in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items()}
    ids = {name: texts.pop(name) for name in _IDS if _is_ids(texts.get(name, b""))}
    values -= sum(map(num_marks, ids.values()))
    if values >= MAX_VALUES:
        raise _too_many_values(values)
    content = {name: from_json(text, allow_inf_nan=False) for name, text in texts.items()}
    return content | {name: _ids_in(name, text) for name, text in ids.items()}


def _too_many_values(count: int) -> ApiError:
    return bad_request(
        f"the body has {count} values or more beside token ids; at most {MAX_VALUES} are allowed in one request"
    )


def _is_ids(text: bytes) -> bool:
    """Whether there are only lists of integers in a JSON text."""
    return text.startswith(b"[") and not text.translate(None, b"0123456789-,[] \t\r\n")


def _ids_in(name: str, raw: bytes) -> Sequence[Any]:
    """The ids of a list, or of a list of such lists. Raises ApiError 400."""
    lists = raw.count(b"[")
    if lists == 1:
        return _flat_ids(name, raw)
    if lists > _MAX_LISTS:
        raise bad_request(f"{name} has {lists} lists; at most {_MAX_LISTS} are allowed in one request", name)
    return [_flat_ids(name, bytes(each)) for each in msgspec.json.decode(raw, type=list[msgspec.Raw])]


def _flat_ids(name: str, raw: bytes) -> TokenIds:
    if raw[:1] != b"[" or raw.count(b"[") > 1:
        raise bad_request(f"{name} has lists and numbers mixed; give token ids, or lists of them", name)
    inner, found, at = raw[1 : raw.rindex(b"]")], TokenIds(), 0
    while at < len(inner):
        end = inner.find(b",", at + PIECE_BYTES)
        end = len(inner) if end < 0 else end
        try:
            found.add(msgspec.json.decode(b"[%b]" % inner[at:end], type=list[int]))
        except msgspec.ValidationError:
            raise bad_request(f"{name} has a number that is no token id", name) from None
        at = end + 1
        time.sleep(PAUSE_S)
    return found


def _kind(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return "array" if isinstance(value, (list, TokenIds)) else names.get(type(value), "object")


# --- what is in it ----------------------------------------------------------------------------------


def check_body(model: type[B], content: dict[str, Any]) -> B:
    """The checked body.

    Raises:
        ApiError: 400 naming the first field at fault.
    """
    content = {name: value for name, value in content.items() if value is not None}  # null is as if left out
    if not content.keys() <= model.model_fields.keys():
        content = _without_unsupported(model, content)
    for name in _COUNTS.keys() & content.keys():
        value, (most, what) = content[name], _COUNTS[name]
        if isinstance(value, (list, dict)) and len(value) > most:
            raise bad_request(f"{name} has {len(value)} {what}; at most {most} are allowed", name)
    for name, inner in _inner_models(model).items():
        _check_names(inner, name, content.get(name))
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _of_validation(error.errors(include_url=False)[0]) from None


def _without_unsupported(model: type[Body], content: dict[str, Any]) -> dict[str, Any]:
    """The fields that a model has. Raises ApiError 400 for others, but not for UNSUPPORTED ones that change nothing."""
    for name in content:
        if name in UNSUPPORTED and name not in model.model_fields:
            field, value = UNSUPPORTED[name], content[name]
            if not field.no_op(value):
                raise bad_request(f"{name} is {_shown(value)}, which is not supported: {field.reason}", name)
    unknown = next((name for name in content if name not in model.model_fields and name not in UNSUPPORTED), None)
    if unknown is not None:
        raise _unknown(unknown, model.model_fields)
    return {name: value for name, value in content.items() if name in model.model_fields}


@cache
def _inner_models(model: type[Body]) -> dict[str, type[Body]]:
    """Fields of a body whose values are objects with fields of their own, or lists of such objects."""

    def inner(annotation: Any) -> type[Body] | None:
        if isinstance(annotation, type) and issubclass(annotation, Body):
            return annotation
        return next(filter(None, map(inner, get_args(annotation))), None)

    found = {name: inner(field.annotation) for name, field in model.model_fields.items()}
    return {name: each for name, each in found.items() if each is not None}


@cache
def _names(model: type[Body]) -> frozenset[str]:
    """The fields of a body as JSON has them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _check_names(model: type[Body], path: str, value: Any) -> None:
    """Raise ApiError 400 where an object, or one of a list, has a field that the model does not know."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            if isinstance(each, dict) and not each.keys() <= _names(model):
                _check_names(model, f"{path}[{number}]", each)
    elif isinstance(value, dict):
        for name in value:
            if name not in _names(model):
                raise _unknown(name, _names(model), f"{path}.")


def _unknown(name: str, fields: Iterable[str], path: str = "") -> ApiError:
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.7) if len(name) <= SHOWN_CHARS else []
    shown = path + (name if len(name) <= SHOWN_CHARS else name[:SHOWN_CHARS] + "...")
    return bad_request(f"unknown field {shown}" + (f"; did you mean {path}{near[0]}?" if near else ""), shown)


def _of_validation(detail: ErrorDetails) -> ApiError:
    name = _path(detail["loc"])
    if detail["type"] == "missing":
        return bad_request(f"{name} is missing", name)
    if detail["type"] == "extra_forbidden":
        return bad_request(f"unknown field {name}", name)
    reason = re.sub(r"^(Value error, |Input should |List should |String should )", "", detail["msg"])
    reason = reason.removeprefix("must ").partition(" after validation")[0]
    return bad_request(f"{name} is {_shown(detail['input'])}; it must {reason}", name)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN_CHARS]}" if path else part[:SHOWN_CHARS]
    return path


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict, TokenIds)):
        return f"a JSON {_kind(value)}"
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARS else value[:SHOWN_CHARS] + "...")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**SHOWN_CHARS:
        return "a huge number"  # Python refuses to print integers of thousands of digits
    shown = str(value)
    return shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + "..."
