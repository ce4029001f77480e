"""The file that says which servers a simulated fleet has, and which of them fail."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from headway.changes import Change, parse_change
from headway.config_files.toml import check_keys, number, parse, read_text, whole_number
from headway.policy.objectives.service_class import InvalidEntry, entries_of, within
from headway.simulator.changes import CHANGEABLE
from headway.simulator.fleet import ROLES, Failure
from headway.simulator.members import Kind

_FILE_KEYS = ("replica", "failure", "random_failures")
_KIND_KEYS = ("count", "role", "weight", "price_per_hour")
_SHARED = ("model", "service-classes", "tenants")  # shared by all servers of a fleet
MOST_REPLICAS = 10_000


@dataclass(frozen=True, slots=True)
class FleetFile:
    """The contents of a file of a fleet."""

    kinds: tuple[Kind, ...]
    # In order of time: replica, when, and for how long it is down, in seconds.
    failures: tuple[tuple[int, float, float], ...] = ()
    # every_s, down_s: mean time between failures of a replica, and until it is started again; both exponential. None
    # for no random failures.
    every_s: float | None = None
    down_s: float = 0.0
    path: str = field(default="", compare=False)

    @property
    def count(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def failures_of(self, began_ns: int, startup_s: float, seed: int) -> Iterator[Failure]:
        """The failures in a run, in order of time. They do not end if there are random ones."""
        said = iter(self.failures)
        drawn = [self._random(replica, seed) for replica in range(self.count)] if self.every_s is not None else []
        for at_s, replica, down_s in heapq.merge(((at, replica, down) for replica, at, down in said), *drawn):
            at_ns = began_ns + round(at_s * 1e9)
            yield Failure(at_ns, replica, at_ns + round((down_s + startup_s) * 1e9))

    def _random(self, replica: int, seed: int) -> Iterator[tuple[float, int, float]]:
        rng, at_s = Random(f"{seed} {replica}"), 0.0
        assert self.every_s is not None
        while True:
            at_s += rng.expovariate(1 / self.every_s)
            down_s = rng.expovariate(1 / self.down_s) if self.down_s else 0.0
            yield at_s, replica, down_s
            at_s += down_s


def read_fleet_file(path: str) -> FleetFile:
    """Read and check the file.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    return parse(path, read_text(path), _FILE_KEYS, partial(_file_of, path))


def _file_of(path: str, content: Mapping[str, Any]) -> FleetFile:
    kinds = tuple(entries_of(content, "replica", _kind))
    if not kinds:
        raise InvalidEntry("there are no replicas; write [[replica]] once for each kind", "replica")
    roles = {kind.role for kind in kinds}
    if roles != {""} and roles != set(ROLES):
        raise InvalidEntry("some replicas have a role; give all of them one, and each role to some", "replica", 0)
    count = sum(kind.count for kind in kinds)
    failures = entries_of(content, "failure", partial(_failure, count))
    random = content.get("random_failures", {})
    if not isinstance(random, dict):
        raise InvalidEntry("random_failures must be a table; write [random_failures]", "random_failures")
    with within("random_failures"):
        check_keys(random, ("every_s", "down_s"), "random_failures")
        every_s = number(random, "every_s", 1e-3) if random else None
        down_s = number(random, "down_s", 0.0) if random else 0.0
    return FleetFile(kinds, tuple(sorted(failures, key=lambda each: each[1])), every_s, down_s, path)


def _kind(entry: dict[str, Any]) -> Kind:
    changes: list[Change] = []
    for key, value in entry.items():
        if key in _KIND_KEYS:
            continue
        name = key.replace("_", "-")
        if name in _SHARED:
            raise InvalidEntry(f"{key} is the same for all servers of a fleet; give --{name}", key)
        if not isinstance(value, str | int | float):
            raise InvalidEntry(f"{key} is {value!r}; write a number, true, false or a string", key)
        try:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            changes.append(parse_change(name, text, CHANGEABLE))
        except ValueError as error:
            raise InvalidEntry(str(error), key) from None
    role = entry.get("role", "")
    if role not in ("", *ROLES):
        raise InvalidEntry(f"role is {role!r}; choose one of {', '.join(ROLES)}, or leave it out", "role")
    return Kind(
        whole_number(entry, "count", 1, MOST_REPLICAS) if "count" in entry else 1,
        tuple(changes),
        role,
        number(entry, "weight", 1e-6) if "weight" in entry else None,
        number(entry, "price_per_hour", 0.0) if "price_per_hour" in entry else None,
    )


def _failure(count: int, entry: dict[str, Any]) -> tuple[int, float, float]:
    check_keys(entry, ("replica", "at_s", "down_s"), "a failure")
    return whole_number(entry, "replica", 0, count - 1), number(entry, "at_s", 0.0), number(entry, "down_s", 0.0)
