"""What attention loses when the blocks of a sequence lie apart in the pool, which is what compaction could win.

    python -m benchmarks.fragmentation [--threads 2] [--rounds 15]

The same decodes over the same pool of random keys and values, with block tables of runs of 1, 4 and 16 blocks in random
places, each in turn with tables of one run a sequence. The shapes are those of a layer of Qwen2.5-0.5B in bfloat16 with
blocks of 16 tokens. Also: what it takes to copy a block, which is what compaction would cost. See docs/memory.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_kernels import BLOCK_SIZE, DTYPE, HEADS, KV_HEADS, WIDTH, copies_of, interleaved, step
from benchmarks.machine import RESULTS, about, save
from headway.kernels.cpu.kernels import CpuKernels

RUNS = (1, 4, 16)
CASES = ((16, 1024), (1, 16_384), (64, 512))  # sequences, tokens of context


def tables(sequences: int, blocks: int, run: int) -> torch.Tensor:
    """Block tables of `blocks` entries, in runs of so many consecutive blocks that lie anywhere in the pool."""
    starts = torch.randperm(sequences * blocks // run, dtype=torch.int32) * run
    return (starts[:, None] + torch.arange(run, dtype=torch.int32)).view(sequences, blocks).contiguous()


def measure(kernels: CpuKernels, sequences: int, context: int, run: int, rounds: int) -> dict[str, Any]:
    """Seconds of decodes with scattered tables and with whole ones, in turn."""
    geometry, blocks = step(1, context, sequences), context // BLOCK_SIZE
    scattered = replace(geometry, block_tables=tables(sequences, blocks, run))
    whole = replace(geometry, block_tables=tables(sequences, blocks, blocks))
    caches = copies_of((sequences * blocks, KV_HEADS, BLOCK_SIZE, WIDTH), DTYPE)
    query = torch.randn(sequences, HEADS, WIDTH).to(DTYPE)
    slow, fast = interleaved(
        lambda i: kernels.attention(query, caches[i], scattered, 0.125, None),
        lambda i: kernels.attention(query, caches[i], whole, 0.125, None),
        rounds,
        len(caches),
    )
    return {"sequences": sequences, "context": context, "run": run, "scattered_s": slow, "whole_s": fast}


def copying(kernels: CpuKernels, rounds: int) -> float:
    """Seconds that it takes to copy a block of a layer."""
    caches = copies_of((4096, KV_HEADS, BLOCK_SIZE, WIDTH), DTYPE)
    order = torch.randperm(4096).tolist()
    sources, targets = order[:1024], order[1024:2048]
    seconds, _ = interleaved(
        lambda i: kernels.copy_blocks([caches[i]], sources, targets), lambda i: None, rounds, len(caches)
    )
    return seconds / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "fragmentation.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = CpuKernels()
    rows = [measure(kernels, *case, run, args.rounds) for case in CASES for run in RUNS]
    print("attention of a layer, one token a sequence: time with runs of blocks, as a multiple of that with one run")
    for row in rows:
        ratio = row["scattered_s"] / row["whole_s"]
        name = f"{row['sequences']:3} x {row['context']:6,} tokens, runs of {row['run']:2}"
        print(f"  {name}  {row['scattered_s'] * 1e6:7.0f} us  {ratio:5.2f}")
    copy_s = copying(kernels, args.rounds)
    print(f"a block copied: {copy_s * 1e6:.2f} us")
    settings = {"threads": args.threads, "rounds": args.rounds, "block_size": BLOCK_SIZE}
    save({"machine": about(), "settings": settings, "copy_s": copy_s, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
