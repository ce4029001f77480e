"""Grammars of calls, as llguidance reads them: what keeps the tools' schemas is accepted, and nothing else."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headway.grammars.compile import behind, translated
from headway.policy.step.structured_outputs import StructuredOutputs
from headway.text.calls.families import CALLS, CallFamily, family_of
from headway.text.calls.grammar import FRAMES, UnsupportedSchema, before_answer, grammar_for
from headway.text.calls.parser import AnswerParser
from headway.text.calls.scanner import _pattern
from tests.text.calls.written import EXACT, WRITTEN, Call, tool_and_call

# Ways of writing calls that grammars do not lead to.
OTHERS = {
    "arguments first",
    "ernie",
    "llama 3, python tag",
    "mistral, ids",
    "command r",
    "hunyuan, names",
    "phi 4 mini, functools",
    "lfm2, objects",
    "qwen3 coder, no tag",
}
WAYS = [way for way in WRITTEN if way not in OTHERS]


class _Bytes:
    """A vocabulary of all bytes, and of special tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in special] + [b"<eos>"]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = self.unk_token_id = None

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


class Vocabulary:
    """Knows which texts are special tokens, and checks answers against a grammar."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.ids = {text: 256 + number for number, text in enumerate(special)}
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(special)))

    def tokens(self, text: str) -> list[int]:
        if not self.ids:
            return list(text.encode())
        found: list[int] = []
        at = 0
        for match in _pattern(tuple(self.ids)).finditer(text):
            found += [*text[at : match.start()].encode(), self.ids[match.group()]]
            at = match.end()
        return found + list(text[at:].encode())

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        return matcher

    def compiled(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, matcher: LLMatcher, text: str) -> bool:
        matcher.reset()
        ids = self.tokens(text)
        if matcher.validate_tokens(ids) < len(ids):
            return False
        matcher.consume_tokens(ids)
        return bool(matcher.is_accepting())


def special_tags(family: CallFamily) -> list[str]:
    """The tags that look like tokens of their own."""
    tags = family_of("", next(name for name, each in CALLS.items() if each is family), "none").tags
    return [tag for tag in dict.fromkeys(tags) if tag[:2] in ("<|", "<｜", "[T", "[A") or tag.endswith("|>")]


def spoilt(call: Call, tool: Any, dice: random.Random) -> Call:
    """The call with one thing wrong."""
    schema = tool["function"]["parameters"]
    call = copy.deepcopy(call)
    given = [key for key in schema["required"] if key in call.arguments]
    strict = [key for key, each in schema["properties"].items() if each.get("type") in ("integer", "boolean")]
    options = ["name", *(["missing"] if given else []), *(["type"] if strict else [])]
    match dice.choice(options):
        case "name":
            call.name += "x"
        case "missing":
            del call.arguments[dice.choice(given)]
        case "type":
            key = dice.choice(strict)
            call.arguments = {name: "x y" if name == key else each for name, each in call.arguments.items()}
            call.arguments.setdefault(key, "x y")
    return call


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_valid_calls_are_accepted_and_others_are_not(way: str, is_special: bool) -> None:
    parser, write = WRITTEN[way]
    family = family_of("", parser, "none")
    assert family.calls is not None
    vocabulary = Vocabulary(special_tags(family.calls) if is_special else ())
    for seed in range(0, 200, 16):
        dice = random.Random(seed)
        made = [tool_and_call(seed), tool_and_call(seed + 1000)]
        tools, calls = [tool for tool, _ in made], [call for _, call in made]
        matcher = vocabulary.matcher(grammar_for(family, tools, token_ids=vocabulary.ids))
        several = [] if parser == "openai" else [calls, calls[::-1]]
        for right in (calls[:1], calls[1:], *several):
            text = write(right).removesuffix("<|call|>")
            assert vocabulary.accepts(matcher, text), text
        for wrong in (write([spoilt(calls[0], tools[0], dice)]), write(calls[:1]) + "x", "Hello", ""):
            assert not vocabulary.accepts(matcher, wrong), wrong
        single = vocabulary.matcher(grammar_for(family, tools, parallel=False, token_ids=vocabulary.ids))
        assert not vocabulary.accepts(single, write(calls).removesuffix("<|call|>"))
        choice = {"type": "function", "function": {"name": calls[1].name}}
        named = vocabulary.matcher(grammar_for(family, tools, choice, token_ids=vocabulary.ids))
        assert vocabulary.accepts(named, write(calls[1:]).removesuffix("<|call|>"))
        assert calls[0].name == calls[1].name or not vocabulary.accepts(named, write(calls[:1]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_calls_amid_text_are_valid_or_not_there(way: str, is_special: bool) -> None:
    parser, write = WRITTEN[way]
    family = family_of("", parser, "none")
    assert family.calls is not None
    vocabulary = Vocabulary(special_tags(family.calls) if is_special else ())
    is_bare = family.syntax is not None and bool(family.syntax.bare)
    final, told = "", "Let me see. <x> 1 < 2\n"
    if parser == "openai":
        final, told = "<|channel|>final<|message|>", f"<|channel|>commentary<|message|>{told}<|end|><|start|>assistant"
    for seed in range(0, 200, 32):
        made = [tool_and_call(seed), tool_and_call(seed + 1000)]
        tools, calls = [tool for tool, _ in made], [call for _, call in made]
        matcher = vocabulary.matcher(grammar_for(family, tools, "auto", token_ids=vocabulary.ids))
        wrong = write([spoilt(calls[0], tools[0], random.Random(seed))]).removesuffix("<|call|>")
        right = write(calls[:1]).removesuffix("<|call|>")
        for before in ("",) if is_bare else ("", told):
            assert vocabulary.accepts(matcher, before + right), before + right
            assert not vocabulary.accepts(matcher, before + wrong), before + wrong
            assert not vocabulary.accepts(matcher, before + right[:-1]), right
        for text in ("Hello < you, [1] {x}\n<tool", "" if not final else "x"):
            assert vocabulary.accepts(matcher, final + text)
        if parser != "openai":
            assert vocabulary.accepts(matcher, write(calls))
            single = vocabulary.matcher(grammar_for(family, tools, "auto", parallel=False, token_ids=vocabulary.ids))
            assert not vocabulary.accepts(single, write(calls)) and vocabulary.accepts(single, right)


def test_thoughts_before_text_are_free() -> None:
    tool, call = tool_and_call(1)
    text, family = WRITTEN["hermes"][1]([call]), family_of("", "hermes", "think")
    for special in ((), ("<think>", "</think>", "<tool_call>", "</tool_call>")):
        vocabulary = Vocabulary(special)
        free, begun = (
            vocabulary.matcher(grammar_for(family, [tool], "auto", is_reasoning=begun, token_ids=vocabulary.ids))
            for begun in (False, True)
        )
        thought = "I could write a tool_call.\n" if special else "I could write <tool_call> here.\n"
        assert vocabulary.accepts(free, f"<think>{thought}</think>\n\nHm. {text}")
        assert vocabulary.accepts(begun, f"{thought}</think>Hm. {text}")
        assert not vocabulary.accepts(begun, f"{thought}</think>Hm. {text.replace('arguments', 'args')}")


def test_every_family_has_a_grammar() -> None:
    """Also of schemas as the server gives them, which say how the library is to write them."""
    assert FRAMES.keys() == CALLS.keys()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "x-guidance": {"lenient": True}}
    for parser, choice in itertools.product(CALLS, ("required", "auto")):
        function = {"name": "f", "parameters": schema}
        Vocabulary().matcher(grammar_for(family_of("", parser), [{"type": "function", "function": function}], choice))
    assert {WRITTEN[way][0].replace("deepseek_v31", "deepseek_v3") for way in WAYS} == CALLS.keys()


@pytest.mark.covering(1)
@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_grammar_leads_to_is_a_call(way: str, choice: str) -> None:
    """Answers that follow the grammar by chance parse into calls of the tools."""
    family = family_of("", WRITTEN[way][0], "none")
    vocabulary, reached = Vocabulary(), 0
    assert family.calls is not None
    lead = next(FRAMES[name][0].lead for name, each in CALLS.items() if each is family.calls)
    lead = lead or ("<|channel|>commentary to=" if family.is_harmony else "{")
    begins = list(lead.encode()) if choice == "auto" else []  # it would not come by chance
    for seed in range(4):
        dice = random.Random(seed)
        tool, _ = tool_and_call(seed)
        matcher = vocabulary.matcher(grammar_for(family, [tool], choice, parallel=False))
        matcher.consume_tokens(begins)
        said = bytearray(begins)
        while not matcher.is_stopped() and len(said) < 3000:
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
            if matcher.is_accepting() and (not allowed or dice.random() < 0.5):
                break
            # Ends of texts and numbers are likely, so that there is an end.
            likely = [byte for byte in allowed if byte in b'<"}])\n,|/>'] if dice.random() < 0.8 else []
            byte = dice.choice([each for each in likely or allowed if each < 128] or allowed)
            matcher.consume_token(byte)
            said.append(byte)
        if not matcher.is_accepting():
            continue
        reached += 1
        answer = AnswerParser(family, {tool["function"]["name"]: tool["function"]["parameters"]})
        answer.push(said.decode(errors="replace"))
        answer.finish()
        assert answer.outcome == (1, 0, 0), said
    assert reached


def test_reasoning_may_stand_before_calls() -> None:
    tool, call = tool_and_call(1)
    text = WRITTEN["hermes"][1]([call])
    vocabulary = Vocabulary()
    family = family_of("", "hermes", "think")
    free = vocabulary.matcher(grammar_for(family, [tool]))
    begun = vocabulary.matcher(grammar_for(family, [tool], is_reasoning=True))
    assert vocabulary.accepts(free, text) and vocabulary.accepts(free, f"<think>\nHm.\n</think>\n\n{text}")
    assert vocabulary.accepts(begun, f"Hm.</think>{text}") and not vocabulary.accepts(begun, text)
    harmony = EXACT["harmony"][1]([call]).removesuffix("<|call|>")
    for special in ((), ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")):
        vocabulary = Vocabulary(special)
        matcher = vocabulary.matcher(grammar_for(family_of("", "openai"), [tool], token_ids=vocabulary.ids))
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        assert vocabulary.accepts(matcher, harmony) and vocabulary.accepts(matcher, thought + harmony)


@pytest.mark.parametrize("parser", ["pythonic", "gemma4", "qwen3_coder"])
def test_a_schema_that_cannot_be_kept_is_refused_by_its_keyword(parser: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(UnsupportedSchema, match="tool f: schema keyword pattern"):
        grammar_for(family_of("", parser), [tool])


@pytest.mark.parametrize("is_special", [False, True])
def test_answers_that_are_held_to_something_else_may_be_thought_about(is_special: bool) -> None:
    schema = StructuredOutputs("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    for parser, thought in (("qwen3", "<think>\nHm {.\n</think>\n\n"), ("none", "")):
        family = family_of("", "none", parser)
        vocabulary = Vocabulary(("<think>", "</think>") if is_special else ())
        for answer, text in ((schema, '{"a": 3}'), (StructuredOutputs("regex", "ab+"), "abb")):
            held, _ = translated(answer)
            before = before_answer(family, False, vocabulary.ids)
            assert bool(before) == (parser == "qwen3")
            matcher = vocabulary.compiled(behind(before, held).text if before else held.text)
            assert vocabulary.accepts(matcher, text) and not vocabulary.accepts(matcher, f"so {text}")
            if thought:
                assert vocabulary.accepts(matcher, thought + text) and not vocabulary.accepts(matcher, thought)
                begun = vocabulary.compiled(behind(before_answer(family, True, vocabulary.ids), held).text)
                assert vocabulary.accepts(begun, thought.removeprefix("<think>") + text)
                assert not vocabulary.accepts(begun, text)
    harmony = before_answer(family_of("", "openai"), False, {})
    matcher = Vocabulary().compiled(behind(harmony, translated(schema)[0]).text)
    assert Vocabulary().accepts(matcher, '<|channel|>final<|message|>{"a": 3}')
    assert not Vocabulary().accepts(matcher, '{"a": 3}')
