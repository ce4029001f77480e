"""What is asked of an output, as a grammar of llguidance, and what such grammars may cost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from headway.grammars.schema import check_schema
from headway.policy.step.structured_outputs import COMPILED, StructuredOutputs

# JSON texts have their blanks in one way, that of Python's json.dumps: what is not left open costs no step (see
# engine/grammars.py), and a model that has lost its way cannot write blanks until max_tokens.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # up to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,
)
_SHOWN = 300
# What the library says of a grammar, and what of that helps somebody who asked for it.
_OURS = (
    (r"NoExtension", "no text can satisfy it"),
    (r"Unknown format: (.*)", r"schema keyword format is '\1', which is not supported"),
    (r"oneOf constraints", "schema keyword oneOf is not supported where one value could be of two of its parts"),
    (
        r"patternProperty regexes (.*) are not disjoint",
        r"schema keyword patternProperties has \1, which may match the same name",
    ),
    (r"Resource '(.*?)' is not present", r"schema keyword $schema is '\1', which is not supported"),
)


class GrammarError(ValueError):
    """A grammar cannot be compiled or kept; one line for the user."""


def translated(asked: StructuredOutputs) -> tuple[StructuredOutputs, list[str]]:
    """The same in the library's own form, not compiled yet, and the keywords of a relaxed schema that were left out.

    Raises:
        GrammarError: it is no schema or grammar, or says what cannot be kept.
    """
    if asked.kind == COMPILED:
        return asked, []
    left_out: list[str] = []
    try:
        text = _of_schema(asked, left_out) if asked.kind == "json" else _TRANSLATIONS[asked.kind](asked.text)
        return StructuredOutputs(COMPILED, text), left_out
    except (ValueError, RecursionError) as error:
        many = isinstance(error, RecursionError) or str(error).startswith("recursion limit")
        raise GrammarError("it has too many levels" if many else str(error)) from None


def behind(before: str, answer: StructuredOutputs) -> StructuredOutputs:
    """A grammar in the library's form, after what a Lark grammar has before its `@answer`."""
    text = answer.text
    (first, *others) = json.loads(text)["grammars"] if text.lstrip().startswith("{") else [{"lark_grammar": text}]
    grammars = [{"lark_grammar": before}, {**first, "name": "answer"}, *others]
    return StructuredOutputs(COMPILED, json.dumps({"grammars": grammars}, ensure_ascii=False))


def matcher(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    """The state before the first token. The interpreter's lock is free meanwhile.

    Raises:
        GrammarError: the grammar is wrong or too large.
    """
    made = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if made.is_error():
        raise GrammarError(said(made))
    return made


def said(made: LLMatcher) -> str:
    """Why a matcher failed, as one line."""
    text = " ".join(made.get_error().replace("\0", "\\0").split()).removesuffix(" <non-verbose/>")
    for pattern, ours in _OURS:
        if found := re.match(pattern, text):
            text = found.expand(ours)
            break
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _of_schema(asked: StructuredOutputs, left_out: list[str]) -> str:
    try:
        schema = json.loads(asked.text)
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError(f"the schema is {json.dumps(schema)[:60]}; it must be an object")
    kept = check_schema(schema, left_out if asked.relaxed else None)
    return _of_json(json.dumps(kept, ensure_ascii=False), asked.relaxed)


def _of_json(schema: str, relaxed: bool = False) -> str:
    options: Any = {**SPACING, "lenient": relaxed}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _of_choices(text: str) -> str:
    choices: Sequence[str] = json.loads(text)
    return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))


def _of_grammar(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except RecursionError:
        raise
    except Exception as error:  # the library's converter raises bare exceptions
        raise GrammarError(f"the grammar is neither Lark nor GBNF: {error}"[:_SHOWN]) from None


_TRANSLATIONS: dict[str, Callable[[str], str]] = {
    "json_object": lambda text: _of_json('{"type": "object"}'),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _of_choices,
    "grammar": _of_grammar,
}
