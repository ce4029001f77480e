"""Everything the engine process needs to know, as one plain value."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Annotated

from headway.cost.layers import MOST_SINKS, AttentionSinks
from headway.engine.lora_modules import LoraModule, lora_modules
from headway.flags import Flag, size, tokens
from headway.policy.cache.handle import KEY_VARIABLE
from headway.policy.cache.preload import PreloadedPrompt
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.policies import policy_class
from headway.policy.step.scheduler_config import StepLimits, check_budget
from headway.policy.step.speculative_config import SpeculativeConfig

_model, _engine = functools.partial(Flag, panel="Model"), functools.partial(Flag, panel="Engine")

# The names that checkpoints give their formats, as in models.quantization.FORMATS. Importing that would delay the
# start of the server.
_FORMATS = ("compressed-tensors", "awq", "gptq", "fp8", "mxfp4", "modelopt", "bitsandbytes", "gguf")
ROLES = ("prefill", "decode", "both")
LEAST_KEY = 16  # characters of the key that servers sign what they hand over with
HANDOVER_BYTES = 1 << 30  # of host memory for what is handed over, unless --swap-space says it
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
        _model(
            "Type of the KV cache: auto is --dtype, int8 has scales, fp8 (e4m3) has none and is less exact.",
            choices=("auto", "int8", "fp8"),
            common=True,
        ),
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


@dataclass
class EngineConfig(SchedulingOptions, ModelOptions):
    """Engine settings; names and meanings follow vLLM's flags.

    Args:
        model: folder of a Hugging Face checkpoint.
        preloaded: prompts that are computed at the start and stay.
        limits: of the first steps, where those that the flags say are only the most that may come.
        record_traffic: file for what `policy.step.traffic` records, which is begun anew when it is large.
        preload_what_fits: leave out those that do not fit, and adapters that cannot be had, instead of not starting.
        max_model_len: None takes the model's, lowered to what the KV pool holds.

    Raises:
        ValueError: a step has fewer tokens than sequences, there are far more threads or ranks than processors, threads
            cannot be divided among ranks, or ranks among machines, there is no such scheduling policy,
            speculative_config has a wrong value, or a role lacks its key or does not go with another option.
    """

    model: str = ""
    attention_sinks: AttentionSinksFlag = None
    attention_window: AttentionWindowFlag = None
    preloaded: list[PreloadedPrompt] = field(default_factory=list)
    preload_what_fits: bool = False
    limits: StepLimits | None = None
    record_traffic: str | None = None
    seed: Annotated[int, _engine("Seed of dummy weights.")] = 0
    tensor_parallel_size: Annotated[
        int,
        _engine(
            "On a CPU, divide each layer and the KV cache among so many processes (ranks), and --threads among them.",
            min=1,
            metavar="N",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        _engine(
            "On a CPU, divide the layers among so many stages, each of --tensor-parallel-size ranks.",
            min=1,
            metavar="N",
        ),
    ] = 1
    context_parallel_size: Annotated[
        int,
        _engine(
            "On a CPU, divide long prompts among so many processes (ranks), each with the whole model and a share of "
            "--threads, where that is measured to be quicker.",
            min=1,
            metavar="N",
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool, _engine("With --tensor-parallel-size: deal whole experts out to the ranks, instead of cutting each.")
    ] = False
    bind_ranks: Annotated[
        bool,
        _engine(
            "Bind each rank to physical cores, of one memory node if it can be, that no other engine's ranks have."
        ),
    ] = True
    rank_timeout: Annotated[
        float,
        _engine(
            "Restart the engine if a rank holds up the others for so many seconds of a step.",
            min=0.1,
            metavar="SECONDS",
        ),
    ] = 30.0
    nnodes: Annotated[
        int,
        _engine(
            "On CPUs, divide the ranks among so many machines (nodes). Start `headway serve` on each, with the same "
            "options and its --node-rank.",
            min=1,
            metavar="N",
        ),
    ] = 1
    node_rank: Annotated[
        int, _engine("The number of this machine. Node 0 has the server, and others only ranks.", min=0, metavar="N")
    ] = 0
    master_addr: Annotated[
        str, _engine("With --nnodes: the address of node 0, at which other nodes join.", metavar="HOST")
    ] = "127.0.0.1"
    master_port: Annotated[int, _engine("With --nnodes: its port for them.", min=1, max=65535)] = 29501
    distributed_executor_backend: Annotated[
        str,
        _engine(
            "ray has the Ray cluster at RAY_ADDRESS find machines for the ranks; mp starts them here, or by --nnodes.",
            choices=("mp", "ray"),
        ),
    ] = "mp"
    placement_strategy: Annotated[
        str,
        _engine(
            "With Ray: SPREAD prefers a machine for each rank, STRICT_PACK keeps all on this one.",
            choices=("SPREAD", "STRICT_PACK"),
        ),
    ] = "SPREAD"
    role: Annotated[
        str,
        _engine(
            "prefill hands prompts that it has computed over to servers that decode, which compute further tokens. "
            f"Both need the key {KEY_VARIABLE} in their environments.",
            choices=ROLES,
        ),
    ] = "both"
    kv_transfer_host: Annotated[
        str, _engine("With --role prefill: the address at which servers that decode fetch prompts.")
    ] = "127.0.0.1"
    kv_transfer_port: Annotated[
        int, _engine("With --role prefill: its port. Default: a free one.", min=0, max=65535)
    ] = 0
    kv_transfer_timeout: Annotated[
        float,
        _engine(
            "Seconds that a server waits for a chunk of a prompt before it computes all, and that the other keeps it.",
            min=0.01,
            metavar="SECONDS",
        ),
    ] = 10.0
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
    async_scheduling: Annotated[
        bool, _engine("On a GPU, or with stages, plan a decode step and submit it while the step before runs there.")
    ] = True
    nvtx: Annotated[bool, _engine("On a GPU, mark each step as an NVTX range, for Nsight Systems.")] = False
    speculative_config: Annotated[
        SpeculativeConfig | None,
        _engine(
            'Try drafts, which change no token, where they are predicted to pay: {"method": "ngram"} drafts from the '
            'prompt and the output, {"method": "draft_model", "model": NAME} with a small model, too, and '
            '{"method": "mtp"} with the checkpoint\'s head for multi-token prediction, '
            '{"method": "eagle3", "model": NAME} with a head of EAGLE-3. Further keys: '
            "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max.",
            parse=SpeculativeConfig.of,
            metavar="JSON",
        ),
    ] = None
    lora_modules: Annotated[
        list[LoraModule],
        _engine(
            "Adapters in peft's format to serve beside the model, each as NAME=PATH or as JSON with name and path; "
            "several may follow.",
            parse=lora_modules,
            repeated=True,
            metavar="NAME=PATH",
        ),
    ] = field(default_factory=list)
    enable_lora: Annotated[bool, _engine("Serve adapters that are loaded later, too. --lora-modules implies it.")] = (
        False
    )
    max_loras: Annotated[int, _engine("Adapters that a step may have, each in a slot.", min=1, max=1024)] = 8
    max_lora_rank: Annotated[int, _engine("The greatest rank of an adapter.", min=1, max=256)] = 64
    max_cpu_loras: Annotated[
        int | None,
        _engine("Adapters that are kept in host memory, to fill slots from. Default: 4 for each slot.", min=1),
    ] = None
    kv_offload: Annotated[
        str | None,
        _engine(
            "Keep what the prefix cache gives up in this folder, or in a Redis (redis://HOST:PORT), and load it where "
            "that is predicted to be quicker than computing it.",
            metavar="PATH|URL",
        ),
    ] = None
    kv_offload_size: Annotated[
        float,
        _engine("GiB that --kv-offload may take of a disk; a Redis has a limit of its own.", min=0.01, metavar="GIB"),
    ] = 10.0
    record_steps: Annotated[
        str | None, _engine("Append each step's plan and timing to this file; no text is recorded.", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            try:
                self.speculative_config = SpeculativeConfig.of(self.speculative_config)
            except ValueError as error:
                raise ValueError(f"speculative_config: {error}") from None
        self.lora_modules = lora_modules(self.lora_modules)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}, less than max_loras ({self.max_loras}); raise the first or "
                "lower the second"
            )
        if self.max_num_batched_tokens is not None:
            check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        policy_class(self.scheduling_policy)
        self._check_nodes()
        self._check_ranks()
        if self.role != "both":
            self._check_handover()

    @property
    def ranks(self) -> int:
        """Processes that each have a part of the model; 1 where each has all of it."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def processes(self) -> int:
        """Processes that take part in steps."""
        return self.ranks * self.context_parallel_size

    @property
    def machines(self) -> int:
        """The machines that ranks are on, or may be."""
        if self.distributed_executor_backend == "ray":
            return self.ranks if self.placement_strategy == "SPREAD" else 1
        return self.nnodes

    def _check_nodes(self) -> None:
        if self.distributed_executor_backend == "ray" and self.nnodes > 1:
            raise ValueError(
                f"nnodes is {self.nnodes}, but distributed_executor_backend is 'ray', which chooses machines itself; "
                "leave one of them out"
            )
        if self.distributed_executor_backend == "ray" and self.ranks == 1:
            raise ValueError(
                "distributed_executor_backend is 'ray', but there is one rank and nothing to place; add "
                "--pipeline-parallel-size, or leave it out"
            )
        if self.distributed_executor_backend != "ray" and self.placement_strategy != "SPREAD":
            raise ValueError(
                f"placement_strategy is {self.placement_strategy}, but Ray is not asked to place anything; add "
                "--distributed-executor-backend ray, or leave it out"
            )
        if self.distributed_executor_backend != "ray" and self.nnodes == 1 and self.master_addr != "127.0.0.1":
            raise ValueError(
                f"master_addr is {self.master_addr!r}, but there is one node; add --nnodes, or leave it out"
            )
        if self.nnodes < 1 or self.ranks % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which cannot have equally many of {self.ranks} ranks (tensor_parallel_size "
                "times pipeline_parallel_size)"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank is {self.node_rank}, and nnodes {self.nnodes}; give 0 to {self.nnodes - 1}")

    def _check_ranks(self) -> None:
        """Check how many threads and ranks there are, and what cannot be divided among these."""
        processors, processes = len(os.sched_getaffinity(0)), self.processes
        most = MOST_THREADS * processors * max(1, self.machines)
        if self.num_threads is not None and self.num_threads > most:
            raise ValueError(
                f"num_threads is {self.num_threads}, and this process may use {processors} processors; give at most "
                f"{most}, or leave it out for one per physical core"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            limit = most // self.tensor_parallel_size if name == "pipeline_parallel_size" else most
            if not 1 <= (size := getattr(self, name)) <= limit:
                raise ValueError(
                    f"{name} is {size}, and this process may use {processors} processors; give 1 to {limit}"
                )
        if self.context_parallel_size > 1 and self.ranks > 1:
            raise ValueError(
                f"context_parallel_size is {self.context_parallel_size}, whose ranks have the whole model, and "
                f"{self.ranks} ranks share it (tensor_parallel_size and pipeline_parallel_size); leave one of them out"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel is set, but no layer is shared; add --tensor-parallel-size, or leave it out"
            )
        method = None if self.speculative_config is None else self.speculative_config.method
        shared_rows, of_stages = self.context_parallel_size > 1, method == "mtp" and self.pipeline_parallel_size > 1
        if of_stages or (method == "eagle3" and processes > 1) or (method == "mtp" and shared_rows):
            shared_by = "stages" if of_stages else "ranks"
            raise ValueError(
                f"speculative_config: method {method!r} does not go with several {shared_by} ({processes}), as what "
                "the head reads is divided; leave one of them out"
            )
        if self.num_threads is not None and self.num_threads % processes:
            sizes = "context_parallel_size" if shared_rows else "tensor_parallel_size and pipeline_parallel_size"
            raise ValueError(
                f"num_threads is {self.num_threads}, which cannot be divided among {processes} ranks ({sizes}); give a "
                "multiple"
            )

    def _check_handover(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}; choose one of {', '.join(ROLES)}")
        if len(os.environ.get(KEY_VARIABLE, "")) < LEAST_KEY:
            raise ValueError(
                f"role is {self.role}, which needs a key of {LEAST_KEY} characters or more that all servers of both "
                f"roles have; set {KEY_VARIABLE}"
            )
        if self.ranks > 1:
            raise ValueError(f"role is {self.role}, and prompts of several ranks are not handed over; leave one out")
        if self.record_steps is not None:
            raise ValueError(f"role is {self.role}, and recordings have no prompts of others; leave record_steps out")

    def swap_bytes(self, device: str) -> int:
        """Bytes of host memory for blocks that are swapped out, or handed over."""
        if self.role != "both" and self.swap_space is None:
            return max(super().swap_bytes(device), HANDOVER_BYTES)
        return super().swap_bytes(device)

    @property
    def lora_slots(self) -> int:
        """Slots for adapters; 0 where none are served."""
        return self.max_loras if self.enable_lora or self.lora_modules else 0

    def sinks(self, max_positions: int, max_model_len: int) -> AttentionSinks | None:
        """The attention sinks that are asked for; None where none are. AttentionSinks.of() says what it raises."""
        given = self.attention_sinks, self.attention_window, self.block_size
        return AttentionSinks.of(*given, max_positions, max_model_len)


# What `headway serve` takes for everything that nobody chose, and `headway plan` for a machine that was measured.
DEFAULTS = EngineConfig()
