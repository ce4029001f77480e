"""Tests as the tasks of a part: each by its name, whatever the one before it did to the process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS, TESTS, gpu_tests, is_parity
from benchmarks.gpu.runner import Outcome, run

FILE = """
import os
import pytest

DEVICE = "cuda"

def test_good(): pass

def test_bad():
    assert 1 == 2, "these differ"

@pytest.mark.parametrize("number", [1, 2])
def test_that_spoils_the_device(number):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_that_crashes():
    os.abort()

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

def test_last(): pass
"""


@pytest.mark.slow
def test_every_test_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FILE)
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    (tmp_path / "test_elsewhere.py").write_text("def test_without_a_gpu():\n    raise SystemExit\n")
    files = sorted(map(str, tmp_path.glob("test_*.py")))
    pytest = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.reporting", "-p", "no:cacheprovider", "-q"]

    def command(lines: Path, done: Path) -> list[str]:
        return [*pytest, "--continue-on-collection-errors", "--gpu-lines", str(lines), "--gpu-done", str(done), *files]

    outcome = Outcome()
    run(command, outcome, tmp_path / "log", tmp_path, 60, 30)
    # A file's own name is a path where it lies below the same folder as the clone.
    named = {name.rpartition("::")[2].rpartition("/")[2]: task for name, task in outcome.tasks.items()}
    errors = {name: task["error"] for name, task in named.items() if "error" in task}
    assert set(named) - set(errors) == {"test_good", "test_skipped", "test_last"}
    assert "not here" in named["test_skipped"]["skipped"]
    assert "these differ" in errors.pop("test_bad")
    assert "its process was ended by SIGABRT" in errors.pop("test_that_crashes")
    assert "No module named 'no_such_module'" in errors.pop("test_broken.py")
    assert set(errors) == {"test_that_spoils_the_device[1]", "test_that_spoils_the_device[2]"}
    assert all("illegal memory access" in error for error in errors.values())
    assert not outcome.cut and not outcome.left


def test_the_tests_that_need_a_gpu_are_found() -> None:
    files = {str(file.relative_to(TESTS)): is_parity(file) for file in gpu_tests(TESTS)}
    assert files["kernels/test_cuda.py"] is False and files["calibration/test_measure.py"] is False
    assert files["models/test_decoder_parity.py"] is True and files["engine/test_invariance.py"] is True
    commands = {part.name: part.command(Path("l"), Path("d"), Path("m")) for part in PARTS}
    both = [argument for name in ("tests", "parity") for argument in commands[name] if argument.endswith(".py")]
    assert sorted(both) == sorted(str(TESTS / file) for file in files)
