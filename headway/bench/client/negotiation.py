"""Streams of a token or two, tried until the server accepts one: which fields it knows, and which it honours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from headway.bench.client.answer import StreamedAnswer
from headway.bench.client.asker import Asker, Reply
from headway.bench.client.endpoint import Endpoint
from headway.bench.client.failures import RequestFailed
from headway.bench.client.request_body import BodyBuilder
from headway.bench.errors import BenchError
from headway.bench.record import Failure, FailureKind, RequestRecord
from headway.bench.request import Prompt

GREETING = Prompt(text="Hello")
_REFUSED = (400, 422)
# What a 400 may name, and the endpoint's options that put it into the body.
_OPTIONS_OF = {
    "continuous_usage_stats": ("continuous_usage",),
    "ignore_eos": ("ignore_eos",),
    "cache_salt": ("cache_salt",),
    "include_timings": ("include_timings",),
    "stream_options": ("continuous_usage", "include_usage"),
}
_BEYOND_OPENAI = ("continuous_usage", "ignore_eos", "cache_salt", "include_timings")


async def negotiate_stream(asker: Asker, wanted: Endpoint) -> tuple[Endpoint, RequestRecord]:
    """Ask for a stream of two tokens, leaving out what the server refuses.

    Returns:
        The endpoint as the server accepted it, and the record of the stream; its times mean nothing.

    Raises:
        BenchError: it refuses what every server should know, or its stream cannot be read.
    """
    candidate = wanted
    while True:
        reply = await _ask(asker, candidate, GREETING, max_tokens=2)
        if reply.status not in _REFUSED or reply.failure is None:
            break
        weaker = _without(candidate, reply.failure.message)
        if weaker is None:
            raise BenchError(f"the server refuses a request for two tokens ({reply.failure.message})")
        candidate = weaker
    record, failure = read_stream(reply, candidate)
    if failure is not None and failure.kind is not FailureKind.NO_TOKENS:
        raise BenchError(_advice(failure, candidate))
    return candidate, record


async def count_by_stream(asker: Asker, endpoint: Endpoint, prompt: Prompt) -> int | None:
    """Prompt tokens by the usage of a stream of one token; None when the server refuses it, or gives no usage."""
    reply = await _ask(asker, endpoint, prompt, max_tokens=1)
    record, _ = read_stream(reply, endpoint)
    return record.prompt_tokens


def read_stream(reply: Reply, endpoint: Endpoint) -> tuple[RequestRecord, Failure | None]:
    """The record of a stream that has come as one piece, and why it is no answer."""
    record = RequestRecord(0)
    answer = StreamedAnswer(record, keep_timings=endpoint.include_timings)
    answer.headers(reply.status, reply.headers_by_name, 1)
    try:
        answer.body(reply.bytes, 1)
        failure = answer.failure(1)
    except RequestFailed as error:
        failure = error.failure
    answer.settle()
    return record, failure


async def _ask(asker: Asker, endpoint: Endpoint, prompt: Prompt, max_tokens: int) -> Reply:
    fields: dict[str, Any] = BodyBuilder(endpoint).fields(prompt, max_tokens, {})
    fields.pop("min_tokens", None)  # more than max_tokens would be refused
    fields[endpoint.max_tokens_field] = max_tokens
    return await asker.ask("POST", endpoint.route, fields)


def _without(endpoint: Endpoint, said: str) -> Endpoint | None:
    """The endpoint without what a refusal names, or without all that may be refused; None when nothing is left."""
    if "max_completion_tokens" in said and endpoint.max_tokens_field == "max_tokens":
        return dataclasses.replace(endpoint, max_tokens_field="max_completion_tokens")
    for name, options in _OPTIONS_OF.items():
        if name in said and any(getattr(endpoint, option) for option in options):
            return _switched_off(endpoint, options)
    if any(getattr(endpoint, option) for option in _BEYOND_OPENAI):
        return _switched_off(endpoint, _BEYOND_OPENAI)
    return _switched_off(endpoint, ("include_usage",)) if endpoint.include_usage else None


def _switched_off(endpoint: Endpoint, options: Iterable[str]) -> Endpoint:
    changes: dict[str, Any] = {option: type(getattr(endpoint, option))() for option in options}
    return dataclasses.replace(endpoint, **changes)


def _advice(failure: Failure, endpoint: Endpoint) -> str:
    if failure.kind is FailureKind.NOT_FOUND:
        other = "completions" if endpoint.api == "chat" else "chat"
        return f"the server does not answer on {endpoint.route} ({failure.message}); has it only the {other} API?"
    return f"the server fails on a request for two tokens ({failure.kind}: {failure.message}); see its log"
