"""The least time that work can take on a machine (Williams, Waterman and Patterson, Roofline, 2009)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roofline:
    """A machine's two limits: FLOPs and bytes in a second."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on arithmetic is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """FLOPs in a second at so many FLOPs per byte."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def least_seconds(self, flops: float, moved_bytes: float) -> float:
        """The least time of so much work: arithmetic and memory traffic overlap, and the longer one decides."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)
