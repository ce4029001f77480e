"""The Redis in which gateways keep what they share: one batch of changes at a time, each done exactly once."""

from __future__ import annotations

import asyncio
import uuid
from importlib.resources import files
from typing import Any

import msgspec

from headway.config_files.gateway import Shared

# Seconds that Redis has for a batch before it is asked again.
ANSWER_S = 2.0
Reply = tuple[int, list[list[int]], list[tuple[str, list[int], list[int]]]]


class StoreFailed(Exception):
    """Redis cannot be asked; the message says why. Whether it has done what was asked is not known."""


class BudgetStore:
    """The budgets in Redis, as one gateway sees them.

    A batch has a number. One whose answer was lost is sent again with the same number, and Redis does it only if it has
    not yet: see budgets.lua.
    """

    def __init__(self, shared: Shared) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._lease_us = round(shared.lease_s * 1e6)
        self._name = uuid.uuid4().hex
        prefix = f"{{{shared.prefix}}}"  # braces keep all keys in one slot of a cluster
        self._keys = [f"{prefix}:budgets", f"{prefix}:leases", f"{prefix}:open:{self._name}"]
        self._keys.append(f"{prefix}:last:{self._name}")
        self._redis: Any = Redis.from_url(
            shared.redis,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),
            max_connections=1,
        )
        self._script = self._redis.register_script(files(__package__).joinpath("budgets.lua").read_text("utf-8"))

    async def apply(self, number: int, operations: bytes) -> Reply:
        """Do a batch, or hear again what came of it.

        Args:
            number: one more than that of the batch before.
            operations: MessagePack, as budgets.lua describes it.

        Raises:
            StoreFailed: it is to be sent again.
        """
        from redis.exceptions import RedisError

        try:
            now_us, results, states = await self._script(
                keys=self._keys, args=[self._name, number, self._lease_us, operations]
            )
        except (RedisError, OSError, TimeoutError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from None  # which the client has taken for an error of its own
            raise StoreFailed(str(error) or type(error).__name__) from None
        return now_us, results, [(name.decode(), *meters) for name, *meters in states]

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()


def packed(operations: list[list[Any]]) -> bytes:
    """Operations as budgets.lua reads them."""
    return msgspec.msgpack.encode(operations)
