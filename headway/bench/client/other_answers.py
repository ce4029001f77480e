"""Streams of OpenAI's Responses API and of Anthropic's Messages API, read as chunks of a chat.

An event with text, reasoning or a part of a call counts for one chunk of one token, as these APIs say tokens only at
the end. Events that only announce or close something count for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headway.bench.client.answer import Choice, Chunk, Delta, StreamedAnswer, TokenCount, TokenDetails, Usage


class _Tokens(msgspec.Struct):
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    input_tokens_details: TokenDetails | None = None
    cache_read_input_tokens: TokenCount | None = None
    cache_creation_input_tokens: TokenCount | None = None


class _Whole(msgspec.Struct):
    """The response, or the message, that an event is about."""

    usage: _Tokens | None = None
    error: Any = None


class _Begun(msgspec.Struct):
    """What begins with an event: a call, if it is of that type."""

    type: str = ""
    name: str | None = None


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    item: _Begun | None = None
    delta: Any = None
    response: _Whole | None = None
    message: Any = None
    error: Any = None
    timings: Any = None


class _MessageDelta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _MessageEvent(msgspec.Struct):
    type: str = ""
    content_block: _Begun | None = None
    delta: _MessageDelta | None = None
    message: _Whole | None = None
    usage: _Tokens | None = None
    error: Any = None


_decode_response = msgspec.json.Decoder(_ResponseEvent).decode
_decode_message = msgspec.json.Decoder(_MessageEvent).decode
_REASONS = {"response.completed": "stop", "response.incomplete": "length"}


def _text(**fields: Any) -> Chunk:
    return Chunk(choices=[Choice(delta=Delta(**fields))])


def _end(reason: str) -> Chunk:
    return Chunk(choices=[Choice(finish_reason=reason)])


class ResponsesAnswer(StreamedAnswer):
    """Receives one stream of /v1/responses."""

    def _chunks_of(self, data: bytes) -> Iterator[Chunk]:
        event = _decode_response(data)
        return self._chunks(event)

    def _chunks(self, event: _ResponseEvent) -> Iterator[Chunk]:
        kind, whole = event.type, event.response
        if kind == "response.output_item.added" and event.item is not None and event.item.type == "function_call":
            self._calls.begin(event.item.name or "")
        elif kind.endswith(".delta") and isinstance(event.delta, str):
            field = "reasoning" if "reasoning" in kind else "tool_calls" if "call" in kind else "content"
            if field == "tool_calls":
                self._calls.go_on(event.delta)
            yield _text(**{field: event.delta})
        elif kind in _REASONS:
            if whole is not None and (tokens := whole.usage) is not None:
                yield Chunk(usage=Usage(tokens.input_tokens, tokens.output_tokens, tokens.input_tokens_details))
            yield _end(_REASONS[kind])
        elif kind in ("response.failed", "error"):
            said = whole.error if whole is not None else event.error
            yield Chunk(error=said or event.message or kind)


class MessagesAnswer(StreamedAnswer):
    """Receives one stream of /v1/messages."""

    def _chunks_of(self, data: bytes) -> Iterator[Chunk]:
        event = _decode_message(data)
        return self._chunks(event)

    def _chunks(self, event: _MessageEvent) -> Iterator[Chunk]:
        delta = event.delta
        usage = event.message.usage if event.message is not None else event.usage
        if usage is not None:
            yield Chunk(usage=_usage_of(usage))
        if event.type == "error":
            yield Chunk(error=event.error or "error")
        elif event.type == "content_block_start" and (begun := event.content_block) is not None:
            if begun.type == "tool_use":
                self._calls.begin(begun.name or "")
        elif event.type == "content_block_delta" and delta is not None:
            self._calls.go_on(delta.partial_json or "")
            yield _text(content=delta.text, reasoning=delta.thinking, tool_calls=delta.partial_json)
        elif event.type == "message_delta" and delta is not None and delta.stop_reason is not None:
            yield _end(delta.stop_reason)


def _usage_of(tokens: _Tokens) -> Usage:
    """Anthropic counts the tokens that were in the cache, or went there, beside the others of the prompt."""
    cached, prompt = tokens.cache_read_input_tokens, tokens.input_tokens
    if prompt is not None:
        prompt += (cached or 0) + (tokens.cache_creation_input_tokens or 0)
    details = None if cached is None else TokenDetails(cached)
    return Usage(prompt, tokens.output_tokens, details)
