"""Grammars of calls: each family's syntax with the schemas of the tools, in llguidance's Lark.

An answer that keeps such a grammar calls a tool, with arguments that keep its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.text.calls.families import CALLS, Family, Reasoning
from headway.text.calls.values import kinds, properties

Schema = Any
Write = Callable[["_Rules", str, Schema], str]

# Keywords that do not narrow what a value may be.
_SAID = frozenset(
    ("title", "description", "default", "examples", "deprecated", "format", "readOnly", "writeOnly", "$schema")
    + ("x-guidance",)  # how the library is to write it
)
_KEPT = _SAID | {"type", "enum", "const", "anyOf", "items", "properties", "required", "additionalProperties"}
_BARE_KEY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TERMINALS = """\
TEXT: /(?s:.*)/
SPACE: /[ \\n]*/
DIGITS: /[0-9]+/
STRING: /"([^"\\\\\\n]|\\\\[^\\n])*"|'([^'\\\\\\n]|\\\\[^\\n])*'/
INTEGER: /-?(0|[1-9][0-9]*)/
NUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


class UnsupportedSchema(ValueError):
    """A schema has a keyword that a family's syntax cannot be held to."""


def grammar_for(
    family: Family,
    tools: Sequence[Mapping[str, Any]],
    choice: Any = "required",
    *,
    is_reasoning: bool = False,
    parallel: bool = True,
    token_ids: Mapping[str, int] | None = None,
) -> str:
    """The grammar of an answer that calls tools, and may think before.

    Args:
        tools: as OpenAI writes them.
        choice: "required" for any of them, "auto" for text in which there may be calls, or as OpenAI names one.
        is_reasoning: the prompt has begun the reasoning.
        parallel: there may be several calls.
        token_ids: the tags of the family that are special tokens in the vocabulary, which text cannot stand for.

    Raises:
        UnsupportedSchema: it names the tool and the keyword.
    """
    rules = _Rules(token_ids or {})
    if isinstance(choice, Mapping):
        tools = [tool for tool in tools if tool["function"]["name"] == choice["function"]["name"]]
    frames = next(FRAMES[name] for name, each in CALLS.items() if each is family.calls)
    if choice == "auto":
        whole = _amid_text(rules, family, frames, tools, parallel)
    else:
        whole = rules.either([_framed(rules, frame, tools, parallel) for frame in frames])
    return f"start: {_thought(rules, family, is_reasoning)} {whole}\n{rules.text()}{_TERMINALS}"


def before_answer(family: Family, is_reasoning: bool, token_ids: Mapping[str, int]) -> str:
    """The grammar of an answer that is held to another grammar, `@answer`, behind what the model may think before it.

    It is empty where the family knows nothing but the answer. Arguments are as grammar_for() has them.
    """
    if family.reasoning is None and not family.is_harmony:
        return ""
    rules = _Rules(token_ids)
    head = rules.literal("<|channel|>", "final", "<|message|>") if family.is_harmony else ""
    return f"start: {_thought(rules, family, is_reasoning)} {head} @answer\n{rules.text()}{_TERMINALS}"


class _Rules:
    """The rules of a grammar, as they are made."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: dict[str, str] = {}  # a rule's text to its name

    def text(self) -> str:
        return "".join(f"{name}{rule}\n" for rule, name in self._rules.items())

    def is_token(self, text: str) -> bool:
        return text in self._token_ids

    def literal(self, *texts: str) -> str:
        """Texts one after another; those that are special tokens as such."""
        return " ".join(
            f"<[{self._token_ids[text]}]>" if text in self._token_ids else json.dumps(text, ensure_ascii=False)
            for text in texts
            if text
        )

    def rule(self, body: str, attributes: str = "") -> str:
        """The name of a rule with this body."""
        return self._rules.setdefault(f"{attributes}: {body}", f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        """The name of a rule without rules in it, which may intersect what it is made of."""
        return self._rules.setdefault(f": {body}", f"R{len(self._rules)}")

    def either(self, options: Sequence[str]) -> str:
        return options[0] if len(options) == 1 else self.rule(" | ".join(options))

    def schema(self, schema: Schema) -> str:
        """JSON of a schema."""
        return self.rule(f"%json {json.dumps(schema if schema else {'type': 'object', 'properties': {}})}")

    def text_until(self, *ends: str) -> str:
        """Any text with the first of some ends behind it."""
        if all(end in self._token_ids for end in ends):
            return f"TEXT {self.rule(' | '.join(map(self.literal, ends)))}"
        return self.rule(f"/(?s:.*)({'|'.join(map(_pattern, ends))})/", "[lazy]")

    def tag(self, *tags: str) -> str:
        """One of some tags. Text that could go on behind it does not begin before it."""
        texts = [_pattern(tag) for tag in tags if tag not in self._token_ids]
        options = [self.literal(tag) for tag in tags if tag in self._token_ids]
        return self.either([*options, *([self.rule(f"/{'|'.join(texts)}/", "[lazy]")] if texts else [])])

    def members(self, written: Sequence[tuple[str, bool]], separator: str) -> str:
        """Members in their order, of which those that are not required may be left out."""
        after = rest = '""'
        firsts: list[str] = []
        for member, is_required in reversed(written):
            firsts = [f"{member} {rest}", *([] if is_required else firsts)]
            following = f"{self.literal(separator)} {member}"
            after = self.rule(f"{following} {rest}" if is_required else f"({following})? {rest}")
            rest = after
        if not any(is_required for _, is_required in written):
            firsts.append('""')
        return self.either(firsts)


def _pattern(text: str) -> str:
    """A regular expression for a text."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


@dataclass(frozen=True)
class _Frame:
    """What stands around calls: before and behind all, around each, and between two."""

    call: Write
    start: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    is_single: bool = False

    @property
    def lead(self) -> str:
        """The tag that begins calls; empty where none does."""
        return next(iter((*self.start, *self.opens)), "")


def _framed(
    rules: _Rules, frame: _Frame, tools: Sequence[Mapping[str, Any]], parallel: bool, is_led: bool = False
) -> str:
    """Calls, but for the tag that leads them where that has come already."""
    calls = []
    for tool in tools:
        function = tool["function"]
        try:
            calls.append(frame.call(rules, function["name"], function.get("parameters")))
        except UnsupportedSchema as error:
            raise UnsupportedSchema(f"tool {function['name']}: {error}") from None
    call = f"{rules.either(calls)} {rules.literal(*frame.closes)}"
    start, opens = (frame.start[is_led:], frame.opens) if frame.start else ((), frame.opens[is_led:])
    more = f"({rules.literal(*frame.between, *frame.opens)} {call})*" if parallel and not frame.is_single else ""
    return rules.rule(f"{rules.literal(*start, *opens)} {call} {more} {rules.literal(*frame.stop)}")


def _amid_text(
    rules: _Rules, family: Family, frames: Sequence[_Frame], tools: Sequence[Mapping[str, Any]], parallel: bool
) -> str:
    """Text with calls in it, or without: where a family's tag comes, or what begins a call without one, a call does."""
    syntax = family.syntax
    if syntax is None:
        told = rules.rule(f"{rules.literal('<|channel|>', 'commentary', '<|message|>')} {rules.text_until('<|end|>')}")
        final = f"{rules.literal('<|channel|>', 'final', '<|message|>')} TEXT"
        calls = [_framed(rules, frame, tools, parallel) for frame in frames]
        return f"({told} {rules.literal('<|start|>', 'assistant')})* {rules.either([*calls, final])}"
    amid = [frame for frame in frames if frame.lead and frame.lead not in syntax.bare]
    others = [tag for tag in syntax.begins if tag[0] in "<["]  # a word that may begin a call is only a word here
    tags = [tag for tag in dict.fromkeys([*(frame.lead for frame in amid), *others]) if not rules.is_token(tag)]

    def text(pattern: str, end: str = "") -> str:
        """Text in which no tag is, and that does not begin as a call without one."""
        not_in = [f"(?s:.*){_pattern(tag)}(?s:.*)" for tag in tags if tag != end]
        not_in += [f"\\s*[{_pattern(syntax.bare)}](?s:.*)"] if syntax.bare else []
        whole = rules.terminal(f"/{pattern}/{''.join(f' & ~/{each}/' for each in not_in)}")
        return rules.rule(whole, "[lazy]") if end else whole

    free, parts = text("(?s:.*)"), []
    for frame in amid:
        is_token = rules.is_token(frame.lead)
        before = free if is_token else text(f"(?s:.*){_pattern(frame.lead)}", frame.lead)
        parts.append(f"{before} {_framed(rules, frame, tools, parallel, not is_token)}")
    bare = [_framed(rules, frame, tools, parallel) for frame in frames if frame not in amid]
    with_calls = f"({rules.either(parts)}){'*' if parallel else '?'}" if parts else ""
    return rules.either([*bare, f"{with_calls} {free}"])


def _thought(rules: _Rules, family: Family, is_reasoning: bool) -> str:
    """Reasoning that may stand before the calls."""
    if family.is_harmony:
        begin, end = ("<|channel|>", "analysis", "<|message|>"), ("<|start|>", "assistant")
        return f"({rules.literal(*begin)} {rules.text_until('<|end|>')} {rules.literal(*end)})?"
    reasoning: Reasoning | None = family.reasoning
    if reasoning is None:
        return ""
    thought = f"{rules.text_until(*reasoning.ends)} SPACE"
    return thought if is_reasoning else f"({rules.tag(*reasoning.begins)} {thought})?"


# --- calls with arguments in JSON -----------------------------------------------------------------------


def _object(name_key: str = "name", arguments_key: str = "arguments") -> Write:
    def write(rules: _Rules, name: str, schema: Schema) -> str:
        head = f'{{"{name_key}": {json.dumps(name)}, "{arguments_key}": '
        return f"{rules.literal(head)} {rules.schema(schema)} {rules.literal('}')}"

    return write


def _named(
    before: tuple[str, ...], between: tuple[str, ...], after: tuple[str, ...] = (), number: bool = False
) -> Write:
    def write(rules: _Rules, name: str, schema: Schema) -> str:
        head = f"{rules.literal(*before, name)}{' ' + rules.literal(':') + ' DIGITS' if number else ''}"
        return f"{head} {rules.literal(*between)} {rules.schema(schema)} {rules.literal(*after)}"

    return write


# --- calls with tags ------------------------------------------------------------------------------------


def _required(schema: Schema) -> frozenset[str]:
    stated = schema.get("required") if isinstance(schema, Mapping) else None
    return frozenset(stated if isinstance(stated, list) else ())


def _tagged(before: str, after: str, key: tuple[str, str], end: str, line: str = "") -> Write:
    """Calls with a tag for each argument, whose values are bare text."""

    def value(rules: _Rules, schema: Schema) -> str:
        allowed = kinds(schema)
        if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
            options = [each if isinstance(each, str) else json.dumps(each) for each in schema["enum"]]
            return f"{rules.either([rules.literal(each) for each in options])} {rules.literal(line + end)}"
        if allowed and "string" not in allowed:
            return f"{rules.schema(schema)} {rules.literal(line + end)}"
        _check_keywords(schema)
        return rules.text_until(line + end)

    def write(rules: _Rules, name: str, schema: Schema) -> str:
        members = []
        for name_of, each in properties(schema).items():
            member = f"{rules.literal(key[0] + name_of + key[1] + line)} {value(rules, each)} {rules.literal(chr(10))}"
            members.append(f"({member})" + ("" if name_of in _required(schema) else "?"))
        return f"{rules.literal(before.format(name))} {' '.join(members)} {rules.literal(after)}"

    return write


# --- calls in the manner of Python ----------------------------------------------------------------------


def _check_keywords(schema: Schema) -> None:
    if not isinstance(schema, Mapping):
        return
    for keyword in schema:
        if keyword not in _KEPT:
            raise UnsupportedSchema(f"schema keyword {keyword} is not supported in the syntax of this model's calls")


@dataclass(frozen=True)
class _Values:
    """How values are written that are no JSON."""

    quote: str  # around strings; empty for strings as Python has them
    words: tuple[str, str, str]  # how true, false and null are written
    separator: str
    colon: str

    def value(self, rules: _Rules, schema: Schema) -> str:
        """Raises UnsupportedSchema."""
        _check_keywords(schema)
        if not isinstance(schema, Mapping) or not schema.keys() - _SAID:
            return self._anything(rules)
        if "enum" in schema or "const" in schema:
            return rules.either([self._constant(rules, each) for each in schema.get("enum", [schema.get("const")])])
        if "anyOf" in schema:
            return rules.either([self.value(rules, each) for each in schema["anyOf"]])
        return rules.either([self._of_kind(rules, schema, kind) for kind in sorted(kinds(schema))])

    def _of_kind(self, rules: _Rules, schema: Schema, kind: str) -> str:
        match kind:
            case "string":
                return self._string(rules)
            case "integer":
                return "INTEGER"
            case "number":
                return "NUMBER"
            case "boolean":
                return rules.rule(" | ".join(map(rules.literal, self.words[:2])))
            case "null":
                return rules.literal(self.words[2])
            case "array":
                item = self.value(rules, schema.get("items", {}))
                items = f"({item} ({rules.literal(self.separator)} {item})*)?"
                return rules.rule(f"{rules.literal('[')} {items} {rules.literal(']')}")
            case "object":
                found = properties(schema)
                if not found:
                    return self._any_object(rules)
                required = _required(schema)
                members = [
                    (f"{self._key(rules, key)} {self.value(rules, each)}", key in required)
                    for key, each in found.items()
                ]
                inner = rules.members(members, self.separator)
                return rules.rule(f"{rules.literal('{')} {inner} {rules.literal('}')}")
        raise UnsupportedSchema(f"schema type {kind} is not supported")

    def _key(self, rules: _Rules, key: str) -> str:
        if not self.quote:
            return f"{rules.either([rules.literal(json.dumps(key)), rules.literal(repr(key))])} {rules.literal(': ')}"
        if not _BARE_KEY.fullmatch(key):
            raise UnsupportedSchema(f"property {key!r} cannot be written in the syntax of this model's calls")
        return rules.literal(key + self.colon)

    def _string(self, rules: _Rules) -> str:
        return f"{rules.literal(self.quote)} {rules.text_until(self.quote)}" if self.quote else "STRING"

    def _constant(self, rules: _Rules, value: Any) -> str:
        if isinstance(value, str):
            if self.quote:
                return rules.literal(self.quote, value, self.quote)
            return rules.either([rules.literal(json.dumps(value)), rules.literal(repr(value))])
        if isinstance(value, (dict, list)):
            raise UnsupportedSchema("schema keyword enum with objects or lists is not supported")
        return rules.literal({True: self.words[0], False: self.words[1], None: self.words[2]}.get(value, str(value)))

    def _anything(self, rules: _Rules) -> str:
        plain = ["NUMBER", *map(rules.literal, self.words), self._string(rules)]
        inner = rules.rule(" | ".join(plain))
        members = f"({inner} ({rules.literal(self.separator)} {inner})*)?"
        listed = rules.rule(f"{rules.literal('[')} {members} {rules.literal(']')}")
        return rules.rule(f"{inner} | {listed} | {self._any_object(rules, inner, listed)}")

    def _any_object(self, rules: _Rules, *values: str) -> str:
        if not values:
            return self._any_object(rules, rules.rule(f"NUMBER | {self._string(rules)}"))
        key = f"STRING {rules.literal(': ')}" if not self.quote else f"/[A-Za-z_]\\w*/ {rules.literal(self.colon)}"
        member = f"{key} {rules.rule(' | '.join(values))}"
        return rules.rule(
            f"{rules.literal('{')} ({member} ({rules.literal(self.separator)} {member})*)? {rules.literal('}')}"
        )


_PYTHON = _Values("", ("True", "False", "None"), ", ", ": ")


def _python(rules: _Rules, name: str, schema: Schema) -> str:
    _check_keywords(schema)
    members = [
        (f"{rules.literal(key + '=')} {_PYTHON.value(rules, each)}", key in _required(schema))
        for key, each in properties(schema).items()
    ]
    for key in properties(schema):
        if not _BARE_KEY.fullmatch(key):
            raise UnsupportedSchema(f"property {key!r} cannot be written in the syntax of this model's calls")
    return f"{rules.literal(name + '(')} {rules.members(members, ', ')} {rules.literal(')')}"


def _braces(quote: str) -> Write:
    values = _Values(quote, ("true", "false", "null"), ",", ":")

    def write(rules: _Rules, name: str, schema: Schema) -> str:
        inner = values.value(rules, schema) if properties(schema) else rules.literal("{}")
        return f"{rules.literal('call:' + name)} {inner}"

    return write


# --- the families ---------------------------------------------------------------------------------------

_LIST: dict[str, Any] = {"between": (", ",)}
_HERMES = _Frame(_object(), opens=("<tool_call>", "\n"), closes=("\n", "</tool_call>"), between=("\n",))
_DEEPSEEK: dict[str, Any] = {
    "start": ("<｜tool▁calls▁begin｜>",),
    "opens": ("<｜tool▁call▁begin｜>",),
    "closes": ("<｜tool▁call▁end｜>",),
    "stop": ("<｜tool▁calls▁end｜>",),
}
FRAMES: dict[str, tuple[_Frame, ...]] = {
    "hermes": (_HERMES,),
    "granite": (_HERMES, _Frame(_object(), start=("<|tool_call|>", "["), stop=("]",), **_LIST)),
    "llama3_json": (_Frame(_object(arguments_key="parameters"), between=("; ",)),),
    "mistral": (
        _Frame(_object(), start=("[TOOL_CALLS]", " ["), stop=("]",), **_LIST),
        _Frame(_named((), ("[ARGS]",)), opens=("[TOOL_CALLS]",)),
    ),
    "cohere": (
        _Frame(
            _object("tool_name", "parameters"), start=("<|START_ACTION|>", "["), stop=("]", "<|END_ACTION|>"), **_LIST
        ),
    ),
    "hunyuan_a13b": (_Frame(_object(), start=("<tool_calls>", "["), stop=("]", "</tool_calls>"), **_LIST),),
    "phi4_mini_json": (
        _Frame(_object(), start=("<|tool_call|>", "["), stop=("]", "<|/tool_call|>"), **_LIST),
        _Frame(_object(), opens=("<|tool_call|>",), closes=("<|/tool_call|>",)),
    ),
    "deepseek_v3": (
        _Frame(_named(("function", "<｜tool▁sep｜>"), ("\n```json\n",), ("\n```",)), between=("\n",), **_DEEPSEEK),
        _Frame(_named((), ("<｜tool▁sep｜>",)), **_DEEPSEEK),
    ),
    "kimi_k2": (
        _Frame(
            _named(("functions.",), ("<|tool_call_argument_begin|>",), number=True),
            start=("<|tool_calls_section_begin|>",),
            opens=("<|tool_call_begin|>",),
            closes=("<|tool_call_end|>",),
            stop=("<|tool_calls_section_end|>",),
        ),
    ),
    "openai": (
        _Frame(
            _named(("<|channel|>", "commentary to=functions."), (" ", "<|constrain|>", "json", "<|message|>")),
            is_single=True,  # the token that ends a call ends the answer
        ),
    ),
    "qwen3_coder": (
        _Frame(
            _tagged("<function={}>\n", "</function>", ("<parameter=", ">"), "</parameter>", "\n"),
            opens=("<tool_call>", "\n"),
            closes=("\n", "</tool_call>"),
            between=("\n",),
        ),
    ),
    "seed_oss": (
        _Frame(
            _tagged("<function={}>\n", "</function>", ("<parameter=", ">"), "</parameter>"),
            opens=("<seed:tool_call>", "\n"),
            closes=("\n", "</seed:tool_call>"),
            between=("\n",),
        ),
    ),
    "minimax_m2": (
        _Frame(
            _tagged('<invoke name="{}">\n', "</invoke>\n", ('<parameter name="', '">'), "</parameter>"),
            start=("<minimax:tool_call>", "\n"),
            stop=("</minimax:tool_call>",),
        ),
    ),
    "glm45": (
        _Frame(
            _tagged("{}\n", "", ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>"),
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            between=("\n",),
        ),
    ),
    "pythonic": (_Frame(_python, start=("[",), stop=("]",), **_LIST),),
    "llama4_pythonic": (_Frame(_python, start=("<|python_start|>", "["), stop=("]", "<|python_end|>"), **_LIST),),
    "lfm2": (_Frame(_python, start=("<|tool_call_start|>", "["), stop=("]", "<|tool_call_end|>"), **_LIST),),
    "olmo3": (_Frame(_python, start=("<function_calls>", "\n"), between=("\n",), stop=("\n", "</function_calls>")),),
    "gemma3": (_Frame(_python, start=("```tool_code", "\n"), between=("\n",), stop=("\n```",)),),
    "gemma4": (_Frame(_braces('<|"|>'), opens=("<|tool_call>",), closes=("<tool_call|>",)),),
    "functiongemma": (_Frame(_braces("<escape>"), opens=("<start_function_call>",), closes=("<end_function_call>",)),),
}
