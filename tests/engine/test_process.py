"""The step loop between two steps: how much it takes up, and when it looks after the pool."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine import process
from headway.engine.config import EngineConfig
from headway.engine.frames import Frames, framed
from headway.engine.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    Configure,
    EngineOutputs,
    EngineStats,
    Failed,
    Shutdown,
)
from headway.policy.admission.intake import INTAKE_NS
from headway.policy.cache.kv_blocks import CHECKED_AT_ONCE, KVBlocks
from headway.policy.step.sampling_params import SamplingParams


class Core:
    """Notes in `log` what it was asked to do; has work until `steps` steps are done."""

    waits_ms, hooks = 0, ()

    def __init__(self, steps: int = 10**9, parts: int = 0) -> None:
        self.log: list[str] = []
        self.scheduler = self  # which has the pool's check
        self.executor = self
        self.left = 0
        self._steps = steps
        self._parts = parts

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def add(self, request: AddRequest) -> None:
        self.log.append("add")
        self.left = self._steps

    def step(self) -> EngineOutputs:
        self.log.append("step")
        self.left -= 1
        return EngineOutputs([], EngineStats(0, 0, 0.0), 0)

    def look(self) -> None:
        pass

    def check_by_parts(self) -> Iterator[None]:
        for _ in range(self._parts):
            self.log.append("part")
            yield
        self.log.append("checked")


class Script:
    """A channel: each receive() yields the next of `turns` and notes its timeout; at the end comes Shutdown."""

    def __init__(self, turns: list[list[Any]]) -> None:
        self.turns = iter([*turns, [Shutdown()]])
        self.timeouts: list[int] = []

    def receive(self, timeout_ms: int) -> Iterator[Any]:
        self.timeouts.append(timeout_ms)
        yield from next(self.turns)

    def send(self, message: Any) -> None:
        pass


def request(number: int) -> AddRequest:
    return AddRequest(str(number), [1, 2, 3], SamplingParams(), [0])


def test_a_crowd_is_taken_up_a_few_milliseconds_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def clock() -> int:  # a message costs 50 microseconds
        nonlocal now
        now += 50_000
        return now

    monkeypatch.setattr("headway.engine.process.time.monotonic_ns", clock)
    ours, theirs = socket.socketpair()
    channel = process.Channel(theirs)
    crowd = [framed(process._encoder.encode(message)) for message in (*(request(i) for i in range(10_000)), Shutdown())]
    writing = threading.Thread(target=ours.sendall, args=[b"".join(crowd)])
    writing.start()
    channel.send = lambda message: None  # type: ignore[method-assign]
    core = Core()
    assert process._step_loop(channel, core, os.getppid()) == 0  # type: ignore[arg-type]
    between = [len(turn) // len("add,") for turn in ",".join([*core.log, ""]).split("step,")]
    assert sum(between) == 10_000
    assert max(between) == INTAKE_NS // 50_000


@given(messages=st.lists(st.binary(max_size=20), max_size=8), cuts=st.lists(st.integers(0, 250), max_size=8))
def test_messages_are_whole_however_their_bytes_come(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, messages))
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    frames, found = Frames(), []
    for begin, end in itertools.pairwise(ends):
        found += frames.take(stream[begin:end])
    assert found == messages


def test_what_the_other_process_does_not_read_waits_and_holds_up_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    channel, words, waits = process.Channel(theirs), "x" * 3_000_000, list[int]()
    wait = channel._wait
    monkeypatch.setattr(channel, "_wait", lambda event, ms: waits.append(ms) or wait(event, ms))
    for _ in range(3):
        channel.send(Failed(words))
    assert waits == [process.SEND_WAIT_MS] * 3
    frames, found = Frames(), []
    ours.settimeout(5)
    while len(found) < 3:
        assert list(channel.receive(0)) == []
        found += frames.take(ours.recv(1 << 20))
    assert found == [process._encoder.encode(Failed(words))] * 3


def test_an_engine_whose_server_is_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    channel, core = process.Channel(theirs), Core()
    ours.sendall(framed(process._encoder.encode(request(1))))
    ours.close()
    channel.send(Failed("nobody reads this"))
    assert process._step_loop(channel, core, os.getppid()) == 0  # type: ignore[arg-type]
    assert core.log == ["add"]


def test_the_pool_is_checked_when_nothing_else_is_to_do_and_a_request_does_not_wait_for_it() -> None:
    core = Core(steps=1, parts=50)
    turns = [[request(1)], [], [], [], [request(2)], *([[]] * 60)]
    channel = Script(turns)
    process._step_loop(channel, core, os.getppid())  # type: ignore[arg-type]
    assert core.log == ["add", "step", *["part"] * 3, "add", "step", *["part"] * 50, "checked"]
    assert channel.timeouts[:6] == [process.IDLE_POLL_MS, 0, 0, 0, 0, 0]
    assert channel.timeouts[-1] == process.IDLE_POLL_MS  # checked once


def test_an_engine_that_waits_for_company_sleeps_until_a_request_comes() -> None:
    core = Core(steps=2)
    core.waits_ms = 7
    channel = Script([[request(1)], [request(2)], *([[]] * 10)])
    process._step_loop(channel, core, os.getppid())  # type: ignore[arg-type]
    assert core.log[:4] == ["add", "step", "add", "step"]
    assert channel.timeouts[:2] == [process.IDLE_POLL_MS, 7]


def test_a_part_of_the_check_is_small_however_large_the_pool() -> None:
    pool = KVBlocks(100_000, 16)
    table = pool.allocate(60_000)
    pool.register(table[:1], "", tuple(range(16)))
    pool.release(table)
    assert sum(1 for _ in pool.check_by_parts([])) >= 2 * 100_000 // CHECKED_AT_ONCE
    pool.references[99_999] = 1  # a leak at the very end is still found
    with pytest.raises(RuntimeError, match="block 99999 has 1 references, but 0"):
        pool.check([])


class CompilationError(Exception):
    """Stands for what the compiler of kernels raises, which is no RuntimeError."""


@pytest.mark.parametrize("error", [CompilationError("at 12:4:\n  no tl.nothing"), KeyError("x")])
def test_whatever_keeps_an_engine_from_starting_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    sent: list[Any] = []
    channel = Script([])
    monkeypatch.setattr(channel, "send", sent.append)
    monkeypatch.setattr(process, "start_engine", fail)
    configure = Configure(EngineConfig(model="m"), PROTOCOL_VERSION)
    assert process._serve(channel, configure, os.getppid()) == 1  # type: ignore[arg-type]
    assert sent == [Failed(" ".join(str(error).split()))]
    assert type(error).__name__ in capsys.readouterr().err
