"""What other processes compile is what a start needs, and they end with it, however it ends."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from headway.kernels.cpu import ahead as cpu_ahead
from headway.kernels.cpu import compile as cpu_compile
from headway.kernels.cpu.ahead import compiling

NEEDED = """
from functools import partial

import torch
from headway.bundled import STORY
from headway.engine.config import EngineConfig
from headway.engine.start import start_engine
from headway.kernels.cpu import ahead as cpu_ahead
from headway.kernels.cpu import compile as cpu_compile

asked, read = set(), cpu_compile.read
cpu_compile.read = lambda name: asked.add(name) or read(name)
for scheme in ("none", "int8", "int4"):
    start_engine(EngineConfig(str(STORY), device="cpu", num_threads=2, kv_cache_memory=1 << 24, quantization=scheme))
    wanted = cpu_ahead.jobs(torch.bfloat16, scheme, torch.bfloat16, cpu_ahead.choice_for())
    paths = {cpu_compile.path_of(partial(make.__wrapped__, *kinds)) for make, kinds in wanted}
    assert len(paths) == len(wanted) >= 7
    print(scheme, [path.name for path in paths if path.name not in asked])
"""

KILLED = """
import os, signal, sys
import torch
from headway.kernels.cpu import ahead as cpu_ahead

helpers, start = [], cpu_ahead._silent
cpu_ahead._silent = lambda *given: helpers.append(start(*given)) or helpers[0]
torch.set_num_threads(2)
with cpu_ahead.compiling(torch.float32, "none", torch.float32, lambda line: None):
    print(helpers[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Silent:
    """Stands in for a helper process."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.command, self.ended = command, False
        self.wait = lambda: 0

    def kill(self) -> None:
        self.ended = True


def environment(tmp_path: Path) -> dict[str, str]:
    path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path)}


def test_a_start_needs_what_is_compiled_ahead() -> None:
    """And so nothing is compiled in vain."""
    path = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        [sys.executable, "-c", NEEDED],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.stdout.splitlines() == [f"{scheme} []" for scheme in ("none", "int8", "int4")]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Silent]:
    """The helpers of a machine on which nothing was compiled yet."""
    helpers: list[Silent] = []

    def start(*arguments: object) -> Silent:
        helpers.append(Silent(*arguments))
        return helpers[-1]

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_ahead, "_silent", start)
    return helpers


@pytest.mark.parametrize(("threads", "helpers"), [(1, 0), (2, 1), (3, 2), (16, 3)])
def test_there_is_a_helper_for_each_further_thread(
    threads: int, helpers: int, started: list[Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with suppress(KeyError), compiling(torch.float32, "int8", torch.int8, print):
        assert [each.ended for each in started] == [False] * helpers
        raise KeyError
    assert [each.ended for each in started] == [True] * helpers
    assert [each.command[-4:] for each in started] == [["float32", "int8", "int8", str(n)] for n in range(helpers)]
    assert cpu_compile.listener is None


def test_no_helper_where_little_is_missing(
    started: list[Silent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    path_of = cpu_compile.path_of
    said: list[str] = []
    missing: list[Path] = []

    def compiled(make: object) -> Path:
        path = path_of(make)
        if "attend" in path.name:
            missing.append(path)
        else:
            path.write_bytes(b"")
        return path

    monkeypatch.setattr(cpu_ahead, "path_of", compiled)
    with compiling(torch.float32, "none", torch.float32, said.append):
        assert cpu_compile.listener is not None
        cpu_compile.listener("attend", missing[0])
        cpu_compile.listener("route", tmp_path / "route.native")  # of a less common layer: nobody has counted these
    assert started == []
    once = "compiling CPU kernels, once on this machine"
    assert said == [f"{once}: attend, 0 of 1 done", f"{once}: route"]


def test_what_nobody_compiles_is_compiled_while_others_are_at_what_is_needed(
    started: list[Silent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def job(name: str) -> cpu_ahead.Job:
        def make() -> None:
            made.append(name)
            (tmp_path / f"{name}.native").touch()

        make.__wrapped__ = lambda: name  # type: ignore[attr-defined]
        return make, ()

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu_ahead, "jobs", lambda *_: [job(name) for name in "abcd"])
    monkeypatch.setattr(cpu_ahead, "path_of", lambda name: tmp_path / f"{name()}.native")
    locks = [(tmp_path / f"{name}.lock").open("ab") for name in "ac"]
    with ExitStack() as stack, compiling(torch.float32, "none", torch.float32, print):
        for lock in locks:
            fcntl.flock(stack.enter_context(lock), fcntl.LOCK_EX)
        assert cpu_compile.listener is not None
        cpu_compile.listener("b", tmp_path / "b.native")
        assert made == []
        cpu_compile.listener("a", tmp_path / "a.native")
        assert made == ["d", "b"]


@pytest.mark.slow
def test_a_helper_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, env=environment(tmp_path))
    status, until = Path(f"/proc/{int(ran.stdout)}/status"), time.monotonic() + 60
    while status.exists() and "Z (zombie)" not in status.read_text():  # in a container nobody may ask how it ended
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_helpers_and_engine_share_the_work(tmp_path: Path) -> None:
    """The first start on a machine leaves the same code as one without helpers."""
    code = """
import sys
import torch
from headway.bundled import STORY
from headway.engine.config import EngineConfig
from headway.engine.start import start_engine
from headway.kernels.cpu import code as cpu_code
from headway.kernels.cpu import compile as cpu_compile

own, compile_entry = [], cpu_compile.compile_entry
cpu_compile.compile_entry = lambda function: own.append(function.__qualname__) or compile_entry(function)
start_engine(EngineConfig(str(STORY), device="cpu", num_threads=int(sys.argv[1]), kv_cache_memory=1 << 24))
print(len(own), len(list(cpu_code.code_folders()[-1].glob("*.native"))))
"""
    counts = []
    for threads in ("1", "2"):
        folder = tmp_path / threads
        ran = subprocess.run(
            [sys.executable, "-c", code, threads], check=True, capture_output=True, text=True, env=environment(folder)
        )
        counts.append([int(word) for word in ran.stdout.split()])
    (alone, kept), (together, kept_together) = counts
    assert alone == kept
    assert together < kept_together == kept + 1  # two threads need one function more
