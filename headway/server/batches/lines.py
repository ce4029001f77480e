"""The lines of a batch: what a line of its input asks for, what is wrong with one, and lines of its output."""

from __future__ import annotations

import secrets
import time
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.server.batches.objects import ENDPOINTS, BatchError
from headway.server.batches.store import Result

MOST_REQUESTS = 50_000
MOST_ERRORS = 100
# The event loop gets the interpreter in between, as the lock is else handed over every 5 ms only.
LINES_BETWEEN_PAUSES, PAUSE_S = 64, 2e-5


class RequestLine(msgspec.Struct):
    """One request of a batch, as OpenAI writes it; `body` is the JSON of the request's body."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """Fields of a request's body that a batch checks or restricts."""

    model: Any = None
    stream: Any = None
    service_class: Any = None
    service_tier: Any = None


class BadLine(ValueError):
    """A line is wrong; the others run. The message says what is wrong."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


def parse(raw: bytes) -> RequestLine:
    """The request in a line. Raises BadLine."""
    try:
        line = msgspec.json.decode(raw.removeprefix(BOM_UTF8), type=RequestLine)  # which editors of Windows write
        line.body = msgspec.Raw(bytes(line.body))  # else it holds the whole of what was read
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine("invalid_json_line", f"the line is not a valid request: {error}", _custom_id(raw)) from None
    if line.method != "POST":
        raise BadLine("invalid_method", f"method is {line.method[:60]!r}; it must be POST", line.custom_id)
    return line


def _custom_id(raw: bytes) -> str | None:
    """The custom_id of a line that is wrong otherwise, if it can be found."""
    try:
        found = msgspec.json.decode(raw.removeprefix(BOM_UTF8))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def _body_of(line: RequestLine) -> _Body:
    """The fields that a batch checks. Raises BadLine where one is not allowed; the route answers other errors."""
    try:
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine("invalid_body", f"body is not a JSON object: {error}", line.custom_id) from None
    if body.stream:
        raise BadLine("invalid_body", "stream must be false in a batch", line.custom_id)
    if body.service_class is not None or body.service_tier not in (None, "auto"):
        message = "service_class and service_tier are not allowed in a batch, which has its own class"
        raise BadLine("invalid_body", message, line.custom_id)
    return body


@dataclass(slots=True)
class Checked:
    """What is known of an input file."""

    total: int = 0
    errors: list[BatchError] = field(default_factory=list)  # why the batch as a whole can't run
    malformed: list[Result] = field(default_factory=list)  # answers to lines that are no requests
    model: str | None = None  # the model that the first request names


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with their numbers from 1. Empty ones are left out, but counted."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def check(path: Path, endpoint: str | None, models: Collection[str] | None, most: int | None) -> Checked:
    """Look through an input file.

    Args:
        endpoint: the route of all its requests; None leaves that to each.
        models: names that are served; None where they are not known.
        most: how many requests it may have; None for any number.
    """
    checked = Checked()
    first_line_of: dict[str, int] = {}

    def wrong(number: int, code: str, message: str, param: str) -> None:
        if len(checked.errors) < MOST_ERRORS:
            checked.errors.append(BatchError(code=code, message=message, param=param, line=number))

    for number, raw in numbered(path):
        checked.total += 1
        if checked.total % LINES_BETWEEN_PAUSES == 0:
            time.sleep(PAUSE_S)
        if most is not None and checked.total > most:
            wrong(number, "too_many_requests", f"the file has more than {most} requests; split it", "file")
            break
        try:
            line = parse(raw)
            first = first_line_of.setdefault(line.custom_id, number)
            if first != number:
                message = f"custom_id {line.custom_id[:60]!r} is also that of line {first}; give each line its own"
                wrong(number, "duplicate_custom_id", message, "custom_id")
            elif line.url != endpoint and (endpoint is not None or line.url not in ENDPOINTS):
                message = f"url is {line.url[:60]!r}; it must be {endpoint or ' or '.join(ENDPOINTS)}"
                wrong(number, "invalid_url", message, "url")
            body = _body_of(line)
            if isinstance(body.model, str):
                checked.model = checked.model or body.model
                if models is not None and body.model not in models:
                    message = f"model {body.model[:200]!r} is not served here; {', '.join(models)} is"
                    wrong(number, "model_not_found", message, "body.model")
        except BadLine as error:
            checked.malformed.append(failed(number, error.custom_id, error.code, str(error)))
    if not checked.total:
        checked.errors.append(BatchError(code="empty_file", message="the file has no requests"))
    return checked


# --- lines of the output ----------------------------------------------------------------------------


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def failed(number: int, custom_id: str | None, code: str, message: str) -> Result:
    """The answer to a line that was not sent as a request."""
    error = {"code": code, "message": message}
    written = {"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}
    return Result(number, False, msgspec.json.encode(written))


class _Usage(msgspec.Struct):
    """Usage of completions, chats and vectors; `input` and `output` are the words of /v1/responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def answered(number: int, custom_id: str, status: int, request_id: str, body: bytes) -> Result:
    """The answer to a request. Its body must be JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    written = msgspec.json.encode({"id": _new_id(), "custom_id": custom_id, "response": response, "error": None})
    if status != 200:
        return Result(number, False, written)
    usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
    cached = (usage.prompt_tokens_details or usage.input_tokens_details or {}).get("cached_tokens") or 0
    thought = (usage.completion_tokens_details or usage.output_tokens_details or {}).get("reasoning_tokens") or 0
    tokens = usage.prompt_tokens or usage.input_tokens, usage.completion_tokens or usage.output_tokens
    return Result(number, True, written, (tokens[0], cached, tokens[1], thought))


def unanswered(path: Path, done: Collection[int], code: str, message: str) -> Iterator[Result]:
    """Answers to the lines of a file that have none."""
    for number, raw in numbered(path):
        if number not in done:
            yield failed(number, _custom_id(raw), code, message)
