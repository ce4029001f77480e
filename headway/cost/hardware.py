"""What a device offers: memory, rates of arithmetic by format, links to its neighbours, watts and price."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.cost.curve import on_curve
from headway.cost.roofline import Roofline

# The arithmetic that a device without units for a format falls back on: the numbers are widened first.
_WIDER = {
    "mxfp4": ("bf16", "fp16", "fp32"),
    "nvfp4": ("bf16", "fp16", "fp32"),
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "int4": ("int8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp32": (),
}


@dataclass(frozen=True, slots=True)
class Link:
    """How devices of one machine reach each other, or machines."""

    kind: str
    bytes_per_s: float  # what a device sends in one direction
    latency_s: float  # seconds of a small all-reduce among them
    max_devices: int  # how many devices are joined like this


# A small all-reduce between machines over InfiniBand: a rule of thumb, three to four times that of NVLink.
NETWORK_LATENCY_S = 30e-6
MOST_DEVICES = 100_000


def network_of(gb_per_s: float) -> Link:
    """A network between machines that gives each device so many 10^9 bytes/s one way."""
    return Link(f"network of {gb_per_s:g} GB/s a device", gb_per_s * 1e9, NETWORK_LATENCY_S, MOST_DEVICES)


# The network where nobody says what it is: 100 Gb/s for each device.
PLAIN_NETWORK = network_of(12.5)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one device for an hour in US dollars, and where and when that was the list price."""

    per_hour: float
    source: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device. Rates are per second, sizes in bytes."""

    key: str  # its short name
    name: str
    kind: str  # gpu or cpu
    architecture: str
    memory_bytes: int  # memory that programs can have
    bytes_per_s: float  # bandwidth of its memory by the data sheet, or as measured with streaming reads
    # Rates of dense matrix products by format: fp32, bf16, fp16, fp8, int8, fp4, int4, as far as it has them; and
    # mxfp4, for such weights with 8-bit activations.
    flops_per_s: dict[str, float]
    link: Link | None = None
    host_bytes_per_s: float | None = None  # bandwidth between it and its host's memory, one way
    tdp_w: float | None = None
    price: Price | None = None
    sources: tuple[str, ...] = ()
    note: str = ""
    # Pairs of a number of bytes and the rate at which so many are read over and over, smallest first; empty where only
    # memory counts.
    reads: tuple[tuple[int, float], ...] = ()
    network: Link | None = None  # the link between machines of such devices; None where nobody said
    # cuda_cores, tensor_cores: of the whole device; None where no data sheet was at hand.
    cuda_cores: int | None = None
    tensor_cores: int | None = None
    bus_bits: int | None = None  # width of the way to its memory
    measured: bool = False  # it is this machine as `headway calibrate` found it
    aliases: tuple[str, ...] = field(default=())

    def arithmetic(self, format_: str) -> str:
        """The format that products of numbers in `format_` are done in here: itself, or the next wider one.

        Raises:
            ValueError: no format that is as wide is known of this device.
        """
        for name in (format_, *_WIDER.get(format_, ())):
            if name in self.flops_per_s:
                return name
        known = ", ".join(self.flops_per_s)
        raise ValueError(f"{self.key} has no rate for products in {format_}; it has {known}")

    def rate(self, format_: str) -> float:
        """FLOPs in a second of products of numbers in `format_`. Raises ValueError as `arithmetic` does."""
        return self.flops_per_s[self.arithmetic(format_)]

    def bandwidth(self, working_set: int | None = None) -> float:
        """Bytes in a second, where `working_set` bytes are read over and over; None: more than any cache holds.

        Between measured sizes it is interpolated over the logarithm of the size.
        """
        if working_set is None or not self.reads:
            return self.bytes_per_s
        return on_curve(self.reads, working_set)

    def roofline(self, format_: str = "bf16") -> Roofline:
        """The limits of the device by its data sheet."""
        return Roofline(self.rate(format_), self.bytes_per_s)
