"""Programs of other Pythons that are timed by what they say."""

from __future__ import annotations

import sys

import pytest

from benchmarks.processes import Timed

PROGRAM = """
import json, sys
factor, = json.loads(sys.argv[1])
print("noise", flush=True)
print("ready", flush=True)
for line in sys.stdin:
    if line == "end\\n":
        sys.exit(1)
    print("took", factor * float(line), flush=True)
"""


def test_a_program_says_how_long_each_line_took() -> None:
    timed = Timed(sys.executable, PROGRAM, 0.5)
    assert [timed.seconds(asked) for asked in (3, 5)] == [1.5, 2.5]
    timed.close()
    gone = Timed(sys.executable, PROGRAM, 1)
    with pytest.raises(SystemExit, match="its error is above"):
        gone.seconds("end")
    gone.close()
