"""Compiles what an engine is about to need in other processes, while it loads for the first time on a machine.

    python -m headway.kernels.cpu.ahead PARENT DTYPE SCHEME CACHE_DTYPE FIRST

They do what the engine would do a little later, in files that all can read (cpu.compile), so it makes no difference how
far they get, nor whether they start at all.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.kernels.cpu import cache as cpu_cache
from headway.kernels.cpu import compile as cpu_compile
from headway.kernels.cpu import rows as cpu_rows
from headway.kernels.cpu.arithmetic import GROUPED, INT4, INT8
from headway.kernels.cpu.attention import attend_job
from headway.kernels.cpu.choice import Choice, Way, choice_for
from headway.kernels.cpu.code import can_keep, is_being_compiled
from headway.kernels.cpu.compile import path_of
from headway.kernels.cpu.kernels import CACHE_KINDS
from headway.kernels.cpu.packed_weight import kind_of
from headway.kernels.cpu.packing import pack_job, rows_job
from headway.kernels.cpu.product import product_job
from headway.kernels.cpu.sampling import draw_job
from headway.kernels.cpu.simd import BFLOAT16, FLOAT32, KINDS

_MOST_HELPERS = 3
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG, of Linux

Job = tuple[Any, tuple[Any, ...]]  # what returns the address of one, and for which kinds


def jobs(dtype: torch.dtype, scheme: str, cache_dtype: torch.dtype, choice: Choice) -> list[Job]:
    """The jobs in a decoder's step with such weights and such a cache. Those that take longest to compile come first.

    Less common layers have other jobs, which the engine compiles itself.
    """
    x, cache, weight = KINDS[dtype], CACHE_KINDS[cache_dtype], kind_of(scheme, dtype)
    weights = [weight, INT8] if weight is INT4 else [weight]  # the head has 8 bits
    ways = [choice.way(each) for each in weights]
    attention = choice.way(cache, "attention") if cache is BFLOAT16 else Way(cache)
    packed = [each for each in weights if not any(each is grouped for grouped in GROUPED)]
    return [
        (attend_job, (x, attention.kind, attention.least_on_tiles > 0)),
        (draw_job, (FLOAT32,)),  # in which the head's results are
        *((product_job, (x, way.kind, way.least_on_tiles > 0)) for way in ways),
        *((pack_job, (x, each)) for each in packed),
        (cpu_rows.rotate_both_job, (x,)),
        (cpu_rows.add_rms_norm_job, (x,)),
        (cpu_cache.store_job, (x, cache)),
        *((rows_job, (x, each)) for each in packed[-1:]),
        (cpu_rows.rms_norm_job, (x,)),
    ]


@contextmanager
def compiling(dtype: torch.dtype, scheme: str, cache_dtype: torch.dtype, say: Callable[[str], None]) -> Iterator[None]:
    """Report each function that is compiled inside, and start helper processes if most functions are missing.

    While a helper compiles the function that is needed next, this process compiles another one.

    Args:
        say: takes a line before a function is compiled, or waited for, in the calling thread.
    """
    wanted = jobs(dtype, scheme, cache_dtype, choice_for())
    paths = [path_of(partial(make.__wrapped__, *kinds)) for make, kinds in wanted]
    missing = [path for path in paths if not path.exists()]
    helpers: list[subprocess.Popen[bytes]] = []
    if 2 * len(missing) > len(wanted) and sys.platform == "linux" and sys.executable:
        names = [str(kind).removeprefix("torch.") for kind in (dtype, scheme, cache_dtype)]
        command = [sys.executable, "-m", __name__, str(os.getpid()), *names]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with suppress(OSError):
            for first in range(min(torch.get_num_threads() - 1, _MOST_HELPERS)):
                helpers.append(_silent([*command, str(first)], environment))
    caller = threading.get_ident()
    every = "at every start (set NUMBA_CACHE_DIR to a folder that can be written)"
    when = "once on this machine" if can_keep() else every

    def tell(name: str, path: Path) -> None:
        if threading.get_ident() == caller:
            done = sum(each.exists() for each in missing)
            counted = f", {done} of {len(missing)} done" if path in missing else ""  # less common layers have others
            say(f"compiling CPU kernels, {when}: {name}{counted}")
            for (make, kinds), other in reversed([*zip(wanted, paths, strict=True)]):
                if helpers and is_being_compiled(path) and not other.exists() and not is_being_compiled(other):
                    make(*kinds)  # meanwhile

    cpu_compile.listener = tell
    try:
        yield
    finally:
        cpu_compile.listener = None
        for helper in helpers:
            helper.kill()
            helper.wait()


def _silent(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing)


def main(parent: int, dtype: str, scheme: str, cache_dtype: str, first: int) -> None:
    """Compile all jobs, beginning with the one of this number. The process ends with its parent."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent
    if os.getppid() != parent:
        return
    gc.disable()
    wanted = jobs(getattr(torch, dtype), scheme, getattr(torch, cache_dtype), choice_for())
    for make, kinds in wanted[first:] + wanted[:first]:
        make(*kinds)


if __name__ == "__main__":
    _, parent, dtype, scheme, cache_dtype, first = sys.argv
    main(int(parent), dtype, scheme, cache_dtype, int(first))
