"""An event loop whose clock is virtual, and whose connections lead to backends that have been written, and fail."""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.trivial_server import COMPLETION, HEAD, WHOLE, piece

TTFT_S, GAP_S, TOKENS = 0.04, 0.02, 3
SLOW, WAY_S = 25.0, 0.0002  # how many times as slow a backend becomes; seconds of a way through the network
SILENT = ("frozen", "partition")
BROKEN = ("cut", "reset", "stall", "malformed", "ended")  # streams that break, after their first token
FAULTS = ("killed", *SILENT, "half-open", "slow", "5xx", *BROKEN, "renamed")
_ERROR = b'HTTP/1.1 %d Error\r\ncontent-type: application/json\r\ncontent-length: 27\r\n\r\n{"error":{"message":"bad"}}'
_WELL = WHOLE % (2, b"{}")


class Violation(Exception):
    """Something does not hold; the message names the seed."""


class Timeless(selectors.SelectSelector):
    """Nothing is waited for: the time passes as soon as nobody has anything to do."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Violation("everybody waits for ever")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is virtual, and whose connections lead to backends by their addresses."""

    def __init__(self) -> None:
        self._timeless = Timeless()
        super().__init__(self._timeless)
        self.backends: dict[str, Backend] = {}

    def time(self) -> float:
        return self._timeless.now_s

    def time_ns(self) -> int:
        return round(self._timeless.now_s * 1e9)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """A connection to a backend; the arguments that matter of asyncio's."""
        backend = self.backends[host]
        if backend.fault == "partition":
            await asyncio.sleep(math.inf)
        await asyncio.sleep(WAY_S)
        if backend.fault in ("killed", "renamed"):
            raise ConnectionRefusedError(111, "connection refused")
        protocol = factory()
        wire = Wire(self, protocol, backend)
        protocol.connection_made(wire)
        return wire, protocol


class Wire(asyncio.Transport):
    """A connection between the gateway's protocol and a backend."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol, backend: Backend) -> None:
        super().__init__()
        self._loop, self._protocol, self._backend = loop, protocol, backend
        self._life = backend.life
        self._is_closed = self._is_paused = False
        self._held: list[bytes] = []
        backend.wires[self] = None

    def write(self, data: Any) -> None:
        backend = self._backend
        if self._life != backend.life:  # nobody there knows of this connection
            self._loop.call_later(2 * WAY_S, self.lose, ConnectionResetError(104, "reset"))
        elif not self._is_closed:
            self._loop.call_later(WAY_S, backend.receive, self, bytes(data))

    def say(self, data: bytes) -> None:
        """Bytes of the backend come, unless it or the network is silent: then they come when that ends."""
        backend = self._backend
        if self._is_closed or self._life != backend.life:
            return
        if backend.fault in SILENT:
            backend.unsaid.append(partial(self.say, data))
        elif self._is_paused:
            self._held.append(data)
        else:
            self._protocol.data_received(data)

    def lose(self, error: Exception | None = None) -> None:
        """The connection ends."""
        if not self._is_closed:
            self._is_closed = True
            self._backend.wires.pop(self, None)
            self._loop.call_soon(self._protocol.connection_lost, error)

    def close(self) -> None:
        self.lose()

    def abort(self) -> None:
        self.lose()

    def is_closing(self) -> bool:
        return self._is_closed

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        held, self._held = self._held, []
        for data in held:
            self.say(data)


@dataclass(eq=False)
class Backend:
    """A server of completions, which is well or has a fault.

    Attributes:
        fault: one of FAULTS, or empty.
        last: the fault that it has, or had last.
        ended_s: when that was over; 0 as soon as a request has come since then.
        life: how often it was started.
        counted: attempts at it that had failed when its last fault began.
    """

    name: str
    loop: VirtualLoop
    rng: random.Random
    episodes: Episodes
    fault: str = ""
    last: str = ""
    ended_s: float = 0.0
    life: int = 0
    counted: int = 0
    wires: dict[Wire, None] = field(default_factory=dict)
    unsaid: list[Callable[[], None]] = field(default_factory=list)

    def begin(self, fault: str) -> None:
        self.fault = self.last = fault
        self.episodes.begun[fault] += 1
        if fault in ("killed", "half-open"):
            self.life += 1
            wires, self.wires = self.wires, {}
            for wire in wires if fault == "killed" else ():
                wire.lose(ConnectionResetError(104, "reset"))

    def end(self) -> None:
        self.fault, self.ended_s = "", self.loop.time()
        unsaid, self.unsaid = self.unsaid, []
        for say in unsaid:
            say()

    def receive(self, wire: Wire, data: bytes) -> None:
        """Take a request, whole, and say the answer in pieces."""
        if data.startswith(b"GET"):
            answer = partial(wire.say, _WELL)
        else:
            answer = partial(self._answer, wire, b'"stream":true' in data)
            if self.ended_s and not self.fault:
                self.episodes.back_s[self.last].append(self.loop.time() - self.ended_s)
                self.ended_s = 0.0
        if self.fault in SILENT:
            self.unsaid.append(answer)
        else:
            answer()

    def _answer(self, wire: Wire, is_stream: bool) -> None:
        fault, later = self.fault, self.loop.call_later
        if fault == "5xx":
            return wire.say(_ERROR % self.rng.choice((500, 502, 503)))
        pace = SLOW if fault == "slow" else 1.0
        at_s = pace * self.rng.expovariate(1 / TTFT_S)
        if not is_stream:
            whole = COMPLETION.whole(TOKENS)
            if fault in BROKEN:
                return self._break(wire, fault, at_s, whole[: len(whole) // 2])
            later(at_s, wire.say, whole)
            return
        for number in range(TOKENS):
            text = COMPLETION.chunk(b"%d " % number)
            if fault in BROKEN and number:
                return self._break(wire, fault, at_s, b"")
            is_last = number == TOKENS - 1
            later(at_s, wire.say, (b"" if number else HEAD) + text + (COMPLETION.ending(TOKENS) if is_last else b""))
            at_s += pace * GAP_S

    def _break(self, wire: Wire, fault: str, at_s: float, before: bytes) -> None:
        if before:
            self.loop.call_later(at_s, wire.say, before)
        if fault == "malformed":
            self.loop.call_later(at_s, wire.say, piece(b"this is no event\n\n"))
        elif fault == "ended":
            self.loop.call_later(at_s, wire.say, b"0\r\n\r\n")
        elif fault != "stall":
            self.loop.call_later(at_s, wire.lose, None if fault == "cut" else ConnectionResetError(104, "reset"))


@dataclass
class Episodes:
    """What came of faults, by fault.

    Attributes:
        begun: how often it was.
        attempts: attempts at a backend that failed, since it had it and until it had the next one.
        failed: requests that got an error for it.
        back_s: seconds from its end until a request came.
    """

    begun: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    back_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
