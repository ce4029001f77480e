"""Builds a running engine from an EngineConfig: loads the model, sizes the KV pool, warms up, and times each stage."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.draft_model import DraftModel, load_draft
from headway.engine.drafter import NgramDrafter, Speculator
from headway.engine.executor import Executor
from headway.engine.host import available_memory, usable_threads
from headway.engine.memory import bytes_per_block, kv_pool_bytes
from headway.engine.preload import preload
from headway.engine.record_file import RecordFile
from headway.engine.roofline import roofline_of
from headway.engine.runner import Runner
from headway.engine.weight_cache import WeightCache
from headway.kernels import kernels_for
from headway.kernels.interface import KV_CACHE_DTYPES, Kernels
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loading import load_model, resolve_dtype, resolve_model
from headway.models.quantization import rounds_to
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.kv_groups import group_layers, kv_cache_groups, seen_windows
from headway.policy.cache.sizing import BATCHED_TOKENS, PoolSize, pool_size
from headway.policy.cache.swap import NO_SWAP
from headway.policy.step.drafting import Drafting
from headway.policy.step.request import Request, sequences_of
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from headway.engine.offload import Offload
    from headway.engine.ranks import Followers

# Host memory for KV blocks on their way to and from --kv-offload.
_STAGED_BYTES, _LEAST_STAGED = 256 << 20, 64
StageListener = Callable[[str, int], None]


class EngineError(ValueError):
    """The engine cannot be built as configured; the message is one line that says what to change."""


@dataclass(slots=True)
class LoadedEngine:
    """A warmed-up engine, and what others want to know of it."""

    core: EngineCore
    runner: Runner
    max_model_len: int
    num_blocks: int
    block_size: int
    device: str
    kv_cache_dtype: str
    startup_ns: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    kernels: str = ""  # which of several were chosen by measuring, for people
    block_bytes: int = 0
    kept_bytes: int = 0  # bytes of packed weights that are being written to the cache
    draft_block_bytes: int = 0  # bytes of a block of the draft model's cache; 0 without one
    roofline: str = ""  # the calibrated machine by which steps have a least time; empty for none


def build_engine(
    config: EngineConfig,
    on_stage: StageListener | None = None,
    memory: mmap.mmap | None = None,
    cache: WeightCache | None = None,
    beside: ExitStack | None = None,
) -> LoadedEngine:
    """Build an engine as _build() does; what it has started is ended where that fails."""
    with ExitStack() as started:
        engine = _build(config, on_stage, memory, cache, beside, started)
        started.pop_all()
    return engine


def _build(
    config: EngineConfig,
    on_stage: StageListener | None,
    memory: mmap.mmap | None,
    cache: WeightCache | None,
    beside: ExitStack | None,
    started: ExitStack,
) -> LoadedEngine:
    """Load the model and make everything that a step needs.

    The stages are prepare, choose_kernels, storage_read, convert, layout (as far as a memory-mapped file tells them
    apart), kv_allocation, warm_up and, where there are prompts to, preload. Where the cache has the weights,
    weight_cache takes the place of the three of the file.

    Args:
        on_stage: is told the name and the nanoseconds of each stage when it is done; and with 0, what is being done.
        memory: memory for a CPU's weights, see LargePages.
        cache: the cache that has the packed weights, or is to have them.
        beside: keeps what other processes do for this start, until it is closed.
        started: ends what is there for as long as the engine, if it is closed.

    Raises:
        EngineError, ModelError, ValueError: one line naming the value, the limit and what to do.
    """
    stages = _Stages(on_stage)
    with stages.timed("prepare"):
        recording = RecordFile(config.record_steps) if config.record_steps is not None else None
        device = _device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(max(1, (config.num_threads or usable_threads()) // config.tensor_parallel_size))
        folder = resolve_model(config.model)
        model_config = ModelConfig.from_folder(folder)
        dtype = resolve_dtype(config.dtype, model_config)
        cache_dtype = _cache_dtype(config, model_config, dtype)
        kernels = kernels_for(str(device), dtype, memory)
        followers = _followers(config, model_config, device, started)
    packed = model_config.packed
    config = replace(config, quantization=rounds_to(config.quantization, packed))
    with stages.timed("choose_kernels"):
        scheme = config.quantization if packed is None else packed.scheme
        chosen = kernels.choose(dtype, scheme)
    if device.type == "cpu" and beside is not None:
        from headway.kernels.cpu.ahead import compiling

        beside.enter_context(compiling(dtype, scheme, cache_dtype, stages.say))
    asked_len = _asked_model_len(config, model_config)
    if (sinks := config.sinks(model_config.shape.max_positions, asked_len)) is not None:
        model_config = model_config.with_attention_sinks(sinks)
    if followers is not None:
        followers.assign(asked_len)
    began = time.monotonic_ns()
    known = cache.weights(kernels.named) if cache is not None else None
    if known is not None:
        stages.done("weight_cache", time.monotonic_ns() - began)
    options = config.load_format, config.seed, stages.done, asked_len, config.quantization
    shared = None if followers is None else followers.of(kernels, model_config)
    model = load_model(folder, dtype, kernels, device, *options, known, sinks, shared)
    draft = _draft(config, model_config, folder, dtype, kernels, device)
    with stages.timed("kv_allocation"):
        grouped = _windows(model_config, cache_dtype)
        windows, places = seen_windows(grouped, asked_len), model_config.shape.cache_places
        groups = [[places[at] for at in group] for group in group_layers(windows)] if windows else []
        block_bytes = bytes_per_block(model.config.caches, config.block_size, cache_dtype, groups)
        block_bytes *= config.tensor_parallel_size  # of all ranks, whose memory is the same
        draft_block_bytes = 0 if draft is None else bytes_per_block(draft.config.caches, config.block_size, dtype)
        pool = _pool(config, device, model_config, block_bytes + draft_block_bytes, asked_len, grouped)
        seats = pool.max_num_seqs or config.max_num_seqs
        host_blocks = _host_blocks(config, device, block_bytes, has_states=pool.checkpoints is not None)
        if config.kv_offload is not None:
            _check_offload(config, pool)
            host_blocks = max(host_blocks, _STAGED_BYTES // block_bytes, _LEAST_STAGED)
        runner = Runner(
            model,
            kernels,
            device,
            cache_dtype,
            pool.num_blocks,
            config.block_size,
            seats,
            pool.max_model_len,
            host_blocks,
            pool.checkpoints or 0,
            groups,
            graphs=not config.enforce_eager,
            folder=folder,
        )
        executor: Executor = runner
        if followers is not None:
            executor = followers.executor(runner, pool.num_blocks, seats, pool.max_model_len, host_blocks, groups)
        shown = str(cache_dtype).removeprefix("torch.")
        make = Scheduler if recording is None else partial(recording.scheduler, config, str(device), shown)
        swap = NO_SWAP if runner.host is None else runner.host.measured()
        scheduler = config.scheduler(device.type, pool, make, swap)
        offload = None if config.kv_offload is None else _offload(config, folder, scheduler, runner)
    with stages.timed("warm_up"):
        sizes = pool.num_blocks, config.block_size
        blocks = KVBlocks(*sizes, enable_prefix_caching=False, groups=pool.groups)
        warm_up(scheduler.config, executor, blocks, kernels.warm_up_tokens)
        _capture(runner)
        speculator = _speculator(config, runner.vocab_size, scheduler, draft, device)
    roofline = roofline_of(model_config.shape, device, dtype, scheme, cache_dtype)
    core, left_out = EngineCore(scheduler, executor, speculator=speculator, roofline=roofline, offload=offload), []
    if config.preloaded:
        with stages.timed("preload"):
            left_out = preload(core, config.preloaded, config.preload_what_fits)
    if followers is not None:
        followers.serves = True
    kept_bytes = 0
    if cache is not None:
        cache.keep(model.weights, kernels.named)
        kept_bytes = cache.kept_bytes
    about = core, runner, pool.max_model_len, *sizes, str(device), shown
    machine = "" if roofline is None else roofline.machine
    return LoadedEngine(*about, stages.ns, left_out, chosen, block_bytes, kept_bytes, draft_block_bytes, machine)


class _Stages:
    """How long each stage of a start took."""

    def __init__(self, listener: StageListener | None) -> None:
        self.ns: dict[str, int] = {}
        self._listener = listener

    def say(self, line: str) -> None:
        """Tell the listener what is being done, which is no stage."""
        if self._listener is not None:
            self._listener(line, 0)

    def done(self, stage: str, elapsed_ns: int) -> None:
        self.ns[stage] = elapsed_ns
        if self._listener is not None:
            self._listener(stage, elapsed_ns)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic_ns()
        yield
        self.done(stage, time.monotonic_ns() - began)


def _windows(model: ModelConfig, cache_dtype: torch.dtype) -> tuple[int | None, ...]:
    """The window of each place that KV cache groups have.

    It is empty for layers that are not alike and have an int8 cache: their scales would be in one place.
    """
    return () if model.shape.kinds and cache_dtype == torch.int8 else model.shape.cache_windows


def _pool(
    config: EngineConfig,
    device: torch.device,
    model: ModelConfig,
    block_bytes: int,
    asked_len: int,
    windows: tuple[int | None, ...],
) -> PoolSize:
    return pool_size(
        kv_pool_bytes(config, device, model, config.batched_tokens(device.type), asked_len),
        block_bytes,
        config.block_size,
        config.max_num_seqs,
        asked_len,
        config.max_model_len is None,
        model.shape.state_bytes,
        config.enable_prefix_caching,
        kv_cache_groups(
            windows,
            config.batched_tokens(device.type),
            asked_len,
            config.block_size,
            model.shape.attention_sinks,
        ),
        "--gpu-memory-utilization or --kv-cache-memory" if config.kv_cache_memory is None else "--kv-cache-memory",
    )


def warm_up(config: SchedulerConfig, executor: Executor, blocks: KVBlocks, enough: int | None) -> None:
    """Run two prompts and decode, so that kernels are compiled, or loaded, before the first request.

    Where the kernels say how few tokens are enough, each job is run once: in a step of both prompts, and in one of the
    greedy sequence alone, whose tokens are found by a kernel of their own. Else the prompts fill a step, and each kind
    of step comes twice.

    Args:
        blocks: an empty pool, without a prefix cache.
        enough: how few tokens are enough; None where the kernels do not say.
    """
    scheduler = Scheduler(config, blocks)
    longest = max(1, min(config.max_model_len - 6, config.max_num_batched_tokens))
    sequences = ((longest, 5), (1, 3)) if enough is None else ((min(longest, enough), 2), (1, 1))
    for index, (length, new) in enumerate(sequences):
        params = SamplingParams(temperature=float(index), max_tokens=new, ignore_eos=True)
        for sequence in sequences_of(Request(str(index), [1] * length, params, []), config.max_model_len):
            scheduler.add(sequence, 0)
    while scheduler.has_work:
        plan = scheduler.schedule(0)
        outcome = executor.run(plan)
        for sequence, _ in scheduler.complete(plan, outcome.tokens, outcome.times):
            if sequence.finish_reason is not None:
                executor.forget(sequence.seq_id)


def _capture(runner: Runner) -> None:
    """Capture the graphs of decode steps. Raises EngineError where the device refuses."""
    try:
        runner.capture()
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise EngineError(f"decode steps cannot be made CUDA graphs: {reason}; start with --enforce-eager") from error


def _draft(
    config: EngineConfig, target: ModelConfig, folder: Path, dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> Decoder | None:
    """The draft model, if one is asked for. Raises EngineError where it does not fit, or no drafts can be taken."""
    wanted = config.speculative_config
    if wanted is not None and target.shape.recurrent:
        raise EngineError(
            "speculative_config: this model has recurrent layers, whose states cannot go back behind drafts that were "
            "refused; leave it out"
        )
    if wanted is None or wanted.model is None:
        return None
    try:
        options = dtype, kernels, device, config.load_format, config.seed
        return load_draft(resolve_model(wanted.model), folder, target.shape.vocab, *options)
    except ValueError as error:
        raise EngineError(f"speculative_config: model {wanted.model!r}: {error}") from None


def _speculator(
    config: EngineConfig, vocab_size: int, scheduler: Scheduler, draft: Decoder | None, device: torch.device
) -> Speculator | None:
    """What proposes drafts, if that is asked for."""
    wanted = config.speculative_config
    if wanted is None:
        return None
    most = wanted.num_speculative_tokens
    if draft is None:
        return Speculator(NgramDrafter(wanted), most, scheduler)
    blocks, limits = scheduler.blocks, scheduler.config
    sizes = blocks.num_blocks, blocks.block_size
    longest = min(draft.config.max_model_len, limits.max_model_len, blocks.num_blocks * blocks.block_size)
    seats, graphs = limits.max_num_seqs, not config.enforce_eager
    runner = Runner(draft, draft.kernels, device, draft.dtype, *sizes, seats, longest, graphs=graphs)
    empty = KVBlocks(*sizes, enable_prefix_caching=False)
    warm_up(replace(limits, max_model_len=longest), runner, empty, draft.kernels.warm_up_tokens)
    _capture(runner)
    drafting, pool = Drafting(most), KVBlocks(*sizes, config.enable_prefix_caching)
    model = DraftModel(runner, pool, longest, vocab_size)
    model.measure(drafting)
    return Speculator(NgramDrafter(wanted), most, scheduler, model=model, drafting=drafting)


def _followers(config: EngineConfig, model: ModelConfig, device: torch.device, started: ExitStack) -> Followers | None:
    """The processes with the other parts of the model, which begin to load; None where there are none.

    Raises EngineError or ModelError where the model, the device or an option cannot be shared.
    """
    if config.tensor_parallel_size == 1:
        return None
    if device.type != "cpu":
        asked = f"tensor_parallel_size is {config.tensor_parallel_size}"
        raise EngineError(f"{asked}, which {device.type} does not support yet; leave it out")
    from headway.engine.ranks import Followers

    followers = Followers(config, model)
    started.callback(followers.end)
    return followers


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


def _host_blocks(config: EngineConfig, device: torch.device, block_bytes: int, has_states: bool) -> int:
    """How many blocks can be swapped out; by default they take no more than a quarter of the memory that is free."""
    if has_states:
        if config.swap_space:
            raise EngineError(
                f"swap_space is {config.swap_space:g} GiB, but states of recurrent layers are not swapped; leave it out"
            )
        return 0
    wanted = config.swap_bytes(device.type)
    if not wanted:
        return 0
    available = available_memory()
    if config.swap_space is None:
        wanted = min(wanted, available // 4)
    elif not block_bytes <= wanted <= available:
        raise EngineError(
            f"swap_space is {config.swap_space:g} GiB; one block takes {block_bytes / 2**30:.2g} GiB, and "
            f"{available / 2**30:.1f} GiB of memory are free; choose something between, or 0 to swap nothing"
        )
    return wanted // block_bytes


def _check_offload(config: EngineConfig, pool: PoolSize) -> None:
    """Raise EngineError where KV blocks cannot be kept beyond the host's memory."""
    wrong = {
        "layers with a window have block tables of their own": bool(pool.groups),
        "states of recurrent layers are not kept": pool.checkpoints is not None,
        "ranks (tensor_parallel_size) keep nothing": config.tensor_parallel_size > 1,
        "there is no prefix cache (enable_prefix_caching)": not config.enable_prefix_caching,
        "record_steps cannot tell what was loaded": config.record_steps is not None,
    }
    if why := next((reason for reason, holds in wrong.items() if holds), None):
        raise EngineError(f"kv_offload: {why}; leave it out")


def _offload(config: EngineConfig, folder: Path, scheduler: Scheduler, runner: Runner) -> Offload:
    """What keeps evicted blocks, under a name of all that their bytes depend on. Raises EngineError."""
    from headway.engine.offload import Offload, StoreError, model_name, open_store
    from headway.engine.weight_cache import checkpoint_identity

    assert config.kv_offload is not None and runner.host is not None
    sizes = [str(runner.device), runner.host.block_bytes, config.block_size, scheduler.config.max_model_len]
    options = config.dtype, config.quantization, config.load_format, config.seed, config.kv_cache_dtype
    name = model_name(folder, [checkpoint_identity(folder), *sizes, *options])
    try:
        store = open_store(config.kv_offload, name, round(config.kv_offload_size * 2**30))
        return Offload(store, scheduler, runner.host)
    except StoreError as error:
        raise EngineError(str(error)) from None


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
