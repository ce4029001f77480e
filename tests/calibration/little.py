"""Very little to measure; and `python -m headway.calibration` with that."""

from __future__ import annotations

from headway.calibration import __main__ as command
from headway.calibration import calibrate, measure
from headway.calibration.cases import AttentionLoad
from headway.calibration.efforts import Effort
from headway.cost.shape import ModelShape

LAYER = ModelShape(1, 256, 4, 2, 64, 512, 1)
LITTLE = Effort(
    rounds=2,
    piece_s=0.002,
    tokens=(1, 8),
    layers=(LAYER,),
    heads=(LAYER, ModelShape(1, 256, 2, 1, 128, 512, 1)),
    loads=(AttentionLoad(1, 40, 2), AttentionLoad(5, 23, 1)),
    element_tokens=(1, 3),
    depths=(1, 3),
    batches=(1, 3),
    steps=3,
    pool=2**20,
)
LITTLE_OF_PEAKS = measure.Effort(0.0, (measure.MIB,), (64, 128))
LITTLE_MEMORY = 2**29  # as much as a machine has here: a gigabyte, or eight large caches, take seconds to read


def main() -> None:
    """Every effort is this one."""
    for key in measure.EFFORTS:
        measure.EFFORTS[key] = LITTLE_OF_PEAKS
    for pair in calibrate.EFFORTS:
        calibrate.EFFORTS[pair] = LITTLE
    sizes = [measure.MIB, LITTLE_MEMORY // 8]
    measure._Bench._read_sizes = lambda *_: sizes  # type: ignore[method-assign]
    command.main()
