"""Serving programs that are planned and simulated: how they share steps among requests, and their defaults.

A profile is made of settings of our own scheduler and rules that it asks (`policy.step.step_budget.Sharing`): there is
no other scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.cost.catalogue import UnknownName
from headway.cost.hardware import Hardware
from headway.cost.requests import Limits
from headway.engine.config import DEFAULTS
from headway.policy.cache.sizing import default_batched_tokens
from headway.policy.step.step_budget import PREFILL_FIRST

LARGE_MEMORY = 70 * 2**30
SGLANG_CHUNKS = ((35, 2048), (60, 4096), (160, 8192))  # a GPU with less than so many GiB has chunks of so many tokens
# The settings of Headway that other servers do not have.
_WITHOUT_OURS = {
    "scheduling_policy": "fcfs",
    "max_prefill_stall_ms": math.inf,
    "watermark": 0.0,
    "protected_kv": 0.0,
    "swap_space": 0.0,
}


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """How a server schedules."""

    key: str
    name: str
    version: str  # the version whose rules and defaults these are
    rules: str  # how it schedules, as the rest of a sentence that begins with its name
    limits: Callable[[Hardware], Limits]  # gives the limits of a step, and how it is shared, on a hardware
    efficiency: str  # the program that its step times were fitted to: itself, or another one
    lookahead: int | None = 0  # requests that may pass one that does not fit; None for as many as Headway lets

    @property
    def is_headway(self) -> bool:
        return self.key == HEADWAY

    @property
    def in_words(self) -> str:
        """The rules in a sentence, for the assumptions of a plan."""
        return f"Steps are scheduled as by {self.name} ({self.version}): {self.rules}."

    def scheduling(self, hardware: Hardware, longest: int | None) -> dict[str, Any]:
        """The server's defaults, as fields of `policy.step.options.SchedulingOptions`.

        Args:
            longest: tokens of a sequence, if that is known.
        """
        if self.is_headway:
            return {}
        limits = self.limits(hardware)
        found = {**_WITHOUT_OURS, "max_num_seqs": limits.sequences, "max_num_batched_tokens": limits.batched_tokens}
        if limits.whole_prompts and longest is not None and longest <= limits.batched_tokens:
            found["enable_chunked_prefill"] = False
        return found


def _headway(hardware: Hardware) -> Limits:
    device = "cpu" if hardware.kind == "cpu" else "cuda"
    tokens = default_batched_tokens(device, DEFAULTS.max_num_seqs)
    return Limits(tokens, DEFAULTS.max_num_seqs, DEFAULTS.max_prefill_stall_ms / 1e3)


def _vllm(hardware: Hardware) -> Limits:
    """vLLM's EngineArgs.get_batch_defaults: more on GPUs of 70 GiB and above, but not A100s (its PRs 17073, 17885)."""
    is_a100 = hardware.key.lower().startswith("a100")
    if hardware.kind == "gpu" and hardware.memory_bytes >= LARGE_MEMORY and not is_a100:
        return Limits(8192, 1024, ahead=True)
    return Limits(2048, 256 if hardware.kind == "gpu" else 128, ahead=True)


def _sglang(hardware: Hardware) -> Limits:
    """SGLang's ServerArgs.chunked_prefill_size, which depends on memory, and the least of its max_running_requests."""
    chunk = next((tokens for below, tokens in SGLANG_CHUNKS if hardware.memory_bytes < below * 2**30), 16384)
    return Limits(chunk, 2048, ahead=True, sharing=PREFILL_FIRST)


def _tensorrt_llm(hardware: Hardware) -> Limits:
    return Limits(8192, 2048, ahead=True, whole_prompts=True)


def _as_early_vllm(hardware: Hardware) -> Limits:
    limits = _vllm(hardware)
    return Limits(limits.batched_tokens, limits.sequences)


HEADWAY, VLLM = "headway", "vllm"
PROFILES = {
    each.key: each
    for each in (
        EngineProfile(
            VLLM,
            "vLLM",
            "V1 scheduler, 0.14",
            "each step decodes everybody, and prompts share the rest of its tokens",
            _vllm,
            VLLM,
        ),
        EngineProfile(
            HEADWAY,
            "Headway",
            "this version",
            "as by vLLM, while prompts may delay those who decode by a bounded time",
            _headway,
            VLLM,
            lookahead=None,
        ),
        EngineProfile(
            "sglang",
            "SGLang",
            "0.5.6, without --enable-mixed-chunk",
            "while prompts wait and there is room for them, steps compute nothing else, and nobody decodes",
            _sglang,
            "sglang",
        ),
        EngineProfile(
            "tensorrt-llm",
            "TensorRT-LLM",
            "1.0, in-flight batching without enable_chunked_prefill",
            "each step decodes everybody, and takes prompts that fit whole in the rest of its tokens",
            _tensorrt_llm,
            "tensorrt-llm",
        ),
        EngineProfile(
            "vllm-v0",
            "vLLM",
            "V0 of 2024, with chunked prefill",
            "each step decodes everybody, and prompts share the rest of its tokens",
            _as_early_vllm,
            "vllm-v0",
        ),
        EngineProfile("gpt-fast", "gpt-fast", "2024", "one request after the other", _as_early_vllm, "gpt-fast"),
    )
}


def find_profile(name: str, usual: str = VLLM) -> EngineProfile:
    """The profile with this key, in upper or lower case; "auto" is the `usual` one. Raises UnknownName."""
    key = name.strip().lower()
    found = PROFILES.get(usual if key == "auto" else key)
    if found is None:
        raise UnknownName(f"engine {name!r} is not known; known are auto, {', '.join(PROFILES)}")
    return found
