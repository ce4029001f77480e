"""Makes a server that can be simulated from the names of a model and of hardware."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from headway.config_files.classes import ClassFile, read_class_file
from headway.config_files.tenants import TenantFile, read_tenant_file
from headway.cost.capacity import Capacity, capacity, remedies, sequence_bytes
from headway.cost.hardware import Hardware
from headway.cost.loading import HOST_LINK_SHARE
from headway.cost.memory import adapter_bytes
from headway.cost.timing import Deployment
from headway.flags import Flag, Needs, size
from headway.planner.engines import HEADWAY, EngineProfile, find_profile
from headway.planner.request import DeploymentOptions, HardwareName, ModelName, PlanError, PlanRequest
from headway.planner.resolve import Resolved, draft_of, find_hardware, resolve
from headway.planner.words import gigabytes
from headway.policy.admission.queue_bound import QueuedRequests, QueuedTokens, QueueLimits
from headway.policy.admission.quota import Quotas
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.kv_groups import kv_cache_groups, layers_per_group, seen_windows
from headway.policy.cache.sizing import CPU_SHARE, PoolSize, pool_size
from headway.policy.cache.states import MOST_DRAFTS
from headway.policy.cache.swap import NO_SWAP, SwapSpace
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.speculative_config import SpeculativeConfig
from headway.simulator.adapters import AdapterPlan, Adapters
from headway.simulator.drafts import DraftPlan, Drafts
from headway.simulator.engine import Host, NextEngine
from headway.simulator.server import Server
from headway.simulator.static import StaticServer
from headway.simulator.timing import DecodeTiming, Predicted

MOST_HOST_BLOCKS = 100_000_000


def chances(text: str) -> tuple[float, ...]:
    """Parse probabilities with commas between them. Raises ValueError."""
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0.0 <= each <= 1.0 for each in found):
        raise ValueError(f"{text!r}: give a probability from 0 to 1, or several with commas between them")
    return found


_deployment, _engine = functools.partial(Flag, panel="Deployment"), functools.partial(Flag, panel="Engine")
_server = functools.partial(Flag, panel="Server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(DeploymentOptions):
    """A model on hardware, and the bounds of its server.

    Args:
        kv_cache_memory: bytes of the KV pool of a device; None is what the device has left.
        max_num_queued_reqs, max_num_queued_tokens: infinite for no limit, None suits the engine's size.
        acceptance: the chance that a draft is right, by its place.
        given: names of fields, here and in SchedulingOptions, that the user has given; the others have the defaults of
            the profile.
    """

    model: ModelName
    hardware: HardwareName
    tensor_parallel_size: Annotated[
        int, _deployment("Devices that share each layer.", min=1, common=True, needs=Needs.HARDWARE)
    ] = 1
    given: frozenset[str] = frozenset()
    scheduler_profile: Annotated[
        str,
        _engine(
            "continuous is the scheduler of the engine; static answers one padded batch after the other, without one.",
            choices=("continuous", "static"),
        ),
    ] = "continuous"
    kv_cache_memory: Annotated[
        int | None, _engine("Memory of the KV cache, such as 4G. Default: what remains.", parse=size, metavar="SIZE")
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        _engine(
            'Drafts as of headway serve, such as {"method": "ngram"} or {"method": "draft_model", "model": NAME}.',
            parse=SpeculativeConfig.of,
            metavar="JSON",
        ),
    ] = None
    acceptance: Annotated[
        tuple[float, ...] | None,
        _engine(
            "With --speculative-config: chance that a draft is right, 0 to 1; several by place, such as 0.8,0.7,0.6.",
            parse=chances,
            metavar="P[,P...]",
        ),
    ] = None
    lora_adapters: Annotated[
        int | None, _engine("Requests are for so many adapters, of a popularity as Zipf's law has it.", min=1)
    ] = None
    lora_zipf: Annotated[float, _engine("Exponent of that law; 0: all are as popular.", min=0)] = 1.0
    max_loras: Annotated[int, _engine("With --lora-adapters: how many a step may have.", min=1, max=1024)] = 8
    max_lora_rank: Annotated[int, _engine("Rank of these adapters.", min=1, max=256)] = 16
    service_classes: Annotated[
        ClassFile | None,
        _server(
            "TOML file with service classes and their objectives. Default: built-in classes.",
            parse=read_class_file,
            metavar="FILE",
            needs=Needs.RELOAD,
        ),
    ] = None
    tenants: Annotated[
        TenantFile | None,
        _server(
            "TOML file with tenants, their limits and weights.",
            parse=read_tenant_file,
            metavar="FILE",
            needs=Needs.RELOAD,
        ),
    ] = None
    max_num_queued_reqs: QueuedRequests = None
    max_num_queued_tokens: QueuedTokens = None


@dataclass(frozen=True, slots=True)
class Deployed:
    """A server that nothing has come to."""

    scheduler: Scheduler
    timing: DecodeTiming
    limits: QueueLimits
    host: Host
    about: dict[str, Any]  # JSON-able, what it is
    quotas: Quotas | None = None  # what its tenants may use; None without a file of tenants
    deployment: Deployment | None = None  # None where its times do not come from the cost model
    drafts: DraftPlan | None = None
    adapters: AdapterPlan | None = None
    is_static: bool = False

    def server(self, next_engine: NextEngine | None = None) -> Server:
        """Make the simulated server, without clients. The arguments are those of `simulate`."""
        parts = self.scheduler, self.timing, self.limits, self.host, None, None, next_engine, self.quotas
        if self.is_static:
            assert self.deployment is not None
            return StaticServer(self.deployment, *parts)
        server = Server(*parts)
        if self.drafts is not None:
            server.drafts = Drafts(self.drafts, self.scheduler)
        if self.adapters is not None:
            server.adapters = Adapters(self.adapters, self.scheduler)
        return server


def deploy(options: ServerOptions, scheduling: SchedulingOptions, pools: float = 1.0) -> Deployed:
    """A server with nothing in it, and the KV blocks of so many `pools` of such a server.

    Raises:
        PlanError, or another ValueError: there is no such thing, or it does not fit; one line.
    """
    if options.scheduler_profile == "static":
        _check_static(options)
    profile = find_profile(options.engine, HEADWAY)
    options = replace(options, engine=profile.key)
    hardware = find_hardware(options.hardware)[0]
    device = "cpu" if hardware.kind == "cpu" else "cuda"
    scheduling = with_defaults(scheduling, profile, hardware, options)
    found = resolve(_request(options, scheduling, device))
    held = capacity(found.deployment, 1, 1, found.settings)
    drafts = _drafts(options, found)
    pool = _pool(options, scheduling, device, found, held, drafts)
    pool = replace(pool, num_blocks=round(pool.num_blocks * pools))
    if options.service_classes is not None:
        scheduling = replace(scheduling, classes=options.service_classes.table)
    quotas = None
    if options.tenants is not None:
        scheduling = replace(scheduling, weights=options.tenants.table.weights)
        quotas = Quotas(options.tenants.table, 0)
    swap = _swap(options, scheduling, device, found)
    slots = options.max_loras if options.lora_adapters is not None else 0
    scheduler = scheduling.scheduler(device, pool, functools.partial(scheduler_of, profile, hardware, slots), swap)
    efficiency, usual = found.deployment.efficiency, None if profile.is_headway else math.inf
    limits = QueueLimits.for_engine(
        scheduler.config.max_num_seqs,
        scheduler.blocks.pool_tokens(pool.max_model_len),
        options.max_num_queued_reqs or usual,
        options.max_num_queued_tokens or usual,
    )
    about = {
        "name": "headway simulate",
        "model": found.model.name,
        "hardware": found.deployment.hardware.key,
        "tensor_parallel_size": options.tensor_parallel_size,
        "dtype": found.dtype,
        "quantization": found.quantization,
        "kv_cache_dtype": found.kv_cache_dtype,
        "engine": profile.key,
        "scheduler_profile": options.scheduler_profile,
        "efficiency": "as calibrated" if found.machine is not None else profile.efficiency,
        "max_model_len": pool.max_model_len,
        "max_num_seqs": scheduler.config.max_num_seqs,
        "max_num_batched_tokens": scheduler.config.max_num_batched_tokens,
        "num_blocks": pool.num_blocks,
        "block_size": scheduling.block_size,
    }
    per_output_ns = round(efficiency.output_s * 1e9)
    ahead = profile.limits(hardware).ahead
    host = Host(round(efficiency.request_s * 1e9), efficiency.token_s * 1e9, output_ns=per_output_ns, ahead=ahead)
    is_static = options.scheduler_profile == "static"
    timing, deployment = Predicted(found.deployment), found.deployment
    adapters = None
    if options.lora_adapters is not None:
        about |= {"lora_adapters": options.lora_adapters, "max_loras": options.max_loras}
        adapters = _adapters(options, options.lora_adapters, device, found.deployment)
    return Deployed(scheduler, timing, limits, host, about, quotas, deployment, drafts, adapters, is_static)


def _check_static(options: ServerOptions) -> None:
    """Raises PlanError where a batch without a scheduler is asked for together with what only a scheduler does."""
    of_scheduler = {each.name for each in fields(SchedulingOptions)} - {"max_num_seqs", "block_size"}
    of_scheduler |= {"speculative_config", "acceptance", "tenants", "service_classes", "lora_adapters"}
    for name in sorted(options.given & of_scheduler):
        raise PlanError(f"{name} is for a scheduler, which --scheduler-profile static has none of; leave it out")


def _adapters(options: ServerOptions, count: int, device: str, deployment: Deployment) -> AdapterPlan:
    """What adapters cost: a step reads each that it has, and a load goes over the host's link."""
    size = adapter_bytes(deployment.device, 1, options.max_lora_rank, deployment.precision)
    read = deployment.hardware.bytes_per_s * deployment.efficiency.matmul_bytes
    loaded = _host_rate(device, deployment.hardware) or read
    return AdapterPlan(count, options.lora_zipf, round(1e9 * size / loaded), round(1e9 * size / read))


def _drafts(options: ServerOptions, found: Resolved) -> DraftPlan | None:
    """What is asked for of drafts. Raises PlanError where it is not all said, or the model cannot draft."""
    asked = options.speculative_config
    if asked is None:
        if options.acceptance is not None:
            raise PlanError("--acceptance works only with --speculative-config")
        return None
    if options.acceptance is None:
        raise PlanError("--speculative-config needs --acceptance, which depends on draft, model and text")
    if asked.method not in ("ngram", "draft_model"):
        raise PlanError(f"--speculative-config: method {asked.method!r} is not simulated; ngram and draft_model are")
    model = None if asked.model is None else draft_of(asked.model, found.deployment)
    return DraftPlan(asked.num_speculative_tokens, options.acceptance, model)


def _request(options: ServerOptions, scheduling: SchedulingOptions, device: str) -> PlanRequest:
    shared = {each.name: getattr(options, each.name) for each in fields(DeploymentOptions)}
    return PlanRequest(
        model=options.model,
        hardware=options.hardware,
        tensor_parallel_size=options.tensor_parallel_size,
        max_num_batched_tokens=scheduling.batched_tokens(device),
        max_num_seqs=scheduling.max_num_seqs,
        block_size=scheduling.block_size,
        prompt_tokens=1,
        output_tokens=1,
        max_loras=options.max_loras if options.lora_adapters is not None else None,
        max_lora_rank=options.max_lora_rank,
        **shared,
    )


def _block_bytes(options: ServerOptions, found: Resolved, block_size: int) -> int:
    """Bytes of a device's part of a block, for all layers or those that a KV cache group has room for."""
    deployment, windows, shape = found.deployment, _windows(options, found), found.deployment.device
    if windows:
        kept = layers_per_group(windows) * shape.kv_elements_per_place
        return deployment.precision.kv.bytes_of(kept * block_size)
    return sequence_bytes(deployment, block_size, block_size, rolling=False) - shape.state_bytes


def _windows(options: ServerOptions, found: Resolved) -> tuple[int | None, ...]:
    """Windows that sequences outgrow; empty if there are none, or if the engine keeps all tokens."""
    if not found.settings.rolling:
        return ()
    return seen_windows(found.deployment.device.cache_windows, _longest(options, found))


def _longest(options: ServerOptions, found: Resolved) -> int:
    return options.max_model_len or found.model.shape.max_positions or found.model.shape.vocab


def _swap(options: ServerOptions, scheduling: SchedulingOptions, device: str, found: Resolved) -> SwapSpace:
    """Host memory for each device, behind its link; a CPU copies within its memory, which it reads and writes."""
    block_bytes = _block_bytes(options, found, scheduling.block_size)
    rate = _host_rate(device, found.deployment.hardware)
    if not rate:
        return NO_SWAP
    blocks = scheduling.swap_bytes(device) // block_bytes
    if blocks > MOST_HOST_BLOCKS:
        raise ValueError(
            f"--swap-space is {scheduling.swap_space:g} GiB, which is {blocks:.3g} blocks; "
            f"at most {MOST_HOST_BLOCKS:,} can be simulated"
        )
    return SwapSpace(blocks, block_ns=2e9 * block_bytes / rate)


def _host_rate(device: str, hardware: Hardware) -> float:
    """Bytes/s from or to the host's memory; 0 where that is not known."""
    return hardware.bytes_per_s / 2 if device == "cpu" else (hardware.host_bytes_per_s or 0.0) * HOST_LINK_SHARE


def _pool(
    options: ServerOptions,
    scheduling: SchedulingOptions,
    device: str,
    found: Resolved,
    held: Capacity,
    drafts: DraftPlan | None,
) -> PoolSize:
    """Blocks for keys and values, as many as a live engine would have."""
    block_size, longest = scheduling.block_size, _longest(options, found)
    if options.kv_cache_memory is None and not held.fits:
        helps = remedies(found.deployment, 1, 1, found.settings)
        raise PlanError(
            f"{found.model.name} does not fit: each device has {gigabytes(held.usable)} to use, of which weights take "
            f"{gigabytes(held.weights)}, activations and workspace {gigabytes(held.activations + held.workspace)}"
            + (f"; it would fit with {' or with '.join(helps)}" if helps else "")
        )
    draft, draft_bytes, left = None if drafts is None else drafts.model, 0, held.kv_pool
    if draft is not None:
        draft_bytes = sequence_bytes(draft, block_size, block_size, rolling=False)
        share = CPU_SHARE if device == "cpu" else 1.0
        left -= int(share * capacity(draft, 1, 1, found.settings).weights)
    return pool_size(
        left if options.kv_cache_memory is None else options.kv_cache_memory,
        _block_bytes(options, found, block_size) + draft_bytes,
        block_size,
        scheduling.max_num_seqs,
        longest,
        may_shrink=options.max_model_len is None,
        state_bytes=found.deployment.device.state_bytes,
        keep_checkpoints=scheduling.enable_prefix_caching,
        groups=kv_cache_groups(
            _windows(options, found),
            scheduling.batched_tokens(device),
            longest,
            block_size,
            found.model.shape.attention_sinks,
        ),
        draft_states=0 if drafts is None else MOST_DRAFTS,
    )


def with_defaults(
    scheduling: SchedulingOptions, profile: EngineProfile, hardware: Hardware, options: ServerOptions
) -> SchedulingOptions:
    """The options with the defaults of a profile, but for fields that were `given`."""
    defaults = profile.scheduling(hardware, options.max_model_len)
    return replace(scheduling, **{name: value for name, value in defaults.items() if name not in options.given})


def scheduler_of(
    profile: EngineProfile, hardware: Hardware, slots: int, config: SchedulerConfig, blocks: KVBlocks
) -> Scheduler:
    """Make a scheduler that follows the rules of a profile, with slots for so many adapters."""
    lookahead = config.lookahead if profile.lookahead is None else profile.lookahead
    sharing = profile.limits(hardware).sharing
    return Scheduler(replace(config, lookahead=lookahead, sharing=sharing, max_loras=slots), blocks)
