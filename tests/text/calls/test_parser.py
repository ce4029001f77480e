"""Answers are taken apart as they come, whatever is in them and however they are cut."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.text.calls.events import Arguments, CallBegin, CallEnd, Event, Text
from headway.text.calls.families import CALLS, REASONING, Family, family_of
from headway.text.calls.parser import AnswerParser
from tests.text.calls.written import EXACT, WRITTEN, as_json, tool_and_call

NUM_TOOLS = 200
SCHEMAS = {
    "get": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "o": {}}},
    "noop": None,
}


def joined(events: Iterable[Event]) -> list[Event]:
    """Events with neighbours of one kind made one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if (
            isinstance(event, Text)
            and isinstance(last, Text)
            and (event.kind, event.malformed)
            == (
                last.kind,
                last.malformed,
            )
        ):
            found[-1] = Text(event.kind, last.text + event.text, event.malformed)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            found[-1] = Arguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found


def parsed(family: Family, pieces: Iterable[str], tools: Any = SCHEMAS, **options: Any) -> list[Event]:
    parser = AnswerParser(family, tools, **options)
    events = []
    for piece in pieces:
        parser.push(piece)
        events += parser.take()
    parser.finish()
    return joined(events + parser.take())


def cut(text: str, dice: random.Random) -> list[str]:
    """The text in pieces of a few characters, as tokens are."""
    pieces = []
    while text:
        size = dice.choice((1, 1, 2, 3, 5, 9))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    """Name and arguments of each call, which must be complete."""
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [
        "".join(e.text for e in events if isinstance(e, Arguments) and e.index == i) for i in range(len(names))
    ]
    assert [e for e in events if isinstance(e, CallEnd)] == [CallEnd(index, True) for index in range(len(names))]
    return list(zip(names, arguments, strict=True))


def texts_of(events: list[Event], kind: str = "content") -> str:
    return "".join(event.text for event in events if isinstance(event, Text) and event.kind == kind)


@pytest.mark.parametrize("way", WRITTEN)
def test_calls_of_any_tool_come_back_as_they_were_written(way: str) -> None:
    parser, write = WRITTEN[way]
    for seed in range(NUM_TOOLS):
        dice = random.Random(seed)
        made = [tool_and_call(seed + NUM_TOOLS * number) for number in range(dice.choice((1, 1, 2, 3)))]
        tools, calls = (
            {tool["function"]["name"]: tool["function"]["parameters"] for tool, _ in made},
            [call for _, call in made],
        )
        text = write(calls)
        found = calls_of(parsed(family_of("", parser, "none"), cut(text, dice), tools))
        assert [name for name, _ in found] == [call.name for call in calls], text
        assert [json.loads(arguments) for _, arguments in found] == [call.arguments for call in calls], text
        if way in EXACT:
            assert [arguments for _, arguments in found] == [as_json(call.arguments) for call in calls]


CITY = '{"name": "get", "arguments": {"city": "Rome"}}'
CASES = {
    # name: parsers, text, content, reasoning, calls (an incomplete one ends with "...")
    "spaces around belong to the syntax": (
        ("hermes", "think"),
        f"\n<think>\n One. \n</think>\n\n Two. \n<tool_call>\n{CITY}\n</tool_call>\n",
        ("Two.", "One.", ['get {"city": "Rome"}']),
    ),
    "text between calls and behind": (
        ("hermes", "none"),
        f"A\n<tool_call>{CITY}</tool_call>\nB\n<tool_call>{CITY}</tool_call>\nC\n",
        ("A\nB\nC\n", "", ['get {"city": "Rome"}'] * 2),
    ),
    "a text that ends with spaces": (("hermes", "think"), " Two.\n\n", (" Two.\n\n", "", [])),
    "a tag in a text is no reasoning": (("hermes", "think"), "Use <think>.", ("Use <think>.", "", [])),
    "reasoning without an end": (("hermes", "think"), "<think>Hm.\n", ("", "Hm.", [])),
    "no name": (("hermes", "none"), '<tool_call>{"arguments": {}}</tool_call>', (None, "", [])),
    "nothing but a name": (("hermes", "none"), '<tool_call>{"name": "noop"}</tool_call>', ("", "", ["noop {}"])),
    "null for arguments": (
        ("hermes", "none"),
        '<tool_call>{"name": "noop", "arguments": null}</tool_call>',
        ("", "", ["noop {}"]),
    ),
    "arguments as a text": (
        ("hermes", "none"),
        '<tool_call>{"name": "get", "arguments": "{\\"city\\": 5}"}</tool_call>',
        ("", "", ['get {"city": 5}']),
    ),
    "a call within function": (
        ("hermes", "none"),
        f'<tool_call>{{"type": "function", "function": {CITY}}}</tool_call>',
        ("", "", ['get {"city": "Rome"}']),
    ),
    "no last bracket": (("hermes", "none"), f"<tool_call>{CITY[:-1]}</tool_call>", ("", "", ['get {"city": "Rome"}'])),
    "a bracket too many": (("hermes", "none"), f"<tool_call>{CITY}}}</tool_call>", ("}", "", ['get {"city": "Rome"}'])),
    "no end tag": (("hermes", "none"), f"<tool_call>{CITY}", ("", "", ['get {"city": "Rome"}'])),
    "cut off in the arguments": (("hermes", "none"), f"<tool_call>{CITY[:-5]}", ("", "", ['get {"city": "Ro...'])),
    "brackets that do not match": (
        ("hermes", "none"),
        '<tool_call>{"name": "get", "arguments": {"o": [1}}}</tool_call>',
        ("}}}</tool_call>", "", ['get {"o": [1...']),
    ),
    "JSON that is no call": (
        ("llama3_json", "none"),
        '{"name": "Bob", "age": 5}',
        ('{"name": "Bob", "age": 5}', "", []),
    ),
    "a list that is no call": (("pythonic", "none"), "[see](http://x)", ("[see](http://x)", "", [])),
    "arguments by position": (
        ("pythonic", "none"),
        "[get('Rome', 5, o=True)]",
        ("", "", ["get " + '{"city": "Rome", "n": 5, "o": true}']),
    ),
    "escapes of Python": (
        ("pythonic", "none"),
        r"""[get(city='\x41\u00e9\n\'\f\q\ud83d')]""",
        ("", "", ['get {"city": "A\\u00e9\\n\'\\f\\\\q\\ud83d"}']),
    ),
    "numbers of Python": (
        ("pythonic", "none"),
        "[get(n=1_000, o=[.5, 0x10, -3., 1.50])]",
        ("", "", ['get {"n": 1000, "o": [0.5, 16, -3.0, 1.50]}']),
    ),
    "no literal": (("pythonic", "none"), "[get(n=x)]", (")]", "", ['get {"n": ...'])),
    "types by the schema": (
        ("glm45", "none"),
        (
            "<tool_call>get<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>n</arg_key><arg_value>5</arg_value>"
            "<arg_key>o</arg_key><arg_value>{'a': None}</arg_value></tool_call>"
        ),
        ("", "", ['get {"city": "5", "n": 5, "o": "{\'a\': None}"}']),
    ),
    "a call ends the reasoning": (
        ("kimi_k2", "kimi_k2"),
        (
            "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.noop:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
        ("", "Hm.", ["noop {}"]),
    ),
    "messages of harmony": (
        ("openai", "openai"),
        (
            " to=functions.noop<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>analysis"
            "<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant"
            "<|channel|>commentary<|message|>Then <|end|><|start|>assistant<|channel|>final<|message|>done.<|return|>"
        ),
        ("Then done.", "One.\nTwo.", ["noop {}"]),
    ),
    "an answer in tags": (
        ("hunyuan_a13b", "hunyuan_a13b"),
        "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>",
        ("Yes.", "Hm.", []),
    ),
    "reasoning in words": (
        ("granite", "granite"),
        "Here is my thought process: Hm. Here is my response: Yes.",
        ("Yes.", "Hm.", []),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_of_an_answer(case: str) -> None:
    parsers, text, (content, reasoning, calls) = CASES[case]
    events = parsed(family_of("", *parsers), text)
    found, ends = [], [event for event in events if isinstance(event, CallEnd)]
    for end in ends:
        name = next(event.name for event in events if isinstance(event, CallBegin) and event.index == end.index)
        pieces = (event.text for event in events if isinstance(event, Arguments) and event.index == end.index)
        found.append(f"{name} {''.join(pieces)}" + ("" if end.complete else "..."))
    assert (texts_of(events), texts_of(events, "reasoning"), found) == (
        text if content is None else content,
        reasoning,
        calls,
    )


# --- whatever a model writes ---------------------------------------------------------------------------

_JSON_PARTS = ['{"name": "get", ', '"arguments": {', '"city": "a"', "}", "{", "[", "]", '"', "\\", ",", ":", "5", "get"]
_PARTS = [*_JSON_PARTS, "(", ")", "=", "'", "\n", " ", "```", "name", "to=functions.get", "call:get", "functions.get:0"]
FAMILIES = {name: family_of("", name, name if name in REASONING else "think") for name in CALLS}


# All families share what takes a text apart, so that each example is one for all of them.
FEWER = settings(max_examples=settings.default.max_examples // 3)


@st.composite
def answers(draw: st.DrawFn, family: Family) -> str:
    tags = [*family.tags, *(family.syntax.begins if family.syntax else ())] or ["<think>"]
    beginnings = [tag[: len(tag) // 2] for tag in tags]
    parts = st.one_of(st.sampled_from(tags), st.sampled_from(_PARTS + beginnings), st.text(max_size=4))
    written = st.sampled_from([write([tool_and_call(3)[1]]) for name, write in WRITTEN.values()])
    return "".join(draw(st.lists(st.one_of(parts, parts, parts, written), max_size=14)))


@pytest.mark.parametrize("name", FAMILIES)
@FEWER
@given(data=st.data(), has_tools=st.booleans(), is_reasoning=st.booleans())
def test_any_text_in_any_pieces_gives_the_same(
    name: str, data: st.DataObject, has_tools: bool, is_reasoning: bool
) -> None:
    family, tools = FAMILIES[name], SCHEMAS if has_tools else None
    text = data.draw(answers(family))
    whole = parsed(family, [text], tools, is_reasoning=is_reasoning)
    pieces = cut(text, data.draw(st.randoms(use_true_random=False)))
    assert parsed(family, pieces, tools, is_reasoning=is_reasoning) == whole
    assert parsed(family, text, tools, is_reasoning=is_reasoning) == whole
    begun = [event.index for event in whole if isinstance(event, CallBegin)]
    assert begun == [event.index for event in whole if isinstance(event, CallEnd)] == list(range(len(begun)))
    assert has_tools or not begun


@pytest.mark.parametrize("name", FAMILIES)
@given(text=st.text(st.characters(exclude_characters="<[`{", codec="utf-8"), max_size=60), dice=st.randoms())
def test_text_without_tags_comes_out_as_it_is(name: str, text: str, dice: random.Random) -> None:
    assume(not any(word in text for word in ("functools", "Action:", "Here", "to=")))
    assert parsed(FAMILIES[name], cut(text, dice)) == ([Text("content", text)] if text else [])


@pytest.mark.parametrize("name", FAMILIES)
def test_time_grows_with_the_length_alone(name: str) -> None:
    """Nothing of an answer is read again and again, whatever it waits for."""
    family = FAMILIES[name]
    begins = [*(family.syntax.begins if family.syntax else ()), ""]
    for begin in begins[:2]:
        for filler in (
            '{"a": "b',
            '{"arguments": {"x": "',
            "[" * 8,
            "<" * 8,
            "(" * 8,
            "\\" * 8,
            "   \n ",
            begin or "ab ",
        ):
            took = []
            for size in (2_000, 6_000):
                text = begin + filler * (size // len(filler) + 1)
                began = time.process_time()
                parsed(family, (text[at : at + 4] for at in range(0, len(text), 4)))
                took.append(time.process_time() - began)
            assert took[1] < 0.25 + 6 * took[0], (begin, filler, took)
