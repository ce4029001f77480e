"""A machine that nobody measured: its samples are what the cost model says of a known efficiency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.calibration.host import tiny_shape
from headway.calibration.peaks import MachinePeaks, Rate
from headway.calibration.samples import Kind, Piece, Sample
from headway.calibration.store import CalibratedMachine
from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.timing import Deployment, PartTime
from headway.cost.work import total

KERNEL_S = 4e-6  # of a kernel in a piece and in a step
TOKENS = (1, 4, 16, 64, 256)
HARDWARE = Hardware(
    key="mine",
    name="A Processor",
    kind="cpu",
    architecture="x86_64",
    memory_bytes=32 * 2**30,
    bytes_per_s=40e9,
    flops_per_s={"fp32": 300e9, "bf16": 800e9},
    sources=("headway calibrate",),
    note="Measured with 2 threads.",
    measured=True,
)
KNOWN = replace(
    Efficiency.ideal(),
    sharpness=1.0,
    attention_flops=0.4,
    score_s=2e-10,
    kv_bytes=0.6,
    element_bytes=1.7,
    kernel_s=KERNEL_S,
    step_s=3e-4,
    sequence_s=5e-6,
    token_s=Efficiency().token_s,
    request_s=Efficiency().request_s,
    linear=((1, 1.1), (4, 0.8), (16, 0.7), (64, 0.9), (256, 1.0)),
    linear_of={"fp32": ((1, 1.0), (4, 0.9), (16, 0.6), (64, 0.8), (256, 1.2))},
)
LAYER = ModelShape(1, 1024, 16, 4, 64, 3072, 1)
# Two sizes of heads: with one alone, nothing tells products from scores.
HEADS = (LAYER, ModelShape(1, 1024, 8, 4, 128, 3072, 1))
FORMATS = {"bf16": "bfloat16", "fp32": "float32"}


def timed_pieces(efficiency: Efficiency = KNOWN) -> tuple[Sample, ...]:
    """Pieces of all kinds, with the seconds that `headway.cost` gives a machine of this efficiency."""
    return tuple(Sample(piece, 0.95 * seconds, seconds, 4) for piece, seconds in _pieces(efficiency))


def _pieces(efficiency: Efficiency) -> Iterator[tuple[Piece, float]]:
    head = _parts(efficiency, "bf16", Chunk(1))["head"]
    read_s = head.work.weight_bytes / HARDWARE.bytes_per_s
    yield Piece(Kind.STREAM, "bf16", "stream", 1, head.work), read_s
    for format_ in FORMATS:
        for tokens in TOKENS:
            yield _linear(efficiency, format_, tokens)
    for shape in HEADS:
        for context, sequences in ((256, 8), (1024, 1), (4096, 4)):
            yield _attention(efficiency, Kind.DECODE, shape, Chunk(1, context - 1, sequences=sequences))
        for tokens, context in ((64, 64), (256, 256), (512, 2048)):
            yield _attention(efficiency, Kind.PROMPT, shape, Chunk(tokens, context - tokens))
    for tokens in TOKENS:
        parts = _parts(efficiency, "bf16", Chunk(tokens))
        some = [parts[name] for name in ("rotary", "activation")]
        piece = Piece(Kind.ELEMENTS, "bf16", "", tokens, total(part.work for part in some), kernels=2)
        yield piece, sum(part.seconds for part in some)
    for layers in (2, 26):
        deployment = Deployment(tiny_shape(layers), Precision.of("bfloat16"), HARDWARE, efficiency)
        for batch in (1, 8, 32):
            piece = Piece(Kind.STEP, "bf16", "", batch, layers=layers, sequences=batch, context=16)
            yield piece, deployment.step([Chunk(1, 16, sequences=batch)]).seconds


def _parts(efficiency: Efficiency, format_: str, chunk: Chunk, shape: ModelShape = LAYER) -> dict[str, PartTime]:
    deployment = Deployment(shape, Precision.of(FORMATS[format_]), HARDWARE, efficiency)
    return {part.name: part for part in deployment.step([chunk]).parts}


def _linear(efficiency: Efficiency, format_: str, tokens: int) -> tuple[Piece, float]:
    parts = _parts(efficiency, format_, Chunk(tokens, logit_rows=0))
    some = [parts[name] for name in ("qkv", "output", "gate_up", "down")]
    work = total(part.work for part in some)
    return Piece(Kind.LINEAR, format_, "", tokens, work, kernels=4), sum(part.seconds for part in some)


def _attention(efficiency: Efficiency, kind: Kind, shape: ModelShape, chunk: Chunk) -> tuple[Piece, float]:
    part = _parts(efficiency, "bf16", chunk, shape)["attention"]
    scores = part.work.flops // (4 * shape.head_dim)
    return Piece(kind, "bf16", "", chunk.tokens * chunk.sequences, part.work, scores), part.seconds


def a_machine(key: str = "mine", busy: str | None = None) -> CalibratedMachine:
    """An entry as a calibration writes it."""
    hardware = replace(HARDWARE, key=key)
    rate = Rate(HARDWARE.bytes_per_s, 0.9 * HARDWARE.bytes_per_s, 5, "torch", 2**28)
    products = {FORMATS[name]: Rate(best, best, 5, "headway", 1024) for name, best in HARDWARE.flops_per_s.items()}
    peaks = MachinePeaks("cpu", "A Processor", 2, 32 * 2**30, 2**25, (rate,), products, 1e-6, KERNEL_S, 3.0, 0.01)
    return CalibratedMachine(
        hardware=hardware,
        efficiency=KNOWN,
        threads=2,
        date="2026-02-03T04:05:06+00:00",
        versions={"headway": "0.1.0"},
        rounds=4,
        seconds=9.5,
        peaks=peaks,
        samples=timed_pieces(),
        fit_error={"stream": 0.01, "linear": 0.02},
        residuals={str(kind): (0.9, 1.2) for kind in Kind},
        busy=busy,
    )
