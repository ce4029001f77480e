"""What the server does, as a line in the log every ten seconds while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from headway.engine.messages import EngineStats

EVERY_S = 10.0
logger = logging.getLogger("headway.server")


class Activity:
    """Counts tokens of the engine's steps, and writes them to the log.

    Args:
        engine: gives `stats` (EngineStats or None) and `num_waiting`.

    Attributes:
        step_ns: how long steps have taken, all of them together.
    """

    def __init__(self, engine: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._prompt_tokens = self._generated = self._looked_up = self._found = 0
        self._since = clock()
        self.step_ns = 0

    def on_step(self, stats: EngineStats) -> None:
        self.step_ns += stats.step_ns
        self._prompt_tokens += stats.prompt_tokens
        self._generated += stats.generation_tokens
        self._looked_up += stats.prefix_cache_queries
        self._found += stats.prefix_cache_hits

    async def report(self) -> None:
        """Log a line every EVERY_S seconds in which something happened, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            if line := self.line():
                logger.info("%s", line)

    def line(self) -> str:
        """What happened since the last line; "" where nothing did and nothing runs."""
        now, stats = self._clock(), self._engine.stats
        seconds, self._since = max(now - self._since, 1e-3), now
        running, waiting = (0 if stats is None else stats.num_running), self._engine.num_waiting
        tokens = self._prompt_tokens, self._generated
        found, looked_up = self._found, self._looked_up
        self._prompt_tokens = self._generated = self._looked_up = self._found = 0
        if not (any(tokens) or running or waiting):
            return ""
        used = 0.0 if stats is None else stats.kv_cache_usage
        hits = f", {found / looked_up:.0%} of prompt tokens from the prefix cache" if found and looked_up else ""
        return (
            f"{tokens[0] / seconds:,.1f} prompt tokens/s, {tokens[1] / seconds:,.1f} generated tokens/s; "
            f"{running:,} running, {waiting:,} waiting; KV cache {used:.1%} used{hits}"
        )
