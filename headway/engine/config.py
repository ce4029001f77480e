"""Everything the engine process needs to know, as one plain value."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from headway.cost.layers import MOST_SINKS, AttentionSinks
from headway.flags import Flag, size, tokens
from headway.policy.kv_blocks import PROTECTED_SHARE, KVBlocks
from headway.policy.policies import policy_class, policy_name
from headway.policy.preload import PreloadedPrompt
from headway.policy.scheduler import Scheduler
from headway.policy.scheduler_config import SchedulerConfig, check_budget
from headway.policy.service_class import BUILT_IN, ClassTable
from headway.policy.sizing import SWAP_SPACE, PoolSize, default_batched_tokens
from headway.policy.swap import NO_SWAP, SwapSpace

_model, _engine = functools.partial(Flag, panel="Model"), functools.partial(Flag, panel="Engine")

# The names that checkpoints give their formats, as in models.quantization.FORMATS. Importing that would delay the
# start of the server.
_FORMATS = ("compressed-tensors", "awq", "gptq", "fp8", "mxfp4", "modelopt", "bitsandbytes", "gguf")
MOST_THREADS = 2  # threads for each processor; more would only wait for each other

# This is also the default of plans and simulations.
AttentionSinksFlag = Annotated[
    int | None,
    _engine(
        "Let sequences be longer than the model was trained for: layers keep so many of their first tokens, such as 4, "
        "and the last ones (StreamingLLM). Rounded up to whole blocks. Default: off.",
        min=1,
        max=MOST_SINKS,
    ),
]
AttentionWindowFlag = Annotated[
    int | None,
    _engine("With --attention-sinks: tokens that attention sees, sinks included. Default: the model's length.", min=2),
]


@dataclass(kw_only=True)
class ModelOptions:
    """How a model is loaded, and where it runs.

    Args:
        kv_cache_memory: bytes of the KV pool; None measures free memory.
        num_threads: None takes one for each physical core, within the CPU quota.
    """

    dtype: Annotated[
        str, _model("Type of weights and activations.", choices=("auto", "float32", "bfloat16", "float16"), common=True)
    ] = "auto"
    quantization: Annotated[
        str,
        _model(
            "Quantise the weights while loading. The own format of a quantised checkpoint, such as awq, may be named.",
            short="-q",
            choices=("none", "int8", "int8-weight-only", "int4", *_FORMATS),
            metavar="none|int8|int8-weight-only|int4",
            common=True,
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        str,
        _model("Type of the KV cache: auto is --dtype; int8 is for CPUs only.", choices=("auto", "int8"), common=True),
    ] = "auto"
    load_format: Annotated[
        str, _model("dummy makes random weights from config.json.", choices=("auto", "safetensors", "dummy"))
    ] = "auto"
    weight_cache: Annotated[
        bool, _model("On a CPU, keep packed weights on disk, in ~/.cache/headway, so that the next start is faster.")
    ] = True
    device: Annotated[str, _model("Where the model runs.", choices=("auto", "cpu", "cuda"), common=True)] = "auto"
    max_model_len: Annotated[
        int | None,
        _model(
            "Context length: prompt plus output, in tokens, such as 4096 or 4K. Default: the model's.",
            parse=tokens,
            metavar="N",
            common=True,
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        _model(
            "Memory of the KV cache, such as 4G. Default: from the free memory.",
            parse=size,
            metavar="SIZE",
            common=True,
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        _model("CPU threads of the engine. Default: one per physical core.", "--threads", min=1, common=True),
    ] = None


@dataclass(kw_only=True)
class SchedulingOptions:
    """The settings of a scheduler, in a server as in a simulation of one.

    Args:
        max_prefill_stall_ms: may be infinite.
        classes: classes of requests.
        weights: weights of tenants, who take turns by them; where there are none, tenants make no difference.
    """

    classes: ClassTable = BUILT_IN
    weights: dict[str, float] = field(default_factory=dict)
    block_size: Annotated[int, _engine("Tokens in a KV block.", min=1)] = 16
    max_num_seqs: Annotated[int, _engine("Maximum number of sequences in a step.", min=1, common=True)] = 256
    max_num_batched_tokens: Annotated[
        int | None, _engine("Token budget of a step. Default: chosen for the device.", parse=tokens, metavar="N")
    ] = None
    max_prefill_stall_ms: Annotated[
        float,
        _engine("Milliseconds by which prefill may delay running streams in a step.", min=0.0),
    ] = 50.0
    enable_prefix_caching: Annotated[bool, _engine("Reuse the KV cache of shared prompt prefixes.")] = True
    enable_chunked_prefill: Annotated[bool, _engine("Split long prompts over steps.")] = True
    scheduling_policy: Annotated[
        str,
        _engine(
            "How requests are ordered: by objectives (slo), arrival (fcfs), priority (lower first), or your class.",
            parse=policy_name,
            default="slo",
            metavar="slo|fcfs|priority|MODULE:CLASS",
            common=True,
        ),
    ] = "slo"
    watermark: Annotated[
        float,
        _engine("Share of the KV cache that admission keeps free; also of each class's idle share.", min=0.0, max=0.5),
    ] = 0.01
    protected_kv: Annotated[
        float,
        _engine("Largest share of the KV cache for protected prefixes, which many prompts share.", min=0.0, max=0.9),
    ] = PROTECTED_SHARE
    swap_space: Annotated[
        float | None,
        _engine(
            "GiB of host memory for the KV cache of preempted requests. Default: 4 on a GPU, 0 on a CPU.",
            min=0.0,
            metavar="GIB",
        ),
    ] = None
    max_queue_time: Annotated[
        float | None, _engine("Seconds that a request may wait in the queue; then 503. Default: no limit.")
    ] = None

    def scheduler(
        self,
        device: str,
        pool: PoolSize,
        make: Callable[[SchedulerConfig, KVBlocks], Scheduler] = Scheduler,
        swap: SwapSpace = NO_SWAP,
    ) -> Scheduler:
        """A scheduler with an empty pool, for a device that is cpu or cuda.

        Raises:
            ValueError: the settings contradict each other, or one sequence does not fit in the pool.
        """
        if pool.checkpoints is not None:
            swap = NO_SWAP  # states are not swapped, and without them blocks are of no use
        config = SchedulerConfig(
            pool.max_num_seqs or self.max_num_seqs,
            self.batched_tokens(device),
            pool.max_model_len,
            self.enable_chunked_prefill,
            self.scheduling_policy,
            max_prefill_stall_ms=self.max_prefill_stall_ms,
            max_queue_time=math.inf if self.max_queue_time is None else self.max_queue_time,
            classes=self.classes,
            watermark=self.watermark,
            weights=self.weights,
            swap=swap,
        )
        caching, share = self.enable_prefix_caching, self.protected_kv
        return make(config, KVBlocks(pool.num_blocks, self.block_size, caching, share, pool.checkpoints, pool.groups))

    def batched_tokens(self, device: str) -> int:
        """The token budget of a step on cpu or cuda."""
        return self.max_num_batched_tokens or default_batched_tokens(device, self.max_num_seqs)

    def swap_bytes(self, device: str) -> int:
        """Bytes of host memory for swapped blocks, on cpu or cuda."""
        return int((SWAP_SPACE[device] if self.swap_space is None else self.swap_space) * 2**30)


@dataclass
class EngineConfig(SchedulingOptions, ModelOptions):
    """Engine settings; names and meanings follow vLLM's flags.

    Args:
        model: folder of a Hugging Face checkpoint.
        preloaded: prompts that are computed at the start and stay.
        preload_what_fits: leave out those that do not fit, instead of not starting.
        max_model_len: None takes the model's, lowered to what the KV pool holds.

    Raises:
        ValueError: a step has fewer tokens than sequences, there are far more threads than processors, or there is no
            such scheduling policy.
    """

    model: str = ""
    attention_sinks: AttentionSinksFlag = None
    attention_window: AttentionWindowFlag = None
    preloaded: list[PreloadedPrompt] = field(default_factory=list)
    preload_what_fits: bool = False
    seed: Annotated[int, _engine("Seed of dummy weights.")] = 0
    gpu_memory_utilization: Annotated[
        float | None,
        _engine(
            "Share of the memory of the GPU, or of the machine without one, to use when --kv-cache-memory is not set. "
            "Default: 0.9 of a GPU; on a CPU half of what is free becomes the KV cache.",
            short="--memory-utilization",
            min=0.01,
            max=1.0,
            common=True,
        ),
    ] = None
    enforce_eager: Annotated[
        bool, _engine("On a GPU, launch the kernels of a decode step one by one instead of as a CUDA graph.")
    ] = False
    record_steps: Annotated[
        str | None, _engine("Append each step's plan and timing to this file; no text is recorded.", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens is not None:
            check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        policy_class(self.scheduling_policy)
        processors = len(os.sched_getaffinity(0))
        if self.num_threads is not None and self.num_threads > MOST_THREADS * processors:
            raise ValueError(
                f"num_threads is {self.num_threads}, and this process may use {processors} processors; give at most "
                f"{MOST_THREADS * processors}, or leave it out for one per physical core"
            )

    def sinks(self, max_positions: int, max_model_len: int) -> AttentionSinks | None:
        """The attention sinks that are asked for; None where none are. AttentionSinks.of() says what it raises."""
        given = self.attention_sinks, self.attention_window, self.block_size
        return AttentionSinks.of(*given, max_positions, max_model_len)


# What `headway serve` takes for everything that nobody chose, and `headway plan` for a machine that was measured.
DEFAULTS = EngineConfig()
