"""How much may be in the server at once, and when a refused request may come back.

Two things are counted. Choices, from their admission to their end, whether they wait or run: a request with n = 8 and
two prompts has sixteen. And tokens of prompts that have no output yet: the work that a newcomer waits for. There is a
bound on all requests, and one on each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar

from headway.flags import Flag, limit
from headway.policy.admission.tenants import DEFAULT_TENANT
from headway.policy.objectives.service_class import ClassTable

# By default the server takes as much as this many full batches: seats for choices, the KV pool for tokens.
DEFAULT_BATCHES = 8
MAX_RETRY_AFTER_S = 60
# Where no class has a share of seats, the class of rank r of n leaves this share times r / n free for those above it:
# however much it sends, it never has the place of a more urgent request.
HEADROOM = 0.25
# A tenant of weight 1 may have this many times what is free of the bound on all.
TENANT_SHARE = 4
_RATE_WINDOW_NS = 10e9

_limit = partial(Flag, panel="Server", parse=limit, metavar="N|none")
# What an operator says of both; infinite for no limit, None for what suits the engine.
QueuedRequests = Annotated[
    float | None, _limit("Limit of requests (times n) in the server; above it, 429. Default: 8 times --max-num-seqs.")
]
QueuedTokens = Annotated[
    float | None,
    _limit("Limit of prompt tokens whose output has not begun; above it, 429. Default: 8 times the KV cache."),
]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The most that may be in the server at once; infinite for no limit."""

    choices: float = math.inf  # most choices that wait or run
    tokens: float = math.inf  # most tokens of prompts that have no output yet

    @classmethod
    def for_engine(
        cls, max_num_seqs: int, pool_tokens: int, choices: float | None = None, tokens: float | None = None
    ) -> QueueLimits:
        """The limits that the operator chose; where one is None, the limit that suits an engine of this size."""
        return cls(
            DEFAULT_BATCHES * max_num_seqs if choices is None else choices,
            DEFAULT_BATCHES * pool_tokens if tokens is None else tokens,
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """What a request must leave free of the bound on all, for other classes."""

    choices: int = 0
    tokens: int = 0


NOTHING = Kept()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not come in: there are `present` units, and with those `asked` there would be over `limit`."""

    bound: QueueBound  # the bound that would be overstepped
    unit: str  # choices | tokens
    asked: int
    present: int
    limit: int
    kept: int = 0  # how many units of the bound's limit are left to other classes; `limit` does not count them

    @property
    def is_final(self) -> bool:
        """Whether even an empty server would have no room for it."""
        return self.asked > self.limit


@dataclass(slots=True)
class _Rate:
    """A rate in units a second, in which counts fade with a time constant of _RATE_WINDOW_NS."""

    began_ns: int = 0
    last_ns: int = 0
    faded: float = 0.0

    def add(self, count: int, now: int) -> None:
        self.began_ns = self.began_ns or now
        self.faded = self._at(now) + count
        self.last_ns = now

    def _at(self, now: int) -> float:
        return self.faded * math.exp((self.last_ns - now) / _RATE_WINDOW_NS)

    def per_second(self, now: int) -> float:
        """The rate at this time; 0 until something has been counted for some time."""
        observed = 1.0 - math.exp((self.began_ns - now) / _RATE_WINDOW_NS) if self.began_ns else 0.0
        return self._at(now) / observed / (_RATE_WINDOW_NS * 1e-9) if observed > 0 else 0.0


@dataclass(slots=True)
class QueueBound:
    """Counts the requests in the server, and refuses those that are too many. Times are the caller's nanoseconds."""

    limits: QueueLimits
    service_class: str = ""  # the class whose requests count; empty for all
    choices: int = 0
    tokens: int = 0
    _shares: ClassVar[bool] = False  # it may refuse without limits of its own
    _choice_rate: _Rate = field(default_factory=_Rate)
    _token_rate: _Rate = field(default_factory=_Rate)

    @property
    def is_full(self) -> bool:
        """No request can come in, whatever it asks for."""
        return self.choices >= self.limits.choices or self.tokens >= self.limits.tokens

    def refusal(self, choices: int = 0, tokens: int = 0, kept: Kept = NOTHING) -> Refusal | None:
        """Why a request for so many more units is refused; None where it is not. `kept` must be left to others."""
        if choices and self.choices + choices + kept.choices > self.limits.choices:
            limit = int(self.limits.choices) - kept.choices
            return Refusal(self, "choices", choices, self.choices, limit, kept.choices)
        if not tokens or self.tokens + tokens + kept.tokens <= self.limits.tokens:
            return None
        spared = min(kept.tokens, max(0, self.limits.tokens - tokens))  # the longest prompt can come in alone
        if self.tokens + tokens + spared > self.limits.tokens:
            return Refusal(self, "tokens", tokens, self.tokens, int(self.limits.tokens - spared), int(spared))
        return None

    def leave(self, now: int, choices: int = 0, tokens: int = 0) -> None:
        """Note that choices have ended, and that prompts of so many tokens have their first output."""
        self.choices -= choices
        self.tokens -= tokens
        if choices and (self._shares or self.limits.choices < math.inf):
            self._choice_rate.add(choices, now)
        if tokens and (self._shares or self.limits.tokens < math.inf):
            self._token_rate.add(tokens, now)

    def retry_after_s(self, refusal: Refusal, now: int) -> int:
        """Seconds until there should be room, at the rate at which units have left of late; 1 where none is known."""
        rate = (self._choice_rate if refusal.unit == "choices" else self._token_rate).per_second(now)
        if rate <= 0:
            return 1
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil((refusal.present + refusal.asked - refusal.limit) / rate)))


@dataclass(slots=True)
class TenantBound(QueueBound):
    """One tenant's part of the bound on all: a multiple of what is free, so that there is always room for a newcomer.

    One tenant alone gets 4 fifths, two get 4 ninths each, with equal weights (the dynamic thresholds of Choudhury and
    Hahne 1998).
    """

    _shares: ClassVar[bool] = True
    of_all: QueueBound | None = None  # the bound that it shares
    tenant: str = ""
    weight: float = 1.0  # the weight of the tenant

    def refusal(self, choices: int = 0, tokens: int = 0, kept: Kept = NOTHING) -> Refusal | None:
        """Why so many more units are too many for the tenant; None where they are not, or where it has nothing here."""
        assert self.of_all is not None
        limits = self.of_all.limits
        for unit, asked, held, free in (
            ("choices", choices, self.choices, limits.choices - self.of_all.choices - choices),
            ("tokens", tokens, self.tokens, limits.tokens - self.of_all.tokens - tokens),
        ):
            most = TENANT_SHARE * self.weight * max(0.0, free)
            if asked and held and held + asked > most:
                return Refusal(self, unit, asked, held, max(asked, int(most)))
        return None


class Place:
    """One request's share of the queue, until it gives it back: its choices, and its prompts without output.

    Args:
        bounds: the bounds that it counts for; the first is the one on all.
        kept: what it must leave to other classes in the bound on all.
    """

    def __init__(self, *bounds: QueueBound, kept: Callable[[], Kept] = Kept) -> None:
        self._bounds = bounds
        self._kept = kept
        self._choices = 0
        self._prompts: list[int] = []  # tokens of each prompt; 0 once it has had an output

    def take(self, choices: int = 0, prompts: Sequence[int] = ()) -> Refusal | None:
        """Take choices, and prompts of so many tokens. Where they are too many, take nothing and say why."""
        tokens = sum(prompts)
        kept = self._kept()
        for bound in self._bounds:
            refusal = bound.refusal(choices, tokens, kept)
            if refusal is not None:
                return refusal
            kept = NOTHING
        self.count(choices, prompts)
        return None

    def count(self, choices: int, prompts: Sequence[int]) -> None:
        """Take them however many there are."""
        tokens = sum(prompts)
        for bound in self._bounds:
            bound.choices += choices
            bound.tokens += tokens
        self._choices += choices
        self._prompts += prompts

    def _give_back(self, now: int, choices: int = 0, tokens: int = 0) -> None:
        for bound in self._bounds:
            bound.leave(now, choices, tokens)

    def had_output(self, prompt: int, now: int) -> None:
        """Note a token of the prompt with this number; only the first one counts."""
        if self._prompts[prompt]:
            self._give_back(now, tokens=self._prompts[prompt])
            self._prompts[prompt] = 0

    def ended(self, now: int, choices: int = 1) -> None:
        """Note that some of its choices have ended. Does nothing once it is closed."""
        choices = min(choices, self._choices)
        self._choices -= choices
        self._give_back(now, choices)

    def close(self, now: int) -> None:
        """Give everything back; may be called again."""
        if self._choices or any(self._prompts):
            self._give_back(now, self._choices, sum(self._prompts))
            self._choices, self._prompts = 0, [0] * len(self._prompts)


class Queues:
    """The bound on all requests, and that of each class.

    A class's share of seats is a share of the bound on all choices too: others leave it free. Without shares, a class
    leaves the more urgent ones some headroom.
    """

    def __init__(self, limits: QueueLimits, classes: ClassTable) -> None:
        self.of_all = QueueBound(limits)
        self.of_class: dict[str, QueueBound] = {}
        self.of_tenant: dict[str, TenantBound] = {}
        self._weights: Mapping[str, float] | None = None
        self.set_classes(classes)

    def set_classes(self, classes: ClassTable) -> None:
        """Bound each class as the table says. Requests that are in already go on counting."""
        self._shares = {each.name: each.seats for each in classes if each.seats}
        most = 0.0 if self._shares else HEADROOM
        names = [each.name for each in classes]
        self._headroom = {name: most * rank / len(names) for rank, name in enumerate(names)}
        for each in classes:
            bound = self.of_class.setdefault(each.name, QueueBound(QueueLimits(), each.name))
            bound.limits = QueueLimits(choices=each.max_queued)

    def set_tenants(self, weights: Mapping[str, float] | None) -> None:
        """Let no tenant fill the queue; with None, tenants make no difference."""
        self._weights = weights
        for name, bound in self.of_tenant.items():
            bound.weight = (weights or {}).get(name, 1.0)

    def place(self, service_class: str, tenant: str = DEFAULT_TENANT) -> Place:
        """An empty place for a request of a class and a tenant."""
        bounds = [self.of_all, self.of_class[service_class]]
        if self._weights is not None:
            weight = self._weights.get(tenant, 1.0)
            new = TenantBound(QueueLimits(), of_all=self.of_all, tenant=tenant, weight=weight)
            bounds.append(self.of_tenant.setdefault(tenant, new))
        return Place(*bounds, kept=partial(self._kept_from, service_class))

    def _kept_from(self, service_class: str) -> Kept:
        """What other classes may still take of their shares, or the headroom of the more urgent ones."""
        limits = self.of_all.limits
        if self._shares:
            others = ((self.of_class[name], share) for name, share in self._shares.items() if name != service_class)
            return Kept(sum(max(0, _share_of(limits.choices, share) - bound.choices) for bound, share in others))
        headroom = self._headroom.get(service_class)
        return Kept(_share_of(limits.choices, headroom), _share_of(limits.tokens, headroom)) if headroom else NOTHING


def _share_of(limit: float, share: float) -> int:
    """The share of a limit in whole units; 0 where there is no limit."""
    return math.floor(share * limit) if limit < math.inf else 0
