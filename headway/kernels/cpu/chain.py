"""Drafts of a few sequences, one behind the other: passes of a model, without a return to Python between them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from headway.kernels.cpu.compile import callable_of, compiled
from headway.kernels.cpu.jobs import replay_jobs
from headway.kernels.cpu.simd import read_float64, read_int32, read_int64, write_float64, write_integer
from headway.kernels.cpu.team import Program, Team
from headway.kernels.interface import Chain

MOST_ROWS, MOST_GROWING = 16, 256
_MOST_PASSES, _MOST_KINDS = 64, 16
# Words of a chain's memory: numbers; then the worth of each row, the bounds and chances of kinds, the drafts and their
# probabilities, pass by pass, and the addresses of what is one more with each pass.
_MOST, _COST, _EACH, _TOKENS, _MASSES, _ROWS, _NEXT, _CONTEXTS, _NUM_GROWING, _NUM_BOUNDS, _MADE = range(11)
_WORTHS = 11
_BOUNDS = _WORTHS + MOST_ROWS
_CHANCES = _BOUNDS + _MOST_KINDS
_DRAFTS = _CHANCES + _MOST_KINDS
_PROBABILITIES = _DRAFTS + _MOST_PASSES * MOST_ROWS
_GROWING = _PROBABILITIES + _MOST_PASSES * MOST_ROWS
_INFINITE = np.float64(np.inf)


@compiled()
def _chain(board, program, count, memory):
    """Run the program once for each pass, and write into its step's tensors what has changed by the drafts."""
    tokens, masses, rows = read_int64(memory, _TOKENS), read_int64(memory, _MASSES), read_int64(memory, _ROWS)
    made, goes_on = 0, True
    while goes_on:
        for row in range(rows):
            write_float64(masses, row, _INFINITE)
        replay_jobs(board, program, count)
        made += 1
        goes_on, worth = made < read_int64(memory, _MOST), 0.0
        for row in range(rows):
            probability = 1.0 / read_float64(masses, row)
            write_integer(memory, _DRAFTS + (made - 1) * rows + row, read_int64(tokens, row), 64)
            write_float64(memory, _PROBABILITIES + (made - 1) * rows + row, probability)
            own = read_float64(memory, _WORTHS + row) * _chance_of(memory, probability)
            write_float64(memory, _WORTHS + row, own)
            worth += own
            goes_on = goes_on and own > read_float64(memory, _EACH)
        goes_on = goes_on and worth > read_float64(memory, _COST)
        if goes_on:
            _go_on(memory, tokens, rows)
    write_integer(memory, _MADE, made, 64)


@compiled()
def _chance_of(memory, probability):
    kind = 0
    while kind < read_int64(memory, _NUM_BOUNDS) and probability >= read_float64(memory, _BOUNDS + kind):
        kind += 1
    return read_float64(memory, _CHANCES + kind)


@compiled()
def _go_on(memory, tokens, rows):
    """Make the step the next one: its tokens are the drafts, and all stands a place further."""
    contexts = read_int64(memory, _CONTEXTS)
    for row in range(rows):
        write_integer(read_int64(memory, _NEXT), row, read_int64(tokens, row), 64)
        write_integer(contexts, row, read_int32(contexts, row) + 1, 32)
    for number in range(read_int64(memory, _NUM_GROWING)):
        place = read_int64(memory, _GROWING + number)
        write_integer(place, 0, read_int64(place, 0) + 1, 64)


class Chains:
    """Runs chains by a team.

    Attributes:
        tokens, masses: where the program of a pass writes the likeliest token of each row, and the sum of all
            probabilities relative to its own.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._run = callable_of(_chain)
        self._words = np.zeros(_GROWING + MOST_GROWING, np.int64)
        self._reals = self._words.view(np.float64)
        self.tokens, self.masses = np.zeros(MOST_ROWS, np.int64), np.zeros(MOST_ROWS)
        self._words[[_TOKENS, _MASSES]] = self.tokens.ctypes.data, self.masses.ctypes.data

    def run(
        self, program: Program, chain: Chain, tokens: int, contexts: int, growing: list[int]
    ) -> list[list[tuple[int, float]]]:
        """Make drafts of each row; each with its probability.

        Args:
            tokens, contexts: where the step has its tokens, int64, and the lengths of their contexts, int32.
            growing: where int64 numbers are that each pass makes one more.
        """
        words, reals, rows, bounds = self._words, self._reals, len(chain.worths), chain.bounds
        words[_MOST] = min(chain.most, _MOST_PASSES)
        words[_ROWS : _NUM_BOUNDS + 1] = rows, tokens, contexts, len(growing), len(bounds)
        reals[_COST : _EACH + 1] = chain.cost, chain.each
        reals[_WORTHS : _WORTHS + rows] = chain.worths
        reals[_BOUNDS : _BOUNDS + len(bounds)] = bounds
        reals[_CHANCES : _CHANCES + len(chain.chances)] = chain.chances
        words[_GROWING : _GROWING + len(growing)] = growing
        self._team.loop(program, self._run, words.ctypes.data)
        count = int(words[_MADE]) * rows
        drafts, probabilities = words[_DRAFTS : _DRAFTS + count], reals[_PROBABILITIES : _PROBABILITIES + count]
        made = list(zip(drafts.tolist(), probabilities.tolist(), strict=True))
        return [made[row::rows] for row in range(rows)]
