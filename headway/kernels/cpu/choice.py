"""Chooses the way that products take on this processor. It is measured once, and kept beside the compiled code.

That a processor has an instruction says nothing of how fast it is, so where there are several ways to multiply weights
of a kind, each is timed over a block that lies in a near cache. A way serves any number of tokens from its least on.
Sums of floats differ between ways, so theirs is one for any number, and a token's result does not depend on others;
sums of whole numbers are exact, so theirs may take tiles from some number of tokens on. Packed weights are the same
for all ways.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.kernels.cpu.arithmetic import (
    FLOAT4,
    GROUPED,
    GROUPS4,
    GROUPS8,
    HAS_BF16,
    INT4,
    INT8,
    PANEL,
    TILE_TOKENS,
    WIDE_INT8,
    WIDENED,
    arithmetic_of,
)
from headway.kernels.cpu.code import code_folders, exclusive, sources
from headway.kernels.cpu.compile import callable_of, target
from headway.kernels.cpu.groups import HEADER_BYTES, group_bytes, multiply_grouped
from headway.kernels.cpu.ir import VECTOR_BYTES
from headway.kernels.cpu.jobs import once_per_kind
from headway.kernels.cpu.matrix import (
    SPLIT,
    STEP_WORDS,
    TILE_ROWS,
    configurations,
    configure,
    has_matrix_tiles,
    release,
)
from headway.kernels.cpu.panels import TOTALS_BYTES, multiply_panel, unpack_panel
from headway.kernels.cpu.planes import LEAST_GROUP, multiply_planes, words_of_tile
from headway.kernels.cpu.product import MOST_FROM_NIBBLES, multiply_on_tiles
from headway.kernels.cpu.simd import BFLOAT16

VARIABLE = "HEADWAY_CPU_KERNELS"  # auto, default, or a file
# Numbers of tokens that are timed: one, a tile of vectors, some of them, and two groups of matrix tiles.
TOKENS = (1, TILE_TOKENS, 2 * TILE_TOKENS, 4 * TILE_TOKENS)
# How much faster than the default a way must be, so that noise does not decide.
_MARGIN = 1.05
_WORDS, _PANELS, _ROUNDS, _SECONDS = 128, 32, 10, 0.0005


class Way(NamedTuple):
    """How a product is computed."""

    kind: Any  # the kind of its arithmetic; see cpu_arithmetic
    least_on_tiles: int = 0  # tokens from which on it is on matrix tiles; 0: never


Rates = dict[str, dict[int, float]]  # GFLOP/s of one thread, by way and tokens
_KINDS = {
    "bfloat16": BFLOAT16,
    "attention": BFLOAT16,
    "int8": INT8,
    "int4": INT4,
    "int8-weight-only": WIDE_INT8,
    "int8-weight-only in groups": GROUPS8,
    "int4-weight-only": GROUPS4,
    "float4-weight-only": FLOAT4,
}


def ways_of(product: str, tiles: bool) -> dict[str, Way]:
    """The ways to compute a product, the one that is taken without measuring first. Raises KeyError."""
    kind = _KINDS[product]
    if kind is BFLOAT16:
        ways = {"vdpbf16ps": Way(kind), "widened": Way(WIDENED)} if HAS_BF16 else {"widened": Way(kind)}
        return {"tiles": Way(kind, 1), **ways} if tiles else ways
    if not tiles:
        return {"vectors": Way(kind)}
    return {**{f"tiles from {least}": Way(kind, least) for least in reversed(TOKENS)}, "vectors": Way(kind)}


@dataclass
class Choice:
    """The ways that this process takes."""

    tiles: bool = False  # whether it has matrix tiles
    path: Path | None = None  # where results of measurements are kept; None measures nothing
    names: dict[str, str] = field(default_factory=dict)  # the names of the ways that are settled, by product
    rates: dict[str, Rates] = field(default_factory=dict)  # the rates that were measured, by product

    def way(self, kind: Any, product: str = "") -> Way:
        """The way of a kind of weights, or of another product with numbers of this kind."""
        product = product or next((name for name, each in _KINDS.items() if each is kind), "")
        return ways_of(product, self.tiles)[self.name(product)] if product else Way(kind)

    def is_open(self, product: str) -> bool:
        """Whether the product has several ways."""
        return product in _KINDS and len(ways_of(product, self.tiles)) > 1

    def name(self, product: str) -> str:
        """The name of the way that a product takes. This measures it if that is still to be done."""
        if product not in self.names:
            if self.path is None or not self.is_open(product):
                self.names[product] = next(iter(ways_of(product, self.tiles)))
            else:
                self._measure(product, self.path)
        return self.names[product]

    def _measure(self, product: str, path: Path) -> None:
        """Measure a product, while other processes that need it wait: together they would disturb each other."""
        with exclusive(path.with_suffix(".lock")):
            self.read()
            if product in self.names:
                return
            timed = "bfloat16" if product == "attention" else product
            if timed not in self.rates:
                self.rates[timed] = measured(timed, self.tiles)
            self.names[product] = fastest(product, self.tiles, self.rates[timed])
            self._write(path)

    def read(self) -> None:
        """Read what is kept, if it is there and can be used."""
        if self.path is None:
            return
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            said = json.loads(self.path.read_text())
            names = checked(said["ways"], self.tiles, str(self.path))
            rates = {
                product: {
                    name: {int(tokens): float(rate) for tokens, rate in each.items()} for name, each in of.items()
                }
                for product, of in said["gflops"].items()
            }
            self.names, self.rates = {**names, **self.names}, {**rates, **self.rates}

    def _write(self, path: Path) -> None:
        draft = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # it is measured again
            draft.write_bytes(self.to_json())
            draft.replace(path)

    def measure_again(self) -> None:
        """Measure all products that have several ways, and keep that. Raises ValueError if ways are prescribed."""
        if self.path is None:
            raise ValueError(
                f"{VARIABLE} says which kernels are used, or nothing can be kept; unset it to measure them"
            )
        self.names, self.rates = {}, {}
        self.path.unlink(missing_ok=True)
        for product in _KINDS:
            self.name(product)

    def to_json(self) -> bytes:
        """The choice in JSON, as it is kept, and as a file that VARIABLE may name has it."""
        kept = {"ways": self.names, "gflops": self.rates, "path": str(self.path)}
        return json.dumps(kept, indent=1).encode()


def checked(names: object, tiles: bool, source: str) -> dict[str, str]:
    """Check names of ways that were read. Raises ValueError for one that this process does not have."""
    if not isinstance(names, dict):
        raise ValueError(f"{source} has no object `ways`; see docs/cpu.md")
    for product, name in names.items():
        if product not in _KINDS:
            raise ValueError(f"{source} has ways of {product!r}; products are {', '.join(_KINDS)}")
        if name not in (ways := ways_of(product, tiles)):
            raise ValueError(f"{source} has {name!r} for {product}; this processor has {', '.join(ways)}")
    return dict(names)


def choice_for(tiles: bool | None = None) -> Choice:
    """The choice of this process, by its environment. Equal arguments and environments give the same object.

    Raises:
        ValueError: it names a file that cannot be read, or ways that this processor does not have.
    """
    return _choice(has_matrix_tiles() if tiles is None else tiles, os.environ.get(VARIABLE, "") or "auto")


@lru_cache(maxsize=8)
def _choice(tiles: bool, said: str) -> Choice:
    if said == "default":
        return Choice(tiles)
    if said == "auto":
        choice = Choice(tiles, _kept_at(tiles))
        choice.read()
        return choice
    try:
        content = json.loads(Path(said).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no JSON ({error})"
        raise ValueError(f"{VARIABLE} is {said}, which cannot be read: {reason}; use auto, default or a file") from None
    return Choice(tiles, None, checked(content.get("ways") if isinstance(content, dict) else None, tiles, said))


def _kept_at(tiles: bool) -> Path:
    """The file of a choice, named by the processor, the target of compiled code, and its sources."""
    names = {"vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part"}
    about = {platform.machine()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.partition(":")[0].strip() in names:
                about.add(line)
    key = repr((sources(), target(), sorted(about), tiles))
    return code_folders()[-1] / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.ways"


def fastest(product: str, tiles: bool, rates: Rates) -> str:
    """The way with the least geometric mean of times; the default one unless another is faster by a margin."""
    ways = ways_of(product, tiles)

    def slowness(name: str) -> float:
        least = ways[name].least_on_tiles
        vectors = name if name in rates else "vectors"
        taken = [rates["tiles" if least and tokens >= least else vectors][tokens] for tokens in TOKENS]
        return math.prod(taken) ** (-1 / len(taken))

    first, best = next(iter(ways)), min(ways, key=slowness)
    return best if slowness(best) * _MARGIN < slowness(first) else first


@once_per_kind
def _on_vectors(kind: Any, unpacked_kind: Any) -> Any:
    """A block of each of some panels with 1 token, or with some tiles of vectors; step_bytes are those of a word."""

    def multiply(tokens, x, x_stride, packed, step_bytes, totals, scales, room, sums, configurations):
        for panel in range(_PANELS):
            at = packed + panel * _WORDS * step_bytes
            if tokens == 1:
                multiply_panel(kind, 1, x, x_stride, at, _WORDS, totals, scales, 8, 0)
            elif tokens <= MOST_FROM_NIBBLES:
                multiply_panel(kind, TILE_TOKENS, x, x_stride, at, _WORDS, totals, scales, 8, 0)
            else:
                if room != 0:
                    unpack_panel(kind, at, _WORDS, room)
                    at = room
                for first in range(0, tokens, TILE_TOKENS):
                    to = totals + first * TOTALS_BYTES
                    multiply_panel(
                        unpacked_kind, TILE_TOKENS, x + first * x_stride, x_stride, at, _WORDS, to, scales, 8, 0
                    )

    return callable_of(multiply)


@once_per_kind
def _groups_on_vectors(kind: Any) -> Any:
    """The same of weights with groups; step_bytes are those of a group."""
    slices, size = LEAST_GROUP // (arithmetic_of(kind).words * arithmetic_of(kind).inputs), arithmetic_of(kind).inputs
    groups = _WORDS * size // LEAST_GROUP

    def multiply(tokens, x, x_stride, packed, step_bytes, totals, scales, room, sums, configurations):
        more = slices, 0, LEAST_GROUP * 4 // size, sums, sums, 0
        for panel in range(_PANELS):
            multiply_grouped(
                kind, tokens, x, x_stride, packed + panel * groups * step_bytes, groups, groups, step_bytes, totals,
                scales, 0, more,
            )  # fmt: skip

    return callable_of(multiply)


@once_per_kind
def _on_tiles(kind: Any, unpacked_kind: Any) -> Any:
    """The same on matrix tiles, as products are there."""

    def multiply(tokens, x, x_stride, packed, step_bytes, totals, scales, room, sums, configurations):
        rows = tokens if tokens <= TILE_ROWS else tokens // 2
        configure(configurations + rows * VECTOR_BYTES)
        for panel in range(_PANELS):
            multiply_on_tiles(
                kind, unpacked_kind, tokens, rows, x, x_stride, packed + panel * _WORDS * step_bytes, _WORDS, _WORDS,
                step_bytes, totals, scales, 8, room, sums,
            )  # fmt: skip
        release()

    return callable_of(multiply)


@once_per_kind
def _planes_on_tiles(kind: Any) -> Any:
    """The same of weights of SPLIT, of whose tokens both planes lie in x."""
    inputs, in_groups = _WORDS * arithmetic_of(kind).inputs, kind is not WIDE_INT8
    size, header = (LEAST_GROUP, HEADER_BYTES * PANEL) if in_groups else (inputs, 0)

    def multiply(tokens, x, x_stride, packed, step_bytes, totals, scales, room, sums, configurations):
        rows = tokens if tokens <= TILE_ROWS else tokens // 2
        of_group = step_bytes if in_groups else _WORDS * step_bytes
        configure(configurations + rows * VECTOR_BYTES)
        for panel in range(_PANELS):
            multiply_planes(
                kind, tokens, rows, x, x_stride, inputs, packed + panel * inputs // size * of_group, inputs, size,
                inputs // size, of_group, header, totals, scales, 0, room, sums, (0, sums, sums, 0),
            )  # fmt: skip
        release()

    return callable_of(multiply)


def measured(product: str, tiles: bool) -> Rates:
    """GFLOP/s of one thread: the best pass of some rounds in which the ways take turns, as others may be at work."""
    kind, layout = _KINDS[product], arithmetic_of(_KINDS[product])
    in_groups, splits = (any(kind is each for each in some) for some in (GROUPED, SPLIT))
    unpacks, step_bytes, steps = kind is INT4, PANEL * layout.lane_bytes // layout.words, _WORDS
    if in_groups:
        step_bytes, steps = group_bytes(kind, LEAST_GROUP), _WORDS * layout.inputs // LEAST_GROUP
    packed = torch.zeros(_PANELS * steps * step_bytes, dtype=torch.uint8)
    x, totals = torch.zeros(TOKENS[-1], _WORDS), torch.zeros(TOKENS[-1] + 16, PANEL)
    scales, room, sums = torch.zeros(TOKENS[-1], 2), torch.zeros(_WORDS, PANEL), torch.zeros(32, PANEL)
    more = (
        room.data_ptr() if unpacks or splits else 0, sums.data_ptr() if layout.integer else 0,
        configurations(0, words_of_tile(LEAST_GROUP) if in_groups else STEP_WORDS),
    )  # fmt: skip

    def run(way: Way, tokens: int) -> None:
        if in_groups and not way.least_on_tiles:
            of_kind = _groups_on_vectors(way.kind)
        elif splits and way.least_on_tiles:
            of_kind = _planes_on_tiles(way.kind)
        else:
            of_kind = (_on_tiles if way.least_on_tiles else _on_vectors)(way.kind, INT8 if unpacks else way.kind)
        of_kind(
            tokens, x.data_ptr(), _WORDS * 4, packed.data_ptr(), step_bytes, totals.data_ptr(), scales.data_ptr(), *more
        )

    timed = {name.partition(" ")[0]: way for name, way in ways_of(product, tiles).items()}
    seconds = {name: dict.fromkeys(TOKENS, math.inf) for name in timed}
    for way in timed.values():
        run(way, TOKENS[0])  # compiles
    for _, (name, way), tokens in itertools.product(range(_ROUNDS), timed.items(), TOKENS):
        began = time.perf_counter()
        until = began + _SECONDS
        while began < until:
            run(way, tokens)
            ended = time.perf_counter()
            seconds[name][tokens], began = min(seconds[name][tokens], ended - began), ended
    flops = 2e-9 * PANEL * _PANELS * _WORDS * layout.inputs
    return {
        name: {tokens: float(f"{flops * tokens / taken:.4g}") for tokens, taken in of.items()}
        for name, of in seconds.items()
    }
