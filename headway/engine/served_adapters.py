"""The adapters that an engine serves, as the API process knows them: by the names that requests use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from headway.engine.lora_modules import LoraModule
from headway.engine.messages import AdapterFound, DropAdapter, LoadAdapter

logger = logging.getLogger("headway.engine")


class AdapterError(ValueError):
    """An adapter cannot be loaded; the message is for the user."""


class ServedAdapters(dict[str, AdapterFound]):
    """Adapters by name. Of those that the first engine is to load, only names are known before it is ready.

    Args:
        send: sends a message to the engine.
    """

    def __init__(self, modules: Sequence[LoraModule], send: Callable[[LoadAdapter | DropAdapter], None]) -> None:
        super().__init__((each.name, AdapterFound(each.name, each.path)) for each in modules)
        self._send = send
        self._finding: dict[str, asyncio.Future[AdapterFound]] = {}

    @property
    def modules(self) -> list[LoraModule]:
        """What the next engine process is to load."""
        return [LoraModule(each.name, each.path) for each in self.values()]

    def engine_ready(self, found: Sequence[AdapterFound]) -> None:
        """An engine process serves these. One that could not be had again is told of in the log."""
        self.clear()
        for each in found:
            if each.error:
                logger.warning("an adapter is not served any more: %s", each.error)
            else:
                self[each.name] = each

    def engine_ended(self, error: Exception) -> None:
        """The engine process will not answer; what is being loaded fails with this error."""
        for asked in self._finding.values():
            if not asked.done():
                asked.set_exception(error)

    def take(self, answer: AdapterFound) -> None:
        """Take the engine's answer."""
        asked = self._finding.get(answer.name)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    async def load(self, name: str, path: str) -> AdapterFound:
        """Have the engine read an adapter, and serve it under this name, also with engine processes to come.

        Raises:
            AdapterError: it cannot be served, or one of this name is being loaded.
        """
        if name in self._finding:
            raise AdapterError(f"adapter {name!r} is being loaded; wait for that")
        asked: asyncio.Future[AdapterFound] = asyncio.get_running_loop().create_future()
        self._finding[name] = asked
        try:
            self._send(LoadAdapter(name, path))
            found = await asked
        finally:
            del self._finding[name]
        if found.error:
            raise AdapterError(found.error)
        self[name] = found
        return found

    def drop(self, name: str) -> None:
        """Serve no adapter under this name any more. Requests that have it go on."""
        dropped = self.pop(name)
        if all(each.digest != dropped.digest for each in self.values()):
            self._send(DropAdapter(dropped.digest))
