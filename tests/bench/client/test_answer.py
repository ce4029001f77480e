"""Which chunks count as tokens, and what the record keeps of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.bench.client.answer import StreamedAnswer
from headway.bench.client.failures import RequestFailed
from headway.load.record import Failure, FailureKind, RequestRecord

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def text(content: str, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}], **fields}


def delta(finish_reason: str | None = None, usage: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    chunk = {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}
    return chunk if usage is None else {**chunk, "usage": usage}


def so_far(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": tokens}


def read(
    *chunks: dict[str, Any], done: bool = True, content_type: str = "text/event-stream", **options: Any
) -> tuple[RequestRecord, Failure | None]:
    """Chunk i comes at time i + 1."""
    record = RequestRecord(0)
    answer = StreamedAnswer(record, **options)
    answer.headers(200, {b"content-type": content_type.encode()}, 1)
    try:
        for number, chunk in enumerate(chunks):
            answer.body(b"data: " + json.dumps(chunk).encode() + b"\n\n", number + 1)
        if done:
            answer.body(b"data: [DONE]\n\n", len(chunks) + 1)
        failure = answer.failure(99)
    except RequestFailed as error:
        failure = error.failure
    answer.settle()
    return record, failure


def test_chunks_with_text_count_and_the_usage_chunk_does_not() -> None:
    record, failure = read(text("a"), text("b"), text("c", "length"), {"choices": [], "usage": USAGE})
    assert failure is None
    assert list(record.chunk_ns) == [1, 2, 3] and list(record.chunk_tokens) == [1, 1, 1]
    assert not record.tokens_per_chunk_known
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, 4)
    assert record.finish_reason == "length" and record.end_ns == 5


def test_a_completion_chunk_without_text_is_a_token_unless_it_finishes() -> None:
    record, _ = read(text("a"), text(""), text("", "stop"))
    assert list(record.chunk_ns) == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"refusal": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"token_ids": [5]},
        {"role": "assistant", "content": "x"},
    ],
)
def test_a_delta_that_brings_anything_counts(fields: dict[str, Any]) -> None:
    record, failure = read(delta(role="assistant", content=""), delta(**fields), delta("stop"))
    assert failure is None and list(record.chunk_ns) == [2]


@pytest.mark.parametrize("fields", [{"role": "assistant"}, {"role": "assistant", "content": None}, {"content": ""}, {}])
def test_a_delta_that_brings_nothing_does_not(fields: dict[str, Any]) -> None:
    record, failure = read(delta(**fields), delta(content="x"), delta("stop"))
    assert failure is None and list(record.chunk_ns) == [2]


def test_with_continuous_usage_the_growth_counts_and_not_the_text() -> None:
    record, failure = read(
        delta(role="assistant", content="", usage=so_far(0)),
        delta(content="abc", usage=so_far(3)),
        delta(usage=so_far(4)),  # a token without text
        delta(content="rest", usage=so_far(4)),  # text without a token
        delta("length", content="d", usage=so_far(6)),
        {"choices": [], "usage": so_far(6)},
    )
    assert failure is None
    assert list(record.chunk_ns) == [2, 3, 5] and list(record.chunk_tokens) == [3, 1, 2]
    assert record.tokens_per_chunk_known and record.output_tokens == 6 == sum(record.chunk_tokens)


def test_usage_beside_the_finish_reason_only_is_not_taken_for_a_growth() -> None:
    record, failure = read(delta(role="assistant"), delta(content="a"), delta(content="b"), delta("stop", so_far(50)))
    assert failure is None
    assert list(record.chunk_tokens) == [1, 1] and record.output_tokens == 50 and not record.tokens_per_chunk_known


def test_an_opening_chunk_without_usage_does_not_hide_that_the_others_have_it() -> None:
    record, _ = read(delta(role="assistant"), delta(content="ab", usage=so_far(2)), delta("stop", so_far(3)))
    assert list(record.chunk_tokens) == [2, 1] and record.tokens_per_chunk_known


def test_what_had_come_counts_by_the_last_usage_when_the_stream_is_cut() -> None:
    record, failure = read(delta(content="a", usage=so_far(2)), delta(content="b", usage=so_far(5)), done=False)
    assert failure is not None and failure.kind is FailureKind.CUT
    assert record.tokens == 5 and record.tokens_per_chunk_known


def test_an_answer_of_tokens_without_text_has_the_time_of_its_end() -> None:
    record, failure = read(delta(role="assistant"), delta("stop"), {"choices": [], "usage": so_far(1)})
    assert failure is None and list(record.chunk_ns) == [2] and record.ok


def test_no_token_at_all_is_a_failure() -> None:
    record, failure = read(delta(role="assistant"), delta("stop"), {"choices": [], "usage": so_far(0)})
    assert failure is not None and failure.kind is FailureKind.NO_TOKENS and not record.ok


def test_a_finish_reason_is_enough_of_an_end() -> None:
    assert read(text("a", "stop"), done=False)[1] is None


def test_text_is_kept_where_asked() -> None:
    chunks = [
        delta(role="assistant", content=""),
        delta(reasoning="hm"),
        delta(content="a"),
        delta("stop", content="b"),
    ]
    assert read(*chunks, keep_text=True)[0].text == "ab"
    assert read(*chunks)[0].text is None
    assert read(text("a"), text("b", "stop"), keep_text=True)[0].text == "ab"


def test_timings_are_kept_where_asked() -> None:
    timings = {"e2e_ns": 5, "phases_ns": {"queue": 5}}
    assert read(text("a", "stop", timings=timings), keep_timings=True)[0].timings == timings
    assert read(text("a", "stop", timings=timings))[0].timings is None


@pytest.mark.parametrize(
    "chunk", [{"error": {"message": "it broke"}}, {"error": "it broke"}, {"object": "error", "message": "it broke"}]
)
def test_an_error_in_the_stream_ends_it(chunk: dict[str, Any]) -> None:
    record, failure = read(text("a"), chunk)
    assert failure == Failure(FailureKind.STREAM_ERROR, "it broke")
    assert list(record.chunk_ns) == [1]


@pytest.mark.parametrize(
    "event", [b'event: error\ndata: {"message": "it broke"}\n\n', b"event: error\ndata: it broke\n\n"]
)
def test_an_event_named_error_ends_it(event: bytes) -> None:
    answer = StreamedAnswer(RequestRecord(0))
    answer.headers(200, {}, 1)
    with pytest.raises(RequestFailed, match="it broke") as caught:
        answer.body(event, 1)
    assert caught.value.failure.kind is FailureKind.STREAM_ERROR


@pytest.mark.parametrize(
    ("content_type", "body", "kind", "message"),
    [
        ("application/json", b'{"error": {"message": "no"}}', FailureKind.STREAM_ERROR, "no"),
        ("application/json", b'{"choices": []}', FailureKind.MALFORMED, "application/json instead of a stream"),
        ("text/html; charset=utf-8", b"<html>", FailureKind.MALFORMED, "'<html>'"),
    ],
)
def test_a_response_that_is_no_stream(content_type: str, body: bytes, kind: FailureKind, message: str) -> None:
    answer = StreamedAnswer(RequestRecord(0))
    answer.headers(200, {b"content-type": content_type.encode()}, 1)
    answer.body(body, 1)
    failure = answer.failure(1)
    assert failure is not None and failure.kind is kind and message in failure.message


def test_usage_that_does_not_count_along_leaves_the_counting_to_the_text() -> None:
    nothing = {"prompt_tokens": 0, "completion_tokens": 0}
    chunks = (text("a", usage=nothing), text("b", usage=nothing), text("", "stop", usage=nothing))
    record, failure = read(*chunks, {"choices": [], "usage": USAGE})
    assert failure is None
    assert list(record.chunk_ns) == [1, 2] and list(record.chunk_tokens) == [1, 1]
    assert not record.tokens_per_chunk_known and record.output_tokens == 3


@pytest.mark.parametrize("count", [-1, 2**31, 10**30])
@pytest.mark.parametrize("name", ["completion_tokens", "prompt_tokens"])
def test_usage_that_is_no_count_is_malformed(name: str, count: int) -> None:
    _, failure = read(text("a", usage={name: count}))
    assert failure is not None and failure.kind is FailureKind.MALFORMED and name in failure.message


def test_json_too_deep_to_be_read_is_malformed() -> None:
    answer = StreamedAnswer(RequestRecord(0))
    answer.headers(200, {b"content-type": b"text/event-stream"}, 1)
    with pytest.raises(RequestFailed) as raised:
        answer.body(b'data: {"timings": ' + b"[" * 5000 + b"]" * 5000 + b"}\n\n", 1)
    assert raised.value.failure.kind is FailureKind.MALFORMED


@pytest.mark.parametrize("status", [200, 500])
def test_an_error_too_deep_to_be_read_is_a_failure(status: int) -> None:
    answer = StreamedAnswer(RequestRecord(0))
    answer.headers(status, {b"content-type": b"application/json"}, 1)
    answer.body(b"[" * 5000, 1)
    failure = answer.failure(2)
    assert failure is not None and failure.status == status
