"""Made-up figures and rows beside the published ones, which tests of predictions and of fits share."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.fit import METRICS, Compared
from benchmarks.published.rows import Row, Source, rows

ROWS = rows()
SOURCE = Source("paper", "", "", "", "", "", family="paper", use="fit")
ROW = Row(
    source=SOURCE,
    model="llama-3.1-8b",
    hardware="H100-SXM",
    engine="vllm",
    tensor_parallel=1,
    quantization="none",
    kv_cache_dtype="auto",
    load="concurrency",
    load_value=1,
    prompt_tokens=512,
    output_tokens=8,
    num_prompts=None,
    statistic="mean",
    ttft_ms=1.0,
    tpot_ms=1.0,
    output_tokens_per_s=None,
    spread=0.0,
    notes="",
)


def figures(row: Row) -> dict[str, float]:
    return {name: value for name in METRICS if (value := getattr(row, name)) is not None}


def compared(ratio: float, row: Row = ROW, metric: str = "tpot_ms") -> Compared:
    """A figure that was measured at so many times its prediction."""
    return Compared(row, metric, measured=50.0 * ratio, predicted=50.0)


def of_source(key: str, ratios: list[float], metric: str = "tpot_ms", hardware: str = "H100-SXM") -> list[Compared]:
    row = replace(ROW, source=replace(SOURCE, key=key), hardware=hardware)
    return [compared(ratio, row, metric) for ratio in ratios]
