"""Answers are taken apart as they come, whatever is in them and however they are cut."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import assume, given
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


FILLERS = ('{"a": "b', '{"arguments": {"x": "', "[" * 8, "<" * 8, "(" * 8, "\\" * 8, "   \n ")


# --- whatever a model writes ---------------------------------------------------------------------------

_JSON_PARTS = ['{"name": "get", ', '"arguments": {', '"city": "a"', "}", "{", "[", "]", '"', "\\", ",", ":", "5", "get"]
_PARTS = [*_JSON_PARTS, "(", ")", "=", "'", "\n", " ", "```", "name", "to=functions.get", "call:get", "functions.get:0"]
FAMILIES = {name: family_of("", name, name if name in REASONING else "think") for name in CALLS}


@st.composite
def answers(draw: st.DrawFn, family: Family) -> str:
    tags = [*family.tags, *(family.syntax.begins if family.syntax else ())] or ["<think>"]
    beginnings = [tag[: len(tag) // 2] for tag in tags]
    parts = st.one_of(st.sampled_from(tags), st.sampled_from(_PARTS + beginnings), st.text(max_size=4))
    written = st.sampled_from([write([tool_and_call(3)[1]]) for name, write in WRITTEN.values()])
    return "".join(draw(st.lists(st.one_of(parts, parts, parts, written), max_size=14)))


@pytest.mark.parametrize("name", FAMILIES)
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
            for size in (3_000, 9_000):
                text = begin + filler * (size // len(filler) + 1)
                began = time.process_time()
                parsed(family, (text[at : at + 4] for at in range(0, len(text), 4)))
                took.append(time.process_time() - began)
            assert took[1] < 0.25 + 6 * took[0], (begin, filler, took)
