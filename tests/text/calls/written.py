"""Tools made by chance, and calls of them as each family writes them."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
WORDS = ["get", "set", "find", "list", "user", "order", "weather", "city", "date", "unit", "filter", "path", "query"]
TEXTS = [
    "",
    "Paris",
    "New York, NY",
    'She said "no"',
    "a\nb\n",
    " spaces ",
    "C:\\temp\\new",
    "{not: json}",
    "[1, 2",
    "日本語 😀",
    "it's",
    "<b>bold</b> & more",
    "def f(x):\n\treturn {'a': x}\n",
    "f(a=1), g()",
    "null",
    "5",
    "true",
    "\\u00e9 \\n",
    "\u2028 line",
    '"""',
    "'''",
    "],}",
]


def _name(dice: random.Random) -> str:
    return "_".join(dice.sample(WORDS, dice.randint(1, 3))) + dice.choice(["", "", "_2", "X"])


def _value(dice: random.Random, schema: Json) -> Any:
    if "enum" in schema:
        return dice.choice(schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        return dice.choice([None, "Paris", "a\nb"])
    match kind:
        case "string":
            return dice.choice(TEXTS)
        case "integer":
            return dice.choice([0, -1, 7, 2**53, dice.randint(-1000, 1000)])
        case "number":
            return dice.choice([0.5, -2.25, 1e20, 3, 1.5e-7])
        case "boolean":
            return dice.random() < 0.5
        case "array":
            return [_value(dice, schema["items"]) for _ in range(dice.randint(0, 3))]
    return {key: _value(dice, each) for key, each in schema["properties"].items() if dice.random() < 0.8}


def _schema(dice: random.Random, depth: int = 0) -> Json:
    kinds = ["string", "string", "integer", "number", "boolean", "enum", "nullable"]
    kind = dice.choice(kinds + ["array", "object"] * (depth < 2))
    match kind:
        case "enum":
            return {"type": "string", "enum": ["celsius", "fahrenheit", "a b"]}
        case "nullable":
            return {"type": ["string", "null"], "description": "May be null."}
        case "array":
            return {"type": "array", "items": _schema(dice, depth + 1)}
        case "object":
            names = {_name(dice): _schema(dice, depth + 1) for _ in range(dice.randint(0, 3))}
            return {"type": "object", "properties": names}
    return {"type": kind}


@dataclass
class Call:
    name: str
    arguments: Json


def tool_and_call(seed: int) -> tuple[Json, Call]:
    """A tool, and a call of it that is valid."""
    dice = random.Random(seed)
    names = {_name(dice): _schema(dice) for _ in range(dice.randint(0, 5))}
    required = [name for name in names if dice.random() < 0.6]
    schema = {"type": "object", "properties": names, "required": required}
    name = _name(dice) + dice.choice(string.ascii_lowercase)
    arguments = {key: _value(dice, names[key]) for key in names if key in required or dice.random() < 0.5}
    tool = {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    return tool, Call(name, arguments)


# --- how each family writes them ----------------------------------------------------------------------


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: list[Call], key: str = "arguments", name: str = "name") -> list[str]:
    return [as_json({name: call.name, key: call.arguments}) for call in calls]


def _list(calls: list[Call], key: str = "arguments", name: str = "name") -> str:
    return f"[{', '.join(_objects(calls, key, name))}]"


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _function(call: Call, line: str = "") -> str:
    parameters = "".join(
        f"<parameter={key}>{line}{_bare(value)}{line}</parameter>\n" for key, value in call.arguments.items()
    )
    return f"<function={call.name}>\n{parameters}</function>"


def _invoke(call: Call) -> str:
    parameters = "".join(f'<parameter name="{k}">{_bare(v)}</parameter>\n' for k, v in call.arguments.items())
    return f'<invoke name="{call.name}">\n{parameters}</invoke>\n'


def _glm(call: Call) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n" for key, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{pairs}</tool_call>"


def _python(call: Call) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _braces(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{_braces(each, quote)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(_braces(each, quote) for each in value) + "]"
    return as_json(value)


def _deepseek(calls: list[Call], typed: bool) -> str:
    def one(call: Call) -> str:
        arguments = as_json(call.arguments)
        inner = f"function<｜tool▁sep｜>{call.name}\n```json\n{arguments}\n```"
        return inner if typed else f"{call.name}<｜tool▁sep｜>{arguments}"

    each = (f"<｜tool▁call▁begin｜>{one(call)}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{chr(10).join(each) if typed else ''.join(each)}<｜tool▁calls▁end｜>"


def _kimi(calls: list[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>{as_json(call.arguments)}"
        "<|tool_call_end|>"
        for number, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def _harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{as_json(call.arguments)}<|call|>"
        for call in calls
    )


def _hunyuan_named(calls: list[Call]) -> str:
    each = (f"<tool_call>{call.name}\n```json\n{as_json(call.arguments)}\n```\n</tool_call>" for call in calls)
    return f"<tool_calls>{''.join(each)}</tool_calls>"


Write = Callable[[list[Call]], str]
# Parser, and how it is written; `exact` where the arguments are JSON, which is to come out as it was written.
EXACT: dict[str, tuple[str, Write]] = {
    "hermes": ("hermes", lambda calls: "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls))),
    "arguments first": (
        "hermes",
        lambda calls: "".join(
            f'<tool_call>{{"arguments": {as_json(call.arguments)}, "name": {as_json(call.name)}}}</tool_call>'
            for call in calls
        ),
    ),
    "ernie": ("ernie45", lambda calls: "\n\n".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in _objects(calls))),
    "granite 3": ("granite", lambda calls: "<|tool_call|>" + _list(calls)),
    "granite 4": ("granite", lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in _objects(calls))),
    "llama 3": ("llama3_json", lambda calls: "; ".join(_objects(calls, "parameters"))),
    "llama 3, python tag": ("llama3_json", lambda calls: "<|python_tag|>" + "; ".join(_objects(calls, "parameters"))),
    "mistral, list": ("mistral", lambda calls: "[TOOL_CALLS] " + _list(calls)),
    "mistral, names": (
        "mistral",
        lambda calls: "".join(f"[TOOL_CALLS]{call.name}[ARGS]{as_json(call.arguments)}" for call in calls),
    ),
    "mistral, ids": (
        "mistral",
        lambda calls: "".join(
            f"[TOOL_CALLS]{call.name}[CALL_ID]abcdefghi[ARGS]{as_json(call.arguments)}" for call in calls
        ),
    ),
    "deepseek v3": ("deepseek_v3", lambda calls: _deepseek(calls, True)),
    "deepseek v3.1": ("deepseek_v31", lambda calls: _deepseek(calls, False)),
    "kimi": ("kimi_k2", _kimi),
    "harmony": ("openai", _harmony),
    "cohere": (
        "cohere",
        lambda calls: f"<|START_ACTION|>{_list(calls, 'parameters', 'tool_name')}<|END_ACTION|>",
    ),
    "command r": ("cohere", lambda calls: f"Action: ```json\n{_list(calls, 'parameters', 'tool_name')}\n```"),
    "hunyuan": ("hunyuan_a13b", lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>"),
    "hunyuan, names": ("hunyuan_a13b", _hunyuan_named),
    "phi 4 mini": ("phi4_mini_json", lambda calls: f"<|tool_call|>{_list(calls)}<|/tool_call|>"),
    "phi 4 mini, one by one": (
        "phi4_mini_json",
        lambda calls: "".join(f"<|tool_call|>{each}<|/tool_call|>" for each in _objects(calls)),
    ),
    "lfm2, objects": ("lfm2", lambda calls: f"<|tool_call_start|>{_list(calls)}<|tool_call_end|>"),
    "phi 4 mini, functools": ("phi4_mini_json", lambda calls: "functools" + _list(calls)),
}
TURNED: dict[str, tuple[str, Write]] = {
    "qwen3 coder": (
        "qwen3_coder",
        lambda calls: "\n".join(f"<tool_call>\n{_function(call, chr(10))}\n</tool_call>" for call in calls),
    ),
    "qwen3 coder, no tag": ("qwen3_coder", lambda calls: "\n".join(_function(call, "\n") for call in calls)),
    "seed": (
        "seed_oss",
        lambda calls: "\n".join(f"<seed:tool_call>\n{_function(call)}\n</seed:tool_call>" for call in calls),
    ),
    "glm": ("glm45", lambda calls: "\n".join(map(_glm, calls))),
    "minimax": (
        "minimax_m2",
        lambda calls: f"<minimax:tool_call>\n{''.join(map(_invoke, calls))}</minimax:tool_call>",
    ),
    "llama 3.2": ("pythonic", lambda calls: f"[{', '.join(map(_python, calls))}]"),
    "llama 4": ("llama4_pythonic", lambda calls: f"<|python_start|>[{', '.join(map(_python, calls))}]<|python_end|>"),
    "lfm2": ("lfm2", lambda calls: f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>"),
    "olmo 3": ("olmo3", lambda calls: f"<function_calls>\n{chr(10).join(map(_python, calls))}\n</function_calls>"),
    "gemma 3": ("gemma3", lambda calls: f"```tool_code\n{chr(10).join(map(_python, calls))}\n```"),
    "gemma 4": (
        "gemma4",
        lambda calls: "".join(
            f"<|tool_call>call:{call.name}" + _braces(call.arguments, '<|"|>') + "<tool_call|>" for call in calls
        ),
    ),
    "function gemma": (
        "functiongemma",
        lambda calls: "".join(
            f"<start_function_call>call:{call.name}{_braces(call.arguments, '<escape>')}<end_function_call>"
            for call in calls
        ),
    ),
}
WRITTEN = EXACT | TURNED
