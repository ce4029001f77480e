"""Compiled code is kept between starts, dropped when a kernel source has changed, and made by one process at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headway
from headway.kernels import cpu_compile
from headway.kernels.cpu_compile import alone, compiled, compiled_callback, drop_stale_code

# Each line of input calls the function with those numbers; says how often code was compiled, not loaded, and the sum.
KERNEL = """
import sys
from headway.kernels.cpu_compile import compiled, compiled_callback

@compiled()
def double(x):
    return x + x

@compiled()
def twice_double(x):
    return double(double(x))

for line in sys.stdin:
    total = sum(twice_double(float(word) if "." in word else int(word)) for word in line.split())
    compiled_callback(lambda address: None)
    missed = [sum(function.stats.cache_misses.values()) for function in (double, twice_double)]
    print(*missed, total, flush=True)
"""


def test_code_is_dropped_when_a_source_changes_and_kept_when_none_does(tmp_path: Path) -> None:
    (tmp_path / "cpu_a.py").write_text("one")
    code = tmp_path / "__pycache__" / "cpu_b.f-1.py311.nbi"
    drop_stale_code(tmp_path)
    code.write_text("compiled")
    drop_stale_code(tmp_path)
    assert code.exists()
    (tmp_path / "cpu_a.py").write_text("two")
    drop_stale_code(tmp_path)
    assert not code.exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cpu_a.py").write_text("one")
    (tmp_path / "__pycache__").write_text("a file in the way")
    drop_stale_code(tmp_path)


def test_processes_that_start_together_compile_each_function_once(tmp_path: Path) -> None:
    """For each type; a function that another calls too. Each begins with what the other ends with."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    environment = {**os.environ, "PYTHONPATH": str(Path(headway.__file__).parent.parent)}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "code")
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "kernel.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(2)
    ]  # fmt: skip
    said = []
    for process, line in zip(processes, ("1 2.5\n", "2.5 1\n"), strict=True):
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()
    for process in processes:
        said.append(process.communicate()[0].split())
        assert process.returncode == 0
    for function in (0, 1):
        assert sum(int(words[function]) for words in said) == 2
    assert [float(words[2]) for words in said] == [14.0, 14.0]


def test_a_lock_is_let_go_of_whatever_happens_and_may_be_taken_again_inside(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "f.lock"
    for _ in range(2):
        with pytest.raises(KeyError), alone(lock), alone(lock):
            raise KeyError
    (tmp_path / "file").write_text("")
    with alone(tmp_path / "file" / "f.lock"):
        pass


def test_a_callback_uses_no_code_that_another_can_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what its functions were compiled to alone, nor what another callback has made of them."""
    monkeypatch.setattr(cpu_compile, "_lock_of", lambda function: None)  # loaded code could not be looked into

    @compiled()
    def fibonacci(n: int) -> int:  # calls itself, so that a call is left
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    def callback(address: int) -> None:
        fibonacci(address)
        fibonacci(address + 1)

    linkages = re.findall(r"^define (\w+).*fibonacci", compiled_callback(callback).inspect_llvm(), re.MULTILINE)
    assert linkages == ["internal"]
