"""The memory plan: what a step takes, what that leaves for the KV pool, and how the pool is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.cost.shape import CacheSpec
from headway.engine.config import EngineConfig
from headway.engine.host import available_memory
from headway.kernels.cpu_memory import LargePages
from headway.kernels.interface import LayerCache
from headway.models.config import ModelConfig
from headway.policy.sizing import cpu_pool_bytes, gpu_pool_bytes, sampling_bytes

ACTIVATION_COPIES = 8  # tensors of the widest activation that live at once in a step
SCALE_DTYPE = torch.float32  # of a token and head in a cache of int8


def _cache_parts(
    spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what a layer's cache consists of, in the order of LayerCache."""
    blocks = (num_blocks, spec.heads, block_size)
    parts: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((*blocks, dim), dtype) for dim in (spec.key_dim, spec.value_dim)
    ]
    return parts + [(blocks, SCALE_DTYPE)] * 2 if dtype == torch.int8 else parts


def bytes_per_block(caches: Sequence[CacheSpec], block_size: int, dtype: torch.dtype) -> int:
    """What a block takes in all layers, with the scales that a cache of int8 has."""
    parts = [part for spec in caches for part in _cache_parts(spec, 1, block_size, dtype)]
    return sum(math.prod(shape) * of.itemsize for shape, of in parts)


def zero_caches(
    caches: Sequence[CacheSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """An empty cache for each layer, with keys and values [N, G, B, D]; those of int8 with their scales.

    A CPU takes their memory from the system page by page when it is first written, not all at start-up.
    """
    memory = LargePages()

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return memory.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    return [
        LayerCache(*(zeros(*part) for part in _cache_parts(spec, num_blocks, block_size, dtype))) for spec in caches
    ]


def kv_pool_bytes(
    config: EngineConfig, device: torch.device, model: ModelConfig, batched_tokens: int, max_model_len: int
) -> int:
    """Bytes for keys and values: as configured, or measured now, after the weights were loaded.

    A full step takes its activations and the sampler beside them; policy.sizing says what that leaves.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    shape = model.shape
    widest = max(2 * shape.ffn, shape.hidden, shape.heads * shape.head_dim)
    if (experts := shape.experts) is not None:  # a result for each of a token's experts, and of the shared one
        widest = max(widest, (experts.per_token + 1) * shape.hidden, 2 * experts.width, 2 * experts.shared_width)
    step = batched_tokens * widest * 2 * ACTIVATION_COPIES
    step += sampling_bytes(config.max_num_seqs, shape.vocab, max_model_len)
    if device.type == "cpu":
        return cpu_pool_bytes(available_memory(), step)
    return gpu_pool_bytes(*torch.cuda.mem_get_info(device), config.gpu_memory_utilization, step)
