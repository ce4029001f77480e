"""What is read of a backend's stream, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.gateway.events import MAX_EVENT, BrokenStream, EventReader


def stream(*events: Any, newline: str = "\n") -> bytes:
    lines = [each if isinstance(each, str) else f"data: {json.dumps(each)}" for each in events]
    return "".join(f"{line}{newline}{newline}" for line in lines).replace("\r\n" * 3, "\r\n" * 2).encode()


CHAT = stream(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    ": a comment",
    {"choices": [{"index": 0, "delta": {"content": "a\n\nb"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "c"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "cache_read_input_tokens": 7}},
    "data: [DONE]",
)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_events_are_the_same_wherever_they_are_cut(newline: str) -> None:
    data = CHAT.replace(b"\n", newline.encode())
    for size in (1, 2, 3, 7, 64, len(data)):
        reader, found = EventReader(), []
        for at in range(0, len(data), size):
            found += [raw for raw, _ in reader.whole(data[at : at + size])]
        assert b"".join(found) == data and len(found) == 6, size
        assert reader.ended and reader.is_complete and not reader.error
        assert reader.pieces == 2 and reader.finished == 1 and reader.usage is not None and reader.usage.tokens == 9


@pytest.mark.parametrize("end", [len(CHAT) - 1, CHAT.index(b"data: [DONE]"), CHAT.index(b'"stop"'), 5, 0])
def test_a_stream_without_its_end_is_not_complete(end: int) -> None:
    reader = EventReader()
    list(reader.whole(CHAT[:end]))
    # Some servers leave out [DONE]; the reason of a choice's end is enough, where nothing is half.
    assert reader.is_complete == (end == CHAT.index(b"data: [DONE]"))


def test_streams_of_anthropic_tell_their_use_in_two_parts() -> None:
    reader = EventReader()
    begun = {"input_tokens": 20, "cache_read_input_tokens": 48, "cache_creation_input_tokens": 16, "output_tokens": 1}
    events = (
        {"type": "message_start", "message": {"id": "m", "usage": begun}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
    )
    list(reader.whole(stream(*[f"event: {each['type']}\ndata: {json.dumps(each)}" for each in events])))
    assert not reader.is_complete and reader.usage is not None and reader.usage.tokens == 20 + 48 + 16 + 5
    list(reader.whole(stream('event: message_stop\ndata: {"type": "message_stop"}')))
    assert reader.is_complete


def test_streams_of_responses_tell_their_id_and_their_end() -> None:
    reader = EventReader()
    list(reader.whole(stream({"type": "response.created", "response": {"id": "resp_1", "usage": None}})))
    list(reader.whole(stream({"type": "response.output_text.delta", "delta": "a"})))
    assert reader.response_id == "resp_1" and reader.pieces == 1 and not reader.is_complete
    use = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4}
    list(reader.whole(stream({"type": "response.completed", "response": {"id": "resp_1", "usage": use}})))
    assert reader.is_complete and not reader.error and reader.usage is not None and reader.usage.tokens == 4


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "no", "type": "t"}},
        {"type": "error", "message": "no"},
        {"type": "error", "error": {"type": "api_error", "message": "no"}},
        {"type": "response.failed", "response": {"id": "r", "error": {"code": "x", "message": "no"}}},
    ],
)
def test_what_a_backend_tells_as_an_error_is_one(event: Any) -> None:
    reader = EventReader()
    list(reader.whole(stream(event)))
    assert reader.error and reader.ended


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n\n",
        b"<html></html>\n\n",
        b'data: {"choices": "none"}\n\n',
        b"data: [1]\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: \xff\n\n",
        b"data: " + b"x" * (MAX_EVENT + 1),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_part_of_an_answer_breaks_the_stream_behind_what_came_before(data: bytes) -> None:
    reader, found = EventReader(), list[bytes]()
    with pytest.raises(BrokenStream):
        found.extend(raw for raw, _ in reader.whole(stream({"choices": []}) + data))
    assert found == [stream({"choices": []})]
