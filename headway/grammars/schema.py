"""Which JSON schemas can be kept to the letter. The others are refused, and the keyword at fault is named.

The library enforces what it compiles, but compiles some schemas to less than they say. `tests/grammars` holds the list
of keywords of draft 2020-12 against this module.
"""

from __future__ import annotations

import json
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
    return _checked(schema, "", left_out, 0)


def _checked(schema: dict[str, Any], path: str, left_out: list[str] | None, depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise UnsupportedSchema(f"the schema has more than {MAX_DEPTH} levels")
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "uniqueItems" and value is False:
            continue
        reason = _reason(schema, name, value, path)
        if not reason:
            kept[name] = _inner(name, value, f"{path}/{name}", left_out, depth)
        elif left_out is not None and name != "$ref":
            left_out.append(f"{path}/{name}")
        else:
            raise UnsupportedSchema(f"schema keyword {reason} (at {path or 'the root'})")
    return kept


def _inner(name: str, value: Any, path: str, left_out: list[str] | None, depth: int) -> Any:
    """The value of a keyword, with schemas in it checked."""
    if isinstance(value, dict) and name in _ONE:
        return _checked(value, path, left_out, depth + 1)
    if isinstance(value, dict) and name in _MAPS:
        return {
            key: _checked(each, f"{path}/{key:.40}", left_out, depth + 1) if isinstance(each, dict) else each
            for key, each in value.items()
        }
    if isinstance(value, list) and name in _LISTS:
        return [
            _checked(each, f"{path}/{at}", left_out, depth + 1) if isinstance(each, dict) else each
            for at, each in enumerate(value)
        ]
    return value


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
