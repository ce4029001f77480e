"""Routes of other APIs than chat completions, which become chat completions: /v1/messages and /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headway.server.api import messages_api, responses, responses_api
from headway.server.api.messages_api import CountBody, MessagesAnswer, MessagesBody
from headway.server.api.parts import PartsAnswer
from headway.server.api.prompts import chat_prompt
from headway.server.api.responses_api import ResponsesAnswer, ResponsesBody
from headway.server.api.responses_store import ResponseStore, page_of
from headway.server.api.schemas import ChatBody
from headway.server.api.serving import read, read_unless_full
from headway.server.edge.edge import ACCESS
from headway.server.edge.http_head import is_newest_first, query_number
from headway.server.errors import AnthropicErrorBody, ApiError, bad_request, json_response, not_found
from headway.server.generation import Generation
from headway.server.service import Service

Shape = Callable[[Generation], PartsAnswer]
Generate = Callable[[Request, ChatBody, Shape], Coroutine[Any, Any, Response]]
_PAGE, _MOST_ON_PAGE = 20, 100
_STREAM = responses.EVENT_STREAM
_STATUSES = (400, 401, 403, 404, 408, 413, 429, 500, 503)
_FAILURES, _OF_MESSAGES = responses.errors(*_STATUSES), responses.errors(*_STATUSES, body=AnthropicErrorBody)


class TranslatedRoutes:
    """The handlers.

    Args:
        generate: answers a chat completion, in the shape that it is given.
    """

    def __init__(self, service: Service, generate: Generate, store: ResponseStore) -> None:
        self._service, self._generate, self._store = service, generate, store

    def add_to(self, app: FastAPI) -> None:
        add, body = partial(responses.add_route, app), responses.json_body
        add("POST", "/v1/messages", self.messages, _answered("message"), _OF_MESSAGES, body(MessagesBody))
        counted = {"content": {"application/json": {"schema": _COUNT}}}
        add("POST", "/v1/messages/count_tokens", self.count_tokens, counted, _OF_MESSAGES, body(CountBody))
        add("POST", "/v1/responses", self.responses, _answered("response"), _FAILURES, body(ResponsesBody))
        one = {"parameters": [responses.in_path("response_id")]}
        kept, failures = _answered("response", streams=False), responses.errors(400, 401, 404)
        add("GET", "/v1/responses/{response_id}", self.response, kept, failures, one)
        add("DELETE", "/v1/responses/{response_id}", self.delete, {}, failures, one)
        add("POST", "/v1/responses/{response_id}/cancel", self.cancel, {}, failures, one)
        page = [
            responses.query("after", "The item after which the page begins."),
            responses.query("limit", "Items of a page.", type="integer", minimum=1, maximum=_MOST_ON_PAGE),
            responses.query("order", "Newest first (desc, the default) or last.", enum=["asc", "desc"]),
        ]
        listed = {"parameters": [*one["parameters"], *page]}
        # Without it, POST /v1/responses/compact would be said not to be allowed.
        add("POST", "/v1/responses/{response_id}", self.unknown, {}, {}, in_schema=False)
        add("GET", "/v1/responses/{response_id}/input_items", self.input_items, {}, failures, listed)

    # --- Anthropic's --------------------------------------------------------------------------------

    async def messages(self, request: Request) -> Response:
        body = await read_unless_full(self._service, request, MessagesBody)
        with _renamed(messages_api.NAMES):
            chat, model = messages_api.chat_of(body, self._template), self._model(body)
            return await self._generate(request, chat, lambda made: MessagesAnswer(made, body, model))

    async def count_tokens(self, request: Request) -> Response:
        body = await read(self._service, request, CountBody)
        self._service.check_model(body.model)
        prompt = await chat_prompt(self._service, messages_api.chat_of(body, self._template), is_cut=True)
        return json_response({"input_tokens": len(prompt.token_ids)})

    def _model(self, body: CountBody | ResponsesBody) -> str:
        return body.model or self._service.settings.served_model_names[0]

    @property
    def _template(self) -> str:
        return "" if self._service.template is None else self._service.template.source

    # --- OpenAI's -----------------------------------------------------------------------------------

    async def responses(self, request: Request) -> Response:
        service = self._service
        body = await read_unless_full(service, request, ResponsesBody)
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = self._conversation(request, body.previous_response_id)
        items = responses_api.items_of(body.input)
        messages = before + responses_api.messages_of(items)
        if not messages:
            raise bad_request("input is empty; give a text or at least one item", "input")
        model = self._model(body)

        def shape(made: Generation) -> ResponsesAnswer:
            return ResponsesAnswer(made, body, self._store, service.tokenizer, items, messages, model)

        with _renamed(responses_api.NAMES):
            chat = responses_api.chat_of(body, messages)
            if body.truncation == "auto":
                await self._drop_oldest(chat)
            return await self._generate(request, chat, shape)

    def _conversation(self, request: Request, name: str) -> list[dict[str, Any]]:
        try:
            kept = self._store.find(name, self._tenant(request))
        except ApiError as error:
            field, code = "previous_response_id", "previous_response_not_found"
            raise ApiError(400, error.message, param=field, code=code) from None
        messages: list[dict[str, Any]] = msgspec.json.decode(kept.messages)
        return messages

    async def _drop_oldest(self, chat: ChatBody) -> None:
        """Drop the oldest messages, but system messages, until the conversation fits the context.

        The last message stays. Each attempt drops twice as many as the one before.
        """
        limit = self._service.check_ready().max_model_len - (chat.max_completion_tokens or 1)
        kept, dropped = chat.messages, 0
        while True:
            prompt = await chat_prompt(self._service, chat, chat.cache_salt, is_cut=True)
            others = [number for number, each in enumerate(kept[:-1]) if each.role not in ("system", "developer")]
            if len(prompt.token_ids) <= limit or dropped == len(others):
                return
            dropped = min(len(others), 2 * dropped or 1)
            left_out = set(others[:dropped])
            chat.messages = [each for number, each in enumerate(kept) if number not in left_out]

    async def response(self, request: Request) -> Response:
        return _kept(self._store.find(request.path_params["response_id"], self._tenant(request)).body)

    async def delete(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        self._store.delete(name, self._tenant(request))
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        self._store.cancel(name, self._tenant(request))
        return json_response({"id": name, "object": "response", "status": "cancelled"})

    async def unknown(self, request: Request) -> Response:
        raise not_found(f"there is no POST {request.url.path[:100]}")

    async def input_items(self, request: Request) -> Response:
        query = request.query_params
        limit, newest_first = query_number(query, "limit", _PAGE, _MOST_ON_PAGE), is_newest_first(query)
        kept = self._store.find(request.path_params["response_id"], self._tenant(request))
        items = msgspec.json.decode(kept.input_items)
        return _kept(page_of(items, query.get("after"), limit, newest_first))

    @staticmethod
    def _tenant(request: Request) -> str:
        tenant: str = request.scope[ACCESS].tenant
        return tenant


@contextmanager
def _renamed(names: dict[str, str]) -> Iterator[None]:
    """Errors within it name fields as the API calls them."""
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
            first, space, rest = error.message.partition(" ")
            error.message = names.get(first, first) + space + rest
        raise


def _kept(encoded: bytes) -> Response:
    return Response(encoded, media_type="application/json")


_COUNT = {"type": "object", "properties": {"input_tokens": {"type": "integer"}}, "required": ["input_tokens"]}


def _answered(kind: str, streams: bool = True) -> dict[str, Any]:
    """How OpenAPI describes an answer: an object of this kind, or a stream of events."""
    key = "type" if kind == "message" else "object"
    schema = {"type": "object", "properties": {key: {"const": kind}, "id": {"type": "string"}}, "required": ["id", key]}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    return {"content": {**content, **_STREAM["content"]} if streams else content}
