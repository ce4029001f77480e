"""Tools that a request offers to the model, and calls of them in earlier answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import JsonValue, WithJsonSchema

from headway.server.api.fields import Body, Int, must_be, said
from headway.server.errors import bad_request
from headway.text.calls.families import CALLS, Family

MAX_TOOLS = 512
# Values in the arguments of the earlier calls of one request: they are parsed for the chat template.
MAX_ARGUMENT_VALUES = 2**15
_CHOICES = ("none", "auto", "required")
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function", "description": "Only functions can be called."},
        "function": {
            "type": "object",
            "description": "The function.",
            "properties": {"name": {"type": "string", "description": "The name of one of the tools."}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}

_NO_CALLS: dict[str, Any] = {"tool_calls": {"maxItems": 0}}
_CONTENT: dict[str, Any] = {"content": {"type": ["string", "array"]}}
# What a message of each role needs, as JSON schemas.
MESSAGES: list[JsonValue] = [
    {
        "properties": {"role": {"enum": ["system", "developer", "user"]}, **_CONTENT, **_NO_CALLS},
        "required": ["content"],
    },
    {"properties": {"role": {"const": "assistant"}}, "required": ["content"]},
    {"properties": {"role": {"const": "assistant"}, "tool_calls": {"minItems": 1}}, "required": ["tool_calls"]},
    {
        "properties": {"role": {"const": "tool"}, "tool_call_id": {"type": "string"}, **_CONTENT, **_NO_CALLS},
        "required": ["content", "tool_call_id"],
    },
]


def _is_choice(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None or value in _CHOICES
    function = value.get("function")
    is_named = isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str)
    return value.keys() == {"type", "function"} and value["type"] == "function" and is_named


ToolChoiceField = Annotated[
    Any,
    must_be('none, auto, required, or {"type": "function", "function": {"name": ...}}', _is_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_CHOICES)}, _NAMED, {"type": "null"}]}),
]


class FunctionDefinition(Body):
    name: str = said(
        "The name by which the model calls it: letters, digits, _, - and dots.",
        ...,
        min_length=1,
        max_length=128,
        pattern=r"^[a-zA-Z0-9_.-]+$",
    )
    description: str | None = said("What it does, for the model.")
    parameters: dict[str, Any] | None = said("The JSON schema of its arguments, an object; default one without any.")
    strict: bool | None = said(
        "Whether a schema that cannot be kept to the letter is refused where a call is required; default false."
    )


class Tool(Body):
    type: Literal["function"] = said("The only tools are functions.", ...)
    function: FunctionDefinition = said("The function.", ...)


class CalledFunction(Body):
    name: str = said("The name of the function.", ...)
    arguments: str = said("The arguments as a JSON text, as the model wrote them.", ...)
    parsed_arguments: Any = said("As the openai client adds it; it has no effect.")


class ToolCall(Body):
    """A call of a tool, as an answer had it."""

    id: str = said("The id of the call.", ..., max_length=256)
    type: Literal["function"] = said("The only tools are functions.", "function")
    function: CalledFunction = said("The function that was called.", ...)
    index: Int | None = said("The number of the call, as in chunks of a stream; it has no effect.")


def offered(
    tools: Sequence[Tool] | None, choice: Any, family: Family, knows_tools: bool
) -> list[dict[str, Any]] | None:
    """The tools that the model may call, for its chat template; None where it may call none.

    Args:
        choice: the request's tool_choice.
        knows_tools: the chat template writes tools.

    Raises:
        ApiError: 400 for tools that contradict themselves or the choice, or that the model cannot be given.
    """
    names = _checked_names(tools or [])
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        path = "tool_choice.function.name"
        raise bad_request(
            f"{path} is {choice['function']['name'][:60]!r}; it must be the name of one of the tools", path
        )
    if not tools:
        if choice == "required":
            raise bad_request("tool_choice is 'required'; that needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    if not knows_tools:
        raise bad_request(
            "the model's chat template does not know tools; leave them out, or start the server with a template that "
            "does (--chat-template)",
            "tools",
        )
    if family.calls is None:
        raise bad_request(
            "the model's chat template does not tell how the model calls tools; start the server with "
            f"--tool-call-parser and one of {', '.join(CALLS)}",
            "tools",
        )
    return [_for_template(tool) for tool in tools]


def _for_template(tool: Tool) -> dict[str, Any]:
    """A tool for the chat template, many of which expect that it has parameters."""
    function = tool.model_dump(exclude_none=True)["function"]
    function.pop("strict", None)
    parameters = {"type": "object", "properties": {}} | function.pop("parameters", {})
    return {"type": "function", "function": function | {"parameters": parameters}}


def is_enforced(choice: Any) -> bool:
    """Whether an answer has to call a tool, which a grammar sees to."""
    return choice == "required" or isinstance(choice, dict)


def _checked_names(tools: Sequence[Tool]) -> set[str]:
    """The names of tools. Raises ApiError 400 where two have the same, or parameters are those of no object."""
    names: set[str] = set()
    for number, tool in enumerate(tools):
        path, function = f"tools[{number}].function", tool.function
        if function.name in names:
            raise bad_request(f"{path}.name is {function.name!r}, the name of an earlier tool", f"{path}.name")
        names.add(function.name)
        if function.parameters:
            kind, inner = function.parameters.get("type", "object"), function.parameters.get("properties", {})
            if kind != "object":
                raise bad_request(
                    f'{path}.parameters.type is {str(kind)[:60]!r}; it must be "object"', f"{path}.parameters.type"
                )
            if not isinstance(inner, dict):
                message = f"{path}.parameters.properties is no JSON object; it must have a schema for each argument"
                raise bad_request(message, f"{path}.parameters.properties")
    return names


def for_template(calls: Sequence[ToolCall], as_text: bool) -> list[dict[str, Any]]:
    """Earlier calls for the chat template.

    Args:
        as_text: it takes arguments as a JSON text, and not as an object.
    """
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": call.function.arguments if as_text else _parsed(call.function.arguments),
            },
        }
        for call in calls
    ]


def _parsed(arguments: str) -> Any:
    """The object in a JSON text; the text where it has none, as when a model was cut off in it."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
