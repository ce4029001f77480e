"""What counts as an engine that ends no step: real processes in several states, and machines that are slow."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headway.engine import watchdog
from headway.engine.watchdog import LEAST_S, MOST_S, Watchdog

LIMIT_S = 0.08


@pytest.fixture(params=["waits", "computes", "is stopped"])
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    code = "while True: pass" if request.param == "computes" else "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    if request.param == "is stopped":
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # a signal takes its time on a busy machine
    yield process
    process.kill()
    process.wait()


def watch(dog: Watchdog, pid: int, *, has_work: bool = True, loads: bool = False, seconds: float = 60.0) -> str | None:
    """What the watchdog says within so many seconds."""

    async def watched() -> str | None:
        try:
            return await asyncio.wait_for(dog.watch(pid, lambda: has_work, lambda: loads), seconds)
        except TimeoutError:
            return None

    return asyncio.run(watched())


def test_whatever_it_does_it_ends_no_step(process: subprocess.Popen[bytes]) -> None:
    dog, began = Watchdog(LIMIT_S), time.monotonic()
    assert "had requests and ended no step" in (watch(dog, process.pid) or "")
    assert time.monotonic() - began >= 2 * LIMIT_S
    assert dog.limit_s == 2 * LIMIT_S and dog.stalled_s == 0.0


def test_while_it_loads_it_may_take_any_time_unless_it_is_stopped(process: subprocess.Popen[bytes]) -> None:
    stopped = "T" in watchdog.main_thread(process.pid)[0]
    found = watch(Watchdog(LIMIT_S), process.pid, loads=True, seconds=60.0 if stopped else 8 * LIMIT_S)
    assert found is None or (stopped and "was stopped while it loaded" in found)
    assert (found is None) == (not stopped)


def test_without_work_nothing_is_expected(process: subprocess.Popen[bytes]) -> None:
    assert watch(Watchdog(LIMIT_S), process.pid, has_work=False, seconds=8 * LIMIT_S) is None


@pytest.mark.parametrize(("state", "share"), [("R", 0.0), ("R", 0.1), ("D", 0.0)])
def test_a_starved_engine_is_not_a_stalled_one(monkeypatch: pytest.MonkeyPatch, state: str, share: float) -> None:
    """It would run, and gets little of a processor, or waits for its memory to come back from the disk."""
    began = time.monotonic()
    monkeypatch.setattr(watchdog, "main_thread", lambda pid: (state, share * (time.monotonic() - began)))
    assert watch(Watchdog(LIMIT_S), os.getpid(), seconds=8 * LIMIT_S) is None


def test_time_in_which_nobody_ran_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look comes hours late, as on a machine that goes on after it was suspended."""
    late, clock = iter([0.0, *[36_000.0] * 10**6]), time.monotonic
    monkeypatch.setattr(watchdog, "main_thread", lambda pid: ("S", 0.0))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + next(late))
    began = clock()
    assert watch(Watchdog(LIMIT_S), os.getpid()) is not None
    assert clock() - began >= 1.5 * LIMIT_S


def test_time_counts_from_when_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step should have ended in the pause before a look, where the first request came just before that look."""
    dog, looks = Watchdog(LIMIT_S), iter(range(10**6))
    monkeypatch.setattr(watchdog, "main_thread", lambda pid: ("S", 0.0))
    monkeypatch.setattr(watchdog, "_LOOKS_IN_LIMIT", 0.25)  # one pause is longer than what ends an engine

    async def watched() -> tuple[str, int]:
        return await dog.watch(os.getpid(), lambda: next(looks) > 0, lambda: False), next(looks)

    assert asyncio.run(watched())[1] == 3, "no work, new work, work that waited"


def test_steps_that_end_are_what_counts() -> None:
    async def run() -> tuple[str | None, list[float]]:
        dog, stalled = Watchdog(LIMIT_S), list[float]()
        watching = asyncio.create_task(dog.watch(os.getpid(), lambda: True, lambda: False))
        for _ in range(40):
            await asyncio.sleep(LIMIT_S / 5)
            dog.steps += 1
            stalled.append(dog.stalled_s)
        assert not watching.done()
        while not (dog.stalled_s or watching.done()):
            await asyncio.sleep(LIMIT_S / 50)
        stalled.append(dog.stalled_s)
        return await watching, stalled

    watchdog_says, stalled = asyncio.run(run())
    assert watchdog_says and "0." in watchdog_says
    assert not any(stalled[:-1])


def test_the_limit_follows_the_longest_step_that_is_predicted() -> None:
    dog = Watchdog()
    assert dog.limit_s == MOST_S, "the first steps may compile"
    for longest_s, limit_s in [(0.001, LEAST_S), (5.0, 50.0), (1e6, MOST_S)]:
        dog.longest_step_ns = longest_s * 1e9
        assert dog.limit_s == limit_s
    assert Watchdog(7.0).limit_s == 7.0


def test_engines_that_are_ended_again_and_again_get_more_time_each() -> None:
    dog = Watchdog(0.02)
    limits = []
    for _ in range(5):
        limits.append(dog.limit_s)
        assert watch(dog, 2**30) is not None
    assert limits == [0.02, 0.04, 0.08, 0.16, 0.16]
