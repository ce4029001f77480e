"""The requests of all calls in one batch, which a thread steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.engine.messages import SequenceOutput
from headway.llm.requests import Collector
from headway.llm.vectors import VectorCollector

if TYPE_CHECKING:
    from headway.engine.core import EngineCore

_LINGER_S = 0.05  # how long the step thread waits for another call: starting a thread takes longer than waking one
# Ctrl-C just before a wait begins is noticed only when the wait ends, so waits are no longer than this.
_NOTICED_S = 0.5


class Call:
    """One call of `generate` or `embed`: its requests, and how many choices of each are still to end.

    Args:
        advance: called for every request that has ended.
    """

    def __init__(
        self, collectors: Sequence[Collector | VectorCollector], advance: Callable[[], object] | None = None
    ) -> None:
        self.collectors = {collector.request.request_id: collector for collector in collectors}
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._advance = advance
        self.to_end = {name: collector.request.params.n for name, collector in self.collectors.items()}

    def take(self, output: SequenceOutput) -> bool:
        """Add new tokens; True when a stop string ended the choice and the engine should stop it."""
        name = output.request_id
        stopped = self.collectors[name].take(output)
        if output.finish_reason is not None:
            self.to_end[name] -= 1
            if not self.to_end[name]:
                del self.to_end[name]
                if self._advance is not None:
                    self._advance()
        return stopped


class Batch:
    """The requests of all calls. One thread steps them together; it is there while there are any, and a moment longer.

    Only that thread touches the engine. Callers wait, so that Ctrl-C in one of them never interrupts a step that others
    share.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: dict[str, Call] = {}  # calls by request
        self._changed = threading.Condition()  # holds what follows
        self._driver: threading.Thread | None = None
        self._joining: list[Call] = []
        self._leaving: list[Call] = []

    def run(self, call: Call) -> None:
        """Wait until the call is complete, and raise what went wrong. Interrupting the wait aborts its requests."""
        if not call.to_end:
            return
        try:
            self._join(call)
            while not call.ended.wait(_NOTICED_S):
                pass
        except BaseException:
            with self._changed:
                self._leaving.append(call)
                self._changed.notify()
            raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # its traceback holds the call

    def _join(self, call: Call) -> None:
        with self._changed:
            if self._driver is None:
                # A daemon if its caller is one, so that it keeps the interpreter alive for as long as its caller does.
                self._driver = threading.Thread(target=self._drive, name="headway-steps")
                try:
                    self._driver.start()
                except BaseException:
                    self._driver = None
                    raise
            self._joining.append(call)
            self._changed.notify()

    def _drive(self) -> None:
        while True:
            try:
                if not self._admit():
                    return
                for output in self._core.advance():
                    self._hand_over(output)
            except BaseException as error:
                self._fail(error)

    def _admit(self) -> bool:
        """Let calls in and out between two steps. False when there is none left: then this thread ends."""
        with self._changed:
            if self._driver is not threading.current_thread():
                return False  # an interrupt came while it was being started
            if not (self._joining or self._leaving or self._calls):
                self._changed.wait(_LINGER_S)
            elif (self._core.unready or self._core.adapters) and not (self._joining or self._leaving):
                self._changed.wait(self._core.waits_ms / 1000)
            joining, self._joining = self._joining, []
            leaving, self._leaving = self._leaving, []
            if not (joining or leaving or self._calls):
                self._driver = None
                return False
        for call in joining:
            self._add(call)
        for call in leaving:
            self._end(call)
        return True

    def _add(self, call: Call) -> None:
        try:
            for name, collector in call.collectors.items():
                self._calls[name] = call
                self._core.add(collector.request)
        except Exception as error:
            self._end(call, error)

    def _hand_over(self, output: SequenceOutput) -> None:
        call = self._calls.get(output.request_id)
        if call is None:  # its call has ended
            return
        try:
            if call.take(output):
                self._core.abort(output.request_id, output.index)
        except Exception as error:
            self._end(call, error)
        else:
            if not call.to_end:
                self._end(call)

    def _end(self, call: Call, error: BaseException | None = None) -> None:
        for name in call.collectors:
            self._calls.pop(name, None)
            if call.to_end:
                self._core.abort(name)
        call.error = error
        call.ended.set()

    def _fail(self, error: BaseException) -> None:
        """A step failed: every call fails, as all share the step."""
        for name, call in self._calls.items():
            call.error = error
            with suppress(Exception):
                self._core.abort(name)
        calls, self._calls = set(self._calls.values()), {}
        for call in calls:
            call.ended.set()
