"""The playbook, which playbook.toml has: levers on latency and throughput, what shows that one is due, what to do then.

The levers are those of document 003 (steps of its chapter 11, pitfalls of chapter 14, boxes of chapter 15) and of
document 004, and what a machine without a GPU adds. `pitfalls` finds which are due on a running server.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.changes import Change, parse_change
from headway.engine.config import EngineConfig
from headway.flags import Needs
from headway.server.settings import ServerSettings

SERVE = (ServerSettings, EngineConfig)
ANY = "any"


@dataclass(frozen=True, slots=True)
class Lever:
    """One lever."""

    key: str
    title: str  # what is wrong where the lever is due
    parts: tuple[str, ...]  # which steps, pitfalls, boxes (of document 003) and levers (of document 004) it covers
    signal: str  # the measured signal that says so
    verify: str  # how to see that it helped
    # Flags to start a server with, by its kind; {names} are filled in by the diagnosis.
    remedy: Mapping[str, str] = field(default_factory=dict)
    # What to do beside or instead, by the kind of server or for `any`.
    advice: Mapping[str, str] = field(default_factory=dict)
    planned: str = ""  # the kind of `headway plan levers` that predicts the gain before anything runs; empty for none

    def changes(self, kind: str, values: Mapping[str, object]) -> tuple[Change, ...]:
        """The flags that a server of this kind is to be started with. Those of Headway are checked as if typed."""
        words = shlex.split(self.remedy.get(kind, "").format_map(values))
        found = []
        while words:
            flag = words.pop(0)
            value = words.pop(0) if words and not words[0].startswith("--") else None
            found.append(_change(kind, flag, value))
        return tuple(found)

    def advised(self, kind: str) -> str:
        """What to do beside the flags; empty where nothing is known."""
        return self.advice.get(kind, self.advice.get(ANY, ""))


def _change(kind: str, flag: str, value: str | None) -> Change:
    if kind == "headway":
        denied = value is None and flag.startswith("--no-")
        name = f"--{flag.removeprefix('--no-')}" if denied else flag
        return parse_change(name, value or ("false" if denied else "true"), SERVE)
    return Change(flag.lstrip("-").replace("-", "_"), value, " ".join(filter(None, (flag, value))), kind, Needs.RESTART)


_BENCH = "headway bench with the same load before and after, then headway bench --compare"


def _lever(key: str, said: dict[str, Any]) -> Lever:
    said |= {"parts": tuple(said["parts"]), "verify": said["verify"].replace("{bench}", _BENCH)}
    return Lever(key, **said)


_TEXT = Path(__file__).with_name("playbook.toml").read_text(encoding="utf-8")
LEVERS = tuple(_lever(key, said) for key, said in tomllib.loads(_TEXT).items())
BY_KEY: dict[str, Lever] = {each.key: each for each in LEVERS}
