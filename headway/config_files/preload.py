"""The file that says which prompts are computed before the server is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.config_files.toml import line_of, parse, read_text
from headway.policy.objectives.service_class import A_STRING, InvalidEntry, check_entry, within

_KEYS = ("name", "system", "text", "cache_salt")


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """What prompts begin with."""

    name: str
    where: str  # file and line
    system: str = ""  # the system message of chats
    text: str = ""  # the first words of completions. Either this or `system` is there.
    cache_salt: str = ""


def read_preload_file(path: str) -> list[NamedPrompt]:
    """Read and check the file.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    text = read_text(path)
    entries = parse(path, text, ("prompt",), _entries)
    wheres = (f"{path}, line {line_of(text, 'prompt', number)}" for number in range(len(entries)))
    return [NamedPrompt(where=where, **entry) for where, entry in zip(wheres, entries, strict=True)]


def _entries(content: dict[str, Any]) -> list[dict[str, str]]:
    entries = content.get("prompt", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidEntry("there are no prompts; write [[prompt]] once for each", "prompt")
    names: list[str] = []
    for number, entry in enumerate(entries):
        with within("prompt", number):
            check_entry(entry, "a prompt", dict.fromkeys(_KEYS, A_STRING))
        if not entry.get("name"):
            raise InvalidEntry('a prompt has no name; write name = "..."', "prompt", number)
        if entry["name"] in names:
            raise InvalidEntry(
                f"two prompts are named {entry['name']!r}; give each its own name", "prompt", number, "name"
            )
        names.append(entry["name"])
        if bool(entry.get("system")) == bool(entry.get("text")):
            raise InvalidEntry(f"prompt {entry['name']!r} needs either system or text", "prompt", number)
    return entries
