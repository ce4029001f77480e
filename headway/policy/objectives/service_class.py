"""Classes of requests: what each is promised, what it may use, and what happens when a promise cannot be kept.

The order of the classes in a table is their rank: where not everybody's objective can be met, the first class keeps
its own and the last one yields first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")
MOST_MS = 1e9
LONGEST_NAME = 64
WHEN_LATE = ("serve", "refuse")
SERVICE_TIERS = ("priority", "default", "flex")
COUNTS = ("max_queued", "max_prompt_tokens", "max_output_tokens")
SHARES = ("seats", "tokens", "kv")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Kinds of values in files, as errors name them; of ANYTHING its reader says more.
A_STRING, A_NUMBER, TWO_NUMBERS, A_BOOLEAN = "a string", "a number", "a list of two numbers", "true or false"
STRINGS, ANYTHING = "a list of strings", "anything"
KINDS: Mapping[str, Callable[[Any], bool]] = {
    A_STRING: lambda value: isinstance(value, str),
    A_NUMBER: _is_number,
    TWO_NUMBERS: lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)),
    A_BOOLEAN: lambda value: isinstance(value, bool),
    STRINGS: lambda value: isinstance(value, list) and all(isinstance(each, str) and each for each in value),
    ANYTHING: lambda value: True,
}


class InvalidEntry(ValueError):
    """An entry of a file of classes or of tenants is wrong.

    Args:
        path: where it is, as keys and positions from the outermost one, like ("class", 2, "ttft_ms").
    """

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


@contextmanager
def within(*path: str | int) -> Iterator[None]:
    """Put this path before the path of each InvalidEntry that is raised inside."""
    try:
        yield
    except InvalidEntry as error:
        raise InvalidEntry(str(error), *path, *error.path) from None


def check_entry(entry: Mapping[str, Any], what: str, kinds: Mapping[str, str]) -> None:
    """Raise InvalidEntry for a key that a table of a file does not have, or whose value is of another kind.

    Args:
        what: what the table describes.
        kinds: one of KINDS for each key that it may have.
    """
    for key, value in entry.items():
        if key not in kinds:
            raise InvalidEntry(f"{key!r} is unknown; {what} has {', '.join(kinds)}", key)
        if not KINDS[kinds[key]](value):
            raise InvalidEntry(f"{key} is {value!r:.80}; it must be {kinds[key]}", key)


def entries_of(content: Mapping[str, Any], key: str, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """What `make` makes of each table in a list of a file. Raises InvalidEntry where it is no list, or `make` does."""
    listed, found = content.get(key, []), []
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise InvalidEntry(f"{key} must be a list; write [[{key}]] once for each", key)
    for number, entry in enumerate(listed):
        with within(key, number):
            found.append(make(entry))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. Shares are of the whole, 0 to 1; what is infinite has no limit.

    Raises:
        InvalidEntry: naming the key, its value and its limits.
    """

    name: str
    # Objective for the time from a request's first byte to its first token; infinite for none.
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf  # objective for the time between two tokens; infinite for none
    e2e_ms: float = math.inf  # objective for the time from a request's first byte to its last token; infinite for none
    # Least and most time that the first request of an idle engine may wait for others to join it.
    window_ms: tuple[float, float] = (0.0, 0.0)
    seats: float = 0.0  # share of --max-num-seqs that other classes may not take
    # Share of a step's prompt tokens that other classes may not take while prompts of this one wait.
    tokens: float = 0.0
    kv: float = 0.0  # share of the KV pool that other classes may not take
    # Most of the KV pool that sequences of the class use, as a share; but always enough for one sequence.
    max_kv: float = 1.0
    max_queued: float = math.inf  # most choices of the class that wait or run
    queue_timeout_s: float = math.inf  # a request that has waited this long without being begun is ended
    # max_prompt_tokens, max_output_tokens: longest prompt, and most that max_tokens may ask for.
    max_prompt_tokens: float = math.inf
    max_output_tokens: float = math.inf
    # A request without an objective, or that has yielded, goes first once it has waited this long.
    starvation_s: float = 60.0
    # What happens to a request whose first token cannot be there in time: `serve` lets it go on behind those that still
    # can, `refuse` ends it.
    when_late: str = "serve"

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidEntry('a class has no name; write name = "..."', "name")
        if len(self.name) > LONGEST_NAME or not self.name.isprintable():
            raise InvalidEntry(f"name is {self.name!r:.80}; give at most {LONGEST_NAME} printable characters", "name")
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            self._check(key, "an objective is more than 0 and at most 1e9 ms", lambda ms: 0 < ms <= MOST_MS, math.inf)
        least, most = self.window_ms
        if not 0 <= least <= most <= 1000:
            raise InvalidEntry(
                f"window_ms is [{least:g}, {most:g}]; give a minimum and a maximum, from 0 to 1000 ms", "window_ms"
            )
        for key in SHARES:
            self._check(key, "a share is from 0 to below 1", lambda share: 0 <= share < 1)
        self._check("max_kv", "it is a share, above 0 and at most 1", lambda share: 0 < share <= 1)
        if self.max_kv < self.kv:
            raise InvalidEntry(f"max_kv is {self.max_kv:g}, below kv, {self.kv:g}; give at least as much", "max_kv")
        for key in COUNTS:
            self._check(key, "it must be a whole number from 1", lambda count: count >= 1 and count % 1 == 0, math.inf)
        for key in ("queue_timeout_s", "starvation_s"):
            self._check(key, "it must be more than 0", lambda seconds: seconds > 0)
        if self.when_late not in WHEN_LATE:
            raise InvalidEntry(f"when_late is {self.when_late!r}; choose one of {', '.join(WHEN_LATE)}", "when_late")

    def _check(self, key: str, rule: str, holds: Callable[[float], bool], allowed: float | None = None) -> None:
        value = getattr(self, key)
        if value != allowed and not holds(value):
            raise InvalidEntry(f"{key} is {value:g}; {rule}", key)

    def within_e2e(self, ttft_ms: float, tpot_ms: float, further: float) -> tuple[float, float]:
        """The milliseconds until a first token, and between two, by which a request keeps e2e_ms too.

        The first token has half of the time, or all where it is the only one; the other tokens share what is left
        evenly, where it is known how many they may be.

        Args:
            ttft_ms, tpot_ms: those by which it keeps its other objectives.
            further: tokens that may follow the first; infinite where nobody knows.
        """
        ttft_ms = min(ttft_ms, self.e2e_ms / 2 if further else self.e2e_ms)
        if 0 < further < math.inf:
            tpot_ms = min(tpot_ms, (self.e2e_ms - ttft_ms) / further)
        return ttft_ms, tpot_ms


@dataclass(frozen=True, slots=True)
class ClassTable:
    """All classes, the most urgent first.

    Raises:
        InvalidEntry: two classes have one name, a name is unknown, or shares add up to the whole or more.
    """

    classes: tuple[ServiceClass, ...]
    default: str = ""  # name of the class of a request that names none
    # Name of the class for each of OpenAI's service tiers; `auto` is `default`.
    service_tiers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [each.name for each in self.classes]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise InvalidEntry(f"two classes are named {name!r}; give each its own name", "class", number, "name")
        if not names:
            raise InvalidEntry("there are no classes; write [[class]] once for each", "class")
        for tier in self.service_tiers:
            if tier not in SERVICE_TIERS:
                raise InvalidEntry(
                    f"service tier {tier!r} is unknown; there are {', '.join(SERVICE_TIERS)}", "service_tiers", tier
                )
        if self.default:
            self._check_name(self.default, "default")
        for tier, name in self.service_tiers.items():
            self._check_name(name, "service_tiers", tier)
        for key in SHARES:
            given = [(getattr(each, key), number) for number, each in enumerate(self.classes)]
            total = sum(share for share, _ in given)
            if total >= 1:
                last = max(number for share, number in given if share)
                message = f"the classes' shares of {key} add up to {total:g}; keep the sum below 1"
                raise InvalidEntry(message, "class", last, key)

    def _check_name(self, name: str, *path: str | int) -> None:
        if name not in (each.name for each in self.classes):
            known = ", ".join(each.name for each in self.classes)
            raise InvalidEntry(f"{path[-1]} is {name!r}, which is not a class; there are {known}", *path)

    def __iter__(self) -> Iterator[ServiceClass]:
        return iter(self.classes)

    @property
    def default_class(self) -> ServiceClass:
        return self.named(self.default) if self.default else self.classes[0]

    def named(self, name: str) -> ServiceClass:
        """The class of this name. Raises ValueError where there is none."""
        for each in self.classes:
            if each.name == name:
                return each
        raise ValueError(f"service class {name!r} is unknown; there are {', '.join(each.name for each in self)}")

    def rank(self, name: str) -> int:
        """The rank of a class: 0 for the most urgent one; one that is no longer in the table comes last."""
        for rank, each in enumerate(self.classes):
            if each.name == name:
                return rank
        return len(self.classes)

    def of_tier(self, tier: str) -> ServiceClass:
        """The class of a service tier; the default one where the table maps it to none."""
        name = self.service_tiers.get("default" if tier == "auto" else tier)
        return self.named(name) if name else self.default_class

    def tier_of(self, service_class: ServiceClass) -> str:
        """What an answer calls the class in `service_tier`: a tier that leads to it, `default` before others."""
        leading = [tier for tier in SERVICE_TIERS if self.of_tier(tier) == service_class]
        return "default" if "default" in leading or not leading else leading[0]


def table_of(content: Mapping[str, Any]) -> ClassTable:
    """The classes that a file describes, as its `default`, `service_tiers` and list of `class`.

    Raises:
        InvalidEntry: a key is unknown, of another type or out of range, or they contradict each other.
    """
    default, tiers = content.get("default", ""), content.get("service_tiers", {})
    if not isinstance(default, str):
        raise InvalidEntry(f"default is {default!r}; it must be the name of a class", "default")
    if not isinstance(tiers, dict) or not all(isinstance(name, str) for name in tiers.values()):
        raise InvalidEntry("service_tiers must be a table with a class's name for each tier", "service_tiers")
    return ClassTable(tuple(entries_of(content, "class", class_of)), default, tiers)


def class_of(keys: Mapping[str, Any]) -> ServiceClass:
    """A class from its keys in a file. Raises InvalidEntry: one is unknown, of another type or out of range."""
    others = {"name": A_STRING, "when_late": A_STRING, "window_ms": TWO_NUMBERS}
    check_entry(keys, "a class", {each.name: A_NUMBER for each in fields(ServiceClass)} | others)
    values: dict[str, Any] = {"name": "", **keys}
    if "window_ms" in keys:
        values["window_ms"] = tuple(keys["window_ms"])
    return ServiceClass(**values)


BUILT_IN = ClassTable(
    (
        ServiceClass(name="interactive", ttft_ms=1000.0, tpot_ms=100.0, window_ms=(0.0, 5.0), starvation_s=10.0),
        ServiceClass(name="batch", ttft_ms=60_000.0, window_ms=(0.0, 40.0), starvation_s=60.0),
        ServiceClass(name="offline", starvation_s=600.0),
    ),
    default="interactive",
    service_tiers={"priority": "interactive", "default": "interactive", "flex": "batch"},
)
