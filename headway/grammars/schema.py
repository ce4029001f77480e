"""Which JSON schemas can be kept to the letter. The others are refused, and the keyword at fault is named.

The library enforces what it compiles, but compiles some schemas to less than they say. `benchmarks.json_schemas` holds
the official test suite against this module.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# Keywords that cannot be enforced while a text grows, or that the library does not know.
NOT_KEPT = frozenset({
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties",
    "unevaluatedItems", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "$dynamicRef",
    "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "extends", "disallow", "divisibleBy", "x-guidance",
})  # fmt: skip
# Where schemas are within a schema: in a value, in each item of a list, in each value of an object.
_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = frozenset(f"{bound}{of}" for bound in ("min", "max") for of in ("Length", "Items", "Properties"))
# In old drafts, $ref says all: what stands beside it has no meaning, but may hold what is referred to.
_OLD_DRAFT, _BESIDE_REF = re.compile(r"draft-0[3467]"), ("$ref", "$schema", "$defs", "definitions")
MAX_DEPTH = 128  # the library's own


class UnsupportedSchema(ValueError):
    """A schema is no schema, or says what cannot be kept; one line for the user."""


def check_schema(schema: dict[str, Any], left_out: list[str] | None = None) -> dict[str, Any]:
    """The schema without keywords that say nothing.

    Args:
        left_out: keywords that cannot be kept are left out and added here, instead of refused.

    Raises:
        UnsupportedSchema: naming the keyword, and the place.
    """
    draft = schema.get("$schema")
    is_old = isinstance(draft, str) and _OLD_DRAFT.search(draft) is not None
    return _Check(left_out, is_old).schema(schema, "", 0)


@dataclass(frozen=True, slots=True)
class _Check:
    left_out: list[str] | None
    is_old: bool  # an old draft

    def schema(self, schema: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise UnsupportedSchema(f"the schema has more than {MAX_DEPTH} levels")
        if self.is_old and isinstance(schema.get("$ref"), str):
            schema = {name: schema[name] for name in _BESIDE_REF if name in schema}
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            if name == "uniqueItems" and value is False:
                continue
            reason = _reason(schema, name, value, path)
            if not reason:
                kept[name] = self._inner(name, value, f"{path}/{name}", depth)
            elif self.left_out is not None and name != "$ref":
                self.left_out.append(f"{path}/{name}")
            else:
                raise UnsupportedSchema(f"schema keyword {reason} (at {path or 'the root'})")
        return kept

    def _inner(self, name: str, value: Any, path: str, depth: int) -> Any:
        """The value of a keyword, with schemas in it checked."""
        if isinstance(value, dict) and name in _ONE:
            return self.schema(value, path, depth + 1)
        if isinstance(value, dict) and name in _MAPS:
            return {key: self._each(each, f"{path}/{key:.40}", depth) for key, each in value.items()}
        if isinstance(value, list) and name in _LISTS:
            return [self._each(each, f"{path}/{at}", depth) for at, each in enumerate(value)]
        if isinstance(value, float) and name in _COUNTS and value.is_integer():
            return int(value)
        return value

    def _each(self, value: Any, path: str, depth: int) -> Any:
        return self.schema(value, path, depth + 1) if isinstance(value, dict) else value


def _reason(schema: dict[str, Any], name: str, value: Any, path: str) -> str:
    """The keyword and why it cannot be kept; empty where it can."""
    if name in NOT_KEPT:
        return f"{name} is not supported"
    if name in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
        return f"{name} is {json.dumps(value)}, as in draft 4; it must be a number"
    if name == "$id" and path:
        return "$id is not supported below the root"
    if name == "$ref" and isinstance(value, str) and not value.startswith("#"):
        return f"$ref is {value[:60]!r}; only references within the schema (#...) are supported"
    if name == "minProperties" and isinstance(value, (int, float)) and value > max(1, _certain(schema)):
        return f"minProperties is {value}, more than the required properties; a name could come twice"
    return ""


def _certain(schema: dict[str, Any]) -> int:
    """How many different properties each object of the schema has by its own `required`."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return 0
    return len({name for name in required if isinstance(name, str) and name in properties})
