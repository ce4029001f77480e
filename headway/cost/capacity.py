"""Does it fit, how many sequences at once, how long a context: memory as the engine divides it.

The engine takes a share of a device's memory. Weights, the activations of the largest step and a workspace come off it,
and what is left holds keys and values in blocks of tokens (PagedAttention, Kwon et al., 2023). Layers with a sliding
window keep no more than the window (document 002). All figures are bytes or tokens of the fullest device of a replica;
with data parallelism they are those of one group, which holds sequences of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.cost.layers import ShapeError
from headway.cost.memory import activation_bytes, kv_cache_bytes
from headway.cost.parallel import device_weight_bytes
from headway.cost.precision import FP8, Precision
from headway.cost.shape import ModelShape
from headway.cost.timing import Deployment

# What a GPU's driver, runtime and libraries, the sampler and captured graphs take beside the activations: vLLM's own
# reports name 0.1 to 1.8 GiB outside of torch's allocator (its pull request 10511) and about 1 GiB of graphs.
GPU_WORKSPACE = 3 * 2**29
# The interpreter, its libraries and the buffers of their threads: a CPU has neither a context nor graphs.
CPU_WORKSPACE = 2**29
# Positions are 32-bit integers: a limit only where every layer has a window, so that nothing grows with the context.
MOST_CONTEXT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the memory of a replica's fullest device holds, in bytes."""

    memory: int  # all memory of the device
    usable: int  # the part of it that the engine takes
    weights: int  # weights on the device
    activations: int  # activations of the largest step, and what its sampler takes
    workspace: int  # what the runtime and its captured graphs take
    kv_pool: int  # what is left for the cache; negative where not even weights and activations fit
    kv_per_token: int  # cache of a token in all layers of the device, sliding windows apart
    pool_tokens: int  # tokens that fit into the pool, in whole blocks, sliding windows apart
    max_batch: int  # sequences of prompt + output tokens that fit at once
    max_context: int  # tokens of a single sequence that fit, the model's own limit apart
    shortfall: int  # bytes that are missing for one sequence of prompt + output tokens; 0 where it fits

    @property
    def fits(self) -> bool:
        """Whether at least one sequence fits."""
        return self.shortfall == 0


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an engine that decide about memory."""

    utilization: float = 0.9  # share of the memory that the engine takes
    # Where it is given, the cache instead takes this share of what weights and workspace leave free, at most what the
    # activations leave of that.
    free_share: float | None = None
    block_size: int = 16  # tokens of a block of the cache
    max_num_batched_tokens: int = 8192  # tokens of the largest step, which decide the activations
    # Sequences in a step; they decide the size of its logits only, and do not limit `max_batch`.
    max_num_seqs: int = 256
    rolling: bool = True  # layers with a sliding window keep no more than the window; otherwise they keep everything
    sampler_bytes: int = 0  # bytes that the sampler takes beside the activations of a step
    adapter_bytes: int = 0  # bytes of the slots for adapters, a part of the workspace


USUAL = Settings()


def capacity(deployment: Deployment, prompt: int, output: int, settings: Settings = USUAL, cached: int = 0) -> Capacity:
    """How many requests of `prompt` and `output` tokens fit, and what they leave.

    Args:
        cached: tokens of each prompt that are in the prefix cache already, the same ones for all requests. Their whole
            blocks are held once; of a last block that they only fill in part, each sequence has its own. Nothing is
            shared where windows make that cheaper.
    """
    d = deployment
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    weights = device_weight_bytes(d.shape, d.precision, d.parallelism)
    activations = activation_bytes(d.device, settings.max_num_batched_tokens, rows, d.precision, d.flash)
    activations += settings.sampler_bytes
    workspace = (CPU_WORKSPACE if d.hardware.kind == "cpu" else GPU_WORKSPACE) + settings.adapter_bytes
    if settings.free_share is None:
        usable = int(d.hardware.memory_bytes * settings.utilization)
        pool = usable - weights - activations - workspace
    else:
        free = d.hardware.memory_bytes - weights - workspace
        pool = min(int(free * settings.free_share), free - activations)
        usable = weights + workspace + activations + pool
    room, block_size = max(0, pool), settings.block_size
    one = sequence_bytes(d, prompt + output, block_size, settings.rolling)
    apart = room // one
    together = _sharing(d, cached, prompt - cached + output, room, settings) if cached else apart
    in_stage = max(stage.attention_layers for stage in d.device_stages) * d.device.kv_elements_per_layer
    if d.shape.kinds:  # there is one stage
        in_stage = d.device.kv_elements_per_token
    return Capacity(
        memory=d.hardware.memory_bytes,
        usable=usable,
        weights=weights,
        activations=activations,
        workspace=workspace,
        kv_pool=pool,
        kv_per_token=d.precision.kv.bytes_of(in_stage),
        pool_tokens=room // d.precision.kv.bytes_of(block_size * in_stage) * block_size,
        max_batch=max(apart, together),
        max_context=_longest(d, room, settings),
        shortfall=max(0, one - pool),
    )


def sequence_bytes(deployment: Deployment, tokens: int, block_size: int = 16, rolling: bool = True) -> int:
    """Bytes of cache that the fullest device holds for one sequence of so many tokens, in whole blocks.

    Args:
        rolling: layers with a sliding window keep no more than the window.
    """
    return max(_held(deployment, stage, tokens, block_size, rolling) for stage in deployment.device_stages)


def _sharing(deployment: Deployment, prefix: int, rest: int, room: int, settings: Settings) -> int:
    """Sequences that fit into `room` where the prefix's whole blocks are held once."""
    block, rolling = settings.block_size, settings.rolling
    whole = prefix // block * block

    def fitting(stage: ModelShape) -> int:
        left = room - _held(deployment, stage, whole, block, rolling)
        return max(0, left) // _held(deployment, stage, prefix - whole + rest, block, rolling)

    return min(fitting(stage) for stage in deployment.device_stages)


def remedies(
    deployment: Deployment, prompt: int, output: int, settings: Settings = USUAL, cached: int = 0
) -> tuple[str, ...]:
    """What would make one request fit, each by itself and each computed; empty where it fits or nothing helps.

    They are the widest quantization that does, a cache in fp8, the fewest devices that share each layer (or, where no
    such number does, stages of as many as can share one), and the longest request that fits as it is. Each says how
    many sequences would then fit at once.
    """

    def at(changed: Deployment) -> Capacity:
        return capacity(changed, prompt, output, settings, cached)

    now = at(deployment)
    if now.fits:
        return ()
    found = []
    for changes in (_quantized(deployment), _narrow_cache(deployment), _more_devices(deployment)):
        for flags, changed in changes:
            if (then := at(changed)).fits:
                found.append(f"{flags} ({then.max_batch:,} at once)")
                break
    if now.max_context > 1:
        found.append(f"at most {now.max_context:,} tokens of prompt and output (1 at once)")
    return tuple(found)


def _held(deployment: Deployment, stage: ModelShape, tokens: int, block_size: int, rolling: bool) -> int:
    return kv_cache_bytes(stage, tokens, deployment.precision, block_size, rolling=rolling)


def _longest(deployment: Deployment, room: int, settings: Settings) -> int:
    """The most tokens of a sequence whose cache takes no more than `room`."""

    def held(tokens: int) -> int:
        return sequence_bytes(deployment, tokens, settings.block_size, settings.rolling)

    return bisect.bisect_right(range(MOST_CONTEXT + 1), room, key=held) - 1


def _quantized(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """All matrices of the layers in fewer bits, the widest first; for 8 bits, a format that the hardware multiplies."""
    precision, hardware = deployment.precision, deployment.hardware
    for name in ("fp8" if "fp8" in hardware.flops_per_s and not hardware.measured else "int8", "int4"):
        fewer = _precision_of(deployment, name)
        changed = replace(precision, linear=fewer.linear, head=fewer.head, experts=None, latent=fewer.latent)
        yield f"--quantization {name}", replace(deployment, precision=changed)


def _narrow_cache(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    if deployment.precision.kv.bits > FP8.bits:
        name = "int8" if deployment.hardware.measured else "fp8"
        kv = _precision_of(deployment, "none", name).kv
        yield f"--kv-cache-dtype {name}", replace(deployment, precision=replace(deployment.precision, kv=kv))


def _precision_of(deployment: Deployment, quantization: str, kv_cache_dtype: str = "auto") -> Precision:
    """The formats of a scheme, as this engine has them on a calibrated machine, or else as other engines do."""
    dtype = deployment.precision.activations.name
    if deployment.hardware.measured:
        head_dim, kind = deployment.shape.head_dim, deployment.hardware.kind
        return Precision.of_engine(dtype, quantization, kv_cache_dtype, head_dim, kind)
    return Precision.named(dtype, quantization, kv_cache_dtype)


def _more_devices(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """More devices for each layer, and then more stages of the most devices that can share one."""
    now, link = deployment.parallelism, deployment.hardware.link
    if link is None:
        return
    widest = now.tensor
    for tensor in range(now.tensor + 1, link.max_devices + 1):
        if (changed := _spread(deployment, tensor, now.pipeline)) is not None:
            widest = tensor
            yield _size_flags(changed), changed
    for pipeline in range(now.pipeline + 1, deployment.shape.layers + 1):
        if (changed := _spread(deployment, widest, pipeline)) is not None:
            yield _size_flags(changed), changed


def _spread(deployment: Deployment, tensor: int, pipeline: int) -> Deployment | None:
    """The deployment on so many devices; None where the model cannot be divided like this."""
    try:
        return replace(deployment, parallelism=replace(deployment.parallelism, tensor=tensor, pipeline=pipeline))
    except ShapeError:
        return None


def _size_flags(deployment: Deployment) -> str:
    sizes = deployment.parallelism
    flags = f"--tensor-parallel-size {sizes.tensor}"
    return flags if sizes.pipeline == 1 else f"{flags} --pipeline-parallel-size {sizes.pipeline}"
