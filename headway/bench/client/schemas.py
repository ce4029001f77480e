"""How a JSON value breaks a schema, by the keywords that schemas of answers and of tools are made of.

A keyword that is not here is not looked at, so a value that passes may still break it.
"""

from __future__ import annotations

import math
import re
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_SIZES = {str: "Length", list: "Items", dict: "Properties"}


def misfit(value: Any, schema: Any, root: Any = None, at: str = "") -> str:
    """What is wrong with a value, and where in it; "" where nothing is.

    Args:
        root: the schema that `$ref` refers into; the schema itself unless given.
        at: where the value is, such as ".items[3]".
    """
    if not isinstance(schema, dict):
        return f"{at or 'the value'} is not allowed" if schema is False else ""
    root = schema if root is None else root
    if isinstance(name := schema.get("$ref"), str) and (wrong := misfit(value, _referred(name, root), root, at)):
        return wrong
    where = at or "the value"
    if "type" in schema and not any(_is(value, kind) for kind in _listed(schema["type"])):
        return f"{where} is no {' or '.join(map(str, _listed(schema['type'])))}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{where} is not {schema['const']!r}"
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return f"{where} is none of the enum"
    return _simple(value, schema, where) or _parts(value, schema, root, at) or _combined(value, schema, root, at)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return bool(kind == "boolean")
    if kind == "integer" and isinstance(value, float):
        return math.isfinite(value) and value == int(value)
    return isinstance(value, _KINDS.get(kind, ()))


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _referred(name: str, root: Any) -> Any:
    """The schema at a name such as #/$defs/item; one that allows all where it is elsewhere."""
    found = root
    for part in name.removeprefix("#").strip("/").split("/") if name.startswith("#") else ():
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part, {}) if isinstance(found, dict) and part else found
    return found if name.startswith("#") else {}


def _simple(value: Any, schema: dict[str, Any], where: str) -> str:
    """Bounds of numbers, sizes, and patterns."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        broken = [name for name, holds in _BOUNDS.items() if name in schema and not holds(value, schema[name])]
        return f"{where} breaks {broken[0]}" if broken else ""
    size = next((name for kind, name in _SIZES.items() if isinstance(value, kind)), None)
    if size and not schema.get(f"min{size}", 0) <= len(value) <= schema.get(f"max{size}", math.inf):
        return f"{where} breaks min{size} or max{size}"
    if isinstance(value, str) and "pattern" in schema and re.search(schema["pattern"], value) is None:
        return f"{where} breaks its pattern"
    return ""


def _parts(value: Any, schema: dict[str, Any], root: Any, at: str) -> str:
    """Items of a list, members of an object."""
    found: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        found = [
            (each, first[place] if place < len(first) else schema.get("items", True), f"{at}[{place}]")
            for place, each in enumerate(value)
        ]
    elif isinstance(value, dict):
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{at}.{missing[0]} is missing"
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties", {})
        for name, each in value.items():
            of_name = [patterns[pattern] for pattern in patterns if re.search(pattern, name)]
            of_name += [known[name]] if name in known else []
            found += [(each, of, f"{at}.{name}") for of in of_name or [others]]
    return next((wrong for each, of, place in found if (wrong := misfit(each, of, root, place))), "")


def _combined(value: Any, schema: dict[str, Any], root: Any, at: str) -> str:
    where = at or "the value"
    if wrong := next((wrong for each in schema.get("allOf", ()) if (wrong := misfit(value, each, root, at))), ""):
        return wrong
    for name, allowed in (("anyOf", math.inf), ("oneOf", 1)):
        if name in schema:
            fits = sum(not misfit(value, each, root, at) for each in schema[name])
            if not 1 <= fits <= allowed:
                return f"{where} breaks {name}"
    return ""
