"""Reading the table of published measurements."""

from __future__ import annotations

import csv
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """The source of measurements.

    Args:
        protocol: how it was measured, as far as it says.
        family: sources of the same people and programs; error bars are taken from other families.
        max_num_batched_tokens, max_num_seqs: of its servers, where they were not the engine's defaults.
        ahead: its servers scheduled steps while others ran, as `cost.requests.Limits` has it.
        ramp_s: over which the clients of a closed loop began, where they did not begin at once.
        use: "fit" where the efficiencies were fitted to it, "test" where it only judges them, "other" for programs at
            an early stage, which the model does not claim to describe.
    """

    key: str
    title: str
    url: str
    engine_version: str
    date: str
    protocol: str
    family: str
    use: str
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    ahead: bool = False
    ramp_s: float = 0.0


@dataclass(frozen=True)
class Row:
    """One deployment under one load, as measured. Times in ms; None where it was not published.

    Args:
        load: batch (that many at once, and no more), concurrency (closed loop), rate (Poisson), burst (all requests
            of the run at once), of `load_value`.
        statistic: mean or median, of TTFT and TPOT.
        spread: of output lengths around their mean, half the width by the mean.
    """

    source: Source
    model: str
    hardware: str
    engine: str
    tensor_parallel: int
    quantization: str
    kv_cache_dtype: str
    load: str
    load_value: float
    prompt_tokens: int
    output_tokens: int
    num_prompts: int | None
    statistic: str
    ttft_ms: float | None
    tpot_ms: float | None
    output_tokens_per_s: float | None
    spread: float
    notes: str

    @property
    def label(self) -> str:
        tp = f" tp{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        kept = "" if self.quantization == "none" else f" {self.quantization}"
        lengths = f"{self.prompt_tokens}/{self.output_tokens}"
        return f"{self.model}{kept} {self.hardware}{tp} {self.load} {self.load_value:g} {lengths}"


def sources(folder: Path = FOLDER) -> dict[str, Source]:
    """All sources by key."""
    with (folder / "sources.toml").open("rb") as stream:
        return {key: Source(key=key, **entry) for key, entry in tomllib.load(stream).items()}


def rows(folder: Path = FOLDER) -> list[Row]:
    """All measurements, in the order of the file."""
    known = sources(folder)
    with (folder / "measurements.csv").open(newline="") as stream:
        return [_row(fields, known) for fields in csv.DictReader(stream)]


def _row(fields: dict[str, str], known: dict[str, Source]) -> Row:
    def number(name: str) -> float | None:
        return float(fields[name]) if fields[name] else None

    prompts = number("num_prompts")
    return Row(
        source=known[fields["source"]],
        model=fields["model"],
        hardware=fields["hardware"],
        engine=fields["engine"],
        tensor_parallel=int(fields["tensor_parallel"]),
        quantization=fields["quantization"],
        kv_cache_dtype=fields["kv_cache_dtype"],
        load=fields["load"],
        load_value=float(fields["load_value"]),
        prompt_tokens=round(float(fields["prompt_tokens"])),
        output_tokens=round(float(fields["output_tokens"])),
        num_prompts=None if prompts is None else int(prompts),
        statistic=fields["statistic"],
        ttft_ms=number("ttft_ms"),
        tpot_ms=number("tpot_ms"),
        output_tokens_per_s=number("output_tokens_per_s"),
        spread=number("spread") or 0.0,
        notes=fields["notes"],
    )
