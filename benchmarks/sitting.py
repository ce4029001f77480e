"""One sitting: the engines of one precision on one model, point by point and round by round, in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES
from benchmarks.engines.interface import ISA, Settings
from benchmarks.exports import GGUF_KINDS, PACKED_KINDS, model_for
from benchmarks.points import Point
from benchmarks.processes import ROOT, Child, Died, running
from benchmarks.steal import MOST, undisturbed
from benchmarks.work import kv_bytes, shape_of, weight_bytes

_LEAST_KV_BYTES = 1 << 30
_ROUND_UP = 256  # some engines give each sequence a multiple of so many tokens
_COPIES = 1.5  # copies of its weights that an engine may hold in memory, the cache apart
_HEADWAY = {"bf16": "none", "int8": "int8", "int4": "int4"}
# What restricts engines to some instructions; llama.cpp is what it was built for, and its driver checks that.
ISAS = {
    "avx2": {
        ISA: "avx2",
        "NUMBA_CPU_NAME": "x86-64-v3",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # OpenVINO's and torch's
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}


@dataclass(frozen=True)
class Entry:
    """One engine in one setting, a row of the table.

    Args:
        python: that it is installed in.
        quantization: of Headway, as it reads the weights.
        kv_bits: of a number in the KV cache.
        variant: shown beside the others, but never the best peer.
        exporter: the Python that makes its files; "" where that is `python`.
        root: the checkout that it runs, with its own benchmarks.engines; "" is this one.
        isa: the instructions that it is restricted to, a key of ISAS; "" is all that the processor has.
    """

    label: str
    engine: str
    python: str
    quantization: str = "none"
    kv_bits: int = 16
    variant: bool = False
    exporter: str = ""
    root: str = ""
    isa: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the engine's process."""
        return ISAS.get(self.isa, {})


def entries(
    precision: str, peers: list[tuple[str, str]], headway: bool, variants: bool, kv_bits: int = 16
) -> list[Entry]:
    """Headway first, then the peers (name, python) that have this precision and a KV cache of so many bits.

    vLLM's CPU build does not round weights itself, and reads packed checkpoints beside bf16; a GGUF file is for Headway
    and llama.cpp, which makes it.
    """
    listed = [("headway", sys.executable)] * headway + peers
    if precision in GGUF_KINDS:
        exporter = dict(peers)["llama.cpp"]
        return [
            Entry(name, name, python, kv_bits=kv_bits, exporter=exporter)
            for name, python in listed
            if name in ("headway", "llama.cpp")
        ]
    if precision in PACKED_KINDS:
        return [Entry(name, name, python, kv_bits=kv_bits) for name, python in listed if name in ("headway", "vllm")]
    found = []
    for name, python in listed:
        quantization = _HEADWAY[precision] if name == "headway" else "none"
        if name != "vllm" or (precision, kv_bits) == ("bf16", 16):
            found.append(Entry(name, name, python, quantization, kv_bits))
        if variants and name == "headway" and precision == "int8":
            found.append(Entry("headway, weights only", name, python, "int8-weight-only", kv_bits, variant=True))
        if variants and name in ("headway", "openvino") and kv_bits == 16:
            found.append(Entry(f"{name}, 8-bit KV cache", name, python, quantization, 8, variant=True))
    return found


@dataclass
class Sitting:
    """What was measured; every list is by round.

    Args:
        rates: tokens a second, by point label and entry label.
        peaks: of the machine, by point label; see benchmarks.engines.peaks.
        about: what each entry says of itself.
        left_out: labels of points that could not be measured, and why.
        died: labels of entries that ended by themselves; the sitting goes on without them.
    """

    shape: str
    precision: str
    points: list[Point]
    entries: list[Entry]
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    peaks: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    died: dict[str, Died] = field(default_factory=dict)

    @property
    def alive(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.label not in self.died]

    def lose(self, label: str, end: Died) -> None:
        self.died[label] = end if label in end.line else Died(f"{label}: {end}")
        print(f"{end}\n{self.shape}, {self.precision}: going on without {label}", file=sys.stderr)

    def add(self, point: Point, label: str, rate: float) -> None:
        rates = self.rates.setdefault(point.label, {entry.label: [] for entry in self.entries})
        rates[label].append(rate)


def cache_bytes(shape: str, points: list[Point], rounds: int) -> int:
    """Bytes of the KV cache that the largest point needs, 1 GiB at least."""
    padded = (point.batch * -(-point.longest(rounds) // _ROUND_UP) * _ROUND_UP for point in points)
    return max(_LEAST_KV_BYTES, kv_bytes(shape_of(SHAPES[shape]), max(padded)))


def worker_command(
    entry: Entry,
    shape: str,
    precision: str,
    points: list[Point],
    rounds: int,
    threads: int,
    folder: Path,
    structured: bool = False,
) -> list[str]:
    """The entry's process, with room for all the points. Makes the entry's model files, which may take minutes."""
    settings = Settings(
        model=str(model_for(entry.engine, precision, shape, entry.exporter or entry.python, folder)),
        precision=precision,
        threads=threads,
        longest=max(point.longest(rounds) for point in points),
        sequences=max(point.batch for point in points),
        kv_bytes=cache_bytes(shape, points, rounds),
        quantization=entry.quantization,
        kv_bits=entry.kv_bits,
        structured=structured,
    )
    content = asdict(settings) | {"vocabulary": SHAPES[shape]["vocab_size"]}
    return [entry.python, "-m", "benchmarks.engines.worker", entry.engine, json.dumps(content)]


def sit(sitting: Sitting, rounds: int, threads: int, folder: Path, keep: Callable[[], None]) -> None:
    """Measure every point that is not held on every entry, `rounds` times after one round that does not count.

    An entry that dies is measured no more. `keep` is called after each round that counts. A measurement during which
    the machine's host took processors away is repeated, see undisturbed().
    """
    points = [point for point in sitting.points if not point.held]
    with ExitStack() as stack:
        children, peaks = _start(stack, sitting, points, rounds, threads, folder)
        for number in range(rounds + 1):
            _measure_peaks(sitting, points, peaks, number)
            for point in points:
                asked = {"batch": point.batch, "prompt": point.prompt, "new": point.new, "seed": number}
                for child in list(children):
                    if reply := _ask(sitting, children, child, {"do": "run", **asked}):
                        _take(sitting, point, child.name, float(reply[point.rate]), number)
                _rotate(children)
            if number:
                keep()


def sit_held(sitting: Sitting, rounds: int, threads: int, folder: Path, keep: Callable[[], None]) -> None:
    """Measure the held points, one after the other, each with processes of its own that have room for it alone.

    See sit().
    """
    for point in sitting.points:
        if not point.held:
            continue
        if reason := _too_large(sitting, point, rounds):
            sitting.left_out[point.label] = reason
            print(f"{point.label}: left out, {reason}", file=sys.stderr)
            continue
        with ExitStack() as stack:
            children, peaks = _start(stack, sitting, [point], rounds, threads, folder)
            asked = {"batch": point.batch, "prompt": point.prompt, "new": point.total_new(rounds), "seed": 0}
            for child in list(children):
                if held := _ask(sitting, children, child, {"do": "hold", **asked}, again=False):
                    print(f"{point.label}: {child.name} took its prompts in {held['seconds']:.1f} s", file=sys.stderr)
            for number in range(rounds + 1):
                _measure_peaks(sitting, [point], peaks, number)
                for child in list(children):
                    if reply := _ask(sitting, children, child, {"do": "advance", "new": point.new}, again=False):
                        _take(sitting, point, child.name, float(reply["decode"]), number)
                _rotate(children)
                if number:
                    keep()


def _ask(
    sitting: Sitting, children: list[Child], child: Child, request: dict[str, Any], again: bool = True
) -> dict[str, Any] | None:
    """The reply of a child, asked again if it was disturbed; None if it died, and then it leaves the children."""
    try:
        if not again:
            return child.ask(request)
        reply, stolen = undisturbed(partial(child.ask, request))
    except Died as end:
        sitting.lose(child.name, end)
        children.remove(child)
        return None
    if stolen > MOST:
        print(f"{stolen:.0%} of the processors' time was stolen from what follows", file=sys.stderr)
    return reply


def _rotate(children: list[Child]) -> None:
    """Rotate the children, so that none always comes first."""
    children[:] = [*children[1:], *children[:1]]


def _start(
    stack: ExitStack, sitting: Sitting, points: list[Point], rounds: int, threads: int, folder: Path
) -> tuple[list[Child], Child]:
    """The entries' processes, and the one that measures the machine."""
    children = []
    for entry in sitting.alive:
        try:
            command = worker_command(entry, sitting.shape, sitting.precision, points, rounds, threads, folder)
            children.append(
                stack.enter_context(running(entry.label, command, Path(entry.root or ROOT), entry.variables))
            )
        except Died as end:
            sitting.lose(entry.label, end)
    sitting.about |= {child.name: child.about for child in children}
    command = [sys.executable, "-m", "benchmarks.engines.peaks", str(threads)]
    return children, stack.enter_context(running("the machine", command))


def _measure_peaks(sitting: Sitting, points: list[Point], peaks: Child, number: int) -> None:
    found = peaks.ask({})
    read, bf16, int8 = found["read"] / 1e9, found["bf16"] / 1e9, found["int8"] / 1e9
    print(f"round {number}: reads {read:.1f} GB/s, products {bf16:.0f} and {int8:.0f} GFLOP/s", file=sys.stderr)
    if number:
        for point in points:
            sitting.peaks.setdefault(point.label, []).append(found)


def _take(sitting: Sitting, point: Point, label: str, rate: float, number: int) -> None:
    print(f"round {number}: {point.label}: {label} {rate:.1f}", file=sys.stderr)
    if number:  # the first round only warms up
        sitting.add(point, label, rate)


def _too_large(sitting: Sitting, point: Point, rounds: int) -> str | None:
    """Why not all engines can hold the point at the same time; None where they can."""
    weights = weight_bytes(shape_of(SHAPES[sitting.shape]), sitting.precision) * _COPIES
    needed = len(sitting.alive) * (weights + cache_bytes(sitting.shape, [point], rounds))
    free = _available_bytes()
    if needed <= free:
        return None
    return f"as {len(sitting.alive)} engines need {needed / 1e9:.0f} GB at once and {free / 1e9:.0f} GB are free"


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) * 1024
