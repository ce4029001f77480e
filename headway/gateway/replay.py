"""Goes on with a stream that broke, at another backend, from the tokens that had come: nobody sees where it broke.

Headway draws a token from the logits, a seed and the token's position alone. So a backend that is given the prompt and
the tokens so far, as a prompt of ids, and the same seed, goes on as the first one would have. What depends on more than
that, such as penalties, stop strings, grammars and calls of tools, is not replayed.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from headway.gateway.asked import Api, Body
from headway.gateway.member import Member
from headway.gateway.question import post
from headway.gateway.upstream import UpstreamFailed
from headway.server.edge.streaming import event

# Fields that the draw of a token needs; they are passed on as they are.
_DRAWN_BY = (
    *("model", "temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "ignore_eos"),
    *("stop_token_ids", "skip_special_tokens", "service_class", "service_tier", "cache_salt", "user", "priority"),
)
# Further fields that a request may have whose stream can be gone on with: what they mean is over when it has begun.
_MAY_HAVE = frozenset(
    (
        *_DRAWN_BY,
        *("stream", "stream_options", "n", "seed", "max_tokens", "max_completion_tokens", "prompt", "messages"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        *("reasoning_effort", "metadata", "prompt_cache_key", "store", "safety_identifier", "include_timings"),
    )
)
_MOST_SEED = 2**31
# Tokens at the end whose text may not have come, as they are a part of a character, and a short prompt before them.
_HELD_TOKENS, _CONTEXT_TOKENS = 4, 8


class CannotReplay(Exception):
    """The stream cannot be gone on with; the message says why."""


class Replay:
    """What a stream of OpenAI's API has had so far.

    Attributes:
        request: the body that the first backend is sent: it also asks for token ids, and names a seed.
    """

    def __init__(self, fields: dict[str, msgspec.Raw], is_chat: bool) -> None:
        self._is_chat = is_chat
        seed = fields.get("seed")
        is_given = seed is not None and bytes(seed) != b"null"
        self._seed = msgspec.Raw(seed if is_given and seed is not None else b"%d" % random.randrange(_MOST_SEED))
        self.request = msgspec.json.encode(fields | {"seed": self._seed, "return_token_ids": True})
        self._drawn_by = {name: fields[name] for name in _DRAWN_BY if name in fields}
        options = fields.get("stream_options")
        self._options = {} if options is None else msgspec.json.decode(options, type=dict[str, msgspec.Raw])
        self._asks_timings = {name: fields[name] for name in ("include_timings",) if name in fields}
        self._limit = _number(fields, "max_completion_tokens") or _number(fields, "max_tokens")
        self._head: dict[str, Any] = {}  # what all chunks of the stream begin with
        self._prompt: list[int] | None = None
        self._tokens: list[int] = []
        self._text = ""
        self._replayed = 0  # tokens of the prompt that the present backend was given beyond the client's
        self._has_more = False  # something came that is no text
        self.has_finished = False

    @classmethod
    def of(cls, api: Api, path: str, body: Body, raw: bytes) -> Replay | None:
        """The replay of a request; None where its stream cannot be gone on with."""
        if api.streams != "openai" or not body.stream or body.choices > 1:
            return None
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        given = {name: value for name, value in fields.items() if bytes(value) != b"null"}
        is_chat = path == "/v1/chat/completions"
        if not given.keys() <= _MAY_HAVE or (not is_chat and not _is_one_prompt(given.get("prompt"))):
            return None
        if not isinstance(msgspec.json.decode(given.get("stream_options", b"{}")), dict):
            return None
        return cls(given, is_chat)

    # --- what comes -----------------------------------------------------------------------------------------

    def passed(self, raw: bytes) -> bytes:
        """What the client gets of an event of the first backend, without what it did not ask for."""
        chunk = _chunk_of(raw)
        if chunk is None or "choices" not in chunk:
            return raw
        ids = chunk.pop("prompt_token_ids", None)
        self._head = self._head or {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
        is_empty = bool(chunk["choices"])
        for choice in chunk["choices"]:
            ids = choice.pop("prompt_token_ids", ids)
            text = choice.get("delta", {}).get("content") if self._is_chat else choice.get("text")
            is_empty = not self._note(choice, text) and not choice.get("delta")
        self._prompt = ids if self._prompt is None else self._prompt
        return b"" if is_empty else event(msgspec.json.encode(chunk))

    @property
    def replayed(self) -> int:
        """How many tokens the present backend was given that an earlier one had made."""
        return self._replayed

    def joined(self, raw: bytes, timings: bytes = b"") -> bytes:
        """What the client gets of an event of a backend that has gone on: a chunk of the first one's stream.

        Args:
            timings: of the whole stream, where the event has some.
        """
        chunk = _chunk_of(raw)
        if chunk is None:
            return raw
        found: list[dict[str, Any]] = []
        for choice in chunk.get("choices") or []:
            choice.pop("prompt_token_ids", None)
            text = choice.pop("text", "")
            if not self._note(choice, text):
                return b""
            content = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
            found.append({"index": 0, **content, **choice})
        told: dict[str, Any] = {**self._head, "choices": found}
        if "usage" in chunk:
            told["usage"] = chunk["usage"] and self._usage(chunk["usage"])
        if timings:
            told["timings"] = msgspec.Raw(timings)
        return event(msgspec.json.encode(told))

    def _note(self, choice: dict[str, Any], text: str | None) -> bool:
        """Note what a choice has got. Returns whether that is anything but the id of a token."""
        self._tokens += choice.pop("token_ids", None) or []
        self._text += text or ""
        delta = choice.get("delta") or {}
        self._has_more = self._has_more or bool(delta.keys() - {"role", "content"})
        self.has_finished = self.has_finished or choice.get("finish_reason") is not None
        return bool(text) or choice.get("finish_reason") is not None

    def _usage(self, told: dict[str, Any]) -> dict[str, Any]:
        replayed = self._replayed
        return told | {
            "prompt_tokens": told["prompt_tokens"] - replayed,
            "completion_tokens": told["completion_tokens"] + replayed,
        }

    # --- going on -------------------------------------------------------------------------------------------

    async def continued(self, member: Member) -> bytes:
        """The body with which a backend goes on. Raises CannotReplay."""
        prompt, tokens = self._prompt, self._tokens
        if prompt is None or self._has_more or self.has_finished:
            raise CannotReplay("it has had no token ids, or more than text" if not self.has_finished else "it is over")
        before = prompt[-_CONTEXT_TOKENS:]
        for length in range(len(tokens), max(-1, len(tokens) - _HELD_TOKENS - 1), -1):
            if (await _text_of(member, before + tokens[:length])) == (await _text_of(member, before)) + self._text:
                break
        else:
            raise CannotReplay("its tokens do not make its text")
        self._tokens = tokens = tokens[:length]
        self._replayed = length
        left = self._left(member, len(prompt)) - length
        if left < 1:
            raise CannotReplay("it has all the tokens that it may have")
        own = {"prompt": prompt + tokens, "max_tokens": left, "seed": self._seed, "add_special_tokens": False}
        usage = self._options | {"include_usage": True}
        options = {"stream": True, "stream_options": usage, "return_token_ids": True}
        return msgspec.json.encode(self._drawn_by | own | options | self._asks_timings)

    def _left(self, member: Member, prompt_length: int) -> int:
        if self._limit is not None:
            return self._limit
        if not self._is_chat:
            raise CannotReplay("it has no max_tokens")
        names = [msgspec.json.decode(self._drawn_by["model"])] if "model" in self._drawn_by else member.models
        longest = _context_of(member.cards[names[0]]) if names and names[0] in member.cards else 0
        if not longest:
            raise CannotReplay("it has no max_tokens, and nobody says how long its context is")
        return longest - prompt_length


def _number(fields: dict[str, msgspec.Raw], name: str) -> int | None:
    return msgspec.json.decode(fields[name], type=int) if name in fields else None


def _is_one_prompt(prompt: msgspec.Raw | None) -> bool:
    if prompt is None:
        return False
    try:
        msgspec.json.decode(prompt, type=str | list[int])
    except msgspec.ValidationError:
        return False
    return True


def _chunk_of(raw: bytes) -> dict[str, Any] | None:
    content = raw.strip().removeprefix(b"data:").strip()
    if not content.startswith(b"{"):
        return None
    found: dict[str, Any] = msgspec.json.decode(content)
    return found


def _context_of(raw: msgspec.Raw) -> int:
    """The longest context by a model's card; 0 where that does not say it."""
    length = msgspec.json.decode(raw).get("max_model_len")
    return length if isinstance(length, int) else 0


async def _text_of(member: Member, tokens: list[int]) -> str:
    try:
        status, answer = await post(member, "/detokenize", msgspec.json.encode({"tokens": tokens}))
        if status == 200:
            return str(msgspec.json.decode(answer)["prompt"])
    except (UpstreamFailed, msgspec.MsgspecError, KeyError, TypeError):
        pass
    raise CannotReplay(f"backend {member.entry.name} does not say what its tokens mean")
