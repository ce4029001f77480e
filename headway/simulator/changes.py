"""Changes of a simulated server and its scheduler, as --what-if and a file of a fleet have them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.changes import Change, applied, parse_changes
from headway.policy.step.options import SchedulingOptions
from headway.simulator.deployed import Deployed, ServerOptions, deploy

CHANGEABLE = (ServerOptions, SchedulingOptions)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A server with some flags changed."""

    text: str  # as it was given
    changes: tuple[Change, ...]

    def deploy(self, server: ServerOptions, scheduling: SchedulingOptions) -> Deployed:
        """Raises PlanError or another ValueError, one line that says of which change."""
        try:
            return deploy(*changed(server, scheduling, self.changes))
        except ValueError as error:
            raise ValueError(f"--what-if {self.text}: {error}") from None


def changed(
    server: ServerOptions, scheduling: SchedulingOptions, changes: Iterable[Change]
) -> tuple[ServerOptions, SchedulingOptions]:
    """The options with other values, which count as given."""
    changes = tuple(changes)
    return applied(server, changes), applied(scheduling, changes)


def parse_what_ifs(texts: list[str]) -> list[WhatIf]:
    """Parse texts like max-num-seqs=64 or hardware=H200,tensor-parallel-size=2. Raises ValueError with one line."""
    return [WhatIf(text, parse_changes(text, CHANGEABLE)) for text in texts]
