"""Everything the engine process needs to know, as one plain value."""

from __future__ import annotations

from dataclasses import dataclass

# What None means in the fields below: tokens of a step by device, and of a CPU's memory that is free once the weights
# are loaded, the share that the KV pool takes. The page cache, the API process and the neighbours keep the rest.
BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
CPU_SHARE = 0.5


@dataclass(slots=True)
class EngineConfig:
    """Engine settings; names and meanings follow vLLM's flags.

    Args:
        model: folder of a Hugging Face checkpoint.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        quantization: none, int8, int8-weight-only or int4, of the weights of an ordinary checkpoint; CPU only.
        kv_cache_dtype: of keys and values in the KV cache: auto (as dtype) or int8; int8 on a CPU only.
        load_format: auto, safetensors, or dummy for random weights.
        device: auto, cpu or cuda.
        max_model_len: longest prompt plus output in tokens; None takes the model's, lowered to what the KV pool holds.
        kv_cache_memory: bytes of the KV pool; None measures free memory.
        gpu_memory_utilization: share of device memory that may be used when kv_cache_memory is None.
        max_num_batched_tokens: token budget of a step; None picks one for the device.
        max_prefill_stall_ms: for which prompts may hold up others in a step, where these do not take longer themselves;
            may be infinite.
        scheduling_policy: fcfs or priority.
        max_queue_time: seconds that a request may wait without being begun; None sets no limit.
        record_steps: file to which each step's plan and times are appended; None records nothing.
        num_threads: CPU threads of the engine; None takes one for each physical core, within the CPU quota.
    """

    model: str
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_prefill_stall_ms: float = 50.0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    max_queue_time: float | None = None
    num_threads: int | None = None
    record_steps: str | None = None


# What `headway serve` takes for everything that nobody chose, and `headway plan` for a machine that was measured.
DEFAULTS = EngineConfig(model="")


def default_batched_tokens(device: str, max_num_seqs: int) -> int:
    """The token budget of a step on cpu or cuda: at least a token for each sequence."""
    return max(BATCHED_TOKENS[device], max_num_seqs)
