"""The adapters that are served by name, as an operator gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter by the name that requests use, and its folder."""

    name: str
    path: str


def lora_modules(given: list[Any]) -> list[LoraModule]:
    """Adapters from NAME=PATH, or vLLM's JSON: {"name": NAME, "path": PATH}, also as dicts or LoraModules.

    Raises:
        ValueError: one is neither, or two have one name.
    """
    found = [each if isinstance(each, LoraModule) else _module(each) for each in given]
    for module in found:
        if sum(each.name == module.name for each in found) > 1:
            raise ValueError(f"{module.name!r} is given twice; give each adapter a name of its own")
    return found


def _module(given: Any) -> LoraModule:
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise ValueError(f"{given[:200]!r} is no adapter; write NAME=PATH")
        return LoraModule(name, path)
    try:
        fields = msgspec.json.decode(given) if isinstance(given, str) else given
        name, path = fields["name"], fields["path"]
        known = isinstance(name, str) and isinstance(path, str) and name and path
        unknown = set(fields) - {"name", "path", "base_model_name"}
    except (msgspec.DecodeError, KeyError, TypeError):
        known, unknown = False, set()
    if not known or unknown:
        raise ValueError(f'{str(given)[:200]} is no adapter; write {{"name": NAME, "path": PATH}}')
    return LoraModule(name, path)
