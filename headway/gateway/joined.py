"""One ledger across the hop: the gateway's phases, the network's, and those that a backend tells of itself.

Both ends measure durations, each by its own clock, so their clocks need not agree. What passes between sending a
request and having the answer, and is not in the backend's account, was spent on the network and in kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from headway.gateway.member import clock
from headway.policy.step.ledger import Phase

_PHASES = (Phase.RECEIVE, Phase.ROUTE, Phase.BACKEND, Phase.NETWORK, Phase.SEND)
_RECEIVE, _ROUTE, _BACKEND, _NETWORK, _SEND = map(str, _PHASES)


class Timings(msgspec.Struct):
    """What is read of a backend's `timings`."""

    e2e_ns: int
    ttft_ns: int
    phases_ns: dict[str, int]
    tokens: int = 0


@dataclass(slots=True)
class Joined:
    """The ledger of a request."""

    arrived_ns: int  # when its first byte came
    received_ns: int  # when its body was read and checked
    # Phases at another backend, which had computed its prompt before.
    before: Mapping[str, int] = field(default_factory=dict)

    def phases(self, of_backend: Mapping[str, int], sent_ns: int, came_ns: int, until_ns: int = 0) -> dict[str, int]:
        """Nanoseconds by phase, which sum to the time from the first byte until `until_ns`, or now.

        Args:
            of_backend: phases that the backend has told; where there are none, or they are longer than the whole hop,
                it counts as one phase.
            sent_ns: when the request was handed to the connection.
            came_ns: when its answer, or the part with the backend's account, had come.
        """
        until_ns = until_ns or clock()
        found = {_RECEIVE: self.received_ns - self.arrived_ns, _ROUTE: sent_ns - self.received_ns}
        if self.before:
            found[_ROUTE] -= sum(self.before.values())
        for part in (self.before, hop(of_backend, came_ns - sent_ns)):
            for name, length in part.items():
                found[name] = found.get(name, 0) + length
        found[_SEND] = found.get(_SEND, 0) + until_ns - came_ns
        return {name: length for name, length in found.items() if length}

    def so_far(self, sent_ns: int) -> str:
        """The phases when a stream begins, as a header."""
        now = clock()
        if self.before:
            return as_header(self.phases({}, sent_ns, now, now))
        receive, route, backend = self.received_ns - self.arrived_ns, sent_ns - self.received_ns, now - sent_ns
        own = f"{_RECEIVE};dur={receive / 1e6:.3f}, {_ROUTE};dur={route / 1e6:.3f}, {_BACKEND};dur={backend / 1e6:.3f}"
        return f"{own}, total;dur={(now - self.arrived_ns) / 1e6:.3f}"

    def timings(self, raw: msgspec.Raw, sent_ns: int, came_ns: int, first_ns: int = 0, replayed: int = 0) -> bytes:
        """A backend's `timings`, as JSON, with the whole chain; empty where what it tells is no ledger.

        Args:
            first_ns, replayed: when another backend had made the first token, and how many it had made, where this one
                has gone on with its stream.
        """
        try:
            told = msgspec.json.decode(raw, type=Timings)
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError):
            return b""
        if sum(told.phases_ns.values()) != told.e2e_ns:
            return b""
        until_ns = clock()
        phases = self.phases(told.phases_ns, sent_ns, came_ns, until_ns)
        changed = {
            "e2e_ns": until_ns - self.arrived_ns,
            "ttft_ns": first_ns - self.arrived_ns if first_ns else sent_ns - self.arrived_ns + told.ttft_ns,
            "phases_ns": phases,
            "tokens": told.tokens + replayed,
        }
        return msgspec.json.encode(fields | {name: msgspec.Raw(msgspec.json.encode(v)) for name, v in changed.items()})


def hop(told: Mapping[str, int], length_ns: int) -> dict[str, int]:
    """The phases of a hop that took so long, of which a backend has told these."""
    total = sum(told.values())
    if not told or total > length_ns or min(told.values()) < 0:
        return {_BACKEND: length_ns}
    return {**told, _NETWORK: told.get(_NETWORK, 0) + length_ns - total}


def phases_of_header(value: bytes) -> dict[str, int]:
    """The phases of a Server-Timing header, in nanoseconds, without the total; empty where it has something else."""
    found: dict[str, int] = {}
    for entry in value.decode("latin-1").split(","):
        name, _, length = entry.strip().partition(";dur=")
        try:
            found[name] = round(float(length) * 1e6)
        except (ValueError, OverflowError):
            return {}
    found.pop("total", None)
    return found


def as_header(phases: Mapping[str, int]) -> str:
    """A Server-Timing header, in milliseconds."""
    lengths = [*phases.items(), ("total", sum(phases.values()))]
    return ", ".join([f"{name};dur={length / 1e6:.3f}" for name, length in lengths])
