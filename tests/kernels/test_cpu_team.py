"""The team: every part done once, by more threads than cores, awake or asleep, and gone with its owner."""

from __future__ import annotations

import gc
import struct
import threading
import time

import numpy as np
import pytest
import torch

from headway.kernels.cpu import jobs
from headway.kernels.cpu import team as cpu_team
from headway.kernels.cpu.compile import callable_of
from headway.kernels.cpu.jobs import job, tickets
from headway.kernels.cpu.simd import add_to, pause, read_int64, read_shared, take_ticket
from headway.kernels.cpu.team import Team
from tests.kernels.steps import torch_threads

LAYOUT = struct.Struct("2q")


def count_parts(a: int) -> None:
    """Add one to each of the int64 at the first argument, as many as the second says."""
    part = take_ticket(tickets(a, 0))
    while part < read_int64(a, 1):
        add_to(read_int64(a, 0) + 8 * part, 1)
        part = take_ticket(tickets(a, 0))


def wait_for_another(a: int) -> None:
    """Add one to the int64 at the first argument, then wait for a second thread to do so, for seconds at most."""
    add_to(read_int64(a, 0), 1)
    for _ in range(read_int64(a, 1)):
        if read_shared(read_int64(a, 0)) > 1:
            break
        pause()


@pytest.fixture(scope="module")
def code() -> int:
    return job(count_parts)


def team_of(threads: int) -> Team:
    with torch_threads(threads):
        return Team()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_part_is_done_once_in_every_job(code: int, threads: int) -> None:
    team = team_of(threads)
    done = np.zeros(300, np.int64)
    for _ in range(2000):
        team.run(code, LAYOUT, (done.ctypes.data, len(done)))
    assert (done == 2000).all()


def test_a_team_has_no_more_helpers_than_its_board_can_count(code: int) -> None:
    team = team_of(300)
    assert len(team._helpers) == team.threads - 1 == 127
    done = np.zeros(300, np.int64)
    for _ in range(5):
        team.run(code, LAYOUT, (done.ctypes.data, len(done)))
    assert (done == 5).all()


def test_jobs_after_a_pause_find_sleeping_helpers(code: int) -> None:
    team = team_of(3)
    done = np.zeros(64, np.int64)
    for _ in range(20):
        time.sleep(0.01)
        team.run(code, LAYOUT, (done.ctypes.data, len(done)))
        team.run_alone(code, LAYOUT, (done.ctypes.data, len(done)))
    assert (done == 40).all()


def test_a_sleeping_helper_takes_part_in_the_job_that_wakes_it() -> None:
    """One job that is longer than a helper's patience must not be left to the calling thread alone."""
    waiting, team = job(wait_for_another), team_of(2)
    for _ in range(5):
        time.sleep(0.05)
        came = np.zeros(1, np.int64)
        team.run(waiting, LAYOUT, (came.ctypes.data, 200_000_000))
        assert came[0] >= 2


def test_helpers_sleep_when_there_is_nothing_to_do(code: int) -> None:
    team = team_of(2)
    done = np.zeros(8, np.int64)
    for _ in range(50):
        team.run(code, LAYOUT, (done.ctypes.data, len(done)))
    deadline = time.monotonic() + 10
    while not all(helper.asleep for helper in team._helpers):
        assert time.monotonic() < deadline, "a helper goes on looking for work"
        time.sleep(0.01)


def test_helpers_beyond_a_limit_leave_though_there_is_work_and_come_back(code: int) -> None:
    waiting, team, done = job(wait_for_another), team_of(3), np.zeros(8, np.int64)
    team.limit(1)
    deadline = time.monotonic() + 10
    while not all(helper.asleep for helper in team._helpers):
        assert time.monotonic() < deadline, "a helper goes on looking for work"
        team.run(code, LAYOUT, (done.ctypes.data, len(done)))
    came = np.zeros(1, np.int64)
    team.run(waiting, LAYOUT, (came.ctypes.data, 100_000))
    assert came[0] == 1
    for threads in (2, 3):
        team.limit(threads)
        came[0] = 0
        team.run(waiting, LAYOUT, (came.ctypes.data, 200_000_000))
        assert 2 <= came[0] <= threads


def test_a_team_that_is_dropped_ends_its_threads(code: int) -> None:
    def helpers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("headway-helper")}

    before = helpers()
    team = team_of(4)
    done = np.zeros(8, np.int64)
    team.run(code, LAYOUT, (done.ctypes.data, len(done)))
    mine = helpers() - before
    assert len(mine) == 3
    del team
    gc.collect()
    for thread in mine:
        thread.join(timeout=10)
        assert not thread.is_alive()


def board_with(code: int, word: int) -> np.ndarray:
    """A board, at its address, on which the job is published."""
    board = np.zeros(jobs.ARGUMENTS_AT + 8 * jobs.MOST_ARGUMENTS, np.uint8)
    words = board.view(np.int64)
    words[0], words[jobs._JOB_AT // 8], words[jobs.HELPERS_AT // 8] = word, code, 1
    return board


def test_a_helper_stays_while_a_job_is_open(code: int) -> None:
    """Its publisher may have lost its core in the middle of it; the jobs that follow want help too."""
    board = board_with(code, 1 << 8 | jobs._OPEN)
    helper = threading.Thread(target=callable_of(jobs.help_with_jobs), args=(board.ctypes.data, 0), daemon=True)
    helper.start()
    time.sleep(0.5)
    stayed = helper.is_alive()
    board.view(np.int64)[0] = 1 << 8
    helper.join(10)
    assert stayed and not helper.is_alive()


def test_a_helper_that_is_not_asleep_yet_hears_of_work() -> None:
    """Who has work sees it awake and does not knock; it must not lie down."""
    state = cpu_team._HelperState()
    state.due = state.dismissed = True
    helper = threading.Thread(target=cpu_team._helper, args=(np.zeros(1), 0, state, 0), daemon=True)
    helper.start()
    helper.join(10)
    assert not helper.is_alive()


def test_jobs_are_timed_while_that_is_wanted_and_run_as_always_otherwise(code: int) -> None:
    team, done = team_of(2), np.zeros(10, np.int64)
    arguments, result = (done.ctypes.data, len(done)), torch.zeros(1)
    plain = team._run, team._run_alone, team._replay

    def both() -> torch.Tensor:
        team.run(code, LAYOUT, arguments)
        team.run_alone(code, LAYOUT, arguments)
        return result

    program = team.record(both)
    assert team.times == [] and (done == 2).all()
    began_ns = time.monotonic_ns()
    team.time_jobs(True)
    both()
    team.time_jobs(True)  # whoever asks a second time loses nothing
    assert team.replay(program) is result
    ended_ns = time.monotonic_ns()
    assert (done == 6).all()
    assert [name for name, *_ in team.times] == ["count_parts"] * 4
    readings = [at for _, *times in team.times for at in times]
    assert readings == sorted(readings) and began_ns <= readings[0] and readings[-1] <= ended_ns
    team.time_jobs(False)
    assert (team._run, team._run_alone, team._replay) == plain and team.times == []
    team.replay(program)
    assert (done == 8).all() and team.times == []
