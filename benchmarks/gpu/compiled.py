"""Every Triton kernel compiled as the engine launches it: registers, spills and shared memory beside the device's.

    python -m benchmarks.gpu.compiled 80 90 [--small]     without a GPU, for these compute capabilities

The kernels are called as ever, and what Triton would launch is compiled instead. Registers and spills are ptxas's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.formats import EXPERT_FORMATS, FORMATS, TOKENS, Experts, Format
from benchmarks.gpu.part import Flaw, Machine, Row, Skipped, Tasks, said
from headway.calibration.cases import BLOCK_SIZE, AttentionLoad, geometry
from headway.kernels.cuda.kernels import CudaKernels
from headway.kernels.families import CommonParts
from headway.kernels.interface import LayerCache, LayerState, SinkQueries, Span
from headway.kernels.weights import SILU, DeltaRule

# Bytes that one block may have, by compute capability (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_BYTES = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
# More of a thread's bytes in memory are a tile that is too large; a few are the compiler's choice.
MOST_SPILLED = 256
MULTIPROCESSORS = 132  # those of the target where there is no device; they decide how contexts are split


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    compiled: Any

    def row(self) -> Row:
        """The row of what the kernel takes of a multiprocessor."""
        registers, spilled = resources(self.compiled.asm["ptx"])
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "warps": self.compiled.metadata.num_warps,
            "registers": registers,
            "spilled_bytes": spilled,
            "shared_bytes": self.compiled.metadata.shared,
        }


@contextmanager
def launches(only_compiled: bool = False) -> Iterator[list[Launch]]:
    """Note the launches of Triton kernels inside. With `only_compiled`, they are compiled and nothing runs."""
    found: list[Launch] = []
    run = JITFunction.run

    def noted(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *arguments, grid=grid, warmup=warmup or only_compiled, **options)
        found.append(Launch(self.fn.__name__, tuple(grid), compiled))
        return compiled

    JITFunction.run = noted
    try:
        yield found
    finally:
        JITFunction.run = run


def resources(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as ptxas says of this code."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [_ptxas(target[1] if target else ""), "-v", f"--gpu-name={target[1] if target else ''}", str(file)]
        done = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True)
    used, spilled = re.search(r"Used (\d+) registers", done.stderr), re.search(r"(\d+) bytes spill stores", done.stderr)
    return int(used[1]) if used else 0, int(spilled[1]) if spilled else 0


def _ptxas(target: str) -> str:
    """The path of ptxas. Triton has its own for Blackwell."""
    number = re.search(r"\d+", target)
    nvidia = triton.knobs.nvidia
    newer = getattr(nvidia, "ptxas_blackwell", None) if number and int(number[0]) >= 100 else None
    return str((newer or nvidia.ptxas).path)


Heads = tuple[int, int, int]  # query, key/value, elements
LLAMA_8B, QWEN_7B, QWEN_05B, GPT_OSS, WIDE = (32, 8, 128), (28, 4, 128), (14, 2, 64), (64, 8, 64), (16, 2, 256)
LOADS = {
    "one long decode": AttentionLoad(1, 4096, 1),
    "64 decodes": AttentionLoad(1, 2048, 64),
    "a prompt": AttentionLoad(512, 512, 1),
}


def tasks(machine: Machine) -> Tasks:
    """One for each kernel, type and shape."""
    calls: dict[str, Callable[[], None]] = {}
    if machine.device == "cpu":
        driver.set_active(_NoDevice(90))
    kernels = CudaKernels()
    if not torch.cuda.is_available():
        kernels._multiprocessors = MULTIPROCESSORS
    shapes = {"llama-3.1-8b": LLAMA_8B, "qwen2.5-7b": QWEN_7B, "qwen2.5-0.5b": QWEN_05B, "256 wide": WIDE}
    few = {name: shapes[name] for name in ("llama-3.1-8b", "256 wide")}
    of_dtype = {torch.bfloat16: few if machine.small else shapes, torch.float16: few, torch.float32: few}
    for dtype, of_these in of_dtype.items():
        short = str(dtype).removeprefix("torch.")
        for shape, heads in of_these.items():
            for load, size in LOADS.items():
                calls[f"attention {short}, {shape}, {load}"] = partial(_attention, kernels, dtype, heads, size)
        rest = partial(_attention, kernels, dtype, GPT_OSS, LOADS["a prompt"], window=128, sinks=True)
        calls[f"attention {short}, gpt-oss, window and sinks"] = rest
        gemma = partial(_attention, kernels, dtype, WIDE, LOADS["a prompt"], window=128, softcap=50.0)
        calls[f"attention {short}, gemma 2, window and soft cap"] = gemma
        for load, size in LOADS.items():
            streamed = partial(_attention, kernels, dtype, LLAMA_8B, size, window=1008, first=16)
            calls[f"attention {short}, first keys of a stream, {load}"] = streamed
        decodes = LOADS["64 decodes"]
        calls[f"attention {short}, in common"] = partial(_attention, kernels, dtype, LLAMA_8B, decodes, common=1024)
        for load, size in LOADS.items():
            for cache, rounded in {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.items():
                over = partial(_attention, kernels, dtype, LLAMA_8B, size, cache=rounded)
                calls[f"attention {short}, a cache of {cache}, {load}"] = over
        for load, size in LOADS.items():
            calls[f"attention {short}, latents, {load}"] = partial(_over_latents, kernels, dtype, size)
        some = list(FORMATS)[:1] if machine.small else FORMATS
        for name in some:
            calls[f"packed product {short}, {name}"] = partial(_packed, kernels, dtype, FORMATS[name])
        for name, form in EXPERT_FORMATS.items():
            calls[f"experts {short}, {name}"] = partial(_experts, kernels, dtype, form)
        calls[f"recurrent layers, {short}"] = partial(_recurrent, kernels, dtype)
        for hidden in (896, 4096):
            calls[f"rows of {hidden}, {short}"] = partial(_rows, kernels, dtype, hidden)
    return {name: partial(_checked, task) for name, task in calls.items()}


def _checked(call: Callable[[], object]) -> Iterable[Row]:
    """The kernels that a call launches, compiled.

    Raises:
        Flaw: one cannot be launched, or has most of its tile in memory.
        Skipped: nothing can be compiled here.
    """
    if triton.knobs.runtime.interpret:
        raise Skipped("Triton interprets here")
    with launches(only_compiled=True) as found:
        call()
    capability = _capability()
    limit = 1024 * SHARED_BYTES.get(capability, max(SHARED_BYTES.values()))
    for launch in found:
        row = launch.row()
        yield row
        if row["shared_bytes"] > limit:
            taken = f"takes {row['shared_bytes']:,} bytes of shared memory"
            raise Flaw(f"{launch.kernel} {taken}; capability {capability / 10} has {limit:,}")
        if row["spilled_bytes"] > MOST_SPILLED:
            raise Flaw(f"{launch.kernel} spills {row['spilled_bytes']:,} bytes a thread; its tile is too large")


def _capability() -> int:
    return int(driver.active.get_current_target().arch)


def _attention(
    kernels: CudaKernels, dtype: torch.dtype, heads: Heads, load: AttentionLoad, window: int | None = None,
    sinks: bool = False, softcap: float | None = None, first: int = 0, cache: torch.dtype | None = None,
    common: int = 0,
) -> None:  # fmt: skip
    query_heads, kv_heads, width = heads
    step = geometry(load, "cpu")
    query = torch.zeros(load.tokens * load.sequences, query_heads, width, dtype=dtype)
    has_sinks = torch.zeros(64) if sinks else None
    of_first = SinkQueries(query, first) if first else None
    if common:
        parts = [[0, common, 0, len(query)]], list(range(len(query))), [common] * len(query)
        step.common = CommonParts(*(torch.tensor(each, dtype=torch.int32) for each in parts))
    blocks = _cache((1, kv_heads, BLOCK_SIZE, width), cache or dtype)
    kernels.attention(query, blocks, step, width**-0.5, window, has_sinks, softcap, of_first)


def _cache(shape: tuple[int, ...], dtype: torch.dtype) -> LayerCache:
    numbers = torch.zeros(shape, dtype=dtype)
    scales = [torch.zeros(shape[:3])] * 2 if dtype == torch.int8 else []
    return LayerCache(numbers, numbers, *scales)


def _over_latents(kernels: CudaKernels, dtype: torch.dtype, load: AttentionLoad) -> None:
    """Compile attention over latents like DeepSeek-V3's: 128 heads over 512 numbers and a key of 64."""
    block = torch.zeros(1, 1, BLOCK_SIZE, 576, dtype=dtype)
    query = torch.zeros(load.tokens * load.sequences, 128, 576, dtype=dtype)
    kernels.attention(query, LayerCache(block, block[..., :512]), geometry(load, "cpu"), 576**-0.5, None)


def _packed(kernels: CudaKernels, dtype: torch.dtype, form: Format) -> None:
    """A matrix that is split among programs where rows are few, for each size of tiles; gated too."""
    weight, bias = form.weight(1024, 2048, "cpu", dtype), torch.zeros(1024, dtype=dtype)
    plain, gated = kernels.linear(weight, None), kernels.gated_linear(weight, bias)
    for tokens in TOKENS:
        x = torch.zeros(tokens, 2048, dtype=dtype)
        plain(x)
        gated(x)


def _experts(kernels: CudaKernels, dtype: torch.dtype, form: Format) -> None:
    sizes = Experts(8, 4, 512, 512)
    mixture = sizes.mixture(form, "cpu", kernels, dtype)
    for tokens in TOKENS:
        x = torch.zeros(tokens, sizes.hidden, dtype=dtype)
        mixture(x, *sizes.routed(tokens, "cpu"), x)


def _recurrent(kernels: CudaKernels, dtype: torch.dtype) -> None:
    """A delta net of Qwen3-Next, 16 heads of keys and 32 of values of 128 each, and a short convolution of LFM2."""
    tokens, keys, heads, width = 7, 16, 32, 128
    step = geometry(AttentionLoad(tokens, tokens, 1), "cpu")
    step.spans = torch.zeros(2, len(Span._fields), dtype=torch.int64)
    channels = (2 * keys + heads) * width
    state = LayerState(torch.zeros(2, 3, channels), torch.zeros(2, heads, width, width))
    mixed = torch.zeros(tokens, channels, dtype=dtype)
    kernels.convolve(mixed, None, torch.zeros(4, channels), None, state, step)
    rule = DeltaRule(keys, torch.zeros(heads), torch.zeros(heads), torch.zeros(width), 1e-6)
    of_heads = torch.zeros(tokens, heads * width, dtype=dtype), torch.zeros(tokens, 2 * heads, dtype=dtype)
    kernels.delta_rule(mixed, *of_heads, rule, state, step)
    x = mixed[:, :2048]
    state = LayerState(torch.zeros(2, 2, 2048), None)
    kernels.convolve(x, (x, x), torch.zeros(3, 2048), torch.zeros(2048), state, step)


def _rows(kernels: CudaKernels, dtype: torch.dtype, hidden: int) -> None:
    """The operations on rows, of 7 tokens with heads of 128."""
    tokens, width = 7, 128
    heads = hidden // width

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    kernels.rms_norm(zeros(tokens, hidden), zeros(hidden), 1e-6)
    kernels.rms_norm(zeros(tokens, heads + 2, width)[:, :heads], zeros(width), 1e-6)
    kernels.add_rms_norm(zeros(tokens, hidden), zeros(tokens, hidden), zeros(hidden), 1e-6)
    kernels.apply_gate(zeros(tokens, 8 * hidden), SILU)
    qkv = zeros(tokens, heads + 2, width)
    tables, positions = torch.zeros(64, width // 2), torch.zeros(tokens, dtype=torch.int64)
    kernels.rotate(qkv[:, :heads], qkv[:, heads : heads + 1], tables, tables, positions)
    for kept in (dtype, torch.int8, torch.float8_e4m3fn):
        cache = _cache((4, 1, BLOCK_SIZE, width), kept)
        kernels.store(qkv[:, heads : heads + 1], qkv[:, heads + 1 :], cache, positions)


class _NoDevice:
    """What Triton asks of a driver to compile, for a device that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def main(argv: list[str]) -> int:
    """Compile for each capability, and print a line for each kernel; 1 if one has a flaw."""
    small, capabilities = "--small" in argv, [int(text) for text in argv if text.isdigit()]
    failed = 0
    for capability in capabilities:
        driver.set_active(_NoDevice(capability))
        for name, task in tasks(Machine(small=small)).items():
            try:
                for row in task():
                    print(capability, name, row)
            except Flaw as flaw:
                failed += 1
                print(f"{capability} {name}: {flaw}", file=sys.stderr)
            except Exception as error:
                failed += 1
                traceback.print_exc()
                print(f"{capability} {name}: {said(error)}", file=sys.stderr)
    return 1 if failed or not capabilities else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
