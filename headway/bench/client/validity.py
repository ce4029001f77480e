"""Whether an answer has the structure that its request asked for: JSON, a schema, a pattern, a choice, calls of tools.

It is read as the three APIs and vLLM's own fields write it. A grammar is not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.bench.client.schemas import misfit

ASKING = (
    *("response_format", "text", "tools", "tool_choice"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
)


@dataclass(slots=True)
class Call:
    """A call of a tool, its arguments as they were written."""

    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class Calls:
    """The calls of one answer, from the parts in which they come."""

    made: list[Call] = field(default_factory=list)

    def begin(self, name: str) -> None:
        self.made.append(Call(name))

    def as_message(self) -> list[dict[str, Any]]:
        """`tool_calls` of a chat's message; without an id, as in other APIs, a call cannot be named there."""
        return [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in self.made
            if each.id
        ]

    def go_on(self, arguments: str) -> None:
        if self.made:
            self.made[-1].arguments += arguments

    def take(self, deltas: Any) -> None:
        """Take `tool_calls` of a chat's delta."""
        for delta in deltas if isinstance(deltas, list) else ():
            function = delta.get("function") if isinstance(delta, dict) else None
            if not isinstance(function, dict):
                continue
            place = delta.get("index", 0)
            while isinstance(place, int) and len(self.made) <= place < 1000:
                self.begin("")
            call = self.made[place] if isinstance(place, int) and 0 <= place < len(self.made) else Call()
            call.id = call.id or delta.get("id") or ""
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""


def structure_of(*bodies: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ask for a structure, the later bodies' before the earlier ones'; empty where none does."""
    return {name: value for body in bodies for name, value in body.items() if name in ASKING}


def wrong_with(text: str, calls: list[Call], asked: Mapping[str, Any]) -> str | None:
    """What is wrong with an answer; "" where nothing is, None where the request left its structure to the model."""
    try:
        return _wrong_with(text, calls, asked)
    except (TypeError, ValueError, AttributeError, RecursionError, re.error) as error:
        return f"not checked, as the request cannot be read: {type(error).__name__}"


def _wrong_with(text: str, calls: list[Call], asked: Mapping[str, Any]) -> str | None:
    tools, choice = _tools(asked.get("tools")), asked.get("tool_choice", "auto")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if tools and kind != "none":
        if calls:
            named = _name_of(choice) if isinstance(choice, dict) else ""
            return next((wrong for call in calls if (wrong := _wrong_call(call, tools, named))), "")
        if kind != "auto":
            return "no tool is called"
    return _wrong_text(text, asked)


def _tools(given: Any) -> dict[str, Any]:
    """The schema of the arguments of each tool."""
    found = {}
    for tool in given if isinstance(given, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            found[name] = function.get("parameters", function.get("input_schema", {}))
    return found


def _name_of(choice: dict[str, Any]) -> str:
    function = choice.get("function", choice)
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _wrong_call(call: Call, tools: dict[str, Any], named: str) -> str:
    if call.name not in tools or named not in ("", call.name):
        return f"the tool {call.name!r} is called"
    return _wrong_json(call.arguments or "{}", tools[call.name], "arguments of a call")


def _wrong_text(text: str, asked: Mapping[str, Any]) -> str | None:
    own = {name.removeprefix("guided_"): value for name, value in asked.items() if name.startswith("guided_")}
    own |= asked.get("structured_outputs") or {}
    if (pattern := own.get("regex")) is not None:
        return "" if re.fullmatch(pattern, text) else "the text breaks the pattern"
    if (choices := own.get("choice")) is not None:
        return "" if text in choices else "the text is none of the choices"
    schema = own.get("json")
    if isinstance(schema, str):
        schema = json.loads(schema)
    output = asked.get("response_format") or (asked.get("text") or {}).get("format")
    if schema is None and isinstance(output, dict):
        if output.get("type") == "json_object":
            schema = {"type": "object"}
        elif output.get("type") == "json_schema":
            schema = output.get("json_schema", output).get("schema", {})
    return None if schema is None else _wrong_json(text, schema, "the text")


def _wrong_json(text: str, schema: Any, what: str) -> str:
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return f"{what}: no JSON"
    wrong = misfit(value, schema)
    return f"{what}: {wrong}" if wrong else ""


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
