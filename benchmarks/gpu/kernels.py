"""Each kernel at the shapes of served models, beside the limits: microseconds, and the share of copies or products.

Weights and caches lie in a pool far larger than any cache, as in a step (headway/calibration/cases.py), which counts
their bytes and FLOPs by the cost model. The share is that of the limit, copies or products, that a kernel is nearer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.checkpoint import SHAPES
from benchmarks.gpu import formats
from benchmarks.gpu.compiled import Launch, launches
from benchmarks.gpu.limits import GIB, random, stopwatch
from benchmarks.gpu.part import Machine, Row, Skipped, Tasks
from headway.calibration.cases import (
    BLOCK_SIZE,
    AttentionLoad,
    Case,
    Pool,
    attention_case,
    element_case,
    geometry,
    linear_cases,
    stream_case,
)
from headway.calibration.stopwatch import measure_rate
from headway.cost.config import read_shape
from headway.cost.shape import ModelShape
from headway.kernels import kernels_for
from headway.kernels.families import CommonParts
from headway.kernels.interface import LayerCache, StepGeometry
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import SILU

DTYPE = torch.bfloat16
_BUDGET_S = 0.15
_ANY_FLOPS = 1e30
DECODES = (AttentionLoad(1, 2048, 1), AttentionLoad(1, 32768, 1), AttentionLoad(1, 2048, 8), AttentionLoad(1, 2048, 64),
           AttentionLoad(1, 512, 256))  # fmt: skip
PROMPTS = (AttentionLoad(512, 512, 1), AttentionLoad(2048, 2048, 1), AttentionLoad(8192, 8192, 1),
           AttentionLoad(512, 8192, 1))  # fmt: skip
TOKENS = (1, 8, 64, 256, 2048, 8192)
_SMALL_LOADS = (AttentionLoad(1, 64, 2), AttentionLoad(16, 16, 1))


def tasks(machine: Machine) -> Tasks:
    """One for each kernel and shape."""
    pool = Pool(2**24 if machine.small else min(2 * GIB, torch.cuda.mem_get_info()[0] // 4), machine.device)
    found: Tasks = {"stream": partial(_rows, machine, lambda: [stream_case(pool, DTYPE)])}
    names = ("tiny",) if machine.small else ("llama-3.1-8b", "qwen2.5-7b")
    for name in names:
        shape = replace(read_shape(SHAPES[name], name), layers=1, sliding_windows=())  # cases are of one layer
        for load in _SMALL_LOADS if machine.small else (*DECODES, *PROMPTS):
            label = f"{name} attention, {load.sequences} x {load.tokens} of {load.context}"
            found[label] = partial(_rows, machine, partial(_attention, pool, shape, load))
        for load in _SMALL_LOADS[:1] if machine.small else (AttentionLoad(1, 4096, 16), AttentionLoad(1, 32768, 1)):
            label = f"{name} attention over rounded caches, {load.sequences} x {load.context}"
            found[label] = partial(_rounded_caches, machine, shape, load)
        for tokens in (4,) if machine.small else TOKENS:
            cases = partial(linear_cases, pool, shape, DTYPE, (tokens,), _ANY_FLOPS)
            found[f"{name} products of a layer, {tokens} tokens"] = partial(_rows, machine, cases)
            elements = partial(_elements, pool, shape, tokens)
            found[f"{name} norms and rotation, {tokens} tokens"] = partial(_rows, machine, elements)
            found[f"{name} gate and cache writes, {tokens} tokens"] = partial(_single, machine, shape, tokens)
        for sequences, common in ((2, 32),) if machine.small else ((16, 4096), (64, 2048), (4, 8192)):
            label = f"{name} attention, {sequences} with {common} tokens in common"
            found[label] = partial(_common_prefix, machine, shape, sequences, common)
    for rows in (4,) if machine.small else (1, 16, 64):
        found[f"masks of allowed tokens, {rows} rows"] = partial(_masks, machine, rows)
    return found | formats.kernels(machine, partial(_measured, machine))


def _attention(pool: Pool, shape: ModelShape, load: AttentionLoad) -> list[Case]:
    return [attention_case(pool, shape, DTYPE, load, pool.size // 3 if load.tokens == 1 else 0)]


def _elements(pool: Pool, shape: ModelShape, tokens: int) -> list[Case]:
    return [element_case(pool, shape, DTYPE, tokens)]


@torch.inference_mode()
def _rows(machine: Machine, cases: Callable[[], Iterable[Case]]) -> Iterable[Row]:
    """Raises Skipped where the pool has no room for such a case."""
    try:
        made = list(cases())
    except ValueError as error:
        raise Skipped(str(error)) from None
    if not made:
        raise Skipped("the pool has no room for a layer")
    for case in made:
        work = case.piece.work
        yield _measured(machine, str(case.piece.kind), case.call, case.runs, work.bytes, work.flops)


@torch.inference_mode()
def _single(machine: Machine, shape: ModelShape, tokens: int) -> Iterable[Row]:
    """Kernels that no case of the calibration has alone."""
    kernels = kernels_for(machine.device, DTYPE)
    blocks = tokens // BLOCK_SIZE + 1, shape.kv_heads, BLOCK_SIZE, shape.head_dim
    cache = LayerCache(random(machine, *blocks), random(machine, *blocks))
    key = random(machine, tokens, shape.kv_heads, shape.head_dim)
    slots = torch.arange(tokens, device=machine.device)
    copied = 4.0 * key.nbytes
    yield _measured(machine, "store", lambda: kernels.store(key, key, cache, slots), 1, copied, 0.0)
    table = random(machine, 8192, shape.hidden)
    rows = torch.randint(0, 8192, (tokens,), device=machine.device)
    taken = 2.0 * tokens * shape.hidden * DTYPE.itemsize
    yield _measured(machine, "take", lambda: kernels.take(table, rows), 1, taken, 0.0)
    if machine.device == "cuda":
        from headway.kernels.cuda.kernels import CudaKernels

        cuda, gate_up = CudaKernels(), random(machine, tokens, 2 * shape.ffn)
        yield _measured(machine, "gate", lambda: cuda.apply_gate(gate_up, SILU), 1, 1.5 * gate_up.nbytes, 0.0)


@torch.inference_mode()
def _common_prefix(machine: Machine, shape: ModelShape, sequences: int, common: int) -> Iterable[Row]:
    """Decodes whose contexts begin in the same blocks: what these hold read once, and read by each."""
    kernels, own = kernels_for(machine.device, DTYPE), 128
    step = geometry(AttentionLoad(1, common + own, sequences), machine.device)
    step.block_tables[:, : common // BLOCK_SIZE] = step.block_tables[0, : common // BLOCK_SIZE]
    blocks = step.block_tables.numel(), shape.kv_heads, BLOCK_SIZE, shape.head_dim
    caches = [LayerCache(random(machine, *blocks), random(machine, *blocks)) for _ in range(1 if machine.small else 4)]
    query = random(machine, sequences, shape.heads, shape.head_dim)
    numbers = [[0, common, 0, sequences]], list(range(sequences)), [common] * sequences
    parts = CommonParts(*(torch.tensor(each, dtype=torch.int32, device=machine.device) for each in numbers))
    of_token = 2.0 * shape.kv_heads * shape.head_dim * DTYPE.itemsize
    for kernel, given, read in (
        ("attention, read once", parts, common + sequences * own),
        ("attention, read by each", None, sequences * (common + own)),
    ):
        there = replace(step, common=given)

        def call(there: StepGeometry = there) -> None:
            for cache in caches:
                kernels.attention(query, cache, there, shape.head_dim**-0.5, None)

        flops = 4.0 * sequences * (common + own) * shape.heads * shape.head_dim
        yield _measured(machine, kernel, call, len(caches), read * of_token, flops)


@torch.inference_mode()
def _rounded_caches(machine: Machine, shape: ModelShape, load: AttentionLoad) -> Iterable[Row]:
    """Decodes over a cache of each type, and what it takes to store a token of each sequence."""
    kernels, step = kernels_for(machine.device, DTYPE), geometry(load, machine.device)
    blocks = step.block_tables.numel(), shape.kv_heads, BLOCK_SIZE, shape.head_dim
    query = random(machine, load.sequences, shape.heads, shape.head_dim)
    key = random(machine, load.sequences, shape.kv_heads, shape.head_dim)
    slots = torch.arange(load.sequences, device=machine.device)
    for name, dtype in {"bfloat16": DTYPE, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.items():
        scales = [torch.ones(blocks[:3], device=machine.device) for _ in range(2 * (dtype == torch.int8))]
        cache = LayerCache(*(torch.zeros(blocks, dtype=dtype, device=machine.device) for _ in range(2)), *scales)
        moved = sum(tensor.nbytes for tensor in cache.tensors)
        call = partial(kernels.attention, query, cache, step, shape.head_dim**-0.5, None)
        flops = 4.0 * load.sequences * load.context * shape.heads * shape.head_dim
        yield _measured(machine, f"attention over {name}", call, 1, moved, flops)
        store = partial(kernels.store, key, key, cache, slots)
        yield _measured(machine, f"store to {name}", store, 1, 4.0 * key.nbytes, 0.0)


@torch.inference_mode()
def _masks(machine: Machine, rows: int) -> Iterable[Row]:
    """Masks for the draw, by the kernel and as tensor operations; every second token is forbidden."""
    tokens = 4096 if machine.small else read_shape(SHAPES["llama-3.1-8b"], "llama-3.1-8b").vocab
    x = torch.zeros(rows, tokens, device=machine.device)
    marked = torch.full((rows, 1 + tokens // 32), 0x55555555, dtype=torch.int32, device=machine.device)
    marked[:, 0] = torch.arange(rows, device=machine.device)
    moved = 4.0 * marked.numel() + 4.0 * x.numel()
    for name, kernels in {"forbid": kernels_for(machine.device, DTYPE), "forbid in torch": ReferenceKernels()}.items():
        yield _measured(machine, name, partial(kernels.forbid, x, marked), 1, moved, 0.0)


def _measured(machine: Machine, kernel: str, call: Callable[[], object], runs: int, moved: float, flops: float) -> Row:
    """A row: of one run of the `runs` that a call does, with what its largest launch takes of a multiprocessor."""
    with launches() as found:
        call()
    budget = 0.01 if machine.small else _BUDGET_S
    rate = measure_rate(runs, call, stopwatch(machine), budget, "headway", runs)
    seconds = 1.0 / rate.median
    shares = {}
    if copy := machine.limits.get("copy"):
        shares["copies"] = moved / seconds / copy
    if peak := machine.limits.get("gemm bfloat16"):
        shares["products"] = flops / seconds / peak
    nearest = max(shares, key=lambda name: shares[name], default=None)
    return {
        "kernel": kernel,
        "us": seconds * 1e6,
        "bytes_per_s": moved / seconds,
        "flops_per_s": flops / seconds,
        "of": nearest,
        "share": shares[nearest] if nearest else None,
        "launch": largest(found),
    }


def largest(found: Iterable[Launch]) -> Row | None:
    """The launch with the most registers; None where there is none."""
    distinct = {id(launch.compiled): launch for launch in found}
    return max((launch.row() for launch in distinct.values()), key=lambda row: int(row["registers"]), default=None)
