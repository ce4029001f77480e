"""The KV pool: how much memory it may take, and how it is taken."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.engine.config import EngineConfig
from headway.engine.host import available_memory
from headway.kernels.cpu_memory import LargePages
from headway.kernels.interface import LayerCache
from headway.models.config import ModelConfig

CPU_SHARE = 0.5  # of the memory that is free once the weights are loaded
ACTIVATION_COPIES = 8  # tensors of the widest activation that live at once in a step
SCALE_DTYPE = torch.float32  # of a token and head in a cache of int8


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """What a block takes in all layers, with the scales that a cache of int8 has (ModelConfig.kv_bytes_per_token)."""
    scale_size = SCALE_DTYPE.itemsize if dtype == torch.int8 else 0
    return model.kv_bytes_per_block(block_size, dtype.itemsize, scale_size)


def zero_caches(
    layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Empty caches, each with keys and values [N, G, B, D]; those of int8 with their scales.

    A CPU takes their memory from the system page by page when it is first written, not all at start-up.
    """
    memory = LargePages()

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return memory.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    parts = [(shape, dtype)] * 2 + ([(shape[:3], SCALE_DTYPE)] * 2 if dtype == torch.int8 else [])
    return [LayerCache(*(zeros(*part) for part in parts)) for _ in range(layers)]


def kv_pool_bytes(config: EngineConfig, device: torch.device, model: ModelConfig, batched_tokens: int) -> int:
    """Bytes for keys and values: as configured, or measured now, after the weights were loaded.

    On a GPU: the share --gpu-memory-utilization of its memory, less what is in use and the activations
    of a full step. On a CPU: half of the memory that is available, so that the page cache, the API
    process and the neighbours keep the rest.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if device.type == "cpu":
        return int(available_memory() * CPU_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    widest = max(2 * model.intermediate_size, model.hidden_size, model.num_heads * model.head_dim)
    logits = config.max_num_seqs * model.vocab_size * 4 * 3
    activations = batched_tokens * widest * 2 * ACTIVATION_COPIES + logits
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - activations)
