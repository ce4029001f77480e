"""Streams of /v1/responses and /v1/messages, and when an answer begins after its reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.bench.client.answer import StreamedAnswer
from headway.bench.client.failures import RequestFailed
from headway.bench.client.other_answers import MessagesAnswer, ResponsesAnswer
from headway.bench.client.request_body import BodyBuilder
from headway.load.endpoint import Endpoint
from headway.load.measures.summary import summarise
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import Prompt
from tests.bench.records import request, run

USAGE = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}}
RESPONSES: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"id": "r", "error": None}},
    {"type": "response.reasoning_text.delta", "delta": "hm"},
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.output_text.delta", "delta": "b"},
    {"type": "response.output_text.done", "text": "ab"},
    {"type": "response.function_call_arguments.delta", "delta": "{"},
    {"type": "response.completed", "response": {"usage": USAGE}},
]
MESSAGES: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 3, "output_tokens": 1}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
    {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
    {"type": "ping"},
    {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]


def read(kind: type[StreamedAnswer], events: list[dict[str, Any]]) -> tuple[RequestRecord, Failure | None]:
    """Event i comes at time i + 1."""
    record = RequestRecord(0)
    answer = kind(record, keep_text=True)
    answer.headers(200, {b"content-type": b"text/event-stream"}, 1)
    try:
        for number, event in enumerate(events, 1):
            answer.body(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode(), number)
        failure = answer.failure(99)
    except RequestFailed as error:
        failure = error.failure
    answer.settle()
    return record, failure


def test_a_response() -> None:
    record, failure = read(ResponsesAnswer, RESPONSES)
    assert failure is None and list(record.chunk_ns) == [2, 3, 4, 6] and record.answer_ns == 3
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (9, 4, 2)
    assert (record.finish_reason, record.text) == ("stop", "ab")
    cut = [*RESPONSES[:4], {"type": "response.incomplete", "response": {"usage": USAGE}}]
    assert read(ResponsesAnswer, cut)[0].finish_reason == "length"


def test_a_message() -> None:
    record, failure = read(MessagesAnswer, MESSAGES)
    assert failure is None and list(record.chunk_ns) == [3, 5, 7] and record.answer_ns == 5
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (8, 3, 3)
    assert (record.finish_reason, record.text) == ("end_turn", "a")


@pytest.mark.parametrize(
    ("kind", "events", "said"),
    [
        (ResponsesAnswer, [{"type": "response.failed", "response": {"error": {"message": "it broke"}}}], "it broke"),
        (ResponsesAnswer, [{"type": "error", "message": "it broke"}], "it broke"),
        (MessagesAnswer, [{"type": "error", "error": {"type": "overloaded", "message": "busy"}}], "busy"),
        (MessagesAnswer, MESSAGES[:5], "the stream ended without a finish_reason"),
        (ResponsesAnswer, RESPONSES[:5], "the stream ended without a finish_reason"),
    ],
)
def test_failures(kind: type[StreamedAnswer], events: list[dict[str, Any]], said: str) -> None:
    _, failure = read(kind, events)
    assert failure is not None and said in failure.message
    assert failure.kind in (FailureKind.STREAM_ERROR, FailureKind.CUT)


def test_bodies_and_headers() -> None:
    prompt = Prompt(messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    asked = Endpoint("http://h", api="responses", include_usage=True)
    body = BodyBuilder(asked).fields(prompt, 7, {})
    assert body == {"input": prompt.messages, "max_output_tokens": 7, "stream": True}
    asked = Endpoint("http://h", api="messages", api_key="k")
    body = BodyBuilder(asked).fields(prompt, 7, {})
    user = {"role": "user", "content": "u"}
    assert body == {"messages": [user], "system": "s", "max_tokens": 7, "stream": True}
    assert asked.all_headers().items() >= {"x-api-key": "k", "anthropic-version": "2023-06-01"}.items()
    assert asked.route == "/v1/messages" and asked.is_chat and asked.generates


def test_the_answer_after_reasoning_has_a_time_of_its_own() -> None:
    records = [request(i, [10, 20, 30], answer_ns=request(0, [20]).chunk_ns[0]) for i in range(8)]
    found = summarise(run([*records, request(9, [10, 20])])).first_answer_ms
    assert found is not None and (found.count, found.mean) == (8, pytest.approx(20))
    assert summarise(run([request(0, [10, 20])])).first_answer_ms is None
