"""Calls that have to come: the bundled model, which knows no tools, is held to their grammar through all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pytest

from tests.live.conftest import Served
from tests.server.test_tools import TEMPLATE

MODEL = "headway/story"
QUESTION = "How is the weather in Paris?"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 6}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "clock": CLOCK}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose template knows tools."""
    path: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TEMPLATE)
    served = Served("--chat-template", str(path), "--reasoning-parser", "none").until_ready()
    yield served
    served.stop()


@pytest.fixture
def asker(knowing: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{knowing.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check(name: str, arguments: str) -> None:
    jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))


def test_a_required_call_comes_whatever_the_model_would_say(asker: openai.OpenAI) -> None:
    names = set()
    for seed in range(4):
        answer = asker.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            seed=seed,
            n=2,
        )
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            (call,) = choice.message.tool_calls or []
            check(call.function.name, call.function.arguments)  # type: ignore[union-attr]
            names.add(call.function.name)  # type: ignore[union-attr]
    assert names <= SCHEMAS.keys()


def test_a_named_tool_is_the_one_that_is_called_in_a_stream_too(asker: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "clock"}}
    asked: Any = {"model": MODEL, "tools": TOOLS, "tool_choice": named, "max_tokens": 200}
    with asker.chat.completions.stream(messages=[{"role": "user", "content": QUESTION}], **asked) as stream:
        stream.until_done()
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.name == "clock"
    check("clock", call.function.arguments)


def test_a_tool_without_parameters_has_no_arguments(asker: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now"}}]
    answer = asker.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=tools, max_tokens=100,
        tool_choice={"type": "function", "function": {"name": "now"}},
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.arguments == "{}" and answer.choices[0].finish_reason == "tool_calls"  # type: ignore[union-attr]


def test_three_turns_through_chat(asker: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(3):
        answer = asker.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=150, seed=turn,
            parallel_tool_calls=False,
        )  # fmt: skip
        message = answer.choices[0].message
        (call,) = message.tool_calls or []
        check(call.function.name, call.function.arguments)  # type: ignore[union-attr]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]


def test_through_the_other_apis(knowing: Served, asker: openai.OpenAI) -> None:
    functions: Any = [{"type": "function", "name": name, "parameters": each} for name, each in SCHEMAS.items()]
    response = asker.responses.create(
        model=MODEL, input=QUESTION, tools=functions, tool_choice="required", parallel_tool_calls=False
    )
    (item,) = response.output
    assert item.type == "function_call" and response.status == "completed"
    check(item.name, item.arguments)
    tools: Any = [{"name": name, "input_schema": each} for name, each in SCHEMAS.items()]
    with anthropic.Anthropic(base_url=knowing.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL,
            max_tokens=300,
            messages=[{"role": "user", "content": QUESTION}],
            tools=tools,
            tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        )
    (block,) = message.content
    assert block.type == "tool_use" and message.stop_reason == "tool_use"
    jsonschema_rs.validate(WEATHER, block.input)
    structured: Any = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}}
    held = asker.responses.create(model=MODEL, input=QUESTION, text=structured)
    jsonschema_rs.validate(WEATHER, json.loads(held.output_text))


def test_a_strict_tool_s_schema_is_kept_or_refused(asker: openai.OpenAI) -> None:
    inner = {"a": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"const": 1}}}
    schema = {"type": "object", "properties": inner, "additionalProperties": False}

    def ask(strict: bool) -> Any:
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        return asker.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=[tool], tool_choice="required",
            max_tokens=100,
        )  # fmt: skip

    assert "uniqueItems" in ask(False).headers["x-headway-relaxed"]
    with pytest.raises(openai.BadRequestError, match="uniqueItems is not supported") as refused:
        ask(True)
    assert refused.value.param == "tools[0].function.parameters"
