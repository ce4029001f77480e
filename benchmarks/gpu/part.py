"""Runs the tasks of a part and writes each result, as it comes, as a line of JSON. See parts.py and runner.py.

python -m benchmarks.gpu.part NAME LINES DONE MACHINE
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Tasks = dict[str, Callable[[], Iterable[Row]]]
# Nothing works in this process after such an error.
_STICKY = ("CUDA error", "Error [CUDA]", "AcceleratorError")
_LINES_OF_AN_ERROR = 6
SHARE = "HEADWAY_GPU_SHARE"  # in the environment: number/count


class Skipped(Exception):
    """A task that cannot be done here, which is no fault; the message says why."""


class Flaw(Exception):
    """What was measured is wrong; the message says what."""


@dataclass(frozen=True)
class Machine:
    """What tasks run on.

    Args:
        device: cuda; or cpu, for tests of the tasks themselves.
        small: so little of everything that a processor does it in seconds.
        folder: for checkpoints without weights and what commands write.
        limits: bytes/s and FLOP/s by name, as measured by the part of that name; {} before it.
        peaks: of `headway calibrate`, as JSON; None before it.
    """

    device: str = "cuda"
    small: bool = False
    folder: Path = Path()
    limits: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, Any] | None = None

    @classmethod
    def read(cls, file: Path) -> Machine:
        content = json.loads(file.read_text())
        return cls(**{**content, "folder": Path(content["folder"])})


def own_share(names: list[str]) -> list[str]:
    """The names that this process is to run, of those that several processes share. See runner.run_shared."""
    number, count = os.environ.get(SHARE, "0/1").split("/")
    return names[int(number) :: int(count)]


class Lines:
    """The file of results, which the starting process reads while it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")


def said(error: BaseException) -> str:
    """The first lines of an error, after its type."""
    lines = str(error).strip().splitlines()[:_LINES_OF_AN_ERROR]
    return "\n".join([f"{type(error).__name__}: {lines[0] if lines else ''}", *lines[1:]])


def is_sticky(text: str) -> bool:
    return any(mark in text for mark in _STICKY)


def run(tasks: Tasks, done: Iterable[str], lines: Lines) -> None:
    """Every task but those that are done. Leaves the process after an error that spoils it for the next one."""
    known, names = set(done), own_share(list(tasks))
    lines.write(tasks=names)
    for name in names:
        if name in known:
            continue
        lines.write(began=name)
        began = time.perf_counter()
        try:
            for row in tasks[name]():
                lines.write(task=name, row=row)
        except Skipped as reason:
            lines.write(ended=name, skipped=str(reason))
        except Exception as error:
            traceback.print_exc()
            lines.write(ended=name, error=said(error))
            if is_sticky(said(error)):
                sys.exit(1)
        else:
            lines.write(ended=name, seconds=time.perf_counter() - began)


def main(argv: list[str]) -> None:
    name, lines, done, description = argv
    machine = Machine.read(Path(description))
    if machine.device == "cpu" and name != "compiled":  # nothing else runs Triton's kernels there
        os.environ["TRITON_INTERPRET"] = "1"
    module = importlib.import_module(f"benchmarks.gpu.{name}")
    run(module.tasks(machine), json.loads(Path(done).read_text()), Lines(Path(lines)))


if __name__ == "__main__":
    from benchmarks.gpu import part  # the module that tasks import, so that its exceptions are theirs

    part.main(sys.argv[1:])
