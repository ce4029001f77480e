"""Asks backends whether they are well, and which models they have."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import msgspec

from headway.gateway.gateway import Gateway
from headway.gateway.member import Member, clock
from headway.gateway.question import get
from headway.gateway.upstream import UpstreamFailed

# Every so many questions whether a backend is well it is also asked for its models.
MODELS_EVERY = 12
TICK_S = 0.1
# How often one is asked that is not there yet, or not any more.
ABSENT_S = 1.0
logger = logging.getLogger("headway.server")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


async def addresses_of(host: str) -> list[str]:
    """The IP addresses of a name, sorted. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class Asker:
    """Asks all backends of a gateway again and again, and the name service for those whose names are looked up.

    Args:
        look_up: gives the addresses of a name.
    """

    def __init__(self, gateway: Gateway, look_up: Callable[[str], Awaitable[list[str]]] = addresses_of) -> None:
        self._gateway, self._look_up = gateway, look_up
        self._asked: dict[Member, tuple[float, int]] = {}  # when each is asked again, and how often it was

    async def run(self) -> None:
        """Ask for ever."""
        loop = asyncio.get_running_loop()
        while True:
            members = [each for each in self._gateway.members.values() if not each.is_leaving]
            self._asked = {each: self._asked.get(each, (0.0, 0)) for each in members}
            for member, (due, count) in self._asked.items():
                if loop.time() >= due:
                    is_there = member.is_known and not member.breaker.is_down
                    again_s = member.breaker.rule.every_s if is_there else min(member.breaker.rule.every_s, ABSENT_S)
                    self._asked[member] = loop.time() + again_s, count + 1
                    self._gateway.background(self.ask(member, count))
                member.pool.close_old()
            await asyncio.sleep(TICK_S)

    async def resolve(self) -> None:
        """Look names up for ever. Where that fails, addresses stay as they were."""
        while True:
            for host in dict.fromkeys(each.host for each in self._gateway.file.backends if each.resolve):
                try:
                    found = await self._look_up(host)
                except OSError as error:
                    logger.warning("%s cannot be looked up: %s", host, error.strerror or error)
                    continue
                self._gateway.resolved(host, found)
            await asyncio.sleep(self._gateway.file.health.every_s)

    async def ask(self, member: Member, count: int) -> None:
        """Ask one backend, and take what it says. It may have been asked `count` times before."""
        breaker, was_down = member.breaker, member.breaker.is_down
        try:
            if member.entry.health_path:
                status, _ = await get(member, member.entry.health_path)
                # A server without such a route is there, at least.
                breaker.asked(status < 500 and status != 429, clock())
            is_time = not member.is_known or was_down or not count % MODELS_EVERY
            if is_time and not member.entry.models:
                await self._ask_for_models(member)
        except UpstreamFailed as error:
            breaker.asked(False, clock())
            if not was_down and breaker.is_down:
                logger.warning("backend %s is down: %s", member.entry.name, error)
        if breaker.is_down:
            member.move_waiting()
        elif was_down:
            logger.info("backend %s is well again", member.entry.name)

    async def _ask_for_models(self, member: Member) -> None:
        status, body = await get(member, "/v1/models")
        if status != 200:
            return
        try:
            cards = msgspec.json.decode(body, type=_Models).data
            member.cards = {msgspec.json.decode(each, type=_Model).id: each for each in cards}
        except (msgspec.MsgspecError, RecursionError):
            logger.warning("backend %s gives no list of models", member.entry.name)
            return
        member.is_known = True
