"""Structured outputs before the engine: checked elsewhere and once, refused by name, and nobody else waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headway.server import grammars
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer
from tests.server.test_chat import HELLO

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def ask(server: LiveServer, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 5, **fields}, timeout=60)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 2048 and "\\n" not in answer.json()["error"]["message"]
    message: str = answer.json()["error"]["message"]
    return message


SAME = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True, "whitespace_pattern": None}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "text"}, "guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
]


@pytest.mark.parametrize("fields", SAME)
def test_all_spellings_come_to_one_value_of_the_parameters(
    server: LiveServer, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    assert ask(server, **fields, n=2).status_code == 200
    assert server.post("/v1/completions", prompt=["a", "b"], **fields).status_code == 200
    made = {each.params.structured_outputs for each in engine.requests}
    assert len(engine.requests) == 3 and len(made) == 1
    (asked,) = made
    assert asked is not None and asked.kind == "llguidance" and json.loads(asked.text)["grammars"][0]["json_schema"]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_schema"),
        ({"guided_regex": r"\d{3}"}, "lark_grammar"),
        ({"guided_choice": ["a b", "c|d", 'é"\\\n']}, "lark_grammar"),
    ],
)
def test_the_other_kinds(server: LiveServer, engine: FakeEngine, fields: dict[str, Any], kind: str) -> None:
    assert ask(server, **fields).status_code == 200
    asked = engine.requests[0].params.structured_outputs
    assert asked is not None and json.loads(asked.text)["grammars"][0][kind]


def test_grammars_in_lark_and_gbnf(server: LiveServer, engine: FakeEngine) -> None:
    for grammar in ('start: "a" b\nb: /[0-9]+/', 'root ::= "a" b\nb ::= [0-9]+'):
        assert ask(server, guided_grammar=grammar).status_code == 200
    assert len(engine.requests) == 2


def test_text_and_null_ask_for_nothing(server: LiveServer, engine: FakeEngine) -> None:
    for fields in ({"response_format": {"type": "text"}}, {"guided_json": None, "structured_outputs": None}):
        assert ask(server, **fields).status_code == 200
    assert all(each.params.structured_outputs is None for each in engine.requests)


# Keywords of draft 2020-12 and older drafts that say something which would not be kept.
NOT_KEPT: list[dict[str, Any]] = [
    {"not": {}},
    {"if": {}, "then": {}},
    {"dependentSchemas": {"a": {}}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependencies": {"a": ["b"]}},
    {"unevaluatedProperties": False},
    {"unevaluatedItems": False},
    {"contains": {"type": "null"}},
    {"minContains": 2},
    {"maxContains": 2},
    {"uniqueItems": True},
    {"propertyNames": {"maxLength": 3}},
    {"$dynamicRef": "#a"},
    {"$dynamicAnchor": "a"},
    {"$recursiveRef": "#"},
    {"extends": {}},
    {"disallow": "string"},
    {"divisibleBy": 2},
    {"x-guidance": {"lenient": True}},
    {"format": "binary"},
    {"exclusiveMinimum": True, "minimum": 0},
    {"minProperties": 2, "additionalProperties": {"type": "integer"}},
    {"$ref": "https://example.com/schema.json"},
    {"oneOf": [{"minimum": 0}, {"maximum": 9}]},
]


@pytest.mark.parametrize("inner", NOT_KEPT, ids=lambda inner: next(iter(inner)))
def test_keyword_that_cannot_be_kept_is_named(server: LiveServer, engine: FakeEngine, inner: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"p": {"anyOf": [{"type": "null"}, inner]}}, "required": ["p"]}
    answer = ask(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert next(iter(inner)) in refusal(answer)
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
    assert not engine.requests


def test_names_of_properties_and_values_are_no_keywords(server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"if": 1}}, "contains": {"enum": ["not"]}, "$ref": {"type": "null"}},
        "required": ["not"],
        "uniqueItems": False,
        "description": "not",
        "default": {"not": 1},
        "$defs": {"not": {"type": "integer"}},
    }
    assert ask(server, guided_json=schema).status_code == 200


def test_strict_false_leaves_out_what_cannot_be_kept_and_says_so(server: LiveServer, engine: FakeEngine) -> None:
    schema = {**SCHEMA, "not": {}, "properties": {"a": {"type": "string", "format": "ünknown"}}}
    wanted = {"name": "x", "schema": schema, "strict": False}
    for stream in (False, True):
        answer = ask(server, response_format={"type": "json_schema", "json_schema": wanted}, stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-headway-relaxed"] == "/not, Unknown format: ?nknown"
    assert "x-headway-relaxed" not in ask(server, guided_json=SCHEMA).headers
    remote = {**wanted, "schema": {"$ref": "http://example.com"}}
    assert "$ref" in refusal(ask(server, response_format={"type": "json_schema", "json_schema": remote}))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


SLOW = "repeated repetitions", "3,000 alternatives"
HOSTILE: dict[str, dict[str, Any]] = {
    "deep schema": {"guided_json": deep(70)},
    "60,000 groups": {"guided_regex": "(" * 60_000 + "a" + ")" * 60_000},
    "deep Lark": {"guided_grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "deep GBNF": {"guided_grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "NUL": {"guided_grammar": '\0start: "a"'},
    "repeated repetitions": {"guided_regex": "(a{1000}){1000}"},
    "many states": {"guided_regex": "(x|y)*z{3}(a{1000}){1000}"},
    "exponential alternatives": {
        "guided_json": {
            "allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "null"}}} for j in range(4)]} for i in range(12)]
        }
    },
    "loop of references": {
        "guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    },
    "missing reference": {"guided_json": {"$ref": "#/$defs/a"}},
    "remote reference": {"guided_json": {"$ref": "http://127.0.0.1:1/a"}},
    "3,000 alternatives": {
        "guided_json": {"anyOf": [{"properties": {f"k{i}": {"type": "null"}}} for i in range(3000)]}
    },
    "nothing satisfies it": {"guided_json": {"type": "string", "minLength": 5, "maxLength": 3}},
    "rules without an end": {"guided_grammar": "start: a\na: b\nb: a"},
    "look-around": {"guided_regex": "(?=a)a"},
    "20 digits": {"guided_json": {"type": "integer", "multipleOf": 10**18 + 1}},
    "2 MB": {"guided_regex": "a" * 2_000_000},
}


@pytest.mark.parametrize(
    "fields",
    [pytest.param(fields, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, fields in HOSTILE.items()],
)
def test_hostile_grammar_is_a_400(server: LiveServer, engine: FakeEngine, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    refusal(ask(server, **fields))
    assert time.monotonic() - began < 15.0 and not engine.requests


ENDLESS = "root ::= a0\n" + "\n".join(f'a{i} ::= a{i + 1} | "x" a{i + 1}' for i in range(20_000)) + '\na20000 ::= "x"'


def test_grammar_that_takes_too_long_is_given_up_while_others_go_on(
    start_server: Callable[..., LiveServer], engine: FakeEngine
) -> None:
    server = start_server(grammar_timeout=3.0)
    assert ask(server, guided_regex="a{3}").status_code == 200  # the processes are there
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(ask, server, guided_grammar=ENDLESS) for _ in range(2)]
        time.sleep(grammars.QUICK_S + 0.2)
        worst, others = 0.0, 0
        while not all(each.done() for each in slow):
            began = time.monotonic()
            assert server.client.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - began)
            if others < 3:
                assert ask(server, guided_regex=f"b{{{others + 1}}}").status_code == 200
                assert not slow[0].done()
                others += 1
    assert others == 3 and worst < 0.5
    for each in slow:
        assert "takes more than 3 s to compile (--grammar-timeout)" in refusal(each.result())
    assert server.service.grammars.num_checked == {"known": 0, "accepted": 4, "refused": 1}
    refusal(ask(server, guided_grammar=ENDLESS))
    assert server.service.grammars.num_checked == {"known": 1, "accepted": 4, "refused": 1}


def test_process_that_is_killed_or_runs_out_of_memory_is_replaced(
    start_server: Callable[..., LiveServer], engine: FakeEngine
) -> None:
    server = start_server()
    assert ask(server, guided_regex="a{4}").status_code == 200
    process = server.service.grammars._quick[0]._process._process
    assert process is not None
    process.kill()
    process.wait()
    assert ask(server, guided_regex="a{5}").status_code == 200


def test_grammars_that_are_kept_are_bounded(
    start_server: Callable[..., LiveServer], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "KEPT_CHARS", 1000)
    server = start_server()
    for length in range(8):
        assert ask(server, guided_regex="a" * (100 + length)).status_code == 200
    checks = server.service.grammars
    assert 1 <= len(checks._known) < 8 and checks._kept_chars <= 1000
    text = server.client.get("/metrics").text
    assert "headway:grammars_accepted_total" in text and "headway:grammars_waiting" in text


def test_timings_have_the_check(server: LiveServer) -> None:
    answer = ask(server, guided_regex="timed{3}", include_timings=True).json()
    assert answer["timings"]["phases_ns"]["grammar"] > 0
    assert sum(answer["timings"]["phases_ns"].values()) == answer["timings"]["e2e_ns"]
