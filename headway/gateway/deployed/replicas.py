"""Keeps as many replicas of each deployment as are wanted, and has the gateway know where they are.

A replica gets requests when its server says that it is well, as any backend. One that is to go gets nothing new, and
ends when it has answered all. A change of the file replaces replicas one after the other: a new one is well before an
old one goes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headway import __version__
from headway.config_files.gateway import BackendEntry, GatewayFile, backend_of
from headway.gateway.deployed.cluster import Absent, Gone, RayCluster
from headway.gateway.deployed.file import DeployFile, Deployment
from headway.gateway.gateway import Gateway
from headway.gateway.member import Member, clock
from headway.policy.fleet.backend import Ask
from headway.policy.fleet.scaling import Promises, Scaler

TICK_S = 1.0
# A server that was well and does not answer for so long is killed, and started again.
REPLACED_AFTER_S = 60.0
# After one that is gone for good, no other is started for so long.
RESTS_S = 5.0
logger = logging.getLogger("headway.server")


@dataclass(eq=False)
class Replica:
    """One replica."""

    name: str  # of its backend
    handle: Any
    key: str
    version: tuple[Any, ...]  # of the deployment that it was started with
    entry: BackendEntry | None = None  # its backend; None while nobody knows where it is
    is_leaving: bool = False  # it gets nothing new
    was_well: bool = False  # it has been well since its server was started
    silent_since: int = 0
    told: str = ""


@dataclass(eq=False)
class Replicas:
    """The replicas of one deployment."""

    deployment: Deployment
    scaler: Scaler
    promises: Promises
    all: list[Replica] = field(default_factory=list)
    started: int = 0
    rests_until: int = 0  # one was gone, and the next might be at once
    is_retired: bool = False  # the file does not have it any more


class Controller:
    """Follows a file.

    Args:
        more: further flags of all servers.
        tell: is told of each change, as a line.
    """

    def __init__(
        self, cluster: RayCluster, gateway: Gateway, file: DeployFile, more: list[str], tell: Callable[[str], None]
    ) -> None:
        self._cluster, self._gateway, self._more, self._tell = cluster, gateway, more, tell
        self._sets: dict[tuple[str, str], Replicas] = {}
        self._retired: list[Replicas] = []
        self._stopping: set[asyncio.Task[None]] = set()
        self._published: GatewayFile | None = None
        gateway.when_first.append(self._first_token)
        self.take(file)

    def take(self, file: DeployFile) -> None:
        """Follow this file from now on."""
        self._file = file
        known, self._sets = self._sets, {}
        for each in file.deployments:
            key = each.name, each.entry.role
            found = known.pop(key, None)
            if found is None:
                found = Replicas(each, Scaler(each.rule), Promises(each.attainment))
            elif found.deployment != each:
                found.deployment, found.scaler, found.promises = each, Scaler(each.rule), Promises(each.attainment)
            self._sets[key] = found
        for gone in known.values():
            gone.is_retired = True
            self._retired.append(gone)
        self._publish()

    @property
    def _everyone(self) -> list[Replicas]:
        return [*self._sets.values(), *self._retired]

    def _first_token(self, member: Member, ask: Ask, objective_ms: float, took_ms: float) -> None:
        for each in self._sets.values():
            if any(replica.name == member.entry.name for replica in each.all):
                each.promises.first_token(ask, objective_ms, took_ms, clock())

    # --- again and again ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look after all replicas, for ever."""
        while True:
            try:
                await self.tick()
            except Exception:
                logger.exception("replicas were not looked after; it is tried again")
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """Ask all replicas where they are, and start or end some."""
        await asyncio.gather(*(self._ask(each, replica) for each in self._everyone for replica in each.all))
        for each in self._everyone:
            self._scale(each)
        self._retired = [each for each in self._retired if each.all]
        self._publish()

    async def _ask(self, of: Replicas, replica: Replica) -> None:
        try:
            where = await self._cluster.where(replica.handle)
        except Gone as error:
            self._say(replica, f"gone: {error}")
            of.all.remove(replica)
            of.rests_until = clock() + round(RESTS_S * 1e9)
            return
        except Absent as error:
            return self._say(replica, str(error))  # the gateway asks its server itself whether it is well
        if where.version != __version__:
            self._say(replica, f"node {where.node} has Headway {where.version}, and this is {__version__}")
            return
        if replica.entry is None or replica.entry.url != where.url:
            template = of.deployment.entry
            address = backend_of({"name": replica.name, "url": where.url, "kind": "headway", "key": replica.key})
            replica.entry = replace(
                template, **{key: getattr(address, key) for key in ("name", "url", "host", "port", "key")}
            )
        member = self._member(replica)
        state = "unknown" if member is None else self._gateway.state_of(member, clock())
        replica.was_well = replica.was_well or state == "closed"
        told = "ready" if state == "closed" else "draining" if replica.is_leaving else "starting"
        told = where.state if where.state != "running" else state if replica.was_well and state == "down" else told
        self._say(replica, f"{told}, at {where.url}, on node {where.node}")
        await self._replace_silent(replica, state)

    async def _replace_silent(self, replica: Replica, state: str) -> None:
        if state != "down" or not replica.was_well:
            replica.silent_since = 0
        elif not replica.silent_since:
            replica.silent_since = clock()
        elif clock() - replica.silent_since > REPLACED_AFTER_S * 1e9:
            self._tell(f"{replica.name}: it does not answer; its server is started again")
            replica.silent_since, replica.was_well = 0, False
            await self._cluster.restart(replica.handle)

    def _say(self, replica: Replica, told: str) -> None:
        if replica.told != told:
            replica.told = told
            self._tell(f"{replica.name}: {told}")

    def _member(self, replica: Replica) -> Member | None:
        return self._gateway.members.get(replica.name)

    # --- how many -----------------------------------------------------------------------------------------

    def _scale(self, of: Replicas) -> None:
        staying = [each for each in of.all if not each.is_leaving]
        current = [each for each in staying if each.version == of.deployment.version]
        wanted = self._wanted(of, staying)
        if len(current) < wanted and len(staying) <= wanted and clock() >= of.rests_until:
            # A new version comes one at a time; else all come that are lacking.
            for _ in range(min(wanted - len(current), 1 if len(staying) > len(current) else wanted)):
                self._start(of)
        # Who is not well goes first, then the latest. An old one that is well goes only when all new ones are.
        going = [each for each in staying if each not in current] or current
        may_go = going is current or all(map(self._is_well, current))
        surplus = max(0, len(staying) - wanted)
        for replica in sorted(going, key=lambda each: (self._is_well(each), -going.index(each)))[:surplus]:
            if may_go or not self._is_well(replica):
                self._leave(replica)
        for replica in [each for each in of.all if each.is_leaving]:
            member = self._member(replica)
            if member is None or not member.in_flight:
                of.all.remove(replica)
                self._stop(replica)

    def _wanted(self, of: Replicas, staying: list[Replica]) -> int:
        if of.is_retired:
            return 0
        well, now = [each for each in staying if self._is_well(each)], clock()
        seen = [member.seen for each in well if (member := self._member(each)) is not None]
        is_short = len(well) == len(staying) and of.promises.are_missed(seen, now)
        return of.scaler.wanted(sum(each.queues.of_all.choices for each in seen), now, (len(staying) + 1) * is_short)

    def _is_well(self, replica: Replica) -> bool:
        member = self._member(replica)
        return member is not None and self._gateway.state_of(member, clock()) == "closed"

    def _start(self, of: Replicas) -> None:
        deployment = of.deployment
        of.started += 1
        role = f"-{deployment.entry.role}" if deployment.entry.role else ""
        name, key = f"{deployment.name}{role}-{of.started}", secrets.token_urlsafe(24)
        handle = self._cluster.start(deployment, name, key, self._more)
        of.all.append(Replica(name, handle, key, deployment.version))
        self._tell(f"{name}: placed")

    def _leave(self, replica: Replica) -> None:
        replica.is_leaving = True
        self._say(replica, "draining")

    def _stop(self, replica: Replica) -> None:
        self._tell(f"{replica.name}: ended")
        stopping = asyncio.create_task(self._cluster.stop(replica.handle, self._gateway.settings.shutdown_timeout))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    # --- the gateway --------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Have the gateway know all replicas. Those that leave get nothing new."""
        entries = list(self._file.gateway.backends)
        for each in self._everyone:
            for replica in each.all:
                if replica.entry is not None:
                    entries.append(replace(replica.entry, drain=replica.is_leaving))
        file = replace(self._file.gateway, backends=tuple(entries))
        if file != self._published:
            self._published = file
            self._gateway.take(file)

    async def end(self, timeout_s: float) -> None:
        """End all replicas."""
        everyone = [replica for each in self._everyone for replica in each.all]
        await asyncio.gather(*(self._cluster.stop(each.handle, timeout_s) for each in everyone), *self._stopping)
