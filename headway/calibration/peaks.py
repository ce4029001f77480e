"""The result of a calibration. No torch here: whoever reads it need not be able to measure it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from headway.cost.curve import on_curve
from headway.cost.roofline import Roofline

# How far the median of the repeats may lie below the best, and how much of a core others may use, before the machine
# counts as busy.
BUSY_SCATTER = 0.2
BUSY_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Rate:
    """How much of something a second, from several repeats."""

    best: float  # what the machine can do; interruptions only ever slow a repeat down
    median: float  # what it did in the middle of the repeats
    repeats: int
    by: str  # which implementation reached the best
    size: int  # bytes read, or the side of the square matrices

    @property
    def scatter(self) -> float:
        """How far the median lies below the best, 0 to 1."""
        return 1.0 - self.median / self.best


@dataclass(frozen=True, slots=True)
class MachinePeaks:
    """What a device can do at most, as measured."""

    device: str  # "cpu" or "cuda"
    name: str  # the name of the processor or the GPU
    threads: int  # threads that took part; 0 on a GPU
    memory_bytes: int  # the memory of the device, within the limits of this process
    cache_bytes: int  # the largest cache; 0 where it is not known
    # Streaming reads of memory of several sizes, smallest first; the last is far larger than any cache.
    read_bytes_per_s: tuple[Rate, ...]
    gemm_flops_per_s: dict[str, Rate]  # FLOP/s of products of large square matrices, by dtype
    small_op_s: float  # one operation on a few elements, by torch
    kernel_call_s: float  # one call of the engine's own kernels with next to nothing to do
    seconds: float  # seconds that the measurement took
    others_cores: float | None = None  # cores that others used meanwhile, on average; None where that cannot be known

    @property
    def memory_read(self) -> Rate:
        """Reads that no cache can serve."""
        return self.read_bytes_per_s[-1]

    def bandwidth(self, working_set: int) -> float:
        """Bytes a second at which `working_set` bytes are read repeated, so caches count.

        Between the measured sizes it is interpolated over the logarithm of the size.
        """
        return on_curve([(rate.size, rate.best) for rate in self.read_bytes_per_s], working_set)

    def roofline(self, dtype: str, working_set: int | None = None) -> Roofline:
        """The machine's limits for a dtype that was measured; without a working set, memory beyond all caches."""
        read = self.memory_read.best if working_set is None else self.bandwidth(working_set)
        return Roofline(self.gemm_flops_per_s[dtype].best, read)

    def or_better(self, other: MachinePeaks) -> MachinePeaks:
        """The better of two measurements of the same device, rate by rate."""
        reads = zip(self.read_bytes_per_s, other.read_bytes_per_s, strict=True)
        return replace(
            self,
            read_bytes_per_s=tuple(max(pair, key=lambda rate: rate.best) for pair in reads),
            gemm_flops_per_s={
                dtype: max(rate, other.gemm_flops_per_s[dtype], key=lambda rate: rate.best)
                for dtype, rate in self.gemm_flops_per_s.items()
            },
            small_op_s=min(self.small_op_s, other.small_op_s),
            kernel_call_s=min(self.kernel_call_s, other.kernel_call_s),
            seconds=self.seconds + other.seconds,
            others_cores=None
            if self.others_cores is None or other.others_cores is None
            else min(self.others_cores, other.others_cores),
        )

    @property
    def busy(self) -> str | None:
        """Why the peaks may be too low: something else ran meanwhile. None on a quiet machine."""
        if self.others_cores is not None and self.others_cores > BUSY_CORES:
            return (
                f"other processes used {self.others_cores:.1f} cores while the machine was measured: the measured "
                "peaks may be too low"
            )
        rates = {"memory reads": self.memory_read} | {f"{d} products": r for d, r in self.gemm_flops_per_s.items()}
        name, worst = max(rates.items(), key=lambda each: each[1].scatter)
        if worst.scatter <= BUSY_SCATTER:
            return None
        return (
            f"half of the repeats of {name} were {worst.scatter:.0%} or more below the best: other processes use this "
            f"machine, so the measured peaks may be too low"
        )

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> MachinePeaks:
        """Raises msgspec.DecodeError when it is not what to_json() writes."""
        peaks = msgspec.json.decode(text, type=cls)
        if not peaks.read_bytes_per_s or not peaks.gemm_flops_per_s:
            raise msgspec.ValidationError("read_bytes_per_s and gemm_flops_per_s can't be empty")
        return peaks
