"""Jobs: compiled code that the threads of a team share, and the board on which it is published.

A job takes parts of its work by ticket until none is left. The calling thread publishes it, takes parts like everybody
else, and then waits only for parts that others are in the middle of. A barrier, as OpenMP ends each loop with, waits
for every thread to be given a core: beside another busy process, and a server has its clients, that costs a
scheduler's time slice for each of the hundred loops of a step.

The board is one int64: job number * 256 + OPEN + the number of helpers inside the job. Behind it stand the counters of
tickets, the job's code, how many helpers there may be, and the job's arguments.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from headway.kernels.cpu.compile import address_of, compiled, external
from headway.kernels.cpu.simd import (
    add_to,
    call_address,
    pause,
    read_float64,
    read_int64,
    read_shared,
    reset_tickets,
    swap_if,
    take_ticket,
    write_integer,
    write_shared,
)

LINE = 128  # bytes of the longest cache line; what different threads write stands on lines of its own
COUNTERS = 5
_COUNTERS_AT, _JOB_AT, HELPERS_AT, ARGUMENTS_AT = LINE, *(LINE * (each + COUNTERS) for each in (1, 2, 3))
MOST_ARGUMENTS = 34
ENTRY_WORDS = 2 + MOST_ARGUMENTS  # a job in a program: whether all threads run it, its code, its arguments
_OPEN, INSIDE = 128, 127
# A helper looks for the next job for some microseconds, then lets others have the core while it looks on
# for a few milliseconds, which is longer than the pause between two steps; then it sleeps.
_LOOKS = 1000
_YIELDING_LOOKS = 6000

# A job's arguments, by their number.
arg, real_arg = read_int64, read_float64

_sched_yield = external("sched_yield", "int32")


def job(function: Callable[[int], None]) -> int:
    """The address of the compiled code of a function of the arguments' address."""
    return address_of(function)


# Kinds differ by their type and are all equal to zero.
once_per_kind = lru_cache(maxsize=None, typed=True)


@compiled()
def help_with_jobs(board, number):
    """Take part in jobs, beginning with the one that is open, until there has been none for a while.

    Or until there may be no more helpers than this one's number.
    """
    seen = (read_shared(board) >> 8) - 1
    looks = 0
    while looks < _LOOKS + _YIELDING_LOOKS and number < read_shared(board + HELPERS_AT):
        word = read_shared(board)
        if word >> 8 == seen or word & _OPEN == 0:
            # While a job is open, others are in the middle of it, and more will follow.
            looks = looks + 1 if word & _OPEN == 0 else min(looks + 1, _LOOKS)
            if looks < _LOOKS:
                pause()
            else:
                _sched_yield()
        elif swap_if(board, word, word + 1):
            seen, looks = word >> 8, 0
            call_address(read_int64(board + _JOB_AT, 0), board + ARGUMENTS_AT)
            add_to(board, -1)


@compiled()
def run_job(board, code):
    """Publish a job, do it, and wait for helpers that are in the middle of a part."""
    for counter in range(COUNTERS):
        reset_tickets(board + _COUNTERS_AT + counter * LINE)
    write_shared(board + _JOB_AT, code)
    write_shared(board, (((read_shared(board) >> 8) + 1) << 8) | _OPEN)
    call_address(code, board + ARGUMENTS_AT)
    add_to(board, -_OPEN)
    while read_shared(board) & INSIDE:
        pause()


@compiled()
def run_job_alone(board, code):
    for counter in range(COUNTERS):
        reset_tickets(board + _COUNTERS_AT + counter * LINE)
    call_address(code, board + ARGUMENTS_AT)


@compiled()
def replay_jobs(board, program, count):
    """Run the jobs of a program one after the other."""
    for number in range(count):
        entry = program + number * ENTRY_WORDS * 8
        for word in range(MOST_ARGUMENTS):
            write_integer(board + ARGUMENTS_AT, word, read_int64(entry, 2 + word), 64)
        code = read_int64(entry, 1)
        if read_int64(entry, 0):
            run_job(board, code)
        else:
            run_job_alone(board, code)


@compiled(inline="always")
def tickets(arguments, counter):
    """The address of one of the job's counters, which stand before its arguments."""
    return arguments - ARGUMENTS_AT + _COUNTERS_AT + counter * LINE


@compiled(inline="always")
def take_rows(arguments, step):
    """The first of the next `step` rows that nobody has taken."""
    return take_ticket(tickets(arguments, 0)) * step


@compiled()
def take_share(counter, total, threads):
    """Some of `total` items that nobody has taken, as (first, end): fewer and fewer, so that all finish together.

    first is `total` when none is left.
    """
    while True:
        first = read_shared(counter)
        if first >= total:
            return total, total
        end = first + max(1, (total - first) // (2 * threads))
        if swap_if(counter, first, end):
            return first, end
