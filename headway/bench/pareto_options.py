"""Options of `headway bench pareto`, which its help reads without numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from headway.flags import Flag


@dataclass(frozen=True, slots=True)
class ParetoOptions:
    """What is shown.

    Args:
        devices: devices that each run had.
    """

    devices: Annotated[
        int, Flag("Devices that each run had; tokens/s are divided by them.", min=1, max=100_000, common=True)
    ] = 1
    ttft_ms: Annotated[
        float | None, Flag("Leave out runs whose median TTFT is above so many milliseconds.", min=0, common=True)
    ] = None
    report: Annotated[Path | None, Flag("Write an HTML report to this file; its figures are inside.", common=True)] = (
        None
    )
