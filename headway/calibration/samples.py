"""What a calibration times: pieces of a step, each with its work as the cost model counts it. No torch here."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import StrEnum

from headway.cost.work import Work

NO_WORK = Work()


class Kind(StrEnum):
    """Pieces of a step that have an efficiency of their own."""

    STREAM = "stream"  # a large matrix that is read once: the machine's speed beside everything else
    LINEAR = "linear"
    DECODE = "attention of decodes"
    PROMPT = "attention over prompts"
    ELEMENTS = "element-wise operations"
    STEP = "steps of a tiny model"


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to time, as far as the cost model sees it."""

    kind: Kind
    format: str  # the format of its arithmetic, a key of `Hardware.flops_per_s`
    label: str  # tells it from others of its kind
    tokens: int  # the tokens of the step that it is a piece of
    work: Work = NO_WORK  # the work of one run
    scores: int = 0  # pairs of a query and a key, of all heads; 0 outside attention
    kernels: int = 1  # the number of kernels of one run
    # layers, sequences, context: the sizes of a step, whose work the cost model counts from them; 0 for pieces.
    layers: int = 0
    sequences: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A piece with the seconds that one run of it took, from several rounds."""

    piece: Piece
    best: float
    median: float  # what the fits use: what a server will see too, where a best run is luck on a machine that is shared
    repeats: int

    @property
    def scatter(self) -> float:
        """How far the median lies above the best, as a share of the median."""
        return 1.0 - self.best / self.median


@dataclass(slots=True)
class Timings:
    """Seconds of a piece, as they come in."""

    piece: Piece
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> Sample:
        return Sample(self.piece, min(self.seconds), statistics.median(self.seconds), len(self.seconds))
