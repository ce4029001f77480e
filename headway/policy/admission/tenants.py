"""Tenants: who shares a server, what each may use a minute, and how much of it is its share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from headway.policy.objectives.service_class import (
    A_NUMBER,
    A_STRING,
    ANYTHING,
    KINDS,
    LONGEST_NAME,
    InvalidEntry,
    check_entry,
    entries_of,
    within,
)

# The tenant of requests that come with a key of --api-key, or with none where none is needed.
DEFAULT_TENANT = "default"
MOST_A_MINUTE = 100_000_000
LABELS = ALL, OTHER = "all", "other"  # labels of metrics, for all tenants together and for those without a label
LIMITS = ("requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that may be used a minute; 0 for no limit.

    Raises:
        InvalidEntry: naming the key, its value and its limits.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # most tokens of prompts and outputs, as `usage` counts them

    def __post_init__(self) -> None:
        for key in LIMITS:
            value = getattr(self, key)
            if not 0 <= value <= MOST_A_MINUTE:
                raise InvalidEntry(f"{key} is {value}; it must be from 1 to {MOST_A_MINUTE}", key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant(Limits):
    """One tenant."""

    name: str
    weight: float = 1.0  # while several wait, each is served in proportion to its weight

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        if not self.name or len(self.name) > LONGEST_NAME or not self.name.isprintable():
            raise InvalidEntry(
                f"a tenant's name is {self.name!r:.80}; give 1 to {LONGEST_NAME} printable characters", "name"
            )
        if self.name in LABELS:
            raise InvalidEntry(f"name is {self.name!r}, which metrics already use; choose another", "name")
        if not 0.001 <= self.weight <= 1000:
            raise InvalidEntry(f"weight is {self.weight:g}; it must be from 0.001 to 1000", "weight")


@dataclass(frozen=True, slots=True)
class TenantTable:
    """All tenants. One that is not in the table has no limits, and the weight 1.

    Raises:
        InvalidEntry: two tenants have one name.
    """

    tenants: tuple[Tenant, ...] = ()
    total: Limits = Limits()  # the most that all together may use

    def __post_init__(self) -> None:
        names = [each.name for each in self.tenants]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise InvalidEntry(f"two tenants are named {name!r}; name each once", "tenant", number, "name")

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self.tenants)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each tenant, by its name."""
        return {each.name: each.weight for each in self.tenants}


NO_TENANTS = TenantTable()


def tenants_of(content: Mapping[str, Any]) -> TenantTable:
    """The tenants that a file describes, as its `total` and list of `tenant`.

    Raises:
        InvalidEntry: a key is unknown, of another type or out of range, or two contradict each other.
    """
    total = content.get("total", {})
    if not isinstance(total, dict):
        raise InvalidEntry("total must be a table; write [total]", "total")
    tenants = entries_of(content, "tenant", lambda keys: Tenant(**{"name": "", **_checked(keys, Tenant, "a tenant")}))
    with within("total"):
        limits = Limits(**_checked(total, Limits, "the total"))
    return TenantTable(tuple(tenants), limits)


def _checked(keys: Mapping[str, Any], kind: type[Limits], what: str) -> dict[str, Any]:
    """The keys, if each is known and of its type. A limit may be left out; one that is given is at least 1.

    Raises InvalidEntry.
    """
    kinds = {"name": A_STRING, "weight": A_NUMBER}
    check_entry(keys, what, {each.name: kinds.get(each.name, ANYTHING) for each in fields(kind)})
    for key, value in keys.items():
        if key in LIMITS and (not KINDS[A_NUMBER](value) or value % 1 or value < 1):
            raise InvalidEntry(f"{key} is {value!r}; it must be a whole number from 1 to {MOST_A_MINUTE}", key)
    return {key: int(value) if key in LIMITS else value for key, value in keys.items()}
