"""The threads that share a kernel's work: OpenMP's, so that torch and Numba use one pool."""

from __future__ import annotations

import threading
from importlib import import_module

import numba
import numpy as np
import torch

# Counters stand a cache line apart.
COUNTERS = 3
COUNTER_BYTES = 64


class Team:
    """As many threads as torch uses when the team is made, and the counters by which they share out work.

    One thread at a time may call kernels of one team, as with the step loop of an engine.
    """

    def __init__(self) -> None:
        if "omp" in _threading_layers():
            numba.config.THREADING_LAYER = "omp"
        self.threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        self._tickets = np.zeros(8 * (COUNTERS + 1), np.int64)
        self._ticket_address = self._tickets.ctypes.data + -self._tickets.ctypes.data % 64
        self._entered: set[int] = set()

    def enter(self) -> tuple[int, int]:
        """(number of threads, address of the counters) for a call from the current Python thread."""
        if threading.get_ident() not in self._entered:
            self._limit()
        return self.threads, self._ticket_address

    def _limit(self) -> None:
        """Numba keeps its thread count per calling thread and resets OpenMP's when it starts its pool."""
        before = torch.get_num_threads()
        numba.set_num_threads(self.threads)
        torch.set_num_threads(before)
        self._entered.add(threading.get_ident())


def _threading_layers() -> set[str]:
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError:
        return set()
    return {"omp"}
