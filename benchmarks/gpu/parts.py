"""The parts of `make gpu`, in the order in which they run. Each is a module of tasks, or a selection of tests.

Nothing here imports torch: the process that starts the parts leaves the GPU to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
_FOR_TESTS = ("pytest", "hypothesis", "httpx", "typer")
_SERVER = ("fastapi", "starlette", "uvicorn", "pydantic", "httptools", "prometheus_client", "jinja2", "uvloop")
_FOR_SERVERS = (*_SERVER, "typer", "rich", "matplotlib")


@dataclass(frozen=True)
class Part:
    """What runs in processes of its own.

    Args:
        says: what it does, for the table.
        needs: Python packages beside those that everything needs; without one of them it is left out.
        seconds: at most, for all of its tasks.
        task_seconds: at most, for one of them; then it is ended and the next one begun.
        shared: nothing is timed, so several processes run tasks at the same time.
        parity_tests: of the tests that need a GPU, those of parity or all others; None for a module of tasks.
    """

    name: str
    says: str
    seconds: float
    task_seconds: float
    needs: tuple[str, ...] = ()
    shared: bool = False
    parity_tests: bool | None = None

    def command(self, lines: Path, done: Path, machine: Path) -> list[str]:
        """The command that runs the tasks except those that `done` names, and writes their results to `lines`."""
        if self.parity_tests is None:
            return [sys.executable, "-m", "benchmarks.gpu.part", self.name, str(lines), str(done), str(machine)]
        files = [str(file) for file in gpu_tests(TESTS) if is_parity(file) == self.parity_tests]
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.reporting", "-p", "no:cacheprovider"]
        # The options of pyproject.toml are left out: some belong to plug-ins that may be missing.
        return [
            *command,
            "-o",
            "addopts=",
            "-q",
            "--continue-on-collection-errors",
            "--gpu-lines",
            str(lines),
            "--gpu-done",
            str(done),
            *files,
        ]


PARTS = (
    Part("limits", "copies, reads, products and launches: what the device can do", 60, 30),
    Part("compiled", "every kernel compiled for it: registers, spills, shared memory", 120, 60, shared=True),
    Part("agreement", "the kernels beside plain torch, and tokens alone beside in company", 90, 60, shared=True),
    Part("tests", "the tests that need a GPU", 180, 60, _FOR_TESTS, shared=True, parity_tests=False),
    Part("kernels", "each kernel beside the limits", 120, 40),
    Part("steps", "decodes and prompts of Llama-3.1-8B's shape", 150, 90),
    Part("calibration", "headway calibrate, for what the cost model predicts", 120, 120),
    Part("served", "headway serve and headway bench", 120, 120, needs=_FOR_SERVERS),
    Part("experiment", "loading, input, prefill, decode, output and memory by model", 200, 120, needs=_FOR_SERVERS),
    Part(
        "parity",
        "Hugging Face's logits, and tokens that do not depend on company, as tests",
        150,
        60,
        needs=(*_FOR_TESTS, "transformers"),
        shared=True,
        parity_tests=True,
    ),
)


def gpu_tests(folder: Path) -> Iterator[Path]:
    """Files with tests marked gpu, or with a DEVICE that is cuda where there is a GPU."""
    for file in sorted(folder.rglob("test_*.py")):
        text = file.read_text()
        if "mark.gpu" in text or '\nDEVICE = "cuda"' in text:
            yield file


def is_parity(file: Path) -> bool:
    return file.name in ("test_decoder_parity.py", "test_invariance.py")
