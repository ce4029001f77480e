"""The client watches itself: what it sees of a stalled loop, of unread bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from headway.bench.client import watch
from headway.bench.client.alarm import Alarm
from headway.bench.client.watch import LoopWatch
from headway.load.record import ClientHealth
from tests.bench.client.senders import Run

# --- the alarm ------------------------------------------------------------------------------------------


def test_an_alarm_rings_after_its_time_and_can_be_set_anew(run: Run) -> None:
    async def measure() -> None:
        rung = []
        done = asyncio.Event()

        def ring() -> None:
            rung.append(time.monotonic_ns())
            done.set()

        clock = Alarm(ring)
        began = time.monotonic_ns()
        clock.set(began + 3600 * 10**9)
        clock.set(began + 7_300_000)
        await done.wait()
        assert rung[0] >= began + 7_300_000
        done.clear()
        clock.set(began)  # has passed: at once
        await done.wait()
        clock.set(time.monotonic_ns() + 1_000_000)
        clock.close()
        await asyncio.sleep(0.01)
        assert len(rung) == 2

    run(measure())


# --- the loop -------------------------------------------------------------------------------------------


def test_a_stall_counts_for_as_long_as_it_took(run: Run) -> None:
    async def measure() -> tuple[ClientHealth, float]:
        with LoopWatch() as seen:
            await asyncio.sleep(0.05)
            began = time.monotonic()
            time.sleep(0.3)
            stalled_ms = (time.monotonic() - began) * 1000
            await asyncio.sleep(0.05)
        return seen.health([], []), stalled_ms

    health, stalled_ms = run(measure())
    late = sorted(health.loop_lag_ms, reverse=True)
    # The first sample that the stall swallowed waited for all of it, and each next one 10 ms less.
    assert stalled_ms - 10.001 <= late[0] <= stalled_ms + 60
    steps = np.array(late[:25]) - np.array(late[1:26])
    assert np.allclose(steps, 10, atol=0.01)
    assert len(health.loop_lag_ms) >= 39
    assert health.cpu_share < 0.9


def test_a_busy_client_says_what_share_of_a_core_it_used(run: Run) -> None:
    async def measure() -> tuple[ClientHealth, float]:
        with LoopWatch() as seen:
            wall, used = -time.monotonic(), -time.process_time()
            while used + time.process_time() < 0.1:
                await asyncio.sleep(0)
            wall, used = wall + time.monotonic(), used + time.process_time()
        return seen.health([], []), used / wall

    health, share = run(measure())
    assert health.cpu_share == pytest.approx(share, rel=0.1)


# --- the sockets ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(count)]
    try:
        yield made
    finally:
        for pair in made:
            for each in pair:
                each.close()


@pytest.mark.parametrize(("count", "unread"), [(3, 50_000), (3 * watch.SOCKETS_PER_SAMPLE, 1500)])
def test_unread_bytes_are_seen(run: Run, count: int, unread: int) -> None:
    async def measure(sockets: list[socket.socket]) -> ClientHealth:
        with LoopWatch(lambda: [each.fileno() for each in sockets], interval_s=0.001) as seen:
            while len(seen.backlog_bytes) < 4:
                await asyncio.sleep(0.001)
        return seen.health([], [])

    with pairs(count) as made:
        for near, _ in made:
            near.send(b"x" * unread)
        health = run(measure([far for _, far in made]))
    assert health.backlog_bytes and set(health.backlog_bytes) == {count * unread}


def test_every_socket_has_its_turn(run: Run) -> None:
    count = 2 * watch.SOCKETS_PER_SAMPLE + 5

    async def measure(sockets: list[socket.socket]) -> list[int]:
        with LoopWatch(lambda: [each.fileno() for each in sockets], interval_s=0.001) as seen:
            while len(seen.backlog_bytes) < 6:
                await asyncio.sleep(0.001)
        return seen.backlog_bytes

    with pairs(count) as made:
        made[-1][0].send(b"x" * 4000)
        assert any(run(measure([far for _, far in made])))


def test_a_closed_socket_does_no_harm(run: Run) -> None:
    async def measure() -> ClientHealth:
        closed = socket.socket()
        was = closed.fileno()
        closed.close()
        with LoopWatch(lambda: [was, -1], interval_s=0.001) as seen:
            while len(seen.backlog_bytes) < 3:
                await asyncio.sleep(0.001)
        return seen.health([], [])

    assert set(run(measure()).backlog_bytes) == {0}


def test_waiting_for_a_core_is_read_where_the_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    before = watch.waited_for_core_ns()
    assert 0 <= before <= watch.waited_for_core_ns()
    monkeypatch.setattr(watch, "Path", lambda _: (_ for _ in ()).throw(OSError))
    assert watch.waited_for_core_ns() == 0
