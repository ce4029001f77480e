"""Plans which rows go to which expert in a step, sorted by expert and cut into pieces of work.

The plan is made by a job and read by the jobs of products, so that a recorded step needs no Python for it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cpu.compile import compiled, give_back, take_memory
from headway.kernels.cpu.jobs import arg, job, once_per_kind
from headway.kernels.cpu.simd import read_int64, write_integer
from headway.kernels.cpu.team import Team

# Rows whose sums a thread keeps at a time.
MOST_ROWS = 256
# Places in a plan, in words: the number of pieces, the most rows of one, the address of the rows and how many there
# are, the pieces.
PIECES, MOST, ROWS, COUNT, TABLE = 0, 1, 2, 3, 4


@compiled()
def row_of(plan, gathers, row):
    """(number in x, expert) of a row: without a plan they are those of x, all for one expert."""
    if plan == 0:
        return row, 0
    at = read_int64(plan, ROWS)
    return read_int64(at, 2 * row) if gathers else row, read_int64(at, 2 * row + 1)


@compiled()
def item_of(plan, number, panels, pieces, tokens):
    """(panel, its number among those of all experts, first row, end) of an item of work.

    Without a plan the rows are cut evenly; with one each piece is of rows for one expert.
    """
    if plan == 0:
        panel, piece = number // pieces, number % pieces
        return panel, panel, piece * tokens // pieces, (piece + 1) * tokens // pieces
    panel, at = number % panels, TABLE + 3 * (number // panels)
    first, end, expert = read_int64(plan, at), read_int64(plan, at + 1), read_int64(plan, at + 2)
    return panel, expert * panels + panel, first, end


@compiled()
def pieces_of(plan, pieces, tokens):
    """(how many pieces there are, the most rows of one)."""
    if plan == 0:
        return pieces, (tokens + pieces - 1) // pieces
    return read_int64(plan, PIECES), read_int64(plan, MOST)


@compiled()
def rows_of(plan, tokens):
    """How many rows there are."""
    return tokens if plan == 0 else read_int64(plan, COUNT)


@compiled()
def _count(chosen, tokens, columns, per_token, starts, experts):
    """Count the tokens of each expert, into `starts`."""
    for expert in range(experts):
        write_integer(starts, expert, 0, 64)
    for token in range(tokens):
        for k in range(per_token):
            expert = read_int64(chosen, token * columns + k)
            write_integer(starts, expert, read_int64(starts, expert) + 1, 64)


@compiled()
def _cut(starts, experts, first_here, here, plan):
    """The pieces of the plan; counts in `starts` become numbers of first rows, or -1 for experts that are not here.

    Returns (experts with rows, most), of all.
    """
    first, pieces, most, touched, busiest = 0, 0, 0, 0, 0
    for expert in range(experts):
        rows = read_int64(starts, expert)
        touched, busiest = touched + (rows > 0), max(busiest, rows)
        if expert < first_here or expert >= first_here + here:
            write_integer(starts, expert, -1, 64)
            continue
        write_integer(starts, expert, first, 64)
        parts = (rows + MOST_ROWS - 1) // MOST_ROWS
        for part in range(parts):
            begin, end = first + part * rows // parts, first + (part + 1) * rows // parts
            at = TABLE + 3 * (pieces + part)
            write_integer(plan, at, begin, 64)
            write_integer(plan, at + 1, end, 64)
            write_integer(plan, at + 2, expert - first_here, 64)
            most = max(most, end - begin)
        first, pieces = first + rows, pieces + parts
    write_integer(plan, COUNT, first, 64)
    write_integer(plan, PIECES, pieces, 64)
    write_integer(plan, MOST, most, 64)
    return touched, busiest


PLAN = struct.Struct("11q")


@once_per_kind
def plan_job() -> int:
    """Sort the tokens by expert; `places` has the row of each token and choice, `counts` adds up RoutingCounts.

    Some experts may be here alone; choices of others have the row -1.
    """

    def make(a: int) -> None:
        chosen, tokens, columns, per_token, experts = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        plan, rows, places, counts = arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8)
        first_here, here = arg(a, 9), arg(a, 10)
        starts = take_memory(experts * 8)
        _count(chosen, tokens, columns, per_token, starts, experts)
        touched, busiest = _cut(starts, experts, first_here, here, plan)
        write_integer(plan, ROWS, rows, 64)
        for token in range(tokens):
            for k in range(per_token):
                expert = read_int64(chosen, token * columns + k)
                row = read_int64(starts, expert)
                if row >= 0:
                    write_integer(starts, expert, row + 1, 64)
                    write_integer(rows, 2 * row, token, 64)
                    write_integer(rows, 2 * row + 1, expert - first_here, 64)
                write_integer(places, token * per_token + k, row, 64)
        give_back(starts)
        write_integer(counts, 0, read_int64(counts, 0) + 1, 64)
        write_integer(counts, 1, read_int64(counts, 1) + tokens * per_token, 64)
        write_integer(counts, 2, read_int64(counts, 2) + touched, 64)
        write_integer(counts, 3, read_int64(counts, 3) + busiest, 64)

    return job(make)


class ExpertPlan:
    """The plan of one step's tokens, in memory of the team.

    Args:
        chosen: experts of each token, int64 [T, columns], of which the first `per_token` count.
        experts: the number of experts to choose from.
        here: the first of those that have rows in the plan, and how many these are.
        counts: int64 [4], the fields of RoutingCounts.

    Attributes:
        rows: pairs of a token and an expert, of which not all are rows where not all experts are here.
        places: int64 [T, per_token], the row of each pair; -1 where its expert is not here.
    """

    def __init__(
        self, team: Team, chosen: Tensor, per_token: int, experts: int, here: tuple[int, int], counts: np.ndarray
    ) -> None:
        tokens, columns = chosen.shape
        self.rows = tokens * per_token
        pieces = min(experts, self.rows) + self.rows // MOST_ROWS
        self._plan = team.empty((TABLE + 3 * pieces,), torch.int64)
        self._rows = team.empty((self.rows, 2), torch.int64)
        self.places = team.empty((tokens, per_token), torch.int64)
        arguments: tuple[Any, ...] = (
            chosen.data_ptr(), tokens, columns, per_token, experts, self._plan.data_ptr(), self._rows.data_ptr(),
            self.places.data_ptr(), counts.ctypes.data, *here,
        )  # fmt: skip
        team.run_alone(plan_job(), PLAN, arguments)

    @property
    def address(self) -> int:
        return self._plan.data_ptr()
