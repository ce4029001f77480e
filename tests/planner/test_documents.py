"""docs/documents.md: what it says can be seen of the five documents can be seen."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest

from headway.planner import make
from tests.planner.command_line import CommandLine

PAGE = Path(__file__).parents[2] / "docs" / "documents.md"
RUN = ("plan", "simulate")


def rows() -> list[tuple[str, str, str]]:
    """Item, command (empty where there is none) and what to look for."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 4 and cells[0] != "section":
            found.append((cells[1], cells[2].strip("`"), cells[3]))
    return found


def is_run(command: str) -> bool:
    words = shlex.split(command)[1:]
    return bool(words) and words[0] in RUN and not {"MODEL", "DIR", "FILE", "URL"} & set(words)


def squeezed(text: str) -> str:
    return " ".join(text.split())


WANTED: defaultdict[str, list[str]] = defaultdict(list)
for _, command, shown in rows():
    if is_run(command):
        WANTED[command] += re.findall(r"`([^`]+)`", shown)


def test_every_row_has_something_to_look_for() -> None:
    assert len(rows()) > 90
    for item, command, shown in rows():
        assert re.findall("`[^`]+`" if is_run(command) else r"\]\([^)]+\)", shown), item


def test_what_it_says_is_printed(headway: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Half of the time of a plan, and no row is about it.
    monkeypatch.setattr(make, "_saturation_rate", lambda *asked: 10.0)
    missing = []
    for command, wanted in WANTED.items():
        ran = headway(*shlex.split(command)[1:], columns=240)
        assert ran.code == 0, f"{command}: {ran.err or ran.out}"
        missing += [f"{command}: {each}" for each in wanted if each not in squeezed(ran.out)]
    assert not missing, "\n".join(missing)


def test_other_commands_have_these_options(headway: CommandLine) -> None:
    named: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for _, command, _ in rows():
        if command and not is_run(command):
            program, *words = shlex.split(command)
            assert program == "headway"
            path = tuple(
                words[: 2 if words[:1] == ["bench"] and words[1] in ("mock", "pareto", "profile", "quality") else 1]
            )
            named[path] |= {word for word in words if word.startswith("--")}
    for path, flags in named.items():
        known = set(re.findall(r"--[\w-]+", headway(*path, "--help-all" if flags else "--help").out))
        assert flags <= known, f"headway {' '.join(path)}"
