"""What a request's output has to be, beyond text: one plain value, whichever field of an API says it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_GRAMMAR_CHARS = 2**20
# Names that vLLM gives these kinds.
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
COMPILED = "llguidance"


class InvalidStructure(ValueError):
    """The value cannot be understood; `field` is the part at fault, empty for the whole."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the output has to be. Raises InvalidStructure: there is no such kind, or the text is too long."""

    # Json (a JSON schema), json_object, regex, choice, grammar (Lark or GBNF), or llguidance, which is what
    # headway.grammars makes of the others.
    kind: str
    # The schema as JSON, the expression, the choices as a JSON list, or the grammar; empty for json_object.
    text: str = ""
    relaxed: bool = False  # parts of a schema that cannot be kept are ignored

    def __post_init__(self) -> None:
        if self.kind not in (*_KINDS, COMPILED):
            raise InvalidStructure(f"there is no kind {self.kind!r:.60}; it must be one of {', '.join(_KINDS)}")
        # What it is compiled to may be longer.
        if len(self.text) > MAX_GRAMMAR_CHARS * (4 if self.kind == COMPILED else 1):
            raise InvalidStructure(
                f"{self.kind} has {len(self.text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed", self.kind
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StructuredOutputs:
        """Read vLLM's `structured_outputs`: json (text or object), json_object, regex, choice or grammar, one of them.

        Raises:
            InvalidStructure: nothing or several are given, a value has the wrong type, or a key is unknown.
        """
        for name, value in given.items():
            # vLLM's further options are taken while they are off; what it falls back on, nothing here does.
            if name not in (*_KINDS, "disable_fallback") and value not in (None, False):
                known = ", ".join(_KINDS)
                raise InvalidStructure(f"{name:.60} is not known; give one of {known}", name[:60])
        asked = [name for name in _KINDS if given.get(name) is not None and given[name] is not False]
        if len(asked) != 1:
            what = f"{' and '.join(asked)} are given together" if asked else "nothing is asked for"
            raise InvalidStructure(f"{what}; give one of {', '.join(_KINDS)}")
        kind, value = asked[0], given[asked[0]]
        check, form = _FORMS[kind]
        if not check(value):
            raise InvalidStructure(f"{kind} must be {form}", kind)
        if kind == "json_object":
            return cls(kind)
        return cls(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _are_choices(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(each, str) and each for each in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "json": (lambda value: isinstance(value, dict) or _is_text(value), "a JSON schema: an object, or its text"),
    "json_object": (lambda value: value is True, "true or false"),
    "regex": (_is_text, "a regular expression that is not empty"),
    "choice": (_are_choices, "a list of strings, none of them empty"),
    "grammar": (_is_text, "a grammar in Lark or GBNF that is not empty"),
}
