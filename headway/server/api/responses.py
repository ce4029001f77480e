"""The bodies of answers, as the OpenAPI document describes them, and routes with what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel

from headway.server.errors import ErrorBody

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Tokens of reasoning in chats that are parsed, and drafts where any were tried."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(BaseModel):
    """Where the time of the choice that finished last has gone; phases_ns sums to e2e_ns."""

    e2e_ns: int
    ttft_ns: int
    phases_ns: dict[str, int]
    detokenize_ns: int
    tokens: int
    steps: int
    preemptions: int
    drafts: int
    accepted_drafts: int
    service_class: str
    ttft_objective_ns: int | None
    ttft_met: bool | None
    tpot_objective_ns: int | None
    tpot_met: bool | None
    e2e_objective_ns: int | None
    e2e_met: bool | None
    yielded: Literal["", "late", "oversized", "overload"]
    passed_over: int


class Answered(BaseModel):
    """What the answers of all routes of the engine have."""

    id: str
    model: str
    usage: Usage
    timings: Timings | None = None


class Generated(Answered):
    created: int
    service_tier: str
    kv_transfer_params: dict[str, Any] | None = None


class Choice(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class CompletionChoice(Choice):
    text: str
    finish_reason: FinishReason | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """`reasoning` and `reasoning_content` are the same text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    message: AssistantMessage
    finish_reason: FinishReason | Literal["tool_calls"]


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None


class Embedding(BaseModel):
    """`embedding` is a string with encoding_format base64: float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answered):
    object: Literal["list"]
    created: int
    data: list[Embedding]


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class Scores(Answered):
    object: Literal["list"]
    created: int
    data: list[Score]


class RankedText(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Answered):
    """The most relevant documents first."""

    results: list[Ranked]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class Unloaded(BaseModel):
    id: str
    object: Literal["model"]
    deleted: bool


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Inferred(BaseModel):
    text: str
    request_id: str


class Text(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ready"]


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int


class Decided(BaseModel):
    ago_ms: float
    decision: str


class Schedule(BaseModel):
    """The last steps, the newest last."""

    steps: list[Decided]


_ERRORS = {
    400: "Bad or unsupported input; `param` names the field",
    401: "No valid API key",
    403: "The API key may not use this service class",
    404: "Not found",
    408: "The request was not complete in time",
    409: "The object's state does not allow this",
    413: "The body is too large",
    429: "The queue or a limit is full; Retry-After says when to try again",
    500: "The server failed",
    503: "Loading, shutting down, waited too long, or the engine is dead; Retry-After says when to try again",
    507: "The disk is full",
}


def errors(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for its `responses`."""
    return {status: {"model": body, "description": _ERRORS[status]} for status in statuses}


def json_body(*schemas: type[BaseModel]) -> Callable[[], dict[str, Any]]:
    """Makes the description of the request body of a route that parses its body itself."""

    def made() -> dict[str, Any]:
        documents = [schema.model_json_schema(ref_template="#/components/schemas/{model}") for schema in schemas]
        for document in documents:
            document.pop("$defs", None)
        content = documents[0] if len(documents) == 1 else {"anyOf": documents}
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": content}}}}

    return made


def definitions(*schemas: type[BaseModel]) -> dict[str, Any]:
    """The definitions that json_body()'s schemas refer to."""
    found: dict[str, Any] = {}
    for schema in schemas:
        found |= schema.model_json_schema(ref_template="#/components/schemas/{model}").get("$defs", {})
    return found


_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A JSON object, or [DONE] at the end."}},
    "required": ["data"],
}
EVENT_STREAM = {"content": {"text/event-stream": {"itemSchema": _EVENT}}}


def query(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """A parameter of a route, behind its path."""
    return {"name": name, "in": "query", "description": description, "schema": {"type": "string", **schema}}


def in_path(name: str) -> dict[str, Any]:
    """A parameter within the path of a route."""
    said = f"The id of the {name.removesuffix('_id')}."
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": said, "schema": schema}


def add_route(
    app: FastAPI,
    method: str,
    path: str,
    handler: Any,
    answer: type[BaseModel] | dict[str, Any],
    failures: dict[int | str, dict[str, Any]],
    more: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
    in_schema: bool = True,
    **options: Any,
) -> None:
    """Register a route on the app itself: routes of a router would be built at their first request.

    Args:
        answer: the body of its answer, or how OpenAPI describes it.
        failures: its error answers, from errors().
        more: further keys of its description, or what makes them.
        in_schema: OpenAPI describes it.
        options: that FastAPI takes, for its description.
    """
    app.add_api_route(path, handler, methods=[method], include_in_schema=False)

    def describe(document: FastAPI) -> None:
        told = {200: answer if isinstance(answer, dict) else {"model": answer}, **failures}
        extra = more() if callable(more) else more
        document.add_api_route(path, handler, methods=[method], responses=told, openapi_extra=extra, **options)

    if in_schema:
        app.state.described.append(describe)
