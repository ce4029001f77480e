"""Answers to chats that are more than text: reasoning, content and calls of tools."""

from __future__ import annotations

import math
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headway.engine.messages import SequenceOutput
from headway.outputs.choices import CONTEXT_TOKENS, Choice, Piece, TokenizedPrompt, TokenText
from headway.server.api.answers import encode
from headway.server.api.chat import ChatAnswer
from headway.server.api.choices import ServedChoice
from headway.server.api.schemas import ChatBody, CompletionBody
from headway.server.edge.streaming import EventWriter
from headway.server.generation import Generation
from headway.server.service import Service
from headway.text.calls.events import Arguments, CallBegin, CallEnd, Event, Text
from headway.text.calls.parser import AnswerParser
from headway.text.tokenizer import Tokenizer

_LETTERS = string.ascii_letters + string.digits


class _Listening:
    """A detokenizer whose text is also parsed, token by token."""

    def __init__(self, text: TokenText, parser: AnswerParser) -> None:
        self._text, self._parser = text, parser
        self.reasoning_tokens = 0

    @property
    def num_chars(self) -> int:
        return self._text.num_chars

    @property
    def stopped_by(self) -> str | None:
        return self._text.stopped_by

    def push(self, token_ids: list[int]) -> str:
        was_reasoning = self._parser.is_reasoning
        new = self._text.push(token_ids)
        self._parser.push(new, len(token_ids))
        if was_reasoning or self._parser.is_reasoning:
            self.reasoning_tokens += len(token_ids)
        return new

    def finish(self) -> str:
        new = self._text.finish()
        self._parser.push(new)
        return new


@dataclass(slots=True, eq=False, kw_only=True)
class ParsedChoice(ServedChoice):
    """A choice that is parsed as it grows; its pieces have `events`."""

    make_parser: Callable[[], AnswerParser]  # makes its parser
    make_id: Callable[[], str]  # makes ids for calls to which the model gives none
    on_calls: Callable[[int, int, int], None]  # told of the parser's outcome at the end
    events: list[Event] = field(default_factory=list)  # all, where the choice keeps what came
    parser: AnswerParser = field(init=False)
    _listening: _Listening = field(init=False)

    def __post_init__(self) -> None:
        Choice.__post_init__(self)
        self.parser = self.make_parser()
        self._detokenizer = self._listening = _Listening(self._detokenizer, self.parser)

    @property
    def reasoning_tokens(self) -> int:
        return self._listening.reasoning_tokens

    def take(self, output: SequenceOutput) -> Piece:
        piece = ServedChoice.take(self, output)
        if piece.finish_reason is not None:
            self.parser.finish()
            self.on_calls(*self.parser.outcome)
        piece.events = self.parser.take()
        if self.keep:
            self.events += piece.events
        return piece


def _short_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def begins_in_reasoning(service: Service, body: CompletionBody | ChatBody, prompt: TokenizedPrompt) -> bool:
    """Whether the prompt has begun the reasoning, so that answers begin within it."""
    reasoning = service.family.reasoning
    if reasoning is None or not isinstance(body, ChatBody):
        return False
    if body.continue_final_message:
        return reasoning.is_open(str(body.messages[-1].content))
    return reasoning.is_begun(service.tokenizer.decode(prompt.token_ids[-CONTEXT_TOKENS:], False))


def parsed_choice(
    service: Service, body: CompletionBody | ChatBody, is_reasoning: bool
) -> Callable[..., ServedChoice] | None:
    """What makes the choices of a checked request; None where its answers are nothing but text."""
    if not isinstance(body, ChatBody):
        return None
    family = service.family
    is_offered = bool(body.tools) and body.tool_choice != "none"
    if family.is_plain and not is_offered:
        return None
    tools = {tool.function.name: tool.function.parameters for tool in body.tools or ()} if is_offered else None
    make_parser = partial(
        AnswerParser,
        family,
        tools,
        is_reasoning=is_reasoning,
        most_calls=1 if body.parallel_tool_calls is False else math.inf,
    )
    make_id = _short_id if family.calls is not None and family.calls.short_ids else _long_id
    tags = family.tags if is_offered else family.tags_without_calls
    shown = frozenset(service.tag_ids[tag] for tag in tags if tag in service.tag_ids)
    return partial(
        ParsedChoice, make_parser=make_parser, make_id=make_id, on_calls=service.metrics.on_calls, shown=shown
    )


class ParsedChatAnswer(ChatAnswer):
    """A chat completion of choices that are parsed."""

    def __init__(self, generation: Generation, body: ChatBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(generation, body, model, tokenizer)
        self._with_reasoning = body.include_reasoning
        self._delta: dict[str, Any] = {}  # of the chunk that is written now

    def entry(self, choice: ServedChoice, *args: Any) -> dict[str, Any]:
        entry = super().entry(choice, *args)
        if entry["finish_reason"] == "stop" and isinstance(choice, ParsedChoice) and choice.parser.num_calls:
            entry["finish_reason"] = "tool_calls"
        return entry

    def usage(self) -> dict[str, Any]:
        choices = (choice for choice in self.generation.choices if isinstance(choice, ParsedChoice))
        details = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)}
        usage = self.generation.usage()
        return usage | {"completion_tokens_details": usage.get("completion_tokens_details", {}) | details}

    def _reasoned(self, text: str) -> dict[str, str]:
        """The fields for reasoning: the name of OpenAI's clients and vLLM, and DeepSeek's."""
        return {"reasoning": text, "reasoning_content": text}

    # --- in one piece -------------------------------------------------------------------------------

    def entire(self, choice: ServedChoice) -> dict[str, Any]:
        assert isinstance(choice, ParsedChoice)
        texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        for event in choice.events:
            match event:
                case Text():
                    texts[event.kind].append(event.text)
                case CallBegin():
                    function = {"name": event.name}
                    calls.append({"id": event.id or choice.make_id(), "type": "function", "function": function})
                    arguments.append([])
                case Arguments():
                    arguments[event.index].append(event.text)
        for call, parts in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(parts)
        content = "".join(texts["content"])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if texts["reasoning"] and self._with_reasoning:
            message |= self._reasoned("".join(texts["reasoning"]))
        logprobs = self._logprobs(choice.logprobs) if self._with_logprobs else None
        return self.entry(choice, {"message": message}, logprobs, choice)

    # --- in chunks ----------------------------------------------------------------------------------

    def _grow(self, writer: EventWriter, choice: ServedChoice, piece: Piece) -> None:
        """Push a chunk for each event of a piece. The last has what else there is of the piece."""
        assert isinstance(choice, ParsedChoice)
        deltas = [delta for event in piece.events if (delta := self._delta_of(event, choice))]
        if len(deltas) > 1 and choice.index not in self._opened:
            self._open(writer, choice)
        for delta in deltas[:-1]:
            self._push(writer, choice, False, encode(self._chunk(self.entry(choice, {"delta": delta}))))
        self._delta = deltas[-1] if deltas else {}
        super()._grow(writer, choice, piece)

    def _delta_of(self, event: Event, choice: ParsedChoice) -> dict[str, Any]:
        match event:
            case Text("content"):
                return {"content": event.text}
            case Text():
                return self._reasoned(event.text) if self._with_reasoning else {}
            case CallBegin():
                call = {"id": event.id or choice.make_id(), "type": "function"}
                function = {"name": event.name, "arguments": ""}
                return {"tool_calls": [{"index": event.index, **call, "function": function}]}
            case Arguments():
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
            case CallEnd():
                return {}

    def _delta_content(self, piece: Piece) -> dict[str, Any]:
        return self._delta

    def _is_worth_sending(self, piece: Piece) -> bool:
        return bool(self._delta or piece.finish_reason or piece.logprobs or (self.with_token_ids and piece.token_ids))

    def _around_text(self, choice: ServedChoice) -> None:
        return None
