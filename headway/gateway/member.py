"""A backend of a running gateway: its connections, its breaker, and what routers see of it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

import msgspec

from headway.config_files.gateway import BackendEntry, Timeouts
from headway.gateway.upstream import Pool
from headway.policy.admission.queue_bound import QueueLimits, Queues
from headway.policy.fleet.backend import Ask, Backend
from headway.policy.fleet.health import Breaker, HealthRule
from headway.policy.objectives.service_class import ClassTable

clock = time.monotonic_ns


class Movable(Protocol):
    def move(self) -> None:
        """Go to another backend."""


class Member:
    """One backend.

    Attributes:
        label: its name and what its operator says of it, for a header.
        head: headers that every request to it has.
        cards: what the backend says of each of its models, by their names.
        is_known: it has been asked at least once, or the file has its models.
        in_flight: requests that are there.
        waiting: of those, the ones of whose answer nothing has come, which can move to another backend, in order.
        outcomes: how many requests ended how.
    """

    def __init__(self, entry: BackendEntry, timeouts: Timeouts, rule: HealthRule, classes: ClassTable) -> None:
        self.pool = Pool(entry, timeouts)
        self._take_entry(entry)
        self.breaker = Breaker(rule)
        self.seen = Backend(entry.name, Queues(QueueLimits(), classes), entry.weight, entry.labels)
        self.cards: dict[str, msgspec.Raw] = {}
        self.is_known = bool(entry.models)
        self.in_flight = 0
        self.waiting: dict[Movable, None] = {}
        self.outcomes: Counter[str] = Counter()
        self.is_leaving = False  # it is not in the file any more

    @property
    def models(self) -> list[str]:
        return list(self.entry.models) or list(self.cards)

    def serves(self, model: str | None) -> bool:
        """Whether it has a model; any where the request names none."""
        return model is None or model in self.entry.models or (not self.entry.models and model in self.cards)

    def takes(self, ask: Ask, now: int) -> bool:
        """Whether a request can be sent there."""
        entry = self.entry
        return (
            not (entry.drain or self.is_leaving)
            and self.in_flight < entry.max_requests
            and entry.min_prompt_tokens <= ask.tokens <= entry.max_prompt_tokens
            and self.breaker.allows(now)
        )

    def take(self, entry: BackendEntry, timeouts: Timeouts, rule: HealthRule) -> None:
        """Take what the file says now. Its address is as before."""
        self._take_entry(entry)
        self.pool.timeouts, self.breaker.rule = timeouts, rule
        self.seen.weight, self.seen.labels = entry.weight, entry.labels
        self.is_known = self.is_known or bool(entry.models)

    def _take_entry(self, entry: BackendEntry) -> None:
        self.entry = self.pool.entry = entry
        self.label = "; ".join([entry.name, *(f"{key}={value}" for key, value in entry.labels.items())])
        host = f"[{entry.host}]" if ":" in entry.host else entry.host
        is_usual = entry.port == (443 if entry.is_tls else 80)
        head = f"host: {host if is_usual else f'{host}:{entry.port}'}\r\naccept-encoding: identity\r\n"
        self.head = (head + (f"authorization: Bearer {entry.key}\r\n" if entry.key else "")).encode()

    def move_waiting(self) -> None:
        """Send requests of whose answer nothing has come to other backends: this one does not answer."""
        for each in list(self.waiting):
            each.move()
