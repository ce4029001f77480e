"""Changed flags of a simulated server and its scheduler, as --what-if and a file of a fleet have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from headway.flags import Flag, flags_of, option, value_of
from headway.policy.step.options import SchedulingOptions
from headway.simulator.deployed import Deployed, ServerOptions, deploy

# Fields of ServerOptions and of SchedulingOptions with other values.
Changes = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A server with some flags changed.

    Args:
        text: as it was given.
    """

    text: str
    server: dict[str, Any]
    scheduling: dict[str, Any]

    def deploy(self, server: ServerOptions, scheduling: SchedulingOptions) -> Deployed:
        """Raises PlanError or another ValueError, one line that says of which change."""
        try:
            return deploy(*changed(server, scheduling, (self.server, self.scheduling)))
        except ValueError as error:
            raise ValueError(f"--what-if {self.text}: {error}") from None


def changed(
    server: ServerOptions, scheduling: SchedulingOptions, changes: Changes
) -> tuple[ServerOptions, SchedulingOptions]:
    """The options with other values, which count as given."""
    of_server, of_scheduling = changes
    given = server.given | of_server.keys() | of_scheduling.keys()
    return replace(server, **of_server, given=given), replace(scheduling, **of_scheduling)


def parse_what_ifs(texts: list[str]) -> list[WhatIf]:
    """Parse texts like max-num-seqs=64 or hardware=H200,tensor-parallel-size=2. Raises ValueError with one line."""
    return [WhatIf(text, *_changes(text)) for text in texts]


def _changes(text: str) -> Changes:
    found: Changes = {}, {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().removeprefix("--").replace("_", "-")
        of, field, changed = change(name, value.strip() if equals else None)
        found[of][field] = changed
    return found


def change(name: str, text: str | None) -> tuple[int, str, Any]:
    """Parse a changed flag into its owner (0: the server, 1: its scheduler), its field, and the field's value.

    Args:
        name: the flag without dashes, such as max-num-seqs.
        text: its value; None if none was given.

    Raises:
        ValueError: there is no such flag, or this is no value of it.
    """
    known = {flag: (of, field, hint, options) for of, flag, field, hint, options in _flags()}
    if text is None or name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near and near[0] != name else "write FLAG=VALUE, such as max-num-seqs=64"
        raise ValueError(f"{name!r} does not change a flag of the server; {hint}")
    of, field, kind, options = known[name]
    return of, field, value_of(f"--{name}", kind, options, text)


def _flags() -> Iterator[tuple[int, str, str, Any, Flag]]:
    """Flags of the server (0) and its scheduler (1): name on the command line, name of the field, type, flag."""
    for of, options in enumerate((ServerOptions, SchedulingOptions)):
        for field, hint, flag in flags_of(options):
            if flag is not None:
                yield of, option(field, flag).removeprefix("--"), field.name, hint, flag
