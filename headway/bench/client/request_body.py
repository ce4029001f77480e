"""Make the body of a planned request, as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.load.endpoint import Endpoint
from headway.load.request import Message, PlannedRequest, Prompt, text_of

_encoder = msgspec.json.Encoder()


def as_text(prompt: Prompt) -> str | tuple[int, ...]:
    """The field `prompt` of /v1/completions."""
    if prompt.messages is not None:
        return "\n".join(map(text_of, prompt.messages))
    return prompt.token_ids or prompt.text or ""


def as_messages(prompt: Prompt) -> tuple[Message, ...]:
    """`messages` of /v1/chat/completions; of a prompt that is text or messages."""
    return prompt.messages if prompt.messages is not None else ({"role": "user", "content": prompt.text or ""},)


def as_texts(prompt: Prompt) -> list[str | tuple[int, ...]]:
    """`input` of /v1/embeddings as a list; query and documents of a ranking or of scores."""
    return list(prompt.several) if prompt.several is not None else [as_text(prompt)]


def num_answers(endpoint: Endpoint, prompt: Prompt) -> int:
    """How many vectors or scores a request gets."""
    texts = len(as_texts(prompt))
    return texts if endpoint.api == "embeddings" else max(texts - 1, 1)


def _with_system(messages: tuple[Message, ...]) -> dict[str, Any]:
    """`messages` of /v1/messages, and `system` with those that are the system's."""
    system = [text_of(each) for each in messages if each["role"] == "system"]
    fields: dict[str, Any] = {"messages": [each for each in messages if each["role"] != "system"]}
    return fields | ({"system": "\n".join(system)} if system else {})


class BodyBuilder:
    """Bodies of one endpoint's requests. Later fields win: the endpoint's, its extra_body, the request's own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._api = endpoint.api
        self._length_field = endpoint.length_field
        fields: dict[str, Any] = {"stream": True} if endpoint.generates else {}
        if endpoint.model is not None:
            fields["model"] = endpoint.model
        options = {"include_usage": endpoint.include_usage, "continuous_usage_stats": endpoint.continuous_usage}
        if endpoint.api in ("completions", "chat") and any(options.values()):
            fields["stream_options"] = {name: True for name, wanted in options.items() if wanted}
        if endpoint.ignore_eos:
            fields["ignore_eos"] = True
        if endpoint.cache_salt:
            fields["cache_salt"] = endpoint.cache_salt
        if endpoint.include_timings:
            fields["include_timings"] = True
        self._fields = {**fields, **endpoint.extra_body}

    def fields(self, prompt: Prompt, max_tokens: int, extra_body: dict[str, Any]) -> dict[str, Any]:
        """The body's fields."""
        if self._api == "chat":
            asked: dict[str, Any] = {"messages": as_messages(prompt)}
        elif self._api == "responses":
            asked = {"input": as_messages(prompt)}
        elif self._api == "messages":
            asked = _with_system(as_messages(prompt))
        elif self._api == "completions":
            asked = {"prompt": as_text(prompt)}
        else:
            return {**self._text_fields(as_texts(prompt)), **self._fields, **extra_body}
        return {**asked, self._length_field: max_tokens, **self._fields, **extra_body}

    def _text_fields(self, texts: list[str | tuple[int, ...]]) -> dict[str, Any]:
        if self._api == "embeddings":
            return {"input": texts if len(texts) > 1 else texts[0]}
        query, documents = texts[0], texts[1:] or texts
        if self._api == "score":
            return {"text_1": query, "text_2": documents}
        return {"query": query, "documents": documents}

    def body(self, planned: PlannedRequest, prompt: Prompt | None = None) -> bytes:
        """The body in JSON. `prompt` takes the place of the planned one."""
        return _encoder.encode(
            self.fields(planned.prompt if prompt is None else prompt, planned.output_tokens, planned.extra_body)
        )
