"""What the engine does now, for the live view of the page: one stream of looks at it, for all who watch.

Nothing is kept or asked for while nobody watches. A look asks the engine for its last steps and first sequences,
between two steps. Looks have numbers and ids, and no text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec

from headway import __version__
from headway.engine.client import EngineDead
from headway.engine.messages import Explain
from headway.server.edge.streaming import EventStream, EventWriter, SlowReader, event
from headway.server.ended import Ended
from headway.server.errors import too_many
from headway.server.looks import NS_PER_MS, classes_look, in_ms, sequence_look, step_look
from headway.server.metrics.process import used_by
from headway.server.service import Service

EVERY_S = 0.5
MOST_WATCHERS, MOST_STEPS, MOST_SEQUENCES, MOST_ENDED = 8, 64, 64, 256


class Live:
    """The looks at one server's engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._watchers: dict[EventWriter, asyncio.Event] = {}
        self._places = 0  # of watchers, those whose stream has not begun included
        self._ended: deque[Ended] = deque(maxlen=MOST_ENDED)
        self._looking: asyncio.Task[None] | None = None

    def stream(self) -> EventStream:
        """A stream for one more watcher.

        Raises:
            ApiError: 429, too many watch.
        """
        if self._places >= MOST_WATCHERS:
            raise too_many(f"{MOST_WATCHERS} clients watch /debug/live; close one of them", "too_many_watchers", 5)
        self._places += 1
        return EventStream(self._events, self._service.settings, self._leave)

    def _leave(self) -> None:
        self._places -= 1

    async def _events(self, writer: EventWriter) -> None:
        writer.push(event(msgspec.json.encode({"about": self._about(), **await self._look(0, [])})))
        over = self._watchers[writer] = asyncio.Event()
        if self._looking is None:
            self._service.when_ended.append(self._ended.append)
            self._looking = asyncio.create_task(self._keep_looking())
        try:
            await over.wait()
        finally:
            self._watchers.pop(writer, None)

    async def _keep_looking(self) -> None:
        """Look until nobody watches, or the server shuts down."""
        try:
            after_ns = time.monotonic_ns()
            while self._watchers and not self._service.draining:
                await asyncio.sleep(EVERY_S)
                ended = [self._ended.popleft() for _ in range(len(self._ended))]
                look = await self._look(after_ns, ended)
                after_ns = look.pop("newest_ns")
                encoded = event(msgspec.json.encode(look))
                for writer in list(self._watchers):
                    self._push(writer, encoded)
        finally:
            self._service.when_ended.remove(self._ended.append)
            self._ended.clear()
            self._looking = None
            for over in self._watchers.values():
                over.set()

    def _push(self, writer: EventWriter, encoded: bytes) -> None:
        """Send a look. Who has not taken all earlier ones misses it."""
        if writer.is_drained:
            try:
                writer.push(encoded)
            except SlowReader:  # the stream ends itself
                self._watchers.pop(writer).set()

    async def _look(self, after_ns: int, ended: list[Ended]) -> dict[str, Any]:
        """What is new since `after_ns`, and who is in the engine."""
        service = self._service
        engine, stats, ready = service.engine, service.engine.stats, service.engine.ready
        look: dict[str, Any] = {"state": engine.state, "steps": [], "sequences": [], "cached_blocks": 0}
        newest_ns = after_ns
        try:
            told = await engine.explain(Explain(MOST_STEPS, after_ns, MOST_SEQUENCES, with_words=False))
        except EngineDead:
            pass
        else:
            look["steps"] = [step_look(each) for each in told.steps]
            look["sequences"] = [sequence_look(each) for each in told.sequences]
            look["cached_blocks"] = told.cached_blocks
            newest_ns = told.steps[-1].planned_ns if told.steps else after_ns
        pinned = 0 if ready is None else ready.pinned_blocks
        used, (behind, unread) = used_by(engine.pid), service.backlog()
        return look | {
            "at_ms": time.monotonic_ns() / NS_PER_MS,
            "newest_ns": newest_ns,
            "ended": [_ended(each) for each in ended],
            "engine_cpu_ms": None if used is None else used.cpu_seconds * 1e3,
            "steps_ms": service.activity.step_ns / NS_PER_MS,
            "clients_behind": behind,
            "unread_bytes": unread,
            "running": 0 if stats is None else stats.num_running,
            "waiting": engine.num_waiting,
            "used_blocks": pinned if stats is None else sum(stats.blocks_of_class.values()),
            "running_of_class": {} if stats is None else stats.running_of_class,
            "waiting_of_class": {} if stats is None else stats.waiting_of_class,
            "auto_tune": "" if service.auto_tune is None else service.auto_tune.words,
        }

    def _about(self) -> dict[str, Any]:
        """What does not change while a client watches."""
        ready = self._service.engine.ready
        return {
            "version": __version__,
            "blocks": 0 if ready is None else ready.num_blocks,
            "block_size": 0 if ready is None else ready.block_size,
            "has_roofline": ready is not None and ready.roofline != "",
            "classes": classes_look(self._service.classes.table),
        }


def _ended(ended: Ended) -> dict[str, Any]:
    return {
        "id": f"{ended.name}-{ended.index // ended.params.n}/{ended.index % ended.params.n}",  # as in the engine
        "service_class": ended.terms.service.name,
        "reason": ended.reason,
        "arrived_ms": ended.stamps.arrived_ns / NS_PER_MS,
        "e2e_ms": ended.e2e_ns / NS_PER_MS,
        "ttft_ms": None if ended.ttft_ns is None else ended.ttft_ns / NS_PER_MS,
        "tokens": ended.tokens,
        "met": all(ended.verdicts.values()) if ended.verdicts else None,
        "phases_ms": in_ms(ended.phases_ns),
    }
