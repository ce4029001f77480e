"""The memory plan: what a step takes, what it leaves for the KV pool, and the pool itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.cost.layers import CacheSpec, StateSpec
from headway.engine.config import EngineConfig
from headway.engine.host import available_memory, total_memory
from headway.kernels.cpu.memory import LargePages, SharedPages
from headway.kernels.interface import LayerCache, LayerState
from headway.models.config import ModelConfig
from headway.policy.cache.sizing import DEVICE_SHARE, cpu_pool_bytes, sampling_bytes, shared_pool_bytes

# The places of each KV cache group, each with its layers by number.
Groups = Sequence[Sequence[tuple[int, ...]]]
ACTIVATION_COPIES = 8  # tensors as large as the widest activation that a step has at once
SCALE_DTYPE = torch.float32  # the scale of a token and head in a cache of int8


def _cache_parts(
    spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a layer's cache, in the order of LayerCache."""
    blocks = (num_blocks, spec.heads, block_size)
    parts: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((*blocks, dim), dtype) for dim in (spec.key_dim, spec.value_dim) if dim
    ]
    return parts + [(blocks, SCALE_DTYPE)] * 2 if dtype == torch.int8 else parts


def bytes_per_block(
    caches: Sequence[CacheSpec | StateSpec], block_size: int, dtype: torch.dtype, groups: Groups = ()
) -> int:
    """Bytes of one block in all layers, or those that a KV cache group has room for; with the scales of an int8 cache.

    Args:
        groups: the places of each KV cache group.
    """
    paged = [spec for spec in caches if isinstance(spec, CacheSpec) and spec.source is None]
    if groups:
        paged = [_largest(caches)] * max(map(len, groups))
    parts = [part for spec in paged for part in _cache_parts(spec, 1, block_size, dtype)]
    return sum(math.prod(shape) * of.itemsize for shape, of in parts)


def zero_caches(
    caches: Sequence[CacheSpec | StateSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_states: int = 0,
    pages: SharedPages | None = None,
) -> list[LayerCache | LayerState]:
    """An empty cache for each layer: keys and values [N, G, B, D], and the scales of an int8 cache; or its states.

    On a CPU the system gives their memory page by page when it is first written, not all at start-up.

    Args:
        pages: memory that other processes have, too; None for this process's own.
    """
    memory = pages or LargePages()

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return memory.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def cache(spec: CacheSpec) -> LayerCache:
        tensors = [zeros(*part) for part in _cache_parts(spec, num_blocks, block_size, dtype)]
        return LayerCache(tensors[0], tensors[0][..., : spec.latent]) if spec.latent else LayerCache(*tensors)

    def states(spec: StateSpec) -> LayerState:
        inputs = zeros((num_states, spec.width - 1, spec.channels), torch.float32)
        if not spec.heads:
            return LayerState(inputs, None)
        return LayerState(inputs, zeros((num_states, spec.heads, spec.key_dim, spec.value_dim), torch.float32))

    made: list[LayerCache | LayerState] = []
    for spec in caches:
        if isinstance(spec, StateSpec):
            made.append(states(spec))
        else:
            made.append(cache(spec) if spec.source is None else made[spec.source])
    return made


def zero_places(
    caches: Sequence[CacheSpec | StateSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    groups: Groups,
    pages: SharedPages | None = None,
) -> list[LayerCache]:
    """The memory of KV cache groups: in a place are the first layers of all groups, in another the second ones.

    It is as zero_caches() makes it for the largest layer, with a block of zeros behind the others, for what windows
    have passed.
    """
    largest = [_largest(caches)] * max(map(len, groups))
    places = zero_caches(largest, num_blocks + 1, block_size, dtype, device, pages=pages)
    return [place for place in places if isinstance(place, LayerCache)]


def caches_in(
    places: Sequence[LayerCache], caches: Sequence[CacheSpec | StateSpec], groups: Groups
) -> list[LayerCache | LayerState]:
    """Each layer's part of its place.

    Where n layers are in a place, each has n of its blocks in a block of the place: block b of the place begins with
    block b * n of the first layer.
    """
    found: dict[int, LayerCache | LayerState] = {}
    for number, group in enumerate(groups):
        for place, layers in zip(places, group, strict=False):
            for part, layer in enumerate(layers):
                spec = caches[layer]
                assert isinstance(spec, CacheSpec)
                if place.keys.shape[1] == spec.heads and place.keys.shape[3] == spec.key_dim:
                    found[layer] = replace(place, group=number)
                else:
                    keys, values = (_part(tensor, spec, part) for tensor in (place.keys, place.values))
                    found[layer] = LayerCache(keys, values, group=number)
    sources = [spec.source if isinstance(spec, CacheSpec) else None for spec in caches]
    return [found[layer if source is None else source] for layer, source in enumerate(sources)]


def _part(place: Tensor, spec: CacheSpec, part: int) -> Tensor:
    """Blocks of a smaller layer in a place, from its part of the first one on."""
    shape = spec.heads, place.shape[2], spec.key_dim
    flat = place.view(-1)[part * math.prod(shape) :]
    count = len(flat) // math.prod(shape)
    return flat[: count * math.prod(shape)].view(count, *shape)


def _largest(caches: Sequence[CacheSpec | StateSpec]) -> CacheSpec:
    return max((spec for spec in caches if isinstance(spec, CacheSpec)), key=lambda spec: spec.elements)


def kv_pool_bytes(
    config: EngineConfig, device: torch.device, model: ModelConfig, batched_tokens: int, max_model_len: int
) -> int:
    """Bytes for keys and values: as configured, or measured now, after the weights were loaded.

    A full step takes activations and the sampler's memory; policy.sizing says what is left.

    Raises:
        ValueError: on a CPU, whose memory is only taken as blocks are filled, more was configured than there is.
    """
    if (asked := config.kv_cache_memory) is not None:
        if device.type == "cpu" and asked > (most := total_memory()):
            raise ValueError(
                f"kv_cache_memory is {asked / 2**30:.1f} GiB, but the machine has {most / 2**30:.1f} GiB; lower it"
            )
        return asked
    shape = model.shape
    widths = [each.key_dim for each in shape.caches if isinstance(each, CacheSpec)]
    widest = max(2 * max(part.ffn for part in shape.parts), shape.hidden, shape.heads * max(widths))
    if (experts := shape.experts) is not None:  # a result for each of a token's experts, and of the shared one
        widest = max(widest, (experts.per_token + 1) * shape.hidden, 2 * experts.width, 2 * experts.shared_width)
    if shape.state is not None:
        widest = max(widest, shape.state.projected)
    step = batched_tokens * widest * 2 * ACTIVATION_COPIES
    step += sampling_bytes(config.max_num_seqs, shape.vocab, max_model_len)
    share = config.gpu_memory_utilization
    if device.type == "cpu" and share is None:
        return cpu_pool_bytes(available_memory(), step)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (available_memory(), total_memory())
    return shared_pool_bytes(free, total, share or DEVICE_SHARE, step)
