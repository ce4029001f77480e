"""What an engine is to be, from its EngineConfig and the checkpoint's config: before weights are loaded."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.cost.layers import AttentionSinks
from headway.engine.config import EngineConfig
from headway.engine.host import usable_threads
from headway.kernels import kernels_for
from headway.kernels.interface import KV_CACHE_DTYPES, Kernels
from headway.models.config import ModelConfig
from headway.models.loading import resolve_dtype, resolve_model
from headway.models.quantization import rounds_to
from headway.policy.cache.sizing import BATCHED_TOKENS

if TYPE_CHECKING:
    from headway.engine.nodes import OneMachine
    from headway.engine.ranks import Followers


class EngineError(ValueError):
    """The engine cannot be built as configured; the message is one line that says what to change."""


@dataclass(slots=True)
class Prepared:
    """What is known of an engine before its weights are loaded."""

    config: EngineConfig  # with the quantization that weights are rounded to
    device: torch.device
    folder: Path
    model: ModelConfig  # with the attention sinks that the config asks for
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scheme: str  # of the products of the weights
    asked_len: int  # the longest sequence that is asked for; see PoolSize for what fits
    sinks: AttentionSinks | None  # attention sinks of the layers; None for those of the checkpoint
    kernels: Kernels
    followers: Followers | None  # the processes of other ranks; None where there are none

    @property
    def cache_name(self) -> str:
        """The type of the KV cache, for people."""
        return str(self.cache_dtype).removeprefix("torch.")


def prepare(config: EngineConfig, memory: mmap.mmap | None, started: ExitStack, say: Callable[[str], None]) -> Prepared:
    """Read the model's config, settle on the device and the types of numbers, and start the other ranks.

    Args:
        memory: memory for a CPU's weights, see LargePages.
        started: ends the ranks, if it is closed.
        say: is told what is waited for.

    Raises:
        EngineError, ModelError, ValueError: one line naming the value, the limit and what to do.
    """
    device = _device(config.device)
    if config.nvtx and device.type != "cuda":
        raise EngineError(f"nvtx is set, but the device is {device.type}; leave it out, and ask /debug/profile instead")
    if device.type == "cpu":
        torch.set_num_threads(max(1, (config.num_threads or usable_threads() * config.machines) // config.ranks))
    folder = resolve_model(config.model)
    model = ModelConfig.from_folder(folder)
    dtype = resolve_dtype(config.dtype, model)
    cache_dtype = _cache_dtype(config, model, dtype)
    packed, asked_len = model.packed, _asked_model_len(config, model)
    config = replace(config, quantization=rounds_to(config.quantization, packed))
    scheme = config.quantization if packed is None else packed.scheme
    sinks = config.sinks(model.shape.max_positions, asked_len)
    if sinks is not None:
        model = model.with_attention_sinks(sinks)
    # They may bind this thread, and so those of kernels.
    followers = _followers(config, model, folder, device, started, say)
    shares = followers is not None and config.context_parallel_size > 1
    kernels = followers.kernels(memory) if followers and shares else kernels_for(str(device), dtype, memory)
    return Prepared(config, device, folder, model, dtype, cache_dtype, scheme, asked_len, sinks, kernels, followers)


def _followers(
    config: EngineConfig,
    model: ModelConfig,
    folder: Path,
    device: torch.device,
    started: ExitStack,
    say: Callable[[str], None],
) -> Followers | None:
    """The processes of the other ranks, which begin to load; None where there are none.

    Raises EngineError or ModelError where the model, the device or an option cannot be shared.
    """
    if config.node_rank:
        raise EngineError(f"node_rank is {config.node_rank}; `headway serve` on that machine has its ranks join node 0")
    if config.processes == 1:
        return None
    options = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    asked = next(f"{option} is {size}" for option in options if (size := getattr(config, option)) > 1)
    if device.type != "cpu":
        raise EngineError(f"{asked}, which {device.type} does not support yet; leave it out")
    if config.context_parallel_size > 1 and model.shape.recurrent:
        raise EngineError(f"{asked}, but a recurrent layer computes each token from the one before; leave it out")
    from headway.engine.ranks import Followers

    threads = torch.get_num_threads()
    followers = Followers(config, model, lambda: _nodes(config, model, folder, threads, say), threads)
    started.callback(followers.end)
    return followers


def _nodes(
    config: EngineConfig, model: ModelConfig, folder: Path, threads: int, say: Callable[[str], None]
) -> OneMachine:
    """The machines that ranks are on, when all are there. Raises ValueError where one does not come or fit."""
    from headway.engine.nodes import Nodes, OneMachine, content_of
    from headway.engine.ranks import sizes_of

    about = config, content_of(folder), sizes_of(model), threads
    if config.distributed_executor_backend == "ray":
        from headway.engine.placed import Placement

        say("waiting for machines of the Ray cluster")
        placement = Placement(config, threads)
        if len(placement.parts) > 1:
            return Nodes(*about, placement.parts, (placement.host, 0), placement.bring)
    if config.nnodes == 1:
        return OneMachine(config.processes)
    each = config.ranks // config.nnodes
    parts = [range(first, first + each) for first in range(0, config.ranks, each)]
    say(f"waiting for the other nodes ({config.nnodes - 1}) at {config.master_addr}:{config.master_port}")
    return Nodes(*about, parts, (config.master_addr, config.master_port), lambda address: None)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in BATCHED_TOKENS:
        raise EngineError(f"device is {name!r}; it must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError("device is cuda, but torch finds no CUDA device; use --device cpu")
    return torch.device(name)


def _cache_dtype(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype that --kv-cache-dtype names; auto is the model's. Raises EngineError where the model has no other."""
    name = config.kv_cache_dtype
    if name not in KV_CACHE_DTYPES:
        raise EngineError(f"kv_cache_dtype is {name!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}")
    named = KV_CACHE_DTYPES[name]
    if named is not None and model.shape.latent is not None:
        raise EngineError(f"kv_cache_dtype is {name}, which attention over latents does not support; leave it out")
    return named or dtype


def _asked_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.longest_model_len
    if config.max_model_len is None:
        return model.max_model_len
    has_sinks = config.attention_sinks is not None  # then positions have no end
    if config.max_model_len < 2 or (config.max_model_len > longest and not has_sinks):
        raise EngineError(
            f"max_model_len is {config.max_model_len}; for this model it must be between 2 and {longest}"
            + ("" if has_sinks else "; more needs --attention-sinks")
        )
    return config.max_model_len
