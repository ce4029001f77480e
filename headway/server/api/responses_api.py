"""POST /v1/responses: OpenAI's Responses API, as a translation of chat completions.

A body becomes that of a chat completion, so the same checks, limits, classes and sampling apply; the answer becomes
output items. Nothing runs in the background, and no tools but the client's functions are there.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from headway.server.api.answers import logprob_entries
from headway.server.api.choices import ScoredToken
from headway.server.api.fields import Body, Int, joined, said, string_in
from headway.server.api.parts import Part, PartsAnswer, named_event
from headway.server.api.request_body import check_body
from headway.server.api.responses_store import Kept, ResponseStore
from headway.server.api.schemas import ChatBody, OfEngine
from headway.server.edge.streaming import EventWriter
from headway.server.errors import ApiError, bad_request
from headway.server.generation import Generation
from headway.text.tokenizer import Tokenizer

# What fields of a chat completion are called here, for errors.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_SAME = (
    *("model", "stream", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("user", "service_tier", "service_class", "priority", "cache_salt"),
)
_UNSAID = dict.fromkeys(("description", "parameters", "strict"))  # what a function may leave out, and an answer not
_LOGPROBS = "message.output_text.logprobs"


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = said(
        "A variable of the chat template, which must have it."
    )
    summary: Literal["auto", "concise", "detailed"] | None = said("Without effect: reasoning is given whole.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = said("The older name of summary.")


class TextOptions(Body):
    format: dict[str, Any] | None = said("The format of the text: text, json_object or json_schema.")
    verbosity: Literal["low", "medium", "high"] | None = said("Only medium, which changes nothing.")


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = said("Without effect: nothing is obfuscated.")


class ResponsesBody(OfEngine):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]] = said("A text of the user, or a list of items.", ...)
    instructions: str | None = said("A system message that goes before the conversation.")
    previous_response_id: str | None = said("The response whose conversation goes on.")
    max_output_tokens: Int | None = said("Tokens of the answer at most, its reasoning included.")
    temperature: float | None = said("Randomness, from 0 (the likeliest token) to 100; default 1 or the checkpoint's.")
    top_p: float | None = said("Only the likeliest tokens that have this probability together are drawn.")
    presence_penalty: float | None = said("Subtracted from the logits of tokens that the answer has already, -2 to 2.")
    frequency_penalty: float | None = said(
        "Subtracted from a token's logit for each time that the answer has it, -2 to 2; default 0."
    )
    top_logprobs: Int | None = said("Alternatives, 0 to 20, with include message.output_text.logprobs.")
    stream: bool | None = said("Whether the answer comes token by token, as server-sent events; default false.")
    stream_options: ResponsesStreamOptions | None = said("What the events of a stream have; without effect.")
    store: bool | None = said("Whether the answer is kept for previous_response_id; default true.")
    metadata: dict[str, str] | None = said("Up to 16 texts that the answer repeats.")
    tools: list[dict[str, Any]] | None = said("Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = said("Whether the answer calls a function; default auto.")
    parallel_tool_calls: bool | None = said("Whether there may be several calls; default true.")
    text: TextOptions | None = said("The format of the text.")
    reasoning: Reasoning | None = said("How much the model thinks.")
    truncation: Literal["auto", "disabled"] | None = said(
        "With auto, the oldest messages are dropped where the context is too short; default disabled."
    )
    include: list[str] | None = said("Log-probabilities, by message.output_text.logprobs; others have no effect.")
    background: bool | None = said("Only false.")
    user: str | None = said("A name of the end user; it has no effect.")
    safety_identifier: str | None = said("Without effect.")
    prompt_cache_key: str | None = said("Without effect; see cache_salt.")
    prompt_cache_retention: str | None = said("Without effect.")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = said(
        "Selects a service class by OpenAI's names."
    )

    @property
    def stores(self) -> bool:
        return self.store is not False


def items_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input, each with an id, as a list."""
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    return [
        {**item, "type": item.get("type") or "message", "id": item.get("id") or f"msg_{uuid.uuid4().hex}"}
        for item in items
    ]


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat completion that items stand for.

    Calls and reasoning of the assistant become part of one message with the text beside them.

    Raises:
        ApiError: 400 for an item that is not understood.
    """
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        path, kind = f"input[{number}]", item["type"]
        if kind == "function_call_output":
            output = _text(item.get("output"), f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": string_in(item, "call_id", path), "content": output})
        elif kind == "message" and item.get("role") != "assistant":
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise bad_request(f"{path}.role is {str(role)[:60]!r}; it must be user, assistant, system or developer")
            messages.append({"role": role, "content": _text(item.get("content"), f"{path}.content")})
        else:
            _extend_assistant(messages, item, path)
    return messages


def _extend_assistant(messages: list[dict[str, Any]], item: dict[str, Any], path: str) -> None:
    """Add an item of the assistant to the last message, if that is the assistant's, else as a new one."""
    kind = item["type"]
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (last["content"] and kind == "message"):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if kind == "message":
        last["content"] = _text(item.get("content"), f"{path}.content")
    elif kind == "function_call":
        function = {"name": string_in(item, "name", path), "arguments": string_in(item, "arguments", path)}
        call = {"id": string_in(item, "call_id", path), "type": "function", "function": function}
        last["tool_calls"] = [*last.get("tool_calls", ()), call]
    elif kind == "reasoning":
        if item.get("content"):
            last["reasoning_content"] = _text(item["content"], f"{path}.content")
    else:
        raise bad_request(f"{path} is of type {str(kind)[:60]!r}, which is not supported", f"{path}.type")


def _text(content: Any, path: str) -> str:
    return joined(content, path, "parts", _part_text)


def _part_text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return string_in(part, "refusal", path)
    if kind in _TEXT_PARTS:
        return string_in(part, "text", path)
    raise bad_request(f"{path} is of type {str(kind)[:60]!r}; only text is supported", f"{path}.type")


def chat_of(body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The chat completion that a body asks for, over the messages of its conversation. Raises ApiError 400."""
    if body.background:
        raise bad_request("background is true; answers are given while the request waits", "background")
    chat: dict[str, Any] = {
        "messages": [{"role": "system", "content": body.instructions}, *messages] if body.instructions else messages,
        "max_completion_tokens": body.max_output_tokens,
    }
    chat |= {name: getattr(body, name) for name in _SAME}
    if _LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise bad_request(f"top_logprobs needs {_LOGPROBS!r} in include", "top_logprobs")
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None:
        if body.text.verbosity not in (None, "medium"):
            raise bad_request("text.verbosity: state the length of the answer in a message", "text.verbosity")
        chat |= _format(body.text.format)
    if body.tools:
        chat["tools"] = [_function(tool, f"tools[{number}]") for number, tool in enumerate(body.tools)]
    if body.tool_choice is not None and (body.tools or body.tool_choice not in ("auto", "none")):
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if body.parallel_tool_calls is not None and body.tools:
        chat["parallel_tool_calls"] = body.parallel_tool_calls
    return check_body(ChatBody, chat)


def _format(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None or given.get("type") == "text":
        return {}
    if given.get("type") != "json_schema":
        return {"response_format": given}
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:60]
        raise bad_request(f"{path} is of type {kind!r}; only functions are supported", f"{path}.type")
    function = {name: value for name, value in tool.items() if name not in ("type", "defer_loading")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(given: str | dict[str, Any]) -> Any:
    if isinstance(given, str):
        return given
    if given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise bad_request("tool_choice must be auto, none, required, or a function with its name", "tool_choice")
    return {"type": "function", "function": {"name": given["name"]}}


class ResponsesAnswer(PartsAnswer):
    """OpenAI's `response`, and its events.

    Args:
        items, messages: the request's own items, and the whole conversation before the answer.
    """

    def __init__(
        self,
        generation: Generation,
        body: ResponsesBody,
        store: ResponseStore,
        tokenizer: Tokenizer,
        items: list[dict[str, Any]],
        messages: list[dict[str, Any]],
        model: str,
    ) -> None:
        super().__init__(generation)
        self.name = f"resp_{generation.id}"
        self._body, self._store, self._tokenizer, self._model = body, store, tokenizer, model
        self._items, self._messages = items, messages
        self._created = int(time.time())
        self._number = 0
        self._done: list[dict[str, Any]] = []  # items of parts that have ended

    async def whole(self) -> Response:
        with self._store.under_way(self.name, self.generation):
            return await super().whole()

    async def events(self, writer: EventWriter) -> None:
        with self._store.under_way(self.name, self.generation):
            await super().events(writer)

    # --- objects ------------------------------------------------------------------------------------

    def _response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        body, params = self._body, self.choice.params
        is_cut = status == "incomplete"
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": error.code or "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self._model,
            "output": self._done,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": self.generation.terms.service_tier,
            "store": body.stores,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{**_UNSAID, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """The output item of a part."""
        if part.kind == "call":
            return {
                "id": f"fc_{part.id}",
                "type": "function_call",
                "status": status,
                "call_id": part.call_id,
                "name": part.name,
                "arguments": part.text,
            }
        content = [self._content(part)] if part.texts else []
        if part.kind == "reasoning":
            return {"id": f"rs_{part.id}", "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": f"msg_{part.id}", "type": "message", "status": status, "role": "assistant", "content": content}

    def _content(self, part: Part, text: str | None = None) -> dict[str, Any]:
        """The content part of a message or of reasoning; `text` in place of its own."""
        text = part.text if text is None else text
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs(part.logprobs) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: list[ScoredToken]) -> list[dict[str, Any]]:
        return list(logprob_entries(tokens, self._tokenizer, self._body.top_logprobs or 0))

    # --- events -------------------------------------------------------------------------------------

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(f"response.{kind}", {"sequence_number": number, **content})

    def begun(self) -> list[bytes]:
        response = self._response("in_progress")
        return [self._event(kind, {"response": response}) for kind in ("created", "in_progress")]

    def part_begun(self, part: Part) -> list[bytes]:
        item = self._item(part, "in_progress")
        events = [self._event("output_item.added", {"output_index": part.index, "item": item})]
        if part.kind != "call":
            at = {**self._place(item["id"], part), "part": self._content(part, "")}
            events.append(self._event("content_part.added", at))
        return events

    @staticmethod
    def _place(item_id: str, part: Part) -> dict[str, Any]:
        place = {"item_id": item_id, "output_index": part.index}
        return place if part.kind == "call" else {**place, "content_index": 0}

    def part_grown(self, part: Part, text: str, logprobs: list[ScoredToken]) -> bytes:
        item_id = f"{_PREFIXES[part.kind]}_{part.id}"
        content = {**self._place(item_id, part), "delta": text}
        if part.kind == "text":
            content["logprobs"] = self._logprobs(logprobs)
        return self._event(f"{_STREAMED[part.kind]}.delta", content)

    def part_ended(self, part: Part, complete: bool) -> list[bytes]:
        item = self._item(part, "completed" if complete else "incomplete")
        self._done.append(item)
        place = self._place(item["id"], part)
        if part.kind == "call":
            done = {**place, "name": part.name, "arguments": part.text}
            events = [self._event("function_call_arguments.done", done)]
        else:
            content = self._content(part)
            told = {**place, "text": part.text}
            if part.kind == "text":
                told["logprobs"] = content["logprobs"]
            events = [
                self._event(f"{_STREAMED[part.kind]}.done", told),
                self._event("content_part.done", {**place, "part": content}),
            ]
        return [*events, self._event("output_item.done", {"output_index": part.index, "item": item})]

    def ended(self) -> list[bytes]:
        response = self.whole_body()
        return [self._event(response["status"], {"response": response})]

    def failed(self, error: ApiError) -> list[bytes]:
        return [self._event("failed", {"response": self._response("failed", error)})]

    def whole_body(self) -> dict[str, Any]:
        response = self._response("incomplete" if self.choice.finish_reason == "length" else "completed")
        self._keep(response)
        return response

    def _keep(self, response: dict[str, Any]) -> None:
        if not self._body.stores:
            return
        encode, messages = msgspec.json.encode, [*self._messages, *messages_of(self._done)]
        kept = Kept(self.generation.terms.tenant, encode(response), encode(self._items), encode(messages))
        self._store.keep(self.name, kept)


_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_STREAMED = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
