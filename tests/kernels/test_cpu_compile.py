"""Code is compiled once, by one process at a time, and does not depend on what else was compiled."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.registry import cpu_target

import headway
from headway.kernels.cpu import compile as cpu_compile
from headway.kernels.cpu.compile import _path_of, address_of, compile_entry, compiled
from headway.kernels.cpu.simd import add_to, write_integer

# A line of input asks for the code of the function with such numbers; it says how often code was compiled, and the sum.
KERNEL = """
import ctypes, sys
from headway.kernels.cpu import compile as cpu_compile
from headway.kernels.cpu.compile import address_of, callable_of, compile_entry, compiled
from headway.kernels.cpu.simd import add_to

count = 0

def counted(function):
    global count
    count += 1
    return compile_entry(function)

cpu_compile.compile_entry = counted

@compiled()
def double(x):
    return x + x

def adding(number):
    def add(address: int) -> None:
        add_to(address, double(number))
    return callable_of(add)

for line in sys.stdin:
    total = ctypes.c_int64(0)
    for word in line.split():
        adding(int(word))(ctypes.addressof(total))
    print(count, total.value, "numba" in sys.modules, flush=True)
"""


def told(folder: Path, *lines: str) -> list[list[str]]:
    """What processes say that start together, each with a line of input, and keep their code in the folder."""
    (folder / "kernel.py").write_text(KERNEL)
    environment = {**os.environ, "PYTHONPATH": str(Path(headway.__file__).parent.parent)}
    environment["NUMBA_CACHE_DIR"] = str(folder / "code")
    command = [sys.executable, str(folder / "kernel.py")]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, env=environment, **pipe) for _ in lines]
    for process, line in zip(processes, lines, strict=True):
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
    said = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(lines)
    return said


@pytest.mark.slow
def test_processes_that_start_together_compile_each_function_once(tmp_path: Path) -> None:
    """Each begins with what the other ends with. A process after them loads all, and does not import Numba."""
    said = told(tmp_path, "1 2", "2 1")
    assert sum(int(words[0]) for words in said) == 2
    assert [words[1] for words in said] == ["6", "6"]
    assert told(tmp_path, "1 2") == [["0", "6", "False"]]


def test_damaged_code_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_code: list[bytes] = []

    def counted(function: Callable[..., None]) -> bytes:
        compiled_code.append(compile_entry(function))
        return compiled_code[-1]

    def add_three(address: int) -> None:
        add_to(address, 3)

    def count_and_sum() -> tuple[int, int]:
        total = ctypes.c_int64(0)
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(address_of(add_three))(ctypes.addressof(total))
        return len(compiled_code), total.value

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_compile, "compile_entry", counted)
    assert count_and_sum() == count_and_sum() == (1, 3)
    (code,) = tmp_path.glob("*.native")
    code.write_bytes(code.read_bytes()[:-40])
    assert count_and_sum() == count_and_sum() == (2, 3)


def test_what_a_function_refers_to_outside_is_part_of_its_name() -> None:
    """Also the type of a number, as kinds of weights differ by nothing else."""

    def job(kind: object) -> Path:
        def inner(address: int) -> None:
            str(kind)

        return _path_of(inner)

    kinds = (0, 1, False, np.int8(0), np.uint16(0), np.float32(0))
    assert len({job(kind) for kind in kinds}) == len(kinds)
    assert job(np.int8(0)) == job(np.int8(0))


def test_a_job_uses_no_code_that_another_can_bring() -> None:
    """Neither what its functions were compiled to alone, nor what another job has made of them."""

    @compiled()
    def fibonacci(n: int) -> int:  # calls itself, so that a call is left
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    def job(address: int) -> None:
        fibonacci(address)
        fibonacci(address + 1)

    seen: list[str] = []
    compile_entry(job, seen.append)
    assert re.findall(r"^define (\w+).*fibonacci", seen[0], re.MULTILINE) == ["internal"]


def test_numba_compiles_for_others_as_before() -> None:
    """Also what a job of ours has used of Numba's own."""
    seen: list[str] = []

    def job(address: int) -> None:
        write_integer(address, 0, max(address, 3), 64)

    compile_entry(job, seen.append)
    assert numba.njit(lambda number: max(number, 3))(2) == 3
    assert numba.njit(lambda number: [number, max(number, 3)])(5) == [5, 5]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.65.1", "ImportError: it is too old"),
        ("0.69.0rc1", "AttributeError: 'CPUContext' object has no attribute '_internal_codegen'"),
        ("1.0.0", "AttributeError: 'CPUContext' object has no attribute '_internal_codegen'"),
    ],
)
def test_an_unknown_numba_that_cannot_is_named_with_those_that_can(
    version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(address: int) -> None:
        pass

    monkeypatch.delattr(cpu_target.target_context, "_internal_codegen")
    with pytest.raises(AttributeError):  # a known one: it is an error of ours
        compile_entry(job)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(ValueError, match="numba") as caught:
        compile_entry(job)
    project = tomllib.loads((Path(headway.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (declared,) = (each for each in project["optional-dependencies"]["serve"] if each.startswith("numba"))
    assert str(caught.value) == (
        f"numba {version} cannot compile the CPU kernels ({reason}); install one that can: pip install '{declared}'"
    )
