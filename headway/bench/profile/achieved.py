"""Measured compute beside what the machine allows."""

from __future__ import annotations

from dataclasses import dataclass

from headway.bench.profile.model import ProfiledModel
from headway.calibration.peaks import MachinePeaks
from headway.cost.attention import Chunk
from headway.cost.work import Work, step_work, total


@dataclass(frozen=True, slots=True)
class Achieved:
    """One forward pass."""

    measured_ms: float  # its compute, by the server's ledger
    # The least that the machine needs for it: arithmetic at the peak rate of products, or weights and cache at the peak
    # rate of reads, whichever is longer.
    floor_ms: float
    # flops, kept_bytes: its FLOPs, and bytes of weights and cache.
    flops: float
    kept_bytes: float
    flops_per_s: float  # the peak rate of products
    # The peak rate of reads for as many bytes over and over; above that of memory when they fit in a cache.
    bytes_per_s: float

    @property
    def flops_share(self) -> float:
        """The achieved share of the peak rate of products."""
        return self.flops / (self.measured_ms / 1e3) / self.flops_per_s

    @property
    def bandwidth_share(self) -> float:
        """The achieved share of the peak rate of reads."""
        return self.kept_bytes / (self.measured_ms / 1e3) / self.bytes_per_s

    @property
    def share(self) -> float:
        """The achieved share of what the machine allows: 1 if the step takes the floor of its time."""
        return self.floor_ms / self.measured_ms

    @property
    def bound(self) -> str:
        """What sets the floor: "compute" or "memory"."""
        return "compute" if self.flops / self.flops_per_s > self.kept_bytes / self.bytes_per_s else "memory"

    @property
    def intensity(self) -> float:
        """FLOPs per byte of weights and cache."""
        return self.flops / self.kept_bytes


def prefill_work(model: ProfiledModel, prompt_tokens: int) -> Work:
    """The work of a whole prompt in one forward pass."""
    return total(step_work(model.shape, [Chunk(prompt_tokens)], model.precision).values())


def decode_work(model: ProfiledModel, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    """(FLOPs, bytes of weights and cache) of the mean step after the first token.

    Both are linear in the context but for sliding windows, so all steps are counted.
    """
    steps = [
        total(step_work(model.shape, [Chunk(1, context)], model.precision).values())
        for context in range(prompt_tokens, prompt_tokens + output_tokens - 1)
    ]
    return sum(w.flops for w in steps) / len(steps), sum(w.kept_bytes for w in steps) / len(steps)


def prefill_achieved(
    model: ProfiledModel, peaks: MachinePeaks, prompt_tokens: int, measured_ms: float
) -> Achieved | None:
    """What the prefill achieved; None if it was not measured."""
    work = prefill_work(model, prompt_tokens)
    return achieved(model, peaks, work.flops, work.kept_bytes, measured_ms) if measured_ms > 0 else None


def decode_achieved(
    model: ProfiledModel, peaks: MachinePeaks, prompt_tokens: int, output_tokens: int, measured_ms: float
) -> Achieved | None:
    """What the mean step after the first token achieved in its `measured_ms`; None without such a step."""
    if output_tokens < 2 or measured_ms <= 0:
        return None
    flops, kept_bytes = decode_work(model, prompt_tokens, output_tokens)
    return achieved(model, peaks, flops, kept_bytes, measured_ms)


def achieved(
    model: ProfiledModel, peaks: MachinePeaks, flops: float, kept_bytes: float, measured_ms: float
) -> Achieved:
    """A pass with so much work that took `measured_ms`, above 0."""
    roof = peaks.roofline(model.products, int(kept_bytes))
    least = floor_ms(model, peaks, flops, kept_bytes)
    return Achieved(measured_ms, least, flops, kept_bytes, roof.flops_per_s, roof.bytes_per_s)


def floor_ms(model: ProfiledModel, peaks: MachinePeaks, flops: float, kept_bytes: float) -> float:
    """The least time for so many FLOPs and bytes, which are read over and over."""
    return 1e3 * peaks.roofline(model.products, int(kept_bytes)).least_seconds(flops, kept_bytes)
