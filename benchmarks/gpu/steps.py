"""Steps of the whole engine with Llama-3.1-8B's shape in bfloat16 and random weights, beside the limits.

Of a decode the share is the bytes of weights and cache by its time, of measured copies; of a prompt its FLOPs, of
measured products. The host's gap is the share of a step in which no kernel runs.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.checkpoint import SHAPES
from benchmarks.gpu.limits import GIB
from benchmarks.gpu.part import Machine, Row, Skipped, Tasks
from benchmarks.live_engine import BLOCK, MOST_STEPS, UNTIMED, LiveEngine
from benchmarks.work import kv_bytes, prefill_flops, weight_bytes
from headway.cost.config import read_shape
from headway.cost.shape import ModelShape

_BUDGET_S = 1.0
_PROFILED = 5  # steps
_KERNELS_SHOWN = 8


@dataclass(frozen=True)
class Grid:
    """What is measured: a model, decodes as (sequences, context), prompts as tokens."""

    model: str
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]

    @property
    def shape(self) -> ModelShape:
        return read_shape(SHAPES[self.model], self.model)

    def cache_tokens(self, batch: int, context: int) -> int:
        """Tokens that the pool must hold for decodes of so many sequences."""
        return (batch + 1) * (context + UNTIMED + MOST_STEPS + 2 * BLOCK)


GRID = Grid("llama-3.1-8b", ((1, 2048), (8, 2048), (64, 2048), (256, 512)), (512, 1024, 2048, 4096, 8192))
SMALL = Grid("tiny", ((1, 32), (2, 64)), (32,))


def tasks(machine: Machine) -> Tasks:
    """The start of the engine, then each point on it."""
    grid = SMALL if machine.small else GRID
    room = _room(machine, grid)

    @functools.cache
    def engine() -> LiveEngine:
        fitting = [pair for pair in grid.decodes if grid.cache_tokens(*pair) <= room]
        tokens = max([grid.cache_tokens(*pair) for pair in fitting] + [max(grid.prompts) + 4 * BLOCK])
        batch, context = max(pair[0] for pair in grid.decodes), max(pair[1] for pair in grid.decodes)
        threads = 1 if machine.device == "cpu" else None
        return LiveEngine(
            SHAPES[grid.model], batch, context, max(grid.prompts), threads, machine.device, cache_tokens=tokens
        )

    found: Tasks = {"start": partial(_start, engine)}
    for batch, context in grid.decodes:
        fits = grid.cache_tokens(batch, context) <= room
        found[f"decode {batch} x {context}"] = partial(_decode, machine, grid, engine, batch, context, fits)
        found[f"in order {batch} x {context}"] = partial(_in_order, machine, grid, engine, batch, context, fits)
        found[f"eager {batch} x {context}"] = partial(_eager, machine, grid, engine, batch, context, fits)
    for tokens in grid.prompts:
        found[f"prompt of {tokens}"] = partial(_prompt, machine, grid, engine, tokens)
    for batch, context in (grid.decodes[0], grid.decodes[-1]):
        fits = grid.cache_tokens(batch, context) <= room
        found[f"gaps {batch} x {context}"] = partial(_gaps, machine, engine, batch, context, fits)
        found[f"gaps in order {batch} x {context}"] = partial(_gaps_in_order, machine, engine, batch, context, fits)
    return found


def _room(machine: Machine, grid: Grid) -> float:
    """Tokens for which there is memory beside the weights; below 0 where there is none even for these."""
    if machine.device == "cpu":
        return float("inf")
    free, total = torch.cuda.mem_get_info()
    left = min(free, 0.92 * total) - weight_bytes(grid.shape, "bf16") - _embedding_bytes(grid.shape) - 4 * GIB
    return left / kv_bytes(grid.shape, 1)


def _embedding_bytes(shape: ModelShape) -> int:
    return 0 if shape.tied_embeddings else 2 * shape.vocab * shape.hidden


Engine = Callable[[], LiveEngine]


def _start(engine: Engine) -> Iterable[Row]:
    began = time.perf_counter()
    loaded = engine()
    yield {"seconds": time.perf_counter() - began, "stages": {k: ns / 1e9 for k, ns in loaded.startup_ns.items()}}


def _need(fits: bool, batch: int, context: int) -> None:
    if not fits:
        raise Skipped(f"the cache of {batch} sequences of {context} tokens does not fit beside the weights")


def _decode(machine: Machine, grid: Grid, engine: Engine, batch: int, context: int, fits: bool) -> Iterable[Row]:
    _need(fits, batch, context)
    seconds, middle = engine().decode(context, batch, 0.0 if machine.small else _BUDGET_S)
    shape, median = grid.shape, statistics.median(seconds)
    moved = weight_bytes(shape, "bf16") + batch * kv_bytes(shape, middle)
    copy = machine.limits.get("copy")
    yield {
        "model": grid.model, "tokens": 1, "context": middle, "batch": batch, "seconds": median, "best": min(seconds),
        "bytes": moved, "of": "copies", "share": moved / median / copy if copy else None,
    }  # fmt: skip


def _in_order(machine: Machine, grid: Grid, engine: Engine, batch: int, context: int, fits: bool) -> Iterable[Row]:
    """The same decode where each step is planned when the one before has ended."""
    with engine().in_order():
        yield from _decode(machine, grid, engine, batch, context, fits)


def _eager(machine: Machine, grid: Grid, engine: Engine, batch: int, context: int, fits: bool) -> Iterable[Row]:
    """The same decode, in order and with each kernel launched by itself."""
    with engine().in_order(), engine().eager():
        yield from _decode(machine, grid, engine, batch, context, fits)


def _prompt(machine: Machine, grid: Grid, engine: Engine, tokens: int) -> Iterable[Row]:
    engine().prefill(tokens, 0.0)  # where kernels are compiled
    seconds = engine().prefill(tokens, 0.0 if machine.small else _BUDGET_S)
    flops, median = prefill_flops(grid.shape, 1, tokens), statistics.median(seconds)
    peak = machine.limits.get("gemm bfloat16")
    yield {
        "model": grid.model, "tokens": tokens, "context": 0, "batch": 1, "seconds": median, "best": min(seconds),
        "flops": flops, "of": "products", "share": flops / median / peak if peak else None,
    }  # fmt: skip


def _gaps(machine: Machine, engine: Engine, batch: int, context: int, fits: bool) -> Iterable[Row]:
    """Profile some decodes by torch, which needs CUPTI: which kernels ran, and for how long."""
    _need(fits, batch, context)
    if machine.device != "cuda":
        raise Skipped("a CPU has no gap between steps")
    from torch.profiler import ProfilerActivity, profile

    live = engine()
    with live.decoding(context, batch) as step:
        wall = statistics.median(step() for _ in range(_PROFILED))
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(_PROFILED):
                step()
            torch.cuda.synchronize()
    kernels = [each for each in profiled.key_averages() if each.device_type.name == "CUDA"]
    if not kernels:
        raise Skipped("torch's profiler saw no kernels: CUPTI is missing or not permitted here")
    busy = sum(each.self_device_time_total for each in kernels) / 1e6 / _PROFILED
    most = sorted(kernels, key=lambda each: each.self_device_time_total, reverse=True)[:_KERNELS_SHOWN]
    yield {
        "batch": batch, "context": context, "seconds": wall, "busy": busy, "gap": max(0.0, 1 - busy / wall),
        "launches": sum(each.count for each in kernels) / _PROFILED,
        "kernels": {each.key[:80]: each.self_device_time_total / 1e3 / _PROFILED for each in most},
    }  # fmt: skip


def _gaps_in_order(machine: Machine, engine: Engine, batch: int, context: int, fits: bool) -> Iterable[Row]:
    with engine().in_order():
        yield from _gaps(machine, engine, batch, context, fits)
