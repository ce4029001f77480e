"""A machine, a model and requests of known numbers, to profile without a server."""

from __future__ import annotations

from pathlib import Path

from headway.bench.profile.local_server import Startup
from headway.bench.profile.model import ProfiledModel
from headway.bench.profile.options import DEFAULT_PERCENTILES
from headway.bench.profile.result import ProfileResult, profile_length
from headway.calibration.peaks import MachinePeaks, Rate
from headway.cost.config import read_shape
from headway.load.record import RequestRecord
from tests.bench.records import request
from tests.cost import published

MS = 1_000_000
QWEN = ProfiledModel(
    name="Qwen/Qwen2.5-0.5B",
    folder=Path("qwen"),
    shape=read_shape(published.QWEN2_5_05B),
    dtype="bfloat16",
    checkpoint_bytes=988_097_824,
    max_model_len=32768,
)
PEAKS = MachinePeaks(
    device="cpu",
    name="a processor <of> sorts",
    threads=2,
    memory_bytes=25 * 10**9,
    cache_bytes=32 * 2**20,
    read_bytes_per_s=(Rate(160e9, 150e9, 20, "torch", 16 * 2**20), Rate(32e9, 31e9, 9, "headway", 256 * 2**20)),
    gemm_flops_per_s={"bfloat16": Rate(400e9, 390e9, 12, "headway", 1024)},
    small_op_s=1e-6,
    kernel_call_s=4e-6,
    seconds=5.0,
    others_cores=0.02,
)
STARTUP = Startup(
    url="http://127.0.0.1:1",
    seconds=5.0,
    device="cpu",
    max_model_len=4096,
    num_blocks=1000,
    block_size=16,
    api_stages={"imports": 0.8, "tokenizer": 0.1},
)
ENGINE_STAGES = {"import": 2.0, "prepare": 0.25, "storage_read": 0.5, "convert": 0.5, "kv_allocation": 0.01}


def phases(prefill_ms: float, decode_ms: float) -> dict[str, int]:
    """A ledger of 20 ms around the compute."""
    lengths = {
        "receive": 1.0,
        "tokenize": 2.0,
        "transport": 3.0,
        "queue_capacity": 0.5,
        "schedule": 6.0,
        "prefill_compute": prefill_ms,
        "decode_compute": decode_ms,
        "sampling": 7.0,
        "detokenize": 0.25,
        "send": 0.25,
    }
    return {name: round(ms * MS) for name, ms in lengths.items()}


def answered(
    index: int, prompt: int, prefill_ms: float = 100.0, decode_ms: float = 150.0, tokens: int = 4, late_ms: float = 0.0
) -> RequestRecord:
    """The client saw 4 ms more than the server, and `late_ms` more on top."""
    lengths = phases(prefill_ms, decode_ms)
    server_ms = sum(lengths.values()) / MS
    first = prefill_ms + 12.0
    step = decode_ms / (tokens - 1)
    record = request(
        index,
        [first + step * n for n in range(tokens)],
        end=server_ms + 4.0 + late_ms,
        prompt=prompt,
        timings={"e2e_ns": round(server_ms * MS), "ttft_ns": round(first * MS), "phases_ns": lengths},
    )
    record.planned_prompt_tokens = prompt
    return record


def result(**changes) -> ProfileResult:
    """The profile of two prompt lengths with three requests each."""
    lengths = [
        profile_length(prompt, [answered(n, prompt, prompt * 4.0) for n in range(3)], DEFAULT_PERCENTILES, QWEN, PEAKS)
        for prompt in (64, 256)
    ]
    fields = {
        "model": QWEN,
        "peaks": PEAKS,
        "startup": STARTUP,
        "engine_stages": ENGINE_STAGES,
        "server_version": "9.9.9",
        "lengths": lengths,
        "settings": {"percentiles": DEFAULT_PERCENTILES},
        "began_at": "2026-01-02T03:04:05+00:00",
    }
    return ProfileResult(**(fields | changes))
