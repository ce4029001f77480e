"""Schedulers of other servers, as far as they follow the rules of ours: what is then a default."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from headway.cost.hardware import Hardware
from headway.engine.config import SchedulingOptions
from headway.policy.kv_blocks import KVBlocks
from headway.policy.scheduler import Scheduler
from headway.policy.scheduler_config import SchedulerConfig

HEADWAY, VLLM = PROFILES = ("headway", "vllm")
# vLLM has larger defaults on GPUs with as much memory, but for A100 (vllm-project/vllm, pull requests 17073, 17885).
_LARGE_GIB = 70


def with_defaults(
    scheduling: SchedulingOptions, profile: str, hardware: Hardware, given: AbstractSet[str]
) -> SchedulingOptions:
    """The options with the defaults of a profile, but for fields that were `given`."""
    if profile == HEADWAY:
        return scheduling
    is_gpu, is_ampere = hardware.kind == "gpu", hardware.architecture == "ampere"
    is_large = is_gpu and not is_ampere and hardware.memory_bytes >= _LARGE_GIB * 2**30
    tokens, seqs = (8192, 1024) if is_large else (2048, 256 if is_gpu else 128)
    defaults: dict[str, Any] = {
        "scheduling_policy": "fcfs",
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "max_prefill_stall_ms": math.inf,
        "watermark": 0.0,
        "protected_kv": 0.0,
        "swap_space": 0.0,
    }
    return replace(scheduling, **{name: value for name, value in defaults.items() if name not in given})


def scheduler_of(profile: str, config: SchedulerConfig, blocks: KVBlocks) -> Scheduler:
    """As Scheduler(). With vLLM's rule, one that does not fit lets nobody past it."""
    return Scheduler(config if profile == HEADWAY else replace(config, lookahead=0), blocks)
