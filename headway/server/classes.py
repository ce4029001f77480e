"""The class of a request and what it is promised, by its body, its headers and its API key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headway.config_files.tenants import Access
from headway.policy.admission.tenants import DEFAULT_TENANT
from headway.policy.objectives.service_class import BUILT_IN, MOST_MS, ClassTable, ServiceClass
from headway.server.errors import ApiError, bad_request

CLASS_HEADER = "x-headway-service-class"
TTFT_HEADER, TPOT_HEADER = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"


class NamesClass(Protocol):
    """A body that may name a class, in either of two ways, and a model."""

    service_class: str | None
    service_tier: Any
    model: str | None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is promised, and who it is charged to."""

    service: ServiceClass = BUILT_IN.default_class
    service_tier: str = "default"  # what OpenAI's clients call the class
    # ttft_ms, tpot_ms: objectives of the request, from its class or tighter ones of its own; infinite for none.
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    tenant: str = DEFAULT_TENANT

    def verdicts(self, ttft_ns: int, tpot_ns: float | None, e2e_ns: int) -> dict[str, bool]:
        """Whether each objective was met, by its name; only those that the request has.

        Args:
            tpot_ns: None where there was one token only.
        """
        found = {}
        if self.ttft_ms < math.inf:
            found["ttft"] = ttft_ns <= self.ttft_ms * 1e6
        if self.tpot_ms < math.inf and tpot_ns is not None:
            found["tpot"] = tpot_ns <= self.tpot_ms * 1e6
        if self.service.e2e_ms < math.inf:
            found["e2e"] = e2e_ns <= self.service.e2e_ms * 1e6
        return found


def terms_of(
    table: ClassTable, access: Access, body: NamesClass, headers: Mapping[str, str], ignored: list[str]
) -> Terms:
    """The terms of a request with this access.

    Args:
        ignored: the names of headers that are left aside are appended to it.

    Raises:
        ApiError: 400 when there is no such class, its names contradict each other, or a header is no objective; 403
            when the key may not use the class, or the model.
    """
    if access.models and body.model not in access.models:
        allowed, asked = ", ".join(access.models)[:300], (body.model or "what no model names")[:200]
        message = f"this API key may use {allowed}, not {asked}"
        raise ApiError(403, message, param="model", code="model_not_allowed")
    service = _class_of(table, access, body, headers, ignored)
    if access.best and table.rank(service.name) < table.rank(access.best):
        allowed = f"service class {access.best!r} and less urgent ones"
        message = f"this API key may use {allowed}; the request names {service.name!r}"
        raise ApiError(403, message, param="service_class", code="service_class_not_allowed")
    ttft_ms = objective(headers, TTFT_HEADER, service.ttft_ms, ignored)
    tpot_ms = objective(headers, TPOT_HEADER, service.tpot_ms, ignored)
    named = body.service_tier if body.service_tier != "auto" else None
    return Terms(service, named or table.tier_of(service), ttft_ms, tpot_ms, access.tenant)


def _class_of(
    table: ClassTable, access: Access, body: NamesClass, headers: Mapping[str, str], ignored: list[str]
) -> ServiceClass:
    """The class: that of the body, else that of the header, else the key's default."""
    tier, name = body.service_tier, body.service_class
    header = headers.get(CLASS_HEADER)
    where = "service_class"
    if header is not None and (name is not None or tier not in (None, "auto")):
        ignored.append(CLASS_HEADER)
    elif header is not None:
        where, name = CLASS_HEADER, header
    service = None
    if name is not None:
        service = next((each for each in table if each.name == name), None)
        if service is None:
            known = ", ".join(each.name for each in table)
            raise bad_request(f"{where} is {name[:60]!r}, which is not a class here; there are {known}", where)
    if tier is not None and tier != "auto":
        of_tier = table.of_tier(tier)
        if service is not None and service != of_tier:
            raise bad_request(
                f"service_tier {tier!r} means class {of_tier.name!r}, but service_class is {name!r}; give one of both",
                "service_tier",
            )
        return of_tier
    return service or _default_of(table, access)


def _default_of(table: ClassTable, access: Access) -> ServiceClass:
    """The class of a request that names none: the table's default, or the best that the key may use."""
    if access.default:
        return table.named(access.default)
    above = access.best and table.rank(table.default_class.name) < table.rank(access.best)
    return table.named(access.best) if above else table.default_class


def objective(headers: Mapping[str, str], name: str, of_class: float, ignored: list[str]) -> float:
    """An objective in milliseconds: that of the header where it is tighter than the class's. Raises ApiError 400."""
    given = headers.get(name)
    if given is None:
        return of_class
    try:
        own = float(given)
    except ValueError:
        own = math.nan
    if not 0 < own <= MOST_MS:
        raise bad_request(f"{name} is {given[:60]!r}; it must be milliseconds, more than 0 and at most 1e9", name)
    if own > of_class:
        ignored.append(name)
    return min(own, of_class)
