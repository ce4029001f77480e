"""What all requests of a gateway share: its backends, who may come in, and which backend gets a request."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from headway.config_files.classes import ClassFile
from headway.config_files.gateway import DECODE, PREFILL, BackendEntry, GatewayFile, read_gateway_file
from headway.config_files.tenants import TenantFile
from headway.gateway.asked import OF_BATCHES, Body
from headway.gateway.member import Member, clock
from headway.gateway.metrics import GatewayMetrics
from headway.gateway.settings import MOST_IN_FLIGHT, MOST_TOKENS, GatewaySettings
from headway.gateway.stored import Homes, no_store
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.admission.quota import TOTAL
from headway.policy.fleet.backend import Ask
from headway.policy.fleet.handover import HandoverRule
from headway.policy.fleet.health import RetryBudget
from headway.policy.fleet.routing import router_of
from headway.server.door import Door
from headway.server.edge.bodies import Bodies
from headway.server.errors import ApiError, bad_request, not_found, unavailable
from headway.server.quotas import Budgets

# One of so many requests may be asked of a second backend as the first one is slow.
HEDGED_OF = 20
logger = logging.getLogger("headway.server")


class Gateway(Door):
    """The state behind every route. It needs a running event loop.

    Attributes:
        members: the backends by name, also those that have left the file and still answer.
        when_first: called with each first token of a stream: the backend, the request, and in milliseconds the
            objective and how long it took.

    Raises:
        ValueError: the journal of quotas cannot be kept.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings, self.file = settings, settings.file
        super().__init__(settings)
        self.bodies = Bodies(settings.max_body_size)
        self.members: dict[str, Member] = {}
        self.when_first: list[Callable[[Member, Ask, float, float], None]] = []
        self.retries, self.hedges = RetryBudget(), RetryBudget(per_retry=HEDGED_OF)
        self._addresses: dict[str, list[str]] = {}  # of names that are looked up
        self.homes = Homes(lambda: self.members, settings.tenants is not None)
        self.metrics = GatewayMetrics(settings.metrics_prefix, self.quotas, lambda: self.members, self.state_of)
        choices, tokens = settings.max_num_queued_reqs, settings.max_num_queued_tokens
        self.admission.queues.of_all.limits = QueueLimits(
            MOST_IN_FLIGHT if choices is None else choices, MOST_TOKENS if tokens is None else tokens
        )
        self.take_files(settings.service_classes or ClassFile(), settings.tenants or TenantFile())
        self.take(settings.file)

    def _quotas_of(self, tenants: TenantFile) -> Budgets:
        if not self.file.shared.redis:
            return super()._quotas_of(tenants)
        from headway.gateway.shared.quotas import SharedQuotas

        return SharedQuotas(tenants.table, self.file.shared)

    # --- what the files say -----------------------------------------------------------------------------

    def take_files(self, classes: ClassFile, tenants: TenantFile) -> None:
        super().take_files(classes, tenants)
        self.router = router_of(self.file.routing, classes.table)
        for member in self.members.values():
            member.seen.queues.set_classes(classes.table)
        if self.metrics.by_tenant is not None:
            self.metrics.by_tenant.set_tenants(tenants.table)

    def take(self, file: GatewayFile) -> None:
        """Have the backends of a file from now on. Those that it does not have any more end what they have begun."""
        is_first, now = not self.members, clock()
        self.file, self.router = file, router_of(file.routing, self.classes.table)
        self.hands_over = file.handover != "never" and any(each.role == PREFILL for each in file.backends)
        self._handovers = HandoverRule(file.handover)
        entries = {each.name: each for entry in file.backends for each in self._expanded(entry)}
        for name, member in list(self.members.items()):
            entry = entries.get(name)
            if entry is not None and entry.url == member.entry.url:
                member.take(entry, file.timeouts, file.health)
                member.is_leaving = False
            elif entry is None:
                self._leave(name, name)
            else:  # another server of the same name
                self._leave(name, f"{name} at {member.entry.url}")
        for name, entry in entries.items():
            if name not in self.members:
                member = Member(entry, file.timeouts, file.health, self.classes.table)
                if not is_first:
                    member.breaker.begin(now)
                self.members[name] = member

    def _expanded(self, entry: BackendEntry) -> list[BackendEntry]:
        if not entry.resolve:
            return [entry]
        return [entry.at(address) for address in self._addresses.get(entry.host, ())]

    def resolved(self, host: str, addresses: list[str]) -> None:
        """Have a backend for each address of a name from now on."""
        if addresses != self._addresses.get(host):
            self._addresses[host] = addresses
            logger.info("%s is now %s", host, ", ".join(addresses))
            self.take(self.file)

    def _leave(self, name: str, new_name: str) -> None:
        member = self.members.pop(name)
        member.is_leaving = True
        if member.in_flight:
            self.members[new_name] = member
        else:
            member.pool.close()

    def let_go(self, member: Member) -> None:
        """Forget a backend that has left the file, if it has answered all."""
        if member.is_leaving and not member.in_flight:
            self.members = {name: each for name, each in self.members.items() if each is not member}
            member.pool.close()

    def reload_files(self) -> None:
        """Read the files again. If one is wrong, it stays as it was, and the log says so."""
        self.reload_keys()
        if not self.file.path:
            return
        try:
            file = read_gateway_file(self.file.path)
        except ValueError as error:
            logger.error("backends are unchanged: %s", error)
            return self.metrics.count("reloads", "failed")
        if file.shared != self.file.shared:
            logger.error("[shared] is unchanged: restart the gateway to share something else")
            file = replace(file, shared=self.file.shared)
        self.take(file)
        logger.info("backends are now %s", ", ".join(each.name for each in file.backends))
        self.metrics.count("reloads", "done")

    def has_limit(self, tenant: str) -> bool:
        """Whether a tenant, or all together, may use only so much."""
        if self.quotas is None:
            return False
        meters = (*self.quotas.quotas.of(tenant), *self.quotas.quotas.of(TOTAL))
        return any(each.limit for each in meters)

    def reload_keys(self) -> None:
        """Read the files of classes and of tenants again, where there are any."""
        if self.has_files:
            self.metrics.count("reloads", "done" if self.read_files_again() else "failed")

    # --- which backend ----------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raise ApiError 503 where no backend can answer, and while the gateway shuts down."""
        self.check_up()
        now = clock()
        if not any(each.is_known and each.breaker.allows(now) for each in self.members.values()):
            raise self._no_backend("no backend is well", list(self.members.values()), now)

    def models(self) -> list[str]:
        """Names of all models, those of the first backend first."""
        return list(dict.fromkeys(name for each in self.members.values() for name in each.models))

    def serving(self, body: Body, stores: str = "") -> list[Member]:
        """The backends that have the model of a request, and where it stores files or batches, those that do.

        Raises:
            ApiError: 404 where none has it, 400 where the request names none and there are several, 503 while backends
                have not said what they have.
        """
        members = [each for each in self.members.values() if not each.is_leaving]
        if stores in OF_BATCHES:
            members = [each for each in members if each.entry.batches]
            if not members:
                raise no_store(stores)
        found = [each for each in members if each.serves(body.model)]
        if body.model is None and len(self.models()) > 1 and stores not in OF_BATCHES:
            raise bad_request(f"model is missing; there are {', '.join(self.models())[:300]}", "model")
        if found:
            return found
        if not (all(each.is_known for each in members) and members):
            raise unavailable("not all backends have said which models they have", "backends_loading", 1)
        message = f"model {(body.model or '')[:200]!r} is not served here; there are {', '.join(self.models())[:300]}"
        raise not_found(message, "model_not_found", "model")

    def route(self, ask: Ask, serving: list[Member], tried: set[Member]) -> Member:
        """The backend that gets a request.

        Args:
            serving: those that have its model.
            tried: those that have failed on it, which are not asked again.

        Raises:
            ApiError: 503 where none is well, 429 where all are full, 400 where its prompt fits none.
        """
        now = clock()
        able = [each for each in serving if each not in tried and each.takes(ask, now)]
        if not able:
            raise self._why_none(ask, serving, now)
        if self.hands_over:  # those for prompts answer where all others are gone
            able = [each for each in able if each.entry.role != PREFILL] or able
        return self._best(ask, able, now)

    def _best(self, ask: Ask, able: list[Member], now: int) -> Member:
        if len(able) == 1:
            return able[0]
        for each in able:
            each.seen.share = each.breaker.share(now)
        return able[self.router.choose(ask, [each.seen for each in able])]

    def computing(self, ask: Ask, serving: list[Member], decode: Member) -> Member | None:
        """The backend for prompts that computes the prompt of a request; None where the one that answers does it."""
        now = clock()
        able = [each for each in serving if each.entry.role == PREFILL and each.takes(ask, now)]
        if decode.entry.role != DECODE or not able:
            return None
        found = self._best(ask, able, now)
        return found if self._handovers.pays(ask, found.seen, decode.seen) else None

    def at_home(self, member: Member) -> Member:
        """The backend that has what a request goes on with. Raises ApiError 503 where it is not well."""
        now = clock()
        if not member.breaker.allows(now):
            raise self._no_backend("the backend that has this is not well", [member], now)
        return member

    def has_other(self, ask: Ask, serving: list[Member], tried: set[Member]) -> bool:
        """Whether a request can be sent to a backend that has not failed on it."""
        now = clock()
        return any(each not in tried and each.takes(ask, now) for each in serving)

    def _why_none(self, ask: Ask, serving: list[Member], now: int) -> ApiError:
        entries = [each.entry for each in serving]
        if not any(each.min_prompt_tokens <= ask.tokens <= each.max_prompt_tokens for each in entries):
            most = max(each.max_prompt_tokens for each in entries)
            return bad_request(
                f"the prompt has about {ask.tokens} tokens; no backend takes that many (max_prompt_tokens {most:g})"
            )
        full = [each for each in serving if each.breaker.allows(now) and each.in_flight >= each.entry.max_requests]
        if full:
            message = f"each backend has the {full[0].entry.max_requests} requests that it may have (max_requests)"
            return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        return self._no_backend("no backend with this model is well", serving, now)

    def _no_backend(self, what: str, members: list[Member], now: int) -> ApiError:
        states = ", ".join(f"{each.entry.name} {self.state_of(each, now)}" for each in members[:20])
        wait_ns = min((each.breaker.wait_ns(now) for each in members if not each.breaker.is_down), default=0)
        return unavailable(f"{what}: {states}", "no_backend", max(1, math.ceil(wait_ns / 1e9)))

    def state_of(self, member: Member, now: int) -> str:
        """One word for whether a backend gets requests."""
        if member.entry.drain or member.is_leaving:
            return "draining"
        return member.breaker.state(now) if member.is_known else "unknown"

    async def close(self) -> None:
        """Close what is open."""
        self.full_collections.stop()
        if self.quotas is not None:
            await self.quotas.drained()
        self.end_background()
        for member in self.members.values():
            member.pool.close()
        if self.quotas is not None:
            self.quotas.close()
        await asyncio.sleep(0)
