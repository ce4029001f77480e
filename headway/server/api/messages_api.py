"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as a translation of chat completions.

The shapes are those of Anthropic's API reference, version 2023-06-01. A body becomes that of a chat completion, so the
same checks, limits, classes and sampling apply; the answer becomes content blocks.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import FailFast

from headway.server.api.choices import ScoredToken
from headway.server.api.fields import MOST, Body, Int, joined, said, string_in
from headway.server.api.parts import Part, PartsAnswer, named_event
from headway.server.api.request_body import check_body
from headway.server.api.schemas import MAX_MESSAGES, ChatBody, ContentField, NamesModel, OfEngine
from headway.server.errors import ApiError, anthropic_error, bad_request
from headway.server.generation import Generation

# What fields of a chat completion are called here, for errors.
NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class InputMessage(Body):
    role: Literal["user", "assistant", "system"] = said("Who speaks.", ...)
    content: str | list[dict[str, Any]] = said("The text, or a list of content blocks.", ...)


class MessagesTool(Body):
    type: Literal["custom"] | None = said("Only tools of the client; no tools of a server.")
    name: str = said("The tool's name.", ...)
    description: str | None = said("What the tool is for.")
    input_schema: dict[str, Any] = said("The JSON schema of the tool's input.", ...)
    cache_control: dict[str, Any] | None = said("Without effect: prefixes are always cached.")
    strict: bool | None = said(
        "Whether a schema that cannot be kept is refused where a call is required; default false."
    )
    eager_input_streaming: bool | None = said("Without effect: inputs are always streamed as they come.")


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = said("Whether the answer calls a tool.", ...)
    name: str | None = said("The tool that is called, with type tool.")
    disable_parallel_tool_use: bool | None = said("Whether there is at most one call; default false.")


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"] = said("Whether the model thinks before it answers.", ...)
    budget_tokens: Int | None = said("Without effect: max_tokens limits thinking and answer together.")
    display: Literal["summarized", "omitted"] | None = said("With omitted, the answer is without its thinking.")


class Metadata(Body):
    user_id: str | None = said("A name of the end user; it has no effect.")


class CountBody(NamesModel):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], FailFast()] = said(
        "The conversation so far, 1 to 4,096 messages.", ..., min_length=1, max_length=MAX_MESSAGES
    )
    system: ContentField = said("What the model is told before the conversation.")
    tools: list[MessagesTool] | None = said("The tools that the model may call.")
    tool_choice: MessagesToolChoice | None = said("Whether the answer calls a tool; default auto.")
    thinking: Thinking | None = said("Whether the model thinks before it answers, where its template can tell it.")
    cache_control: dict[str, Any] | None = said("Without effect: prefixes are always cached.")


class MessagesBody(CountBody, OfEngine):
    """POST /v1/messages."""

    max_tokens: int = said("Tokens of the answer at most.", ..., ge=1, le=MOST)
    stop_sequences: list[str] | None = said("Strings that end the text and are not in it, up to 16.")
    stream: bool | None = said("Whether the answer comes token by token, as server-sent events; default false.")
    temperature: float | None = said("Randomness, from 0 (the likeliest token); default 1 or the checkpoint's.")
    top_p: float | None = said("Only the likeliest tokens that have this probability together are drawn.")
    top_k: Int | None = said("Only so many of the likeliest tokens are drawn.")
    metadata: Metadata | None = said("Of the request; without effect.")
    service_tier: Literal["auto", "standard_only"] | None = said("Without effect; see service_class.")


class MessagesChat(ChatBody):
    """The API has no default for max_tokens, so programs ask for as many as any model may have."""

    reduces_max_tokens: ClassVar[bool] = True


def chat_of(body: CountBody, template: str) -> ChatBody:
    """The chat completion that a body asks for.

    Args:
        template: the source of the chat template.

    Raises:
        ApiError: 400 for a content block that is not understood.
    """
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    last = chat["messages"][-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:  # the beginning of the answer
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        chat["tools"] = [_function(tool) for tool in body.tools]
    if body.tool_choice is not None and (body.tools or body.tool_choice.type != "auto"):
        chat |= _tool_choice(body.tool_choice)
    if body.thinking is not None and "enable_thinking" in template:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if isinstance(body, MessagesBody):
        same = ("stream", "temperature", "top_p", "top_k", "service_class", "priority", "cache_salt", "max_tokens")
        chat |= {name: getattr(body, name) for name in same}
        chat["stop"] = body.stop_sequences
    return check_body(MessagesChat, chat)


def _messages(body: CountBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        path, content = f"messages[{number}].content", message.content
        if isinstance(content, str) or message.role == "system":
            messages.append({"role": message.role, "content": _text(content, path)})
        elif message.role == "user":
            messages += _of_user(content, path)
        else:
            messages.append(_of_assistant(content, path))
    return messages


def _of_user(blocks: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """The messages of a user's blocks: one for each result of a tool, and one for the texts between them."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        at = f"{path}[{number}]"
        if block.get("type") == "tool_result":
            result = block.get("content") or ""
            call = string_in(block, "tool_use_id", at)
            messages.append({"role": "tool", "tool_call_id": call, "content": _text(result, f"{at}.content")})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + _block_text(block, at)
        else:
            messages.append({"role": "user", "content": _block_text(block, at)})
    return messages or [{"role": "user", "content": ""}]


def _of_assistant(blocks: list[dict[str, Any]], path: str) -> dict[str, Any]:
    texts, calls, thoughts = list[str](), list[dict[str, Any]](), list[str]()
    for number, block in enumerate(blocks):
        at, kind = f"{path}[{number}]", block.get("type")
        if kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": string_in(block, "name", at), "arguments": arguments}
            calls.append({"id": string_in(block, "id", at), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(string_in(block, "thinking", at))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _text(content: Any, path: str) -> str:
    return joined(content, path, "content blocks", _block_text)


def _block_text(block: Any, path: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise bad_request(f"{path} is of type {str(kind)[:60]!r}, which is not supported here", f"{path}.type")
    return string_in(block, "text", path)


def _function(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise bad_request("tool_choice.name is missing; a choice of type tool names one", "tool_choice.name")
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    chosen = chosen or {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


class MessagesAnswer(PartsAnswer):
    """Anthropic's `message`, and its events."""

    def __init__(self, generation: Generation, body: MessagesBody, model: str) -> None:
        super().__init__(generation)
        self._model = model
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **ending,
            "stop_details": None,
            "container": None,
            "usage": usage,
        }

    def _usage(self) -> dict[str, Any]:
        """Token counts so far; those of the prompt that were cached are counted apart."""
        choice = self.choice
        return {
            "input_tokens": len(choice.prompt.token_ids) - choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached_tokens,
            "cache_creation": None,
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }

    def _ending(self) -> dict[str, Any]:
        choice, calls = self.choice, any(part.kind == "call" for part in self.parts)
        reason = _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
        if calls and reason == "end_turn":
            reason = "tool_use"
        stopped_by = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        return {"stop_reason": "stop_sequence" if stopped_by else reason, "stop_sequence": stopped_by}

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind == "text":
            return {"type": "text", "text": part.text, "citations": None}
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": part.text if self._shows_thinking else "", "signature": ""}
        call = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part)}
        return {**call, "caller": {"type": "direct"}}

    def begun(self) -> list[bytes]:
        ending = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], ending, {**self._usage(), "output_tokens": 0})
        return [named_event("message_start", {"message": message})]

    def part_begun(self, part: Part) -> list[bytes]:
        block = self._block(part)  # its text is still empty
        if part.kind == "call":
            block["input"] = {}
        return [named_event("content_block_start", {"index": part.index, "content_block": block})]

    def part_grown(self, part: Part, text: str, logprobs: list[ScoredToken]) -> bytes:
        if part.kind == "text":
            delta = {"type": "text_delta", "text": text}
        elif part.kind == "reasoning":
            if not self._shows_thinking:
                return b""
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        return named_event("content_block_delta", {"index": part.index, "delta": delta})

    def part_ended(self, part: Part, complete: bool) -> list[bytes]:
        return [named_event("content_block_stop", {"index": part.index})]

    def ended(self) -> list[bytes]:
        delta = named_event("message_delta", {"delta": self._ending(), "usage": self._usage()})
        return [delta, named_event("message_stop", {})]

    def failed(self, error: ApiError) -> list[bytes]:
        return [named_event("error", anthropic_error(error))]

    def whole_body(self) -> dict[str, Any]:
        return self._message([self._block(part) for part in self.parts], self._ending(), self._usage())


def _input(part: Part) -> Any:
    """The arguments of a call as a value; empty where the answer broke off in them."""
    try:
        value = msgspec.json.decode(part.text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
