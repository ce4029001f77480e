"""Budgets that several gateways share: reserved and settled in Redis, in batches, whatever happens to it or to them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.config_files.gateway import Shared
from headway.gateway.shared.store import BudgetStore, Reply, StoreFailed, packed
from headway.policy.admission.quota import TOTAL, UNITS, Meter, OverLimit, Quotas
from headway.policy.admission.tenants import Limits, TenantTable
from headway.server.errors import unavailable
from headway.server.quotas import Budgets, Charge, clock_of_records

# Operations of one batch: it holds up Redis for some 10 us each.
MOST_IN_BATCH = 128
AGAIN_S, MOST_AGAIN_S = 0.05, 1.0
DRAINED_S = 2.0
logger = logging.getLogger("headway.server")


@dataclass(slots=True, eq=False)
class _Reservation:
    """One that is on its way. The answer is empty, or what refuses it."""

    operation: list[Any]
    answer: asyncio.Future[list[int]]
    is_sent: bool = False


class SharedQuotas(Budgets):
    """The budgets in Redis. `quotas` is what is known of them here: the meters as of the last batch.

    Args:
        store: does the batches.

    Attributes:
        is_up: Redis has answered the last batch.
    """

    def __init__(self, table: TenantTable, shared: Shared, store: BudgetStore | None = None) -> None:
        super().__init__(clock_of_records())
        self._shared, self._store = shared, store or BudgetStore(shared)
        self.is_up = True
        self._numbers, self._batches = itertools.count(1), itertools.count(1)
        self._queue: deque[_Reservation | list[Any]] = deque()
        self._unreserved: Counter[tuple[str, str]] = Counter()  # used without having been reserved, by tenant and unit
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self.quotas = Quotas(table, self.clock())
        self.set_tenants(table)

    def set_tenants(self, table: TenantTable) -> None:
        super().set_tenants(table)
        self._limits: dict[str, Limits] = {TOTAL: table.total} | {each.name: each for each in table}

    # --- what requests ask for ----------------------------------------------------------------------------

    def refuse_if_over(self, tenant: str) -> None:
        return  # only Redis knows

    async def reserved(self, tenant: str, prompt_tokens: int, outputs: Iterable[tuple[int, int]]) -> Charge:
        """Do what Budgets.reserved() says. Where Redis does not answer in time, a request is let in and charged later,
        or refused with 503, as the gateway's file says.
        """
        number, both = next(self._numbers), (self._limits.get(tenant, Limits()), self._limits[TOTAL])
        limits = [limit for each in both for limit in (each.requests_per_minute, each.tokens_per_minute)]
        tokens = min([self.expected(tenant, prompt_tokens, outputs), *(each for each in limits[1::2] if each)])
        is_in_doubt = False
        if self.is_up:
            answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
            waiting = _Reservation(["reserve", number, tenant, tokens, *limits], answer)
            self._add(waiting)
            try:
                async with asyncio.timeout(self._shared.timeout_s):
                    refusal = await answer
            except TimeoutError:
                is_in_doubt = waiting.is_sent
            except asyncio.CancelledError:
                self._settle(number, tenant, None, ())
                raise
            else:
                if refusal:
                    raise self.refusal(tenant, _over_limit(tenant, tokens, limits, refusal))
                return Charge(partial(self._settle, number, tenant))
        if self._shared.when_down == "allow":
            return Charge(partial(self._settle if is_in_doubt else self._use, number, tenant))
        if is_in_doubt:
            self._settle(number, tenant, None, ())
        raise unavailable("the budgets that gateways share cannot be asked for now", "quotas_unavailable", 1)

    def _settle(self, number: int, tenant: str, tokens: int | None, outputs: Sequence[int]) -> None:
        self.quotas.learn(tenant, outputs)
        self._add(["settle", number, tenant, -1 if tokens is None else tokens])

    def _use(self, number: int, tenant: str, tokens: int | None, outputs: Sequence[int]) -> None:
        self.quotas.learn(tenant, outputs)
        if tokens is not None:
            self._unreserved[tenant, UNITS[0]] += 1
            self._unreserved[tenant, UNITS[1]] += tokens
            self._wake_up()

    def _add(self, operation: _Reservation | list[Any]) -> None:
        self._queue.append(operation)
        self._wake_up()

    def _wake_up(self) -> None:
        self._idle.clear()
        self._wake.set()

    # --- batches ------------------------------------------------------------------------------------------

    async def keep(self, is_idle: Callable[[], bool]) -> None:
        """Do batches for ever. One is sent at least three times in a lease, so that it does not end."""
        try:
            await self._do([])
            while True:
                if not (self._queue or self._unreserved):
                    self._idle.set()
                    self._wake.clear()
                    try:
                        async with asyncio.timeout(self._shared.lease_s / 3):
                            await self._wake.wait()
                    except TimeoutError:
                        pass
                await self._do(self._next_batch())
        finally:
            await self._store.close()

    def _next_batch(self) -> list[_Reservation | list[Any]]:
        found: list[_Reservation | list[Any]] = []
        while self._queue and len(found) < MOST_IN_BATCH:
            operation = self._queue.popleft()
            if isinstance(operation, _Reservation):
                if operation.answer.done():  # nobody waits for it any more
                    continue
                operation.is_sent = True
            found.append(operation)
        for tenant in {tenant for tenant, _ in self._unreserved}:
            found.append(["use", tenant, *(self._unreserved.pop((tenant, unit), 0) for unit in UNITS)])
        return found

    async def _do(self, batch: list[_Reservation | list[Any]]) -> None:
        number = next(self._batches)
        content = packed([each.operation if isinstance(each, _Reservation) else each for each in batch])
        again_s = AGAIN_S
        while True:
            try:
                reply = await self._store.apply(number, content)
                break
            except StoreFailed as error:
                if self.is_up:
                    self.is_up = False
                    what = "let in and charged later" if self._shared.when_down == "allow" else "refused"
                    logger.error("the budgets in Redis cannot be asked: %s; requests are %s", error, what)
                await asyncio.sleep(again_s)
                again_s = min(MOST_AGAIN_S, 2 * again_s)
        if not self.is_up:
            self.is_up = True
            logger.info("the budgets in Redis answer again")
        self._take(batch, reply)

    def _take(self, batch: list[_Reservation | list[Any]], reply: Reply) -> None:
        now_us, results, states = reply
        ahead_us = self.clock() // 1000 - now_us
        for tenant, *meters in states:
            requests, tokens = [
                Meter(limit, level, at_us + ahead_us, reserved, settled, refunded)
                for limit, level, at_us, reserved, settled, refunded in meters
            ]
            self.quotas.meters[tenant] = requests, tokens
        waiting = [each for each in batch if isinstance(each, _Reservation)]
        for each, result in zip(waiting, results, strict=True):
            if not each.answer.done():
                each.answer.set_result(result)

    async def drained(self) -> None:
        try:
            async with asyncio.timeout(DRAINED_S):
                await self._idle.wait()
        except TimeoutError:
            logger.error("the end of %d requests could not be told to Redis; leases give them back", len(self._queue))

    def close(self) -> None:
        return  # keep() closes


def _over_limit(tenant: str, tokens: int, limits: Sequence[int], refusal: Sequence[int]) -> OverLimit:
    """What budgets.lua says of a refusal: scope and unit, from 1, what is left, and microseconds to wait."""
    scope, unit, left, wait_us = refusal
    whose, limit = (tenant, TOTAL)[scope - 1], limits[2 * scope + unit - 3]
    return OverLimit(whose, UNITS[unit - 1], limit, (1, tokens)[unit - 1], left, wait_us * 1000)
