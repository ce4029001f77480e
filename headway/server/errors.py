"""Answers in JSON: every error leaves the server as an OpenAI error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

# The most bytes of JSON, as a message may repeat what a client has sent.
LONGEST_MESSAGE, LONGEST_PARAM = 1600, 200
# The header's name and values are those of llm-d's router.
DROPPED_HEADER = "x-llm-d-request-dropped-reason"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body that OpenAI clients expect of an answer other than 2xx."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The same for clients of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that is JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


# What OpenAI calls errors, where that is not said otherwise; all others are an "invalid_request_error".
_KINDS = {
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    507: "server_error",
}


class ApiError(Exception):
    """An answer other than 200; the message is for the user.

    Args:
        param: the request field at fault, as messages[0].content.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message, LONGEST_MESSAGE)
        self.param = param and _cut(param, LONGEST_PARAM)
        self.code = code
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """The answer to a request for a path, which may belong to Anthropic's API."""
        body = anthropic_error(self) if path.startswith(ANTHROPIC_PATH) else self.body()
        return json_response(body, self.status, self.headers)


ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error object as Anthropic's clients expect it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _cut(text: str, most: int) -> str:
    """The text, or its beginning, so that it has at most so many bytes of JSON."""
    short = text[:most]
    while len(msgspec.json.encode(short)) > most:
        short = short[: len(short) * 3 // 4]
    return text if short == text else short + "..."


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def not_found(message: str, code: str = "not_found", param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def unavailable(message: str, code: str, retry_after_s: int, dropped: str = "") -> ApiError:
    """An error with 503: nothing is wrong with the request, and it may be sent again later.

    Args:
        dropped: what llm-d's router calls the reason, for DROPPED_HEADER.
    """
    headers = {"retry-after": str(retry_after_s)} | ({DROPPED_HEADER: dropped} if dropped else {})
    return ApiError(503, message, code=code, headers=headers)


def too_many(message: str, code: str, retry_after_s: int) -> ApiError:
    """An error with 429: nothing is wrong with the request, but others are waiting; it may be sent again later."""
    headers = {"retry-after": str(retry_after_s), DROPPED_HEADER: "rejected-saturated"}
    return ApiError(429, message, code=code, headers=headers)


def internal(message: str) -> ApiError:
    return ApiError(500, message, code="internal_error")


def request_failed(message: str) -> ApiError:
    """An error for a request on which the engine failed. Others go on."""
    return ApiError(500, message, kind="engine_error", code="request_failed")


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


# Routes of OpenAI and vLLM that clients look for, and what this server has instead.
_ELSEWHERE = {
    "/pooling": "; use /v1/embeddings",
    "/classify": "; use /v1/score",
    "/v1/audio": "; only text is served",
    "/v1/images": "; only text is served",
}


async def _of_http_exception(request: Request, error: Any) -> Response:
    path, methods = f"{request.method} {request.url.path}", (error.headers or {}).get("Allow", "")
    hint = next((hint for route, hint in _ELSEWHERE.items() if request.url.path.startswith(route)), "")
    message, code = {
        404: (f"there is no {path}{hint}", "not_found"),
        405: (f"{path} is not allowed" + (f"; use {methods}" if methods else ""), "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), None))
    return ApiError(error.status_code, message, code=code, headers=error.headers).response(request.url.path)


async def _of_api_error(request: Request, error: Any) -> Response:
    answer: Response = error.response(request.url.path)
    return answer


async def _of_client_gone(request: Request, error: Any) -> Response:
    return Response(status_code=499)


def install_handlers(app: FastAPI) -> None:
    """Answer errors that routes raise on purpose with an error object; the edge answers all others."""
    app.add_exception_handler(ApiError, _of_api_error)
    app.add_exception_handler(HTTPException, _of_http_exception)
    app.add_exception_handler(ClientGone, _of_client_gone)
