"""Builds a running engine from an EngineConfig: loads the model, sizes the KV pool, warms up, and times each stage."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from headway.engine.ahead import AheadExecutor, StepsAhead
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.draft_head import DraftHead
from headway.engine.draft_model import DraftModel, load_draft
from headway.engine.drafter import NgramDrafter, Speculator
from headway.engine.executor import Executor
from headway.engine.hooks import StepHooks
from headway.engine.host import available_memory
from headway.engine.memory import bytes_per_block, kv_pool_bytes
from headway.engine.messages import PROTOCOL_VERSION, AdapterFound, Ready
from headway.engine.preload import preload
from headway.engine.prepare import EngineError, Prepared, prepare
from headway.engine.record_file import RecordFile
from headway.engine.roofline import roofline_of
from headway.engine.runner import Runner
from headway.engine.weight_cache import WeightCache
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.eagle import load_eagle_head
from headway.models.heads import HeadInputs, load_mtp_head
from headway.models.loading import load_ends, load_model, resolve_model
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.kv_groups import group_layers, kv_cache_groups, seen_windows
from headway.policy.cache.sizing import PoolSize, pool_size
from headway.policy.cache.states import MOST_DRAFTS
from headway.policy.cache.swap import NO_SWAP
from headway.policy.step.drafting import Drafting
from headway.policy.step.request import Request, sequences_of
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from headway.engine.adapters import Adapters

StageListener = Callable[[str, int], None]


@dataclass(slots=True)
class LoadedEngine:
    """A warmed-up engine, and what is said of it when it begins to serve."""

    core: EngineCore
    runner: Runner
    ready: Ready


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
        start = prepare(config, memory, started, stages.say)
    followers, kernels = start.followers, start.kernels
    with stages.timed("choose_kernels"):
        chosen = kernels.choose(start.dtype, start.scheme)
    if start.device.type == "cpu" and beside is not None:
        from headway.kernels.cpu.ahead import compiling

        beside.enter_context(compiling(start.dtype, start.scheme, start.cache_dtype, stages.say))
    if followers is not None:
        followers.assign(start.asked_len)
    model = _load(start, stages, cache)
    adapters, found = None, list[AdapterFound]()
    if config.lora_slots:
        with stages.timed("adapters"):
            adapters, found = _adapters(start, model)
    core, pool = _core(start, stages, model, adapters, recording)
    left_out = list[str]()
    if config.preloaded:
        with stages.timed("preload"):
            left_out = preload(core, config.preloaded, config.preload_what_fits)
    if followers is not None:
        followers.serves = True
    if cache is not None:
        cache.keep(model.weights, kernels.named)
    ready = _ready(start, core, pool)
    ready.startup_ns, ready.kernels, ready.left_out, ready.adapters = stages.ns, chosen, left_out, found
    ready.kept_bytes = 0 if cache is None else cache.kept_bytes
    return LoadedEngine(core, pool.runner, ready)


def _core(
    start: Prepared, stages: _Stages, model: Decoder, adapters: Adapters | None, recording: RecordFile | None
) -> tuple[EngineCore, _Pool]:
    """Allocate the pool, warm up, and make what runs the steps."""
    config, device = start.config, start.device
    draft = _draft(start, model)
    with stages.timed("kv_allocation"):
        pool = _allocate(start, model, draft)
        runner = pool.runner
        runner.adapters = adapters
        make = Scheduler if recording is None else partial(recording.scheduler, config, str(device), start.cache_name)
        swap = NO_SWAP if runner.host is None else runner.host.measured()
        scheduler = config.scheduler(device.type, pool.size, make, swap)
    with stages.timed("warm_up"):
        blocks = KVBlocks(pool.size.num_blocks, config.block_size, enable_prefix_caching=False, groups=pool.size.groups)
        warm_up(scheduler.config, pool.executor, blocks, start.kernels.warm_up_tokens)
        _capture(runner)
        hooks = _hooks(start, runner, scheduler, draft, adapters)
    if config.limits is not None:
        scheduler.set_classes(config.classes, config.weights, config.limits)
    steps = None
    if pool.ahead is not None and config.async_scheduling and all(hook.allows_ahead for hook in hooks):
        steps = StepsAhead(scheduler, pool.ahead)
    roofline = roofline_of(start.model.shape, device, start.dtype, start.scheme, start.cache_dtype)
    core = EngineCore(scheduler, pool.executor, hooks=hooks, roofline=roofline, steps=steps)
    core.adapters = adapters
    return core, pool


def _ready(start: Prepared, core: EngineCore, pool: _Pool) -> Ready:
    """What is known of an engine by its parts."""
    size, blocks, roofline = pool.size, core.scheduler.blocks, core.roofline
    return Ready(
        protocol=PROTOCOL_VERSION,
        startup_ns={},
        num_blocks=size.num_blocks,
        block_size=blocks.block_size,
        max_model_len=size.max_model_len,
        device=str(start.device),
        kv_cache_dtype=start.cache_name,
        max_num_seqs=core.scheduler.config.max_num_seqs,
        pool_tokens=blocks.pool_tokens(size.max_model_len),
        pinned_blocks=len({blocks.node_of(block) for block in blocks.pinned}),  # those of all groups have one node
        checkpoints=None if blocks.checkpoints is None else blocks.checkpoints.num_slots,
        generates=pool.runner.generates,
        block_bytes=pool.block_bytes,
        draft_block_bytes=pool.draft_block_bytes,
        roofline="" if roofline is None else roofline.machine,
    )


def _load(start: Prepared, stages: _Stages, cache: WeightCache | None) -> Decoder:
    """The model, from the cache of packed weights where that has it."""
    config, kernels, followers = start.config, start.kernels, start.followers
    began = time.monotonic_ns()
    known = cache.weights(kernels.named) if cache is not None else None
    if known is not None:
        stages.done("weight_cache", time.monotonic_ns() - began)
    options = config.load_format, config.seed, stages.done, start.asked_len, config.quantization
    shared = None if followers is None else followers.of(kernels, start.model)
    return load_model(start.folder, start.dtype, kernels, start.device, *options, known, start.sinks, shared)


@dataclass(slots=True)
class _Pool:
    """The KV pool, and what runs steps on it."""

    size: PoolSize
    runner: Runner  # of this process
    executor: Executor  # the runner, or what has all ranks run steps
    ahead: AheadExecutor | None  # the same, if it can be given a step while the one before runs
    block_bytes: int  # of a block in all ranks
    draft_block_bytes: int  # of a block of the draft model's cache; 0 without one


def _allocate(start: Prepared, model: Decoder, draft: Decoder | None) -> _Pool:
    """Size the pool by the memory that is left beside the weights, and allocate it."""
    config, device, cache_dtype = start.config, start.device, start.cache_dtype
    grouped = _windows(model.config, cache_dtype, config.pipeline_parallel_size)
    windows, places = seen_windows(grouped, start.asked_len), model.config.shape.cache_places
    groups = [[places[at] for at in group] for group in group_layers(windows)] if windows else []
    block_bytes = bytes_per_block(model.config.caches, config.block_size, cache_dtype, groups)
    if start.followers is not None:
        block_bytes = start.followers.bytes_per_block(cache_dtype, groups)
    draft_block_bytes = 0 if draft is None else bytes_per_block(draft.config.caches, config.block_size, start.dtype)
    size = _pool(start, block_bytes + draft_block_bytes, grouped)
    seats = size.max_num_seqs or config.max_num_seqs
    host_blocks = _host_blocks(config, device, block_bytes, has_states=size.checkpoints is not None)
    shared_bytes = 0 if start.followers is None else start.followers.shared_bytes(size.num_blocks, block_bytes)
    if config.kv_offload is not None:
        from headway.engine.offload import staged_blocks

        host_blocks = max(host_blocks, staged_blocks(config, size, block_bytes))
    runner = Runner(
        model,
        start.kernels,
        device,
        cache_dtype,
        size.num_blocks,
        config.block_size,
        seats,
        size.max_model_len,
        host_blocks,
        size.checkpoints or 0,
        groups,
        graphs=not config.enforce_eager,
        folder=start.folder,
        draft_states=size.draft_states,
        pages=None if start.followers is None else start.followers.pages(shared_bytes),
    )
    executor: Executor = runner
    ahead: AheadExecutor | None = runner if runner.runs_ahead else None
    if start.followers is not None:
        from headway.engine.ranked import StagedExecutor, executor_of
        from headway.engine.ranks import Pool

        of_rank = 0 if shared_bytes else host_blocks
        sizes = size.num_blocks, seats, size.max_model_len, of_rank, size.checkpoints or 0
        executor = executor_of(runner, start.followers, Pool(*sizes, groups, shared_bytes), config)
        ahead = executor if isinstance(executor, StagedExecutor) and executor.runs_ahead else None
    return _Pool(size, runner, executor, ahead, block_bytes, draft_block_bytes)


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


def _windows(model: ModelConfig, cache_dtype: torch.dtype, stages: int) -> tuple[int | None, ...]:
    """The window of each place that KV cache groups have.

    It is empty for layers that are not alike and have an int8 cache: their scales would be in one place. So it is for
    stages, which would have parts of groups.
    """
    return () if stages > 1 or (model.shape.kinds and cache_dtype == torch.int8) else model.shape.cache_windows


def _pool(start: Prepared, block_bytes: int, windows: tuple[int | None, ...]) -> PoolSize:
    config, model, asked_len = start.config, start.model, start.asked_len
    tokens, sinks = config.batched_tokens(start.device.type), model.shape.attention_sinks
    return pool_size(
        kv_pool_bytes(config, start.device, model, tokens, asked_len),
        block_bytes,
        config.block_size,
        config.max_num_seqs,
        asked_len,
        config.max_model_len is None,
        model.shape.state_bytes,
        config.enable_prefix_caching,
        kv_cache_groups(windows, tokens, asked_len, config.block_size, sinks),
        "--gpu-memory-utilization or --kv-cache-memory" if config.kv_cache_memory is None else "--kv-cache-memory",
        0 if config.speculative_config is None else MOST_DRAFTS,
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


def _draft(start: Prepared, model: Decoder) -> Decoder | None:
    """The draft model or head, if one is asked for. Raises EngineError where there is none, or none that fits."""
    config, folder, how = start.config, start.folder, (start.config.load_format, start.config.seed)
    wanted = config.speculative_config
    if wanted is not None and config.ranks > 1 and model.config.shape.recurrent:
        raise EngineError(
            "speculative_config: drafts of a model with recurrent layers do not go with several ranks; leave one out"
        )
    if wanted is None or wanted.method == "ngram":
        return None
    try:
        if wanted.model is None:
            of_ends = folder, model.dtype, model.kernels, *how, config.quantization
            ends = load_ends(*of_ends) if config.ranks > 1 else None  # the ranks have parts of them
            return load_mtp_head(folder, model, *how, config.quantization, ends)
        if wanted.method == "eagle3":
            return load_eagle_head(resolve_model(wanted.model), model, config.quantization)
        sizes = model.config.shape.vocab, model.dtype
        return load_draft(resolve_model(wanted.model), folder, *sizes, model.kernels, model.device, *how)
    except ValueError as error:
        named = f"method {wanted.method!r}" if wanted.model is None else f"model {wanted.model!r}"
        raise EngineError(f"speculative_config: {named}: {error}") from None


def _adapters(start: Prepared, model: Decoder) -> tuple[Adapters, list[AdapterFound]]:
    """What serves adapters, and those that are named. Raises EngineError or ModelError where one cannot be served."""
    from headway.engine.adapters import adapters_of, found_in

    config, followers = start.config, start.followers
    adapters = adapters_of(config, model, None if followers is None else followers.fill)
    found = [found_in(adapters.find(each.path), each.name, each.path) for each in config.lora_modules]
    if not config.preload_what_fits and (failed := [each.error for each in found if each.error]):
        raise EngineError(failed[0])
    return adapters, found


def _hooks(
    start: Prepared, runner: Runner, scheduler: Scheduler, draft: Decoder | None, adapters: Adapters | None
) -> list[StepHooks]:
    """What takes part in steps, as far as it is asked for. Raises EngineError or ValueError where it cannot be."""
    config, host, hooks = start.config, runner.host, list[StepHooks]()
    if adapters is not None:
        from headway.engine.adapters import AdapterLoads

        hooks.append(AdapterLoads(adapters, scheduler))
    if config.kv_offload is not None and host is not None:
        from headway.engine.offload import offload_of

        hooks.append(offload_of(config, start.folder, scheduler, host, str(start.device)))
    if config.speculative_config is not None:
        hooks.append(_speculator(start, runner, scheduler, draft))
    if config.role != "both" and host is not None:
        from headway.engine.handover import Handovers, layout_of

        about = start.device.type, str(start.dtype), config.quantization, start.cache_name
        hooks.append(Handovers(config, scheduler, host, layout_of(config, start.folder, about, host)))
    if config.nvtx:
        from headway.engine.marks import StepMarks

        hooks.append(StepMarks())
    if config.record_traffic is not None:
        from headway.engine.traffic import traffic_of

        hooks.append(traffic_of(config, scheduler, str(start.device), start.cache_name))
    return hooks


def _speculator(start: Prepared, target: Runner, scheduler: Scheduler, draft: Decoder | None) -> Speculator:
    """What proposes drafts."""
    config, wanted = start.config, start.config.speculative_config
    assert wanted is not None
    most = wanted.num_speculative_tokens
    if draft is None:
        return Speculator(NgramDrafter(wanted), most, scheduler)
    blocks, limits = scheduler.blocks, scheduler.config
    sizes = blocks.num_blocks, blocks.block_size
    longest = min(draft.config.max_model_len, limits.max_model_len, blocks.num_blocks * blocks.block_size)
    inputs = draft.weights.embedding
    seats, graphs = limits.max_num_seqs, not (config.enforce_eager or isinstance(inputs, HeadInputs))
    runner = Runner(draft, draft.kernels, draft.device, draft.dtype, *sizes, seats, longest, graphs=graphs)
    empty = KVBlocks(*sizes, enable_prefix_caching=False)
    warm_up(replace(limits, max_model_len=longest), runner, empty, draft.kernels.warm_up_tokens)
    _capture(runner)
    drafting, pool = Drafting(most), KVBlocks(*sizes, config.enable_prefix_caching)
    of_model = runner, pool, longest, target.vocab_size
    model = DraftModel(*of_model)
    if isinstance(inputs, HeadInputs):
        model = head = DraftHead(wanted.method, inputs, *of_model)
        target.results = head.results
    model.measure(drafting)
    return Speculator(NgramDrafter(wanted), most, scheduler, model=model, drafting=drafting)


def _host_blocks(config: EngineConfig, device: torch.device, block_bytes: int, has_states: bool) -> int:
    """How many blocks can be swapped out; by default they take no more than a quarter of the memory that is free."""
    if has_states and config.role != "both":
        raise EngineError(f"role is {config.role}, but states of recurrent layers are not handed over; leave it out")
    if has_states:
        if config.swap_space:
            raise EngineError(
                f"swap_space is {config.swap_space:g} GiB, but states of recurrent layers are not swapped; leave it out"
            )
        return 0
    wanted = config.swap_bytes(device.type)
    if not wanted and config.role != "both":
        raise EngineError(f"role is {config.role}, and swap_space 0: what is handed over has no room; leave one out")
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
