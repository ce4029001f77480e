"""What a reader must open to follow a request: the files and functions that one enters in the engine.

The library answers four prompts with the bundled model while `sys.setprofile` notes each Python function that is
called. Of each file all lines count, of each function the lines that have code. Compiled kernels are not counted.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import headway
from headway import LLM, SamplingParams

PACKAGE = Path(headway.__file__).parent
PROMPTS = ["The old house stood", "Once upon a time", "Tell me about the sea.", "A king had three sons"]


@dataclass(frozen=True)
class Entered:
    """One file of the package.

    Attributes:
        lines: of the whole file.
        functions: that were entered, with comprehensions and lambdas.
        function_lines: lines with code of these functions.
    """

    name: str
    lines: int
    functions: int
    function_lines: int

    @property
    def room(self) -> str:
        return self.name.split("/")[0]


def functions_called(llm: LLM) -> set[CodeType]:
    """The functions that are called while `llm` answers the prompts, also in its own thread."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        llm.generate(PROMPTS, SamplingParams(temperature=0.7, max_tokens=16, seed=1))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return called.copy()  # the thread of the steps may still be noted


def entered(called: set[CodeType]) -> list[Entered]:
    """The package's files with functions among those called, by name."""
    by_file: dict[Path, list[CodeType]] = {}
    for code in called:
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            by_file.setdefault(path, []).append(code)
    return [
        Entered(
            path.relative_to(PACKAGE).as_posix(),
            len(path.read_text().splitlines()),
            len(codes),
            sum(len({line for _, _, line in code.co_lines() if line}) for code in codes),
        )
        for path, codes in sorted(by_file.items())
    ]


def trace() -> list[Entered]:
    """The files that the bundled model's answers enter, with a new engine."""
    return entered(functions_called(LLM("headway/story", kv_cache_memory=32 << 20, num_threads=1)))


def summary(files: list[Entered]) -> str:
    """One line with the four numbers."""
    lines, functions = sum(each.lines for each in files), sum(each.functions for each in files)
    function_lines = sum(each.function_lines for each in files)
    return f"{len(files)} files of {lines:,} lines, {functions:,} functions of {function_lines:,} lines"


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.step_trace", description=__doc__).parse_args()
    files = trace()
    width = max(len(each.name) for each in files)
    print(f"{'file':<{width}}  lines  functions  their lines")
    for each in files:
        print(f"{each.name:<{width}}  {each.lines:>5}  {each.functions:>9}  {each.function_lines:>11}")
    rooms = Counter(each.room for each in files)
    print(f"\n{summary(files)}; " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))


if __name__ == "__main__":
    main()
