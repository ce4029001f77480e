"""What a profile found, and its form as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.bench.profile.achieved import Achieved, decode_achieved, prefill_achieved
from headway.bench.profile.kernels import Kernels
from headway.bench.profile.local_server import Startup
from headway.bench.profile.model import ProfiledModel
from headway.bench.profile.naive import Naive
from headway.bench.profile.stages import STAGES, median_phase, typical_stages
from headway.calibration.peaks import MachinePeaks
from headway.cost.memory import activation_bytes, kv_cache_bytes
from headway.load.measures.latencies import Latencies
from headway.load.measures.numbers import Distribution
from headway.load.measures.percentiles import distribution
from headway.load.record import RequestRecord
from headway.policy.step.ledger import Phase


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Requests of one prompt length."""

    asked_tokens: int
    prompt_tokens: int  # the median over requests, by the server's count
    output_tokens: int
    completed: int
    failures: dict[str, int]
    latencies: dict[str, Distribution]  # ttft_ms, tpot_ms and ttlt_ms (time to last token), from the send
    medians_ms: dict[str, float]  # the medians of the same, however few requests there are; without those that none has
    stages_ms: dict[str, float]  # see typical_stages
    # prefill, decode: None where the server gave no ledger. Decode is the mean step after the first token.
    prefill: Achieved | None
    decode: Achieved | None

    @property
    def total_ms(self) -> float:
        return sum(self.stages_ms.values())


@dataclass(frozen=True, slots=True)
class Opportunity:
    """The largest possible gain of a stage."""

    stage: str
    measured_ms: float
    floor_ms: float  # what physics leaves of it on this machine; 0 for work that needs no time in principle

    @property
    def winnable_ms(self) -> float:
        return max(0.0, self.measured_ms - self.floor_ms)


@dataclass(slots=True, kw_only=True)
class Profile:
    """What any profile has: its settings, and the lengths that were measured."""

    settings: dict[str, Any]
    began_at: str
    lengths: list[LengthProfile]
    interrupted: bool = False

    @property
    def measured(self) -> list[LengthProfile]:
        """Lengths whose stages are known."""
        return [each for each in self.lengths if each.stages_ms]

    @property
    def typical(self) -> LengthProfile | None:
        """The prompt length in the middle, which texts talk about."""
        return self.measured[len(self.measured) // 2] if self.measured else None


@dataclass(slots=True, kw_only=True)
class ProfileResult(Profile):
    """One profile of a server of its own."""

    model: ProfiledModel
    peaks: MachinePeaks
    startup: Startup
    engine_stages: dict[str, float]  # seconds of each stage of the engine's start
    server_version: str
    # What passes are made of, by prompt length; empty where the server did not tell.
    kernels: dict[int, Kernels] = field(default_factory=dict)
    # An answer without a cache beside one with it; None where it was not asked for, or a request failed.
    naive: Naive | None = None
    notes: list[str] = field(default_factory=list)  # what a reader must know to trust the numbers
    folder: Path | None = None  # where the report was written; None before that

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV cache that the server allocated."""
        return self.startup.num_blocks * self.startup.block_size * self.model.kv_bytes_per_token

    @property
    def ok(self) -> bool:
        """Whether something was measured and nothing failed."""
        return bool(self.measured) and not any(each.failures for each in self.lengths)

    def memory_of(self, tokens: int) -> dict[str, int]:
        """Bytes for one sequence of so many tokens: weights, activations of its prompt in one step, cache in blocks."""
        model = self.model
        return {
            "weights": model.weight_bytes,
            "activations": activation_bytes(model.shape, max(1, tokens), 1, model.precision),
            "kv_cache": kv_cache_bytes(model.shape, tokens, model.precision, max(1, self.startup.block_size)),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, for `write_json`; times are in the unit that the key names, sizes in bytes and tokens."""
        model, peaks = self.model, self.peaks
        return {
            "profile": 1,
            "began_at": self.began_at,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "naive": None if self.naive is None else self.naive.as_json(),
            "settings": self.settings,
            "model": {
                "name": model.name,
                "dtype": model.dtype,
                "quantization": model.quantization,
                "parameters": model.shape.num_parameters,
                "parameters_by_part": model.shape.parameters(),
                "weights_bytes": model.weight_bytes,
                "kv_bytes_per_token": model.kv_bytes_per_token,
                "checkpoint_bytes": model.checkpoint_bytes,
            },
            "machine": asdict(peaks) | {"busy": peaks.busy},
            "server": {
                "version": self.server_version,
                "device": self.startup.device,
                "max_model_len": self.startup.max_model_len,
                "kv_cache_blocks": self.startup.num_blocks,
                "block_size": self.startup.block_size,
                "kv_cache_bytes": self.pool_bytes,
            },
            "model_loading": {
                "ready_s": self.startup.seconds,
                "engine_s": self.engine_stages,
                "api_process_s": self.startup.api_stages,
            },
            "kernels": {str(length): passes for length, passes in self.kernels.items()},
            "prompt_lengths": [length_as_json(each) for each in self.lengths],
            "memory": {str(each.asked_tokens): self.memory_of(each.asked_tokens) for each in self.lengths},
            "opportunities": {
                str(each.asked_tokens): [asdict(o) | {"winnable_ms": o.winnable_ms} for o in opportunities(each)]
                for each in self.measured
            },
        }


def length_as_json(each: LengthProfile) -> dict[str, Any]:
    """The profile of a length, JSON-able."""

    def computed(part: Achieved | None) -> dict[str, Any] | None:
        if part is None:
            return None
        derived = ("flops_share", "bandwidth_share", "share", "bound", "intensity")
        return asdict(part) | {name: getattr(part, name) for name in derived}

    return {
        "asked_tokens": each.asked_tokens,
        "prompt_tokens": each.prompt_tokens,
        "output_tokens": each.output_tokens,
        "completed": each.completed,
        "failures": each.failures,
        "medians_ms": each.medians_ms,
        "latencies": {name: asdict(found) for name, found in each.latencies.items()},
        "stages_ms": each.stages_ms,
        "stage_shares": {key: ms / each.total_ms for key, ms in each.stages_ms.items()},
        "prefill": computed(each.prefill),
        "decode_step": computed(each.decode),
    }


def profile_length(
    asked: int,
    records: Sequence[RequestRecord],
    percentiles: Sequence[float],
    model: ProfiledModel | None,
    peaks: MachinePeaks | None,
    told: Mapping[str, float] = {},
) -> LengthProfile:
    """Make the profile of one prompt length from the records of its requests.

    Args:
        model, peaks: None where it is not known what is computed, or by which machine.
        told: milliseconds in each stage, of a server without a ledger.
    """
    done = [record for record in records if record.ok]
    failures: dict[str, int] = {}
    for record in records:
        if record.failure is not None:
            failures[record.failure.kind] = failures.get(record.failure.kind, 0) + 1
    latencies = Latencies.of(records)
    metrics = {"ttft_ms": latencies.ttft_ms, "tpot_ms": latencies.tpot_ms, "ttlt_ms": latencies.e2el_ms}
    found = {name: values[np.isfinite(values)] for name, values in metrics.items()}
    prompt = sorted(record.prompt_tokens or asked for record in done)[len(done) // 2] if done else asked
    output = sorted(record.tokens for record in done)[len(done) // 2] if done else 0
    stages_ms = typical_stages(done) or dict(told)
    prefill_ms, decode_ms = median_phase(done, Phase.PREFILL_COMPUTE), median_phase(done, Phase.DECODE_COMPUTE)
    if prefill_ms is None and told:
        prefill_ms, decode_ms = told["prefill"], told["decode"]
    prefill = decode = None
    if model is not None and peaks is not None and prefill_ms is not None and decode_ms is not None:
        prefill = prefill_achieved(model, peaks, prompt, prefill_ms)
        decode = decode_achieved(model, peaks, prompt, output, decode_ms / max(1, output - 1))
    return LengthProfile(
        asked_tokens=asked,
        prompt_tokens=prompt,
        output_tokens=output,
        completed=len(done),
        failures=failures,
        latencies={name: distribution(values, percentiles) for name, values in found.items()},
        medians_ms={name: float(np.median(values)) for name, values in found.items() if len(values)},
        stages_ms=stages_ms,
        prefill=prefill,
        decode=decode,
    )


def opportunities(each: LengthProfile) -> list[Opportunity]:
    """The stages of a length with their floors, the one with most to win first.

    Prefill and decode have the roofline's floor. All else is bookkeeping that no law of nature asks for.
    """
    floors = {"prefill": each.prefill.floor_ms if each.prefill else 0.0}
    floors["decode"] = each.decode.floor_ms * (each.output_tokens - 1) if each.decode else 0.0
    found = [Opportunity(stage.key, each.stages_ms[stage.key], floors.get(stage.key, 0.0)) for stage in STAGES]
    return sorted(found, key=lambda o: o.winnable_ms, reverse=True)
