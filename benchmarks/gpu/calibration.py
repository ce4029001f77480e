"""What `headway calibrate` makes of this device, in fewer rounds; the cost model's predictions are from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from benchmarks.gpu.part import Machine, Row, Tasks
from headway.calibration.calibrate import calibrate
from headway.calibration.efforts import EFFORTS

_ROUNDS = 4


def tasks(machine: Machine) -> Tasks:
    return {"calibrate": partial(_calibrate, machine)}


def _calibrate(machine: Machine) -> Iterable[Row]:
    """A row of the whole entry, and of how far the fit is off what it was made from."""
    amount = None
    if not machine.small:
        effort = EFFORTS[machine.device, "default"]
        amount = replace(effort, rounds=_ROUNDS, layers=effort.layers[:1])

    def say(stage: str, done: float) -> None:
        print(f"{done:.0%} {stage}", file=sys.stderr)

    threads = 1 if machine.small else None
    found = calibrate(None, machine.device, threads, "quick" if machine.small else "default", say, amount)
    yield {"machine": json.loads(found.to_json()), "fit_error": found.fit_error, "busy": found.busy}
