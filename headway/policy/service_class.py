"""Classes of requests: what each is promised, what it may use, and what happens when a promise cannot be kept.

The order of the classes in a table is their rank: where not everybody's objective can be met, the first class keeps
its own and the last one yields first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MOST_MS = 1e9
WHEN_LATE = ("serve", "refuse")
SERVICE_TIERS = ("priority", "default", "flex")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. Shares are of the whole, 0 to 1; what is infinite has no limit.

    Args:
        ttft_ms: objective for the time from a request's first byte to its first token; infinite for none.
        tpot_ms: objective for the time between two tokens; infinite for none.
        window_ms: least and most time that the first request of an idle engine may wait for others to join it.
        seats: share of --max-num-seqs that other classes may not take.
        tokens: share of a step's prompt tokens that other classes may not take while prompts of this one wait.
        kv: share of the KV pool that other classes may not take.
        max_queued: most choices of the class that wait or run.
        queue_timeout_s: a request that has waited this long without being begun is ended.
        max_prompt_tokens, max_output_tokens: longest prompt, and most that max_tokens may ask for.
        starvation_s: a request without an objective, or that has yielded, goes first once it has waited this long.
        when_late: what happens to a request whose first token cannot be there in time: `serve` lets it go on behind
            those that still can, `refuse` ends it.

    Raises:
        ValueError: naming the key, its value and its limits.
    """

    name: str
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    window_ms: tuple[float, float] = (0.0, 0.0)
    seats: float = 0.0
    tokens: float = 0.0
    kv: float = 0.0
    max_queued: float = math.inf
    queue_timeout_s: float = math.inf
    max_prompt_tokens: float = math.inf
    max_output_tokens: float = math.inf
    starvation_s: float = 60.0
    when_late: str = "serve"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError('a class has no name; write name = "..."')
        for key in ("ttft_ms", "tpot_ms"):
            value = getattr(self, key)
            if not 0 < value <= MOST_MS and value != math.inf:
                raise ValueError(f"{key} is {value:g}; an objective is more than 0 and at most {MOST_MS:g} ms")
        least, most = self.window_ms
        if not 0 <= least <= most <= 1000:
            raise ValueError(f"window_ms is [{least:g}, {most:g}]; give its least and its most, from 0 to 1000 ms")
        for key in ("seats", "tokens", "kv"):
            value = getattr(self, key)
            if not 0 <= value < 1:
                raise ValueError(f"{key} is {value:g}; a share is from 0 to below 1")
        for key in ("max_queued", "max_prompt_tokens", "max_output_tokens"):
            if not getattr(self, key) >= 1:
                raise ValueError(f"{key} is {getattr(self, key):g}; it must be at least 1")
        for key in ("queue_timeout_s", "starvation_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} is {getattr(self, key):g}; it must be more than 0")
        if self.when_late not in WHEN_LATE:
            raise ValueError(f"when_late is {self.when_late!r}; choose one of {', '.join(WHEN_LATE)}")


@dataclass(frozen=True, slots=True)
class ClassTable:
    """All classes, the most urgent first.

    Args:
        default: name of the class of a request that names none.
        service_tiers: name of the class for each of OpenAI's service tiers; `auto` is `default`.

    Raises:
        ValueError: two classes have one name, a name is unknown, or shares add up to the whole or more.
    """

    classes: tuple[ServiceClass, ...]
    default: str = ""
    service_tiers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [each.name for each in self.classes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two classes are named {name!r}; give each its own name")
        if not names:
            raise ValueError("there are no classes; write [[class]] once for each")
        for what, name in [("default", self.default), *self.service_tiers.items()]:
            if name and name not in names:
                raise ValueError(f"{what} is {name!r}, which is no class; there are {', '.join(names)}")
        for tier in self.service_tiers:
            if tier not in SERVICE_TIERS:
                raise ValueError(f"service tier {tier!r} is unknown; there are {', '.join(SERVICE_TIERS)}")
        for key in ("seats", "tokens", "kv"):
            total = sum(getattr(each, key) for each in self.classes)
            if total >= 1:
                raise ValueError(f"the classes' shares of {key} add up to {total:g}; keep the sum below 1")

    def __iter__(self) -> Iterator[ServiceClass]:
        return iter(self.classes)

    @property
    def default_class(self) -> ServiceClass:
        return self.named(self.default) if self.default else self.classes[0]

    def named(self, name: str) -> ServiceClass:
        """Raises ValueError for a name that no class has."""
        for each in self.classes:
            if each.name == name:
                return each
        raise ValueError(f"service class {name!r} is unknown; there are {', '.join(each.name for each in self)}")

    def rank(self, name: str) -> int:
        """0 for the most urgent class; one that is no longer in the table comes last."""
        for rank, each in enumerate(self.classes):
            if each.name == name:
                return rank
        return len(self.classes)

    def of_tier(self, tier: str) -> ServiceClass:
        """The class of a service tier; the default one where the table maps it to none."""
        name = self.service_tiers.get("default" if tier == "auto" else tier)
        return self.named(name) if name else self.default_class

    def tier_of(self, service_class: ServiceClass) -> str:
        """What an answer calls the class in `service_tier`: the tier that leads to it, or else `default`."""
        tiers = {name: tier for tier, name in reversed(self.service_tiers.items())}
        return tiers.get(service_class.name, "default")


def class_of(table: Mapping[str, Any]) -> ServiceClass:
    """A class from the keys of its table in a file.

    Raises:
        ValueError: a key is unknown, of another type or out of range.
    """
    known = {each.name for each in fields(ServiceClass)}
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{key!r} is unknown; a class has {', '.join(sorted(known))}")
        if key in ("name", "when_late"):
            good = isinstance(value, str)
        elif key == "window_ms":
            good = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
        else:
            good = _is_number(value)
        if not good:
            raise ValueError(f"{key} is {value!r}, of the wrong type")
    window = table.get("window_ms")
    return ServiceClass(**{**table, "name": table.get("name", "")} | ({"window_ms": tuple(window)} if window else {}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


BUILT_IN = ClassTable(
    (
        ServiceClass(name="interactive", ttft_ms=1000.0, tpot_ms=100.0, window_ms=(0.0, 5.0), starvation_s=10.0),
        ServiceClass(name="batch", ttft_ms=60_000.0, window_ms=(0.0, 40.0), starvation_s=60.0),
        ServiceClass(name="offline", starvation_s=600.0),
    ),
    default="interactive",
    service_tiers={"priority": "interactive", "default": "interactive", "flex": "batch"},
)
