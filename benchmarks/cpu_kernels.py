"""How fast the CPU kernels are, beside what torch offers for the same work.

    python -m benchmarks.cpu_kernels [--threads 2] [--rounds 9] [--tokens 1 4 16 64 512]

The shapes are those of one layer of Qwen2.5-0.5B in bfloat16. Ours and theirs run in turn, each over enough
copies of its operands that none is in a cache when it is used, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

# Torch's threads would look for work for a while after each of their turns, on cores that ours need in the next.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.families import Family
from headway.kernels.interface import LayerCache, StepGeometry
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import Weight

DTYPE = torch.bfloat16
SHAPES = {"qkv": (1152, 896), "out": (896, 896), "gate_up": (9728, 896), "down": (896, 4864), "lm_head": (151936, 896)}
HEADS, KV_HEADS, WIDTH, BLOCK_SIZE = 14, 2, 64, 16
# More than the last-level cache of any machine this is likely to run on.
COLD_BYTES = 256 << 20

Run = Callable[[int], object]


def interleaved(ours: Run, theirs: Run, rounds: int, copies: int) -> tuple[float, float]:
    """Median seconds of each, called in turn; the argument names the copy of the operands to use."""
    ours(0)
    theirs(0)
    taken: tuple[list[float], list[float]] = [], []
    for index in range(rounds * min(copies, 8)):
        for times, run in zip(taken, (ours, theirs), strict=True):
            start = time.perf_counter()
            run((2 * index + (times is taken[1])) % copies)
            times.append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])


def report(name: str, tokens: int, seconds: tuple[float, float], moved: float, flops: float, peer: str) -> None:
    ours, theirs = seconds
    print(
        f"{name:12s} T={tokens:<4d} {ours * 1e6:9.0f} us"
        f" {moved / ours / 1e9:6.1f} GB/s {flops / ours / 1e9:7.0f} GFLOP/s"
        f"   {theirs / ours:5.2f}x {peer}"
    )


def bench_linear(kernels: CpuKernels, tokens: Sequence[int], rounds: int) -> None:
    for name, (out, width) in SHAPES.items():
        size = out * width * 2
        weights = [torch.randn(out, width).to(DTYPE) for _ in range(max(2, COLD_BYTES // size + 1))]
        linears = [kernels.linear(Weight(weight), None) for weight in weights]
        for count in tokens:
            if name == "lm_head" and count > 64:
                continue
            x = torch.randn(count, width).to(DTYPE)
            seconds = interleaved(
                lambda i: linears[i](x),  # noqa: B023
                lambda i: F.linear(x, weights[i]),  # noqa: B023
                rounds,
                len(weights),
            )
            report(name, count, seconds, size, 2.0 * out * width * count, "F.linear")


def step(queries: int, context: int, sequences: int) -> StepGeometry:
    """Sequences of equal lengths whose blocks lie interleaved in the pool."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.arange(blocks * sequences, dtype=torch.int32).view(blocks, sequences).T.contiguous()
    positions = torch.arange(context - queries, context).repeat(sequences)
    return StepGeometry(
        torch.arange(sequences + 1, dtype=torch.int32) * queries,
        torch.full((sequences,), context, dtype=torch.int32), tables, torch.zeros(0, dtype=torch.int64), positions,
        sequences, queries, context, [queries] * sequences, [context] * sequences,
    )  # fmt: skip


def bench_attention(kernels: CpuKernels, rounds: int) -> None:
    cases = [(1, 192, 1), (1, 192, 16), (1, 1024, 16), (1, 8192, 1), (128, 128, 1), (512, 512, 1), (256, 4096, 1)]
    for queries, context, sequences in cases:
        geometry = step(queries, context, sequences)
        query = torch.randn(queries * sequences, HEADS, WIDTH).to(DTYPE)
        shape = (geometry.block_tables.numel(), KV_HEADS, BLOCK_SIZE, WIDTH)
        caches = [LayerCache(torch.randn(shape).to(DTYPE), torch.randn(shape).to(DTYPE)) for _ in range(8)]
        # What torch would be given by an engine that keeps each sequence's keys and values dense.
        dense = [torch.randn(2, sequences, KV_HEADS, context, WIDTH).to(DTYPE) for _ in range(8)]
        split = query.view(sequences, queries, HEADS, WIDTH).transpose(1, 2).contiguous()
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)

        def ours(i: int) -> Tensor:
            return kernels.attention(query, caches[i], geometry, 0.125, None)  # noqa: B023

        def theirs(i: int) -> Tensor:
            keys, values = dense[i]  # noqa: B023
            if queries == context:  # noqa: B023
                return F.scaled_dot_product_attention(split, keys, values, is_causal=True, enable_gqa=True)  # noqa: B023
            return F.scaled_dot_product_attention(split, keys, values, attn_mask=mask, enable_gqa=True)  # noqa: B023

        moved = 2.0 * sequences * context * KV_HEADS * WIDTH * 2
        pairs = sequences * queries * (context - (queries - 1) / 2)
        name = f"{sequences} x {context}"
        seconds = interleaved(ours, theirs, rounds, 8)
        report(name, queries, seconds, moved, 4 * pairs * HEADS * WIDTH, "SDPA, dense")


def bench_common_prefix(kernels: CpuKernels, rounds: int) -> None:
    """Decodes whose contexts begin in the same blocks, which are read once, beside what does not know that they do."""
    for sequences, common, own in ((16, 4096, 128), (16, 1024, 128), (2, 4096, 128), (64, 512, 128)):
        apart = step(1, common + own, sequences)
        apart.block_tables[:, : common // BLOCK_SIZE] = apart.block_tables[0, : common // BLOCK_SIZE]
        together = replace(apart, context_lens_host=list(apart.context_lens_host))
        together.families = [Family(list(range(sequences)), [common] * (sequences - 1))]
        query = torch.randn(sequences, HEADS, WIDTH).to(DTYPE)
        for dtype in (DTYPE, torch.int8):
            caches = copies_of((apart.block_tables.numel(), KV_HEADS, BLOCK_SIZE, WIDTH), dtype)
            seconds = interleaved(
                lambda i: kernels.attention(query, caches[i], together, 0.125, None),  # noqa: B023
                lambda i: kernels.attention(query, caches[i], apart, 0.125, None),  # noqa: B023
                rounds,
                len(caches),
            )
            moved = 2.0 * (common + sequences * own) * KV_HEADS * WIDTH * dtype.itemsize
            name = f"{sequences} x {common}+{own}" + (" i8" if dtype == torch.int8 else "")
            report(name, 1, seconds, moved, 4.0 * sequences * (common + own) * HEADS * WIDTH, "read by each")


def copies_of(shape: tuple[int, ...], dtype: torch.dtype) -> list[LayerCache]:
    """Caches of the same random content, so many that none is in the processor's caches when its turn comes."""
    keys, values = (torch.randint(-127, 128, shape, dtype=torch.int8).to(dtype) for _ in range(2))
    scales = [torch.full(shape[:3], 0.01)] * 2 if dtype == torch.int8 else []
    size = sum(each.numel() * each.element_size() for each in (keys, values, *scales))
    return [
        LayerCache(keys.clone(), values.clone(), *(each.clone() for each in scales))
        for _ in range(max(2, COLD_BYTES // size + 1))
    ]


def bench_int8_cache(kernels: CpuKernels, rounds: int) -> None:
    for sequences, context in itertools.product((1, 8), (1024, 4096, 16384)):
        geometry = step(1, context, sequences)
        query = torch.randn(sequences, HEADS, WIDTH).to(DTYPE)
        shape = (geometry.block_tables.numel(), KV_HEADS, BLOCK_SIZE, WIDTH)
        narrow, wide = copies_of(shape, torch.int8), copies_of(shape, DTYPE)
        seconds = interleaved(
            lambda i: kernels.attention(query, narrow[i % len(narrow)], geometry, 0.125, None),  # noqa: B023
            lambda i: kernels.attention(query, wide[i % len(wide)], geometry, 0.125, None),  # noqa: B023
            rounds,
            max(len(narrow), len(wide)),
        )
        pairs = sequences * context
        moved = 2.0 * pairs * KV_HEADS * (WIDTH + 4)
        report(f"{sequences} x {context} i8", 1, seconds, moved, 4.0 * pairs * HEADS * WIDTH, "bfloat16 cache")


def bench_rows(kernels: CpuKernels, tokens: Sequence[int], rounds: int) -> None:
    plain = ReferenceKernels()
    for count in tokens:
        x, residual = torch.randn(count, 896).to(DTYPE), torch.randn(count, 896).to(DTYPE)
        weight = torch.randn(896).to(DTYPE)
        both = interleaved(
            lambda _: kernels.add_rms_norm(x, residual, weight, 1e-6),  # noqa: B023
            lambda _: plain.add_rms_norm(x, residual, weight, 1e-6),  # noqa: B023
            rounds,
            8,
        )
        report("add_rms_norm", count, both, 4.0 * x.numel() * 2, 6.0 * x.numel(), "plain torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.rounds < 1 or min(arguments.tokens) < 1:
        parser.error("--threads, --rounds and --tokens must be at least 1")
    torch.set_num_threads(arguments.threads)
    kernels = CpuKernels()
    with torch.inference_mode():
        bench_linear(kernels, arguments.tokens, arguments.rounds)
        bench_attention(kernels, arguments.rounds)
        bench_common_prefix(kernels, arguments.rounds)
        bench_int8_cache(kernels, arguments.rounds)
        bench_rows(kernels, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
