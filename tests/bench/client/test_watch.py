"""The client watches itself: what it sees of a stalled loop, of unread bytes, and when it calls a run client-bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from array import array
from collections.abc import Iterator

import numpy as np
import pytest

from headway.bench.client import watch
from headway.bench.client.alarm import Alarm
from headway.bench.client.watch import LoopWatch, p99, reasons
from headway.bench.record import ClientHealth, Failure, FailureKind, RequestRecord
from tests.bench.client.senders import Run


def answered(ttft_ms: float, gap_ms: float, tokens: int = 5) -> RequestRecord:
    sent_ns = 10**9
    times = [sent_ns + round((ttft_ms + gap_ms * i) * 1e6) for i in range(tokens)]
    return RequestRecord(0, sent_ns=sent_ns, chunk_ns=array("q", times), end_ns=times[-1])


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
    # Of the samples that the stall swallowed, the first waited for all of it and each next one 10 ms less.
    assert stalled_ms - 10.001 <= late[0] <= stalled_ms + 60
    steps = np.array(late[:25]) - np.array(late[1:26])
    assert np.allclose(steps, 10, atol=0.01)
    assert len(health.loop_lag_ms) >= 39
    assert health.bound and "event loop ran late" in health.reasons[0]
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
    assert any("unread" in reason for reason in health.reasons)


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


# --- the judgement --------------------------------------------------------------------------------------


def judged(
    lag_ms: list[float] | None = None,
    start_ms: list[float] | None = None,
    *,
    cpu_share: float = 0.2,
    waited: float = 0.0,
    unread: float = 0.0,
    records: list[RequestRecord] | None = None,
) -> list[str]:
    health = ClientHealth(loop_lag_ms=lag_ms or [], start_lag_ms=start_ms or [], cpu_share=cpu_share)
    return reasons(health, records or [], waited, unread)


def test_a_client_that_keeps_up_has_nothing_to_say() -> None:
    assert judged([0.2] * 1000, [0.1] * 500, waited=0.3) == []
    assert judged() == []


def test_one_short_stall_in_a_long_run_does_not_mark_it() -> None:
    assert judged([0.1] * 995 + [50.0, 40.0, 30.0, 20.0, 10.0]) == []
    assert judged([0.1] * 50 + [50.0, 40.0]) == []  # too few to speak of a 99th percentile
    (reason,) = judged([0.1] * 980 + [25.0] * 20)
    assert reason == (
        "the client's event loop ran late, by 25.0 ms at P99 (limit 10.0 ms, exceeded in 2.0 % of the time): "
        "latencies may be overstated by as much"
    )


def test_requests_sent_late_mark_the_run() -> None:
    (reason,) = judged(start_ms=[0.1] * 980 + [12.0] * 20)
    assert reason == (
        "requests were sent late, by 12.0 ms at P99 (limit 10.0 ms): latencies from the schedule may be overstated "
        "by as much"
    )
    assert judged(start_ms=[9.9] * 1000) == []


def test_where_the_server_is_fast_the_client_must_be_faster() -> None:
    lag = [6.0] * 100
    assert judged(lag, records=[answered(200.0, 40.0)]) == []
    assert "limit 4.0 ms" in judged(lag, records=[answered(200.0, 8.0)])[0]  # half a gap between tokens
    assert "limit 2.0 ms" in judged(start_ms=lag, records=[answered(0.5, 40.0)])[0]
    assert judged([1.9] * 100, [1.9] * 100, records=[answered(0.5, 0.5)]) == []


def test_failed_requests_set_no_limit() -> None:
    failed = answered(0.1, 0.1)
    failed.failure = Failure(FailureKind.CUT, "cut")
    assert judged([6.0] * 100, records=[failed, RequestRecord(1)]) == []


def test_it_says_whose_fault_it_is() -> None:
    busy = judged([20.0] * 100, cpu_share=0.97, waited=0.4)
    assert len(busy) == 2 and busy[1].startswith("the client used 0.97 of a core (limit 0.9)")
    held_up = judged([20.0] * 100, cpu_share=0.3, waited=0.4)
    assert len(held_up) == 2
    assert held_up[1].startswith("the client had no core in 40 % of the time, though it used only 0.30 of one")
    assert judged([20.0] * 100, cpu_share=0.3, waited=0.0)[1:] == []


def test_unread_bytes_mark_the_run_when_they_stay() -> None:
    assert judged(unread=0.04) == []
    assert "in 30 % of the time" in judged(unread=0.3)[0]


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 250, 1000])
def test_p99_is_that_of_numpy(count: int) -> None:
    values = list(np.random.default_rng(count).exponential(size=count))
    assert p99(values) == np.percentile(values, 99, method="inverted_cdf")
    assert p99([]) == 0.0


def test_waiting_for_a_core_is_read_where_the_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    before = watch.waited_for_core_ns()
    assert 0 <= before <= watch.waited_for_core_ns()
    monkeypatch.setattr(watch, "Path", lambda _: (_ for _ in ()).throw(OSError))
    assert watch.waited_for_core_ns() == 0
