"""Makes a deployment of names and flags: which model, hardware, precision, parallelism and limits are meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.calibration.store import CalibratedMachine, StoreError, folder, load
from headway.cost import catalogue
from headway.cost.capacity import Settings, capacity
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware, network_of
from headway.cost.layers import AttentionSinks, ShapeError
from headway.cost.memory import adapter_bytes
from headway.cost.parallel import Parallelism, check, machines
from headway.cost.precision import QUANTIZATIONS, Precision, is_for_experts
from headway.cost.requests import Limits
from headway.cost.shape import ModelShape
from headway.cost.timing import Deployment
from headway.planner.engines import HEADWAY, VLLM, EngineProfile, find_profile
from headway.planner.models import DTYPES, Model, find_model
from headway.planner.request import PlanError, PlanRequest
from headway.policy.cache.sizing import CPU_SHARE, DEVICE_SHARE, sampling_bytes

# How this engine keeps the weights of some checkpoints: int4 names another scheme of its own, and it has no arithmetic
# in fp8.
_AS_PACKED = {"int4": "int4-weight-only", "fp8": "fp8-weight-only"}
MOST_PROMPT_STEPS = 10_000
MOST_TENSOR_PARALLEL = 64  # largest size that is chosen without a --count; a power of two


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a request means."""

    model: Model
    # prompt_tokens, output_tokens: tokens of a request.
    prompt_tokens: int
    output_tokens: int
    deployment: Deployment
    # dtype, quantization, kv_cache_dtype: what "auto" came to.
    dtype: str
    quantization: str
    kv_cache_dtype: str
    replicas: int  # how often the deployment is there, on `devices` devices in all
    devices: int
    engine: EngineProfile  # the server whose rules and limits these are
    limits: Limits  # limits of the engine that serves one data-parallel group
    settings: Settings  # the same engine's settings that decide about memory
    machine: CalibratedMachine | None  # the calibrated machine that it is for; None for hardware of the catalogue


def resolve(request: PlanRequest) -> Resolved:
    """What a request means. Raises PlanError when a name is not known or the model cannot be run like this."""
    try:
        model = _with_heads(_with_sinks(find_model(request.model, request.quantization), request), request.kv_heads)
        hardware, efficiency, machine = find_hardware(request.hardware, request.engine)
        if request.network_gb_per_s is not None:
            hardware = replace(hardware, network=network_of(request.network_gb_per_s))
        if request.host_link_gb_per_s is not None:
            hardware = _with_host_link(hardware, request.host_link_gb_per_s)
        dtype = _dtype(request, model, hardware)
        quantization = model.quantization if request.quantization == "auto" else request.quantization
        if request.quantization == "auto" and hardware.measured:  # it is served as it is packed
            quantization = _AS_PACKED.get(quantization, quantization)
        precision = _precision(model, dtype, quantization, request.kv_cache_dtype, hardware)
        shape = _absorbed(model.shape) if hardware.measured else model.shape
        alone = Deployment(shape, precision, hardware, efficiency, flash=request.flash_attention)
        profile = profile_of(request.engine, hardware)
        prompt_tokens, output_tokens = _lengths(request, model)
        limits = _limits(request, profile, hardware, prompt_tokens)
        settings = _settings(request, model.shape, hardware, limits)

        def fits(spread: Parallelism) -> bool:
            lengths = prompt_tokens, output_tokens, settings, request.cached_tokens
            return capacity(replace(alone, parallelism=spread), *lengths).fits

        parallelism = _parallelism(request, model.shape, hardware, fits)
        deployment = replace(alone, parallelism=parallelism)
    except ValueError as error:
        raise PlanError(str(error)) from None
    _check_flags(request, parallelism)
    devices = request.count or parallelism.devices
    if devices % parallelism.devices:
        raise PlanError(
            f"count is {devices}, but one replica takes {parallelism.devices} devices; give a multiple of that"
        )
    return Resolved(
        model=model,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        deployment=deployment,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=precision.kv.name,
        replicas=devices // parallelism.devices,
        devices=devices,
        engine=profile,
        limits=limits,
        settings=settings,
        machine=machine,
    )


def _with_host_link(hardware: Hardware, gb_per_s: float) -> Hardware:
    if hardware.kind == "cpu":
        raise PlanError(f"host_link_gb_per_s is {gb_per_s:g}, and {hardware.key} is its own host; leave it out")
    return replace(hardware, host_bytes_per_s=gb_per_s * 1e9)


def _with_sinks(model: Model, request: PlanRequest) -> Model:
    """The model, with attention sinks if they are asked for."""
    trained = model.shape.max_positions
    asked = request.attention_sinks, request.attention_window, request.block_size
    sinks = AttentionSinks.of(*asked, trained, request.max_model_len or trained)
    return model if sinks is None else replace(model, shape=model.shape.with_attention_sinks(sinks))


def _with_heads(model: Model, kv_heads: int | None) -> Model:
    """The model with another number of KV heads, if one is asked for."""
    return model if kv_heads is None else replace(model, shape=model.shape.with_kv_heads(kv_heads))


def profile_of(engine: str, hardware: Hardware) -> EngineProfile:
    """The engine of this name; "auto" is Headway on a calibrated machine, and vLLM elsewhere. Raises UnknownName."""
    return find_profile(engine, HEADWAY if hardware.measured else VLLM)


def find_hardware(name: str, engine: str = "auto") -> tuple[Hardware, Efficiency, CalibratedMachine | None]:
    """A calibrated machine with what was measured of it, or one of the catalogue with what `engine` reaches of it.

    Raises:
        ValueError: no such hardware or engine, or this calibrated machine cannot be read.
    """
    fitted_to = find_profile(engine).efficiency
    machines = calibrated(name)
    try:
        hardware = catalogue.find_hardware(name, [each.hardware for each in machines])
    except catalogue.UnknownName as error:
        said = str(error) if str(error).endswith("?") else f"{error};"
        raise PlanError(f"{said} `headway plan --list` lists all; for this machine, run `headway calibrate`") from None
    for machine in machines:
        if machine.hardware is hardware:
            return hardware, machine.efficiency, machine
    return hardware, catalogue.efficiency(hardware, fitted_to), None


def calibrated(name: str) -> tuple[CalibratedMachine, ...]:
    """Machines that `headway calibrate` has measured here, without those that cannot be read.

    Raises:
        StoreError: the one of this name is among the latter.
    """
    found = []
    for path in sorted(folder().glob("[!.]*.json")):
        try:
            found.append(load(path))
        except StoreError:
            if path.stem == name.strip().lower():
                raise
    return tuple(found)


def _dtype(request: PlanRequest, model: Model, hardware: Hardware) -> str:
    if request.dtype != "auto":
        if request.dtype not in DTYPES:
            raise PlanError(f"dtype is {request.dtype!r}; it must be auto, bfloat16, float16 or float32")
        return DTYPES[request.dtype]
    if not (short := {"bf16", "fp16"} & hardware.flops_per_s.keys()):
        return "float32"
    if "bf16" not in short:
        return "float16"
    return "bfloat16" if model.dtype == "float32" else model.dtype


def _precision(model: Model, dtype: str, quantization: str, kv_cache_dtype: str, hardware: Hardware) -> Precision:
    if quantization not in QUANTIZATIONS:
        raise PlanError(f"quantization is {quantization!r}; it must be one of auto, {', '.join(QUANTIZATIONS)}")
    if is_for_experts(quantization) and model.shape.experts is None:
        raise PlanError(f"quantization is {quantization}, and {model.name} has no experts; leave -experts out")
    if hardware.measured:
        precision = Precision.of_engine(dtype, quantization, kv_cache_dtype, model.shape.head_dim, hardware.kind)
    else:
        precision = Precision.named(dtype, quantization, kv_cache_dtype)
    return precision.for_experts_only() if quantization == "mxfp4" and model.shape.experts else precision


def _absorbed(shape: ModelShape) -> ModelShape:
    """The shape as this engine runs it: latent attention is absorbed for prompts too."""
    latent = shape.latent
    return shape if latent is None else replace(shape, latent=replace(latent, always_absorbed=True))


def _parallelism(
    request: PlanRequest, shape: ModelShape, hardware: Hardware, fits: Callable[[Parallelism], bool]
) -> Parallelism:
    """How the model is spread, as the request asks.

    Where it gives no tensor parallel size, that is what --count leaves for it, if one machine has so many devices.
    Otherwise it is the smallest size that fits, among the divisors of what --count leaves, or the powers of two.
    """

    def over(tensor: int) -> Parallelism:
        return Parallelism(
            tensor=tensor,
            pipeline=request.pipeline_parallel_size,
            data=request.data_parallel_size,
            experts=request.enable_expert_parallel,
            sequence=request.sequence_parallel,
        )

    if request.tensor_parallel_size is not None:
        return over(request.tensor_parallel_size)
    others = request.pipeline_parallel_size * request.data_parallel_size
    rest, left = divmod(request.count or others * MOST_TENSOR_PARALLEL, others)
    if left:
        return over(1)

    def can_be(tensor: int) -> bool:
        try:
            check(shape, over(tensor), hardware.link)
        except ShapeError:
            return False
        return True

    if request.count is not None and can_be(rest) and machines(rest * request.data_parallel_size, hardware.link) == 1:
        return over(rest)
    sizes = [size for size in range(1, rest + 1) if rest % size == 0 and can_be(size)]
    return next((spread for spread in map(over, sizes) if fits(spread)), over(1))


def _check_flags(request: PlanRequest, parallelism: Parallelism) -> None:
    for name, asked, devices in (
        ("sequence_parallel", request.sequence_parallel, parallelism.tensor),
        ("enable_expert_parallel", request.enable_expert_parallel, parallelism.tensor * parallelism.data),
    ):
        if asked and devices == 1:
            raise PlanError(
                f"{name} divides work among the devices of a layer, and there is 1; give --tensor-parallel-size 2 or "
                "more, or leave it out"
            )


def _lengths(request: PlanRequest, model: Model) -> tuple[int, int]:
    """Tokens of a prompt and of an answer. Raises PlanError where the context has no room for both."""
    limit, name = model.shape.max_positions, "the model's max_position_embeddings"
    if request.max_model_len is not None:
        limit, name = request.max_model_len, "max_model_len"
    prompt, answer = request.lengths(limit or None)
    tokens = prompt + answer
    if limit and tokens > limit:
        raise PlanError(
            f"prompt_tokens and output_tokens are {tokens:,} together, more than {name}, {limit:,}; ask for fewer"
            + (", or give --max-model-len for a model whose positions are scaled" if not request.max_model_len else "")
        )
    return prompt, answer


def _limits(request: PlanRequest, profile: EngineProfile, hardware: Hardware, prompt_tokens: int) -> Limits:
    usual = profile.limits(hardware)
    tokens, stall_s = usual.batched_tokens, usual.prefill_stall_s
    if profile.is_headway and request.max_num_batched_tokens is None:
        tokens = max(tokens, request.max_num_seqs or request.batch_size or 1)
    tokens = request.max_num_batched_tokens or tokens
    sequences = request.max_num_seqs or min(tokens, max(usual.sequences, request.batch_size or 1))
    if request.max_prefill_stall_ms is not None:
        stall_s = request.max_prefill_stall_ms / 1e3
    if sequences > tokens:
        raise PlanError(
            f"max_num_seqs is {sequences}, more than max_num_batched_tokens, {tokens}: each sequence takes a token of "
            "the step; raise the second or lower the first"
        )
    if (request.batch_size or 1) > sequences:
        raise PlanError(
            f"batch_size is {request.batch_size}, more than max_num_seqs, {sequences}; raise --max-num-seqs and "
            "--max-num-batched-tokens, or lower the batch"
        )
    if (steps := -(-(prompt_tokens - request.cached_tokens) // tokens)) > MOST_PROMPT_STEPS:
        raise PlanError(
            f"a prompt of {prompt_tokens:,} tokens takes {steps:,} steps of max_num_batched_tokens, "
            f"{tokens:,}; at most {MOST_PROMPT_STEPS:,} are planned, so raise --max-num-batched-tokens"
        )
    return replace(
        usual, batched_tokens=tokens, sequences=sequences, prefill_stall_s=stall_s, least_tokens=request.block_size
    )


def _settings(request: PlanRequest, shape: ModelShape, hardware: Hardware, limits: Limits) -> Settings:
    """The engine's settings that decide about memory.

    This engine keeps all tokens in an int8 cache of layers that differ in size, also those that a window has passed. On
    a CPU it takes a share of what is free, unless it is told another one. Other engines' samplers are part of the
    workspace.
    """
    longest, share = request.max_model_len or shape.max_positions or shape.vocab, request.gpu_memory_utilization
    return Settings(
        utilization=share or DEVICE_SHARE,
        free_share=CPU_SHARE if hardware.measured and hardware.kind == "cpu" and share is None else None,
        block_size=request.block_size,
        max_num_batched_tokens=limits.batched_tokens,
        max_num_seqs=limits.sequences,
        rolling=not (hardware.measured and shape.kinds and request.kv_cache_dtype == "int8"),
        sampler_bytes=sampling_bytes(limits.sequences, shape.vocab, longest) if hardware.measured else 0,
        adapter_bytes=adapter_bytes(shape, request.max_loras, request.max_lora_rank) if request.max_loras else 0,
    )


def draft_of(name: str, target: Deployment) -> Deployment:
    """A draft model beside another model: plain weights, on as many devices where these can share a layer of it.

    Raises:
        PlanError: there is no such model.
    """
    try:
        shape = find_model(name, "none").shape
    except ValueError as error:
        raise PlanError(f"draft {error}") from None
    alike = Parallelism(tensor=target.parallelism.tensor)
    try:
        check(shape, alike, target.hardware.link)
    except ShapeError:
        alike = Parallelism()
    precision = replace(target.precision, linear=target.precision.rest, experts=None)
    return Deployment(shape, precision, target.hardware, target.efficiency, alike, target.flash)
