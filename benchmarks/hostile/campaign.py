"""Servers as attacks need them, and all attacks on them."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.hostile.bodies import of_bodies
from benchmarks.hostile.endings import STOPPED, TOO_LARGE, ended, endings, hung, too_large_a_file
from benchmarks.hostile.floods import of_crowds, of_floods, of_queries, of_templates, of_uploads
from benchmarks.hostile.messages import PLAIN, Attack
from benchmarks.hostile.requests import of_headers, of_protocol
from benchmarks.hostile.victim import NotStarted, Row, Victim, attacked
from benchmarks.processes import ROOT

# A server that has grown so much is replaced, so that no attack hides in memory that another one has taken.
_GROWN_MB = 150.0


def all_attacks() -> list[Attack]:
    groups = (of_bodies, of_headers, of_protocol, of_floods, of_crowds, of_queries, of_uploads, of_templates)
    return [attack for group in groups for attack in group()]


class Campaign:
    """Servers as attacks need them: one is kept as long as it holds. With `by_gateway`, a gateway in front of each."""

    def __init__(self, checkout: Path, folder: Path, by_gateway: bool = False) -> None:
        self._checkout, self._folder, self._by_gateway = checkout, folder, by_gateway
        self._victim: Victim | None = None
        self._template = ""

    def victim(self, template: str) -> Victim:
        if self._victim is not None and self._template != template:
            self.drop()
        if self._victim is None:
            self._victim = Victim(template, self._checkout, self._folder, self._by_gateway)
            self._template = template
        return self._victim

    def drop(self) -> None:
        if self._victim is not None:
            self._victim.end()
            self._victim = None

    def run(self, attacks: list[Attack], wanted: Callable[[str, str], bool]) -> Iterator[Row]:
        """A row for each attack whose name and group are wanted, those on the same kind of server together."""
        for attack in sorted(attacks, key=lambda attack: attack.server):
            if not wanted(attack.name, attack.group):
                continue
            try:
                victim = self.victim(attack.server)
            except NotStarted as error:
                said = str(error).strip()
                refused = said.count("\n") == 0 and said.startswith("headway") and attack.server != PLAIN
                yield Row(
                    attack.name, attack.group, wrong=[] if refused else [f"the server did not start: {said[-80:]}"]
                )
                continue
            row = attacked(victim, attack)
            is_lost = any(each.startswith("the server") for each in row.wrong)
            if is_lost or victim.watch.memory_mb() > victim.normal.memory_mb + _GROWN_MB:
                self.drop()
            yield row
        if self._by_gateway:
            return  # how it ends, and long files, is the server's alone
        for ending in endings():
            if wanted(ending.name, "ending"):
                yield ended(self.victim(ending.server), ending)
                self.drop()
        for name, group, case in ((STOPPED, "ending", hung), (TOO_LARGE, "uploads", too_large_a_file)):
            if wanted(name, group):
                yield case(self.victim(PLAIN))
                self.drop()


@contextmanager
def campaign(checkout: Path = ROOT, by_gateway: bool = False) -> Iterator[Campaign]:
    """Raises the limit of open files, as far as it goes: thousands of connections are open at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        running = Campaign(checkout, Path(folder), by_gateway)
        try:
            yield running
        finally:
            running.drop()
