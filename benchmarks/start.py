"""How long an engine takes from the start of its process to its first token: imports, weights, a prompt of 16 tokens.

A first start does not count: afterwards kernels are compiled, packed weights are on disk, and files in the page cache.
llama.cpp is started as a program of its own, llama-simple, where that is given.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.exports import model_for
from benchmarks.points import Point
from benchmarks.processes import ROOT, Child, Died, environment
from benchmarks.sitting import Entry, Sitting, worker_command
from benchmarks.steal import undisturbed

PROMPT = Point("start to first token", "prefill", 1, 16, 1)
_TEXT = "sixteen letters!"  # a token a byte
_TOKENS = len(_TEXT)


def start_times(sitting: Sitting, rounds: int, threads: int, folder: Path, llama_simple: str | None) -> None:
    """Seconds as the rates of PROMPT, after a round that does not count. An entry that dies is measured no more."""
    for number in range(rounds + 1):
        order = sitting.alive
        for place in range(len(order)):
            entry = order[(place + number) % len(order)]  # nobody always comes first
            try:
                command = worker_command(entry, sitting.shape, sitting.precision, [PROMPT], rounds, threads, folder)
                if entry.engine == "llama.cpp" and llama_simple is not None:
                    model = model_for("llama.cpp", sitting.precision, sitting.shape, entry.python, folder)
                    measure = partial(_program, llama_simple, model, threads)
                else:
                    measure = partial(_worker, entry, command, number)
                seconds, _ = undisturbed(measure)
            except Died as end:
                sitting.lose(entry.label, end)
                continue
            print(f"round {number}: {PROMPT.label}: {entry.label} {seconds:.2f} s", file=sys.stderr)
            if number:
                sitting.add(PROMPT, entry.label, seconds)


def _worker(entry: Entry, command: list[str], seed: int) -> float:
    began = time.perf_counter()
    child = Child(entry.label, command, Path(entry.root or ROOT), entry.variables)
    try:
        child.ask({"do": "run", "batch": PROMPT.batch, "prompt": PROMPT.prompt, "new": PROMPT.new, "seed": seed})
        return time.perf_counter() - began
    finally:
        child.close()


def _program(llama_simple: str, model: Path, threads: int) -> float:
    """The seconds until the program has written more than the prompt. It has no flag for threads and would take four.

    Raises:
        Died: it wrote no token.
    """
    command = [llama_simple, "-m", str(model), "-n", "1", _TEXT]
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment(), "OMP_THREAD_LIMIT": str(threads)},
    )
    try:
        assert process.stdout is not None
        written = b""
        while len(written) <= _TOKENS:
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                raise Died(f"{' '.join(command)} ended with exit code {process.wait()} before its first token")
            written += piece
        return time.perf_counter() - began
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()
