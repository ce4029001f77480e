"""The budgets of tenants in a live server: what requests are charged, and refusals and headers as in OpenAI's API."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from headway.policy.admission.quota import TOTAL, UNITS, OverLimit, Quotas
from headway.policy.admission.tenants import TenantTable
from headway.server.errors import ApiError, unavailable
from headway.server.quota_journal import SYNC_S, QuotaJournal

LONG = 4 * 2**20  # bytes of a journal that is to begin anew
logger = logging.getLogger("headway.server")
_SHORT = {"requests": "requests per min (RPM)", "tokens": "tokens per min (TPM)"}


def clock_of_records() -> Callable[[], int]:
    """Unix time in nanoseconds, as a restart needs it, that goes on evenly whatever happens to the wall clock."""
    ahead = time.time_ns() - time.monotonic_ns()
    return lambda: time.monotonic_ns() + ahead


class Charge:
    """What one request has reserved, until it is settled.

    Args:
        settle: is told what was used, as settle() is.
    """

    def __init__(self, settle: Callable[[int | None, Sequence[int]], None]) -> None:
        self._settle = settle
        self._is_settled = False

    def settle(self, tokens: int | None, outputs: Sequence[int] = ()) -> None:
        """Charge the tokens that the request has used; None where it has failed. Only the first call counts.

        Args:
            outputs: lengths of outputs that came to their own end.
        """
        if not self._is_settled:
            self._is_settled = True
            self._settle(tokens, outputs)


class Budgets(ABC):
    """What tenants may use, and what they are told of it, wherever that is kept.

    Attributes:
        quotas: the budgets as this process knows them.
        refused: how many requests were refused, by tenant and unit of the limit.
    """

    quotas: Quotas

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.refused: Counter[tuple[str, str]] = Counter()

    def set_tenants(self, table: TenantTable) -> None:
        """Take the limits of another table from now on."""
        self.quotas.set_tenants(table, self.clock())

    @abstractmethod
    async def keep(self, is_idle: Callable[[], bool]) -> None:
        """Keep what was used where it outlasts this process, for ever."""

    @abstractmethod
    async def drained(self) -> None:
        """Wait, not for long, until all that was used is kept there."""

    @abstractmethod
    def close(self) -> None:
        """Close what keeps it; nothing is charged any more."""

    @abstractmethod
    def refuse_if_over(self, tenant: str) -> None:
        """Raise ApiError 429 when a tenant is known to have no request left, before any work is done on this one."""

    @abstractmethod
    async def reserved(self, tenant: str, prompt_tokens: int, outputs: Iterable[tuple[int, int]]) -> Charge:
        """Reserve what a request is expected to use: its prompts, and outputs as long as the tenant's latest ones.

        Args:
            outputs: how many outputs there are to be of each length at most.

        Raises:
            ApiError: 429 when that is more than is left of a budget; 503 when it cannot be written down.
        """

    def expected(self, tenant: str, prompt_tokens: int, outputs: Iterable[tuple[int, int]]) -> int:
        """The tokens that a request is expected to use."""
        return prompt_tokens + sum(n * self.quotas.expected_output(tenant, most) for n, most in outputs)

    def headers(self, tenant: str) -> dict[str, str]:
        """Headers that say what is left of a tenant's budgets, or where it has no limit, of the budget of all."""
        now, headers = self.clock(), dict[str, str]()
        for unit, own, of_all in zip(UNITS, self.quotas.of(tenant), self.quotas.of(TOTAL), strict=True):
            meter = own if own.limit else of_all
            if meter.limit:
                headers[f"x-ratelimit-limit-{unit}"] = str(meter.limit)
                headers[f"x-ratelimit-remaining-{unit}"] = str(meter.left(now))
                headers[f"x-ratelimit-reset-{unit}"] = _duration(meter.wait_ns(meter.limit, now))
        return headers

    def refusal(self, tenant: str, over: OverLimit) -> ApiError:
        """The answer to a request that would be over a limit, which is counted."""
        self.refused[tenant, over.unit] += 1
        whose = f"tenant {over.tenant!r}" if over.tenant != TOTAL else "all tenants together"
        wait_ms = max(1, math.ceil(over.wait_ns / 1e6))
        return ApiError(
            429,
            f"Rate limit reached for {whose} on {_SHORT[over.unit]}: limit {over.limit}, left {over.left}, "
            f"requested {over.asked}. Please try again in {_duration(over.wait_ns)}.",
            code="rate_limit_exceeded",
            kind=over.unit,
            headers={"retry-after": str(math.ceil(wait_ms / 1000)), "retry-after-ms": str(wait_ms)}
            | self.headers(tenant),
        )


class TenantQuotas(Budgets):
    """Quotas of this process alone, kept in a journal if wanted.

    Args:
        journal: the journal's file; empty for none.

    Raises:
        ValueError: the journal cannot be kept (see QuotaJournal).
    """

    def __init__(self, table: TenantTable, journal: str, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock or clock_of_records())
        self._journal = QuotaJournal(journal) if journal else None
        try:
            if self._journal is None:
                self.quotas = Quotas(table, self.clock())
            else:
                self.quotas = Quotas(table, self.clock(), self._journal.append, self._journal.past)
        except OSError as error:
            raise ValueError(f"cannot keep quotas in {journal}: {error.strerror}; see --quota-journal") from None

    async def keep(self, is_idle: Callable[[], bool]) -> None:
        """Keep the journal on the disk and short, for ever. It begins anew while the server is idle if it can."""
        while self._journal is not None:
            await asyncio.sleep(SYNC_S)
            try:
                await self._journal.sync()
            except OSError as error:
                logger.error("the quota journal could not be flushed to the disk: %s", error.strerror)
            if self._journal.size > (LONG if is_idle() else 4 * LONG):
                self.quotas.compact(self.clock())

    def close(self) -> None:
        """Close the journal; nothing is charged any more."""
        if self._journal is not None:
            self._journal.close()

    def refuse_if_over(self, tenant: str) -> None:
        """Raise ApiError 429 when a tenant has no request left, before any work is done on this one."""
        over = self.quotas.over_limit(tenant, None, self.clock())
        if over is not None:
            raise self.refusal(tenant, over)

    async def drained(self) -> None:
        return

    async def reserved(self, tenant: str, prompt_tokens: int, outputs: Iterable[tuple[int, int]]) -> Charge:
        return self.reserve(tenant, prompt_tokens, outputs)

    def reserve(self, tenant: str, prompt_tokens: int, outputs: Iterable[tuple[int, int]]) -> Charge:
        """reserved(), which here takes no time."""
        tokens = self.expected(tenant, prompt_tokens, outputs)
        try:
            made = self.quotas.reserve(tenant, tokens, self.clock())
        except OSError as error:
            raise unavailable(f"cannot write the quota journal: {error.strerror}", "quota_journal", 5) from None
        if isinstance(made, OverLimit):
            raise self.refusal(tenant, made)
        return Charge(partial(self._settle, made))

    def _settle(self, number: int, tokens: int | None, outputs: Sequence[int]) -> None:
        self.quotas.settle(number, tokens, self.clock(), outputs)


def _duration(length_ns: int) -> str:
    """A duration as OpenAI writes it: 20ms, 7.25s, 6m0s; rounded up to a millisecond."""
    ms = math.ceil(length_ns / 1e6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    seconds = f"{ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
