"""Whether answers have the structure that was asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.bench.client.answer import StreamedAnswer
from headway.bench.client.other_answers import MessagesAnswer, ResponsesAnswer
from headway.bench.client.schemas import misfit
from headway.bench.client.validity import Call, structure_of, wrong_with
from headway.load.measures.summary import summarise
from headway.load.record import RequestRecord
from tests.bench.records import request, run

SCHEMA = {
    "type": "object",
    "required": ["a"],
    "properties": {"a": {"$ref": "#/$defs/count"}, "b": {"type": ["array", "null"], "items": {"enum": ["x", "y"]}}},
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1}},
}


@pytest.mark.parametrize(
    ("value", "schema", "wrong"),
    [
        ({"a": 1, "b": ["x", "y"]}, SCHEMA, ""),
        ({"a": 2.0, "b": None}, SCHEMA, ""),
        ({}, SCHEMA, ".a is missing"),
        ([], SCHEMA, "the value is no object"),
        ({"a": 0}, SCHEMA, ".a breaks minimum"),
        ({"a": True}, SCHEMA, ".a is no integer"),
        ({"a": 1, "b": ["x", "z"]}, SCHEMA, ".b[1] is none of the enum"),
        ({"a": 1, "b": 3}, SCHEMA, ".b is no array or null"),
        ({"a": 1, "c": 3}, SCHEMA, ".c is not allowed"),
        (1, {"enum": [True]}, "the value is none of the enum"),
        ("ab", {"const": "b"}, "the value is not 'b'"),
        ("ab", {"maxLength": 1}, "the value breaks minLength or maxLength"),
        ("ab", {"pattern": "^b"}, "the value breaks its pattern"),
        ([1, "a"], {"prefixItems": [{"type": "integer"}, {"type": "null"}]}, "[1] is no null"),
        ({"x1": 1}, {"patternProperties": {"^x": {"type": "string"}}}, ".x1 is no string"),
        (3, {"anyOf": [{"type": "string"}, {"maximum": 2}]}, "the value breaks anyOf"),
        (3, {"oneOf": [{"type": "integer"}, {"maximum": 5}]}, "the value breaks oneOf"),
        (3, {"allOf": [{"type": "integer"}, {"exclusiveMaximum": 3}]}, "the value breaks exclusiveMaximum"),
        (3, {"$ref": "elsewhere.json"}, ""),
    ],
)
def test_values_against_schemas(value: Any, schema: Any, wrong: str) -> None:
    assert misfit(value, schema) == wrong


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


TOOL = {"name": "f", "parameters": SCHEMA}
CHAT = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
ANTHROPIC = {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}


@pytest.mark.parametrize(
    ("asked", "text", "calls", "wrong"),
    [
        ({"response_format": {"type": "text"}}, "a", [], None),
        ({"response_format": {"type": "json_object"}}, " {}\n", [], ""),
        ({"response_format": {"type": "json_object"}}, "[]", [], "the text: the value is no object"),
        ({"response_format": {"type": "json_object"}}, '{"a": NaN}', [], "the text: no JSON"),
        ({"response_format": schema_of(SCHEMA)}, '{"a": 1}', [], ""),
        ({"response_format": schema_of(SCHEMA)}, '```json\n{"a": 1}', [], "the text: no JSON"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "{}", [], "the text: .a is missing"),
        ({"guided_json": json.dumps(SCHEMA)}, "{}", [], "the text: .a is missing"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "a", [], ""),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "c", [], "the text is none of the choices"),
        ({"guided_regex": "a+"}, "aab", [], "the text breaks the pattern"),
        ({"guided_regex": "("}, "aab", [], "not checked, as the request cannot be read: error"),
        (CHAT, "", [Call("f", '{"a": 1}'), Call("f", '{"a": 2}')], ""),
        (CHAT, "", [Call("f", '{"a": 1}'), Call("f", "{}")], "arguments of a call: .a is missing"),
        (CHAT, "", [Call("g", "{}")], "the tool 'g' is called"),
        (CHAT, "hello", [], "no tool is called"),
        (CHAT | {"tool_choice": "auto"}, "hello", [], None),
        (CHAT | {"tool_choice": "none"}, "hello", [], None),
        (CHAT | {"tool_choice": {"type": "function", "function": {"name": "h"}}}, "", [Call("f", '{"a": 1}')], "f"),
        (ANTHROPIC, "", [Call("f", '{"a": 1}')], ""),
        ({"tools": [TOOL], "tool_choice": "required"}, "", [Call("f", '{"a": "x"}')], "no integer"),
    ],
)
def test_answers(asked: dict[str, Any], text: str, calls: list[Call], wrong: str | None) -> None:
    found = wrong_with(text, calls, structure_of({"temperature": 0}, asked))
    assert found == wrong if not wrong or wrong == found else wrong in (found or "")


def read(kind: type[StreamedAnswer], events: list[dict[str, Any]], asked: dict[str, Any]) -> RequestRecord:
    record = RequestRecord(0)
    answer = kind(record, structure=structure_of(asked))
    answer.headers(200, {b"content-type": b"text/event-stream"}, 1)
    for number, event in enumerate(events, 1):
        answer.body(f"data: {json.dumps(event)}\n\n".encode(), number)
    record.failure = answer.failure(99)
    answer.settle()
    assert record.text is None and not record.calls
    return record


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta}]}


END: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def test_a_chat_in_parts() -> None:
    calls = [{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": '{"a"'}}]
    last = [{"index": 0, "function": {"arguments": ": 1}"}}, {"index": 1, "function": {"name": "f"}}]
    events = [chat(role="assistant"), chat(tool_calls=calls), chat(tool_calls=more), chat(tool_calls=last), END]
    assert read(StreamedAnswer, events, CHAT).invalid == "arguments of a call: .a is missing"
    asked = {"response_format": {"type": "json_object"}}
    assert read(StreamedAnswer, [chat(content="{"), chat(content="}"), END], asked).invalid == ""
    cut = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    assert (
        read(StreamedAnswer, [chat(content="{"), cut], asked).invalid
        == "the text: no JSON, cut at its number of tokens"
    )
    assert read(StreamedAnswer, [chat(content="{"), END], {}).invalid is None
    kept = StreamedAnswer(RequestRecord(0), keep_text=True)  # for a turn that brings results of these calls
    kept.headers(200, {b"content-type": b"text/event-stream"}, 0)
    for event in events:
        kept.body(f"data: {json.dumps(event)}\n\n".encode(), 1)
    kept.settle()
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert kept.record.calls == [made]  # the second call has no id


def test_calls_of_the_other_apis() -> None:
    responses = [
        {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f", "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "delta": '{"a": '},
        {"type": "response.function_call_arguments.delta", "delta": "1}"},
        {"type": "response.completed", "response": {"usage": None}},
    ]
    record = read(ResponsesAnswer, responses, {"tools": [TOOL], "tool_choice": "required"})
    assert (record.invalid, list(record.chunk_ns)) == ("", [2, 3])
    messages = [
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f", "input": {}}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": '{"a": 1'}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "}"}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
    ]
    assert read(MessagesAnswer, messages, ANTHROPIC).invalid == ""
    assert read(MessagesAnswer, messages[:2] + messages[3:], ANTHROPIC).invalid == "arguments of a call: no JSON"


def test_their_share_is_a_number_of_the_run() -> None:
    records = [request(at, [10, 20]) for at in range(4)]
    for record, invalid in zip(records, ["", "", "no tool is called", None], strict=True):
        record.invalid = invalid
    found = summarise(run(records))
    assert found.validity is not None
    assert (found.validity.asked, found.validity.valid, found.validity.wrong) == (3, 2, {"no tool is called": 1})
    assert found.validity.low < 2 / 3 < found.validity.high
    assert any("1 request answered without the structure" in note for note in found.notes)
    assert summarise(run([request(0, [10, 20])])).validity is None
