"""Formulas of weights, cache, memory, and the work and time of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headway.cost.attention import Chunk
from headway.cost.capacity import sequence_bytes
from headway.cost.memory import kv_cache_bytes
from headway.cost.parallel import stages
from headway.cost.precision import Format
from headway.cost.shape import ModelShape
from headway.cost.timing import LINEAR, PartTime
from headway.cost.work import (
    LAYER_NORM_FLOPS,
    NORMALISATION,
    RMS_NORM_FLOPS,
    Operation,
    compute_format,
    step_work,
    total,
)
from headway.planner.formula import Formula, plain
from headway.planner.plan import Plan, PlannedStep
from headway.policy.cache.kv_groups import group_windows, layers_per_group

EXACT = "counted from the shape, exactly"
FITTED = "efficiency: cost/tables/efficiency.toml"


def added(terms: Iterable[str]) -> str:
    return " + ".join(terms)


def of_weights(plan: Plan) -> Iterator[Formula]:
    shape, precision = plan.deployment.shape, plan.deployment.precision
    parts = {name: count for name, count in shape.parameters().items() if count}
    yield Formula(
        "Parameters",
        added([name.replace("_", " ") for name in parts]),
        added([plain(count) for count in parts.values()]),
        shape.num_parameters,
        "",
        EXACT,
    )
    kept = {
        "linear": precision.linear,
        "latent": precision.of_latent,
        "experts": precision.of_experts,
        "head": precision.head,
        "embedding": precision.rest,
        "rest": precision.rest,
    }
    groups = [(name, count, kept[name]) for name, count in shape.matrices().items() if count]
    yield Formula(
        "Bytes of weights",
        "parameters × bits / 8, scales of groups included: "
        + ", ".join(f"{name} in {format_.name}" for name, _, format_ in groups),
        added([_kept_in(plan, name, count, format_) for name, count, format_ in groups]),
        plan.weights_bytes,
        "bytes",
        "document 000, Memory Components; 4.25 bits of MXFP4: document 000, Models",
    )


def _kept_in(plan: Plan, part: str, count: int, format_: Format) -> str:
    """Bytes of so many parameters, as an expression; in a packed format, of padded panels with the scales of rows."""
    if format_.rows == 1:
        return f"{plain(count)} * {plain(format_.bits_per_element)} / 8"
    terms = [
        f"{number} * {plain(rows)} * ({plain(width)} * {plain(format_.bits_per_element)} + {format_.row_bits}) / 8"
        for number, rows, width in map(format_.filled_up, plan.deployment.shape.projections()[part])
        if number * rows * width
    ]
    return added(terms)


def of_cache(plan: Plan) -> Iterator[Formula]:
    shape, bits = plan.deployment.shape, plain(plan.deployment.precision.kv.bits_per_element)
    if shape.latent is None:
        rule = "2 × layers × KV heads × head dimension × bytes of an element"
        numbers = added(
            f"2 * {part.attention_layers} * {part.kv_heads} * {part.head_dim} * {bits} / 8"
            for part in shape.parts
            if part.projected_kv
        )
        source = "document 000, KV Cache Formula; document 002, KV Cache Memory Requirements; document 003, 3.3"
    else:
        rule = "layers × (latent + rotary key) × bytes of an element"
        numbers = f"{shape.layers} * ({shape.latent.kv_rank} + {shape.latent.rope_dim}) * {bits} / 8"
        source = "document 002, Multi-head Latent Attention; DeepSeek-V2 2024, section 2.1"
    yield Formula("Cache of a token", rule, numbers, plan.kv_bytes_per_token, "bytes", source)
    work, whole = plan.workload, _shared(plan)
    state = _states(shape)
    kept = _cached(plan, shape, work.prompt + work.output)
    numbers = f"({kept}{state}) * {plain(plan.batch)}"
    if whole:
        prefix = _cached(plan, shape, whole)
        own = _cached(plan, shape, work.prompt - whole + work.output)
        groups = min(plan.batch, plan.deployment.parallelism.data)
        shared, each = (f"({cached}{state})" for cached in (prefix, own))
        numbers = f"min({numbers}, {shared} * {groups} + {each} * {plain(plan.batch)})"
    yield Formula(
        "Cache of the batch",
        "(cache of a token in a layer × tokens in whole blocks, in all layers, + states) × sequences; what all share "
        "is held once",
        numbers,
        plan.kv_cache_bytes,
        "bytes",
        "document 000, KV Cache Formula; PagedAttention 2023 for the blocks; document 002, Sliding Window Attention",
    )


def _shared(plan: Plan) -> int:
    """Tokens of the prefix that all requests share, in whole blocks."""
    return plan.workload.cached // plan.settings.block_size * plan.settings.block_size


def _cached(plan: Plan, shape: ModelShape, tokens: int) -> str:
    """Bytes of cache of so many tokens in all layers."""
    kv, block = plan.deployment.precision.kv, plan.settings.block_size
    whole = f"ceil({plain(tokens)} / {block})"
    if plan.settings.rolling and any(shape.cache_windows):
        return f"{plain(kv.bytes_of(shape.kv_elements_per_place))} * ({_kept(shape, whole, block)})"
    return added(
        f"{plain(kv.bytes_of(part.kv_elements_per_layer))} * "
        + (f"({part.attention_layers} * {block} * {whole})" if part.attention_layers else "(0)")
        for part in shape.parts
        if part.projected_kv
    )


def _kept(shape: ModelShape, whole: str, block: int) -> str:
    """Tokens that layers with windows keep, in whole blocks and for the layers that a group has room for.

    They keep what the window sees, wherever blocks begin.

    Args:
        whole: blocks of all tokens.
    """
    windows, sinks = shape.cache_windows, shape.attention_sinks
    layers, groups = layers_per_group(windows), group_windows(windows)

    def blocks(window: int | None) -> str:
        if window is None:
            return whole
        first = sinks.sinks if sinks is not None and window == sinks.window else 0
        of_sinks = f"ceil({first} / {block}) + " if first else ""
        return f"min({whole}, {of_sinks}ceil({window - first - 1} / {block}) + 1)"

    return added([f"{groups.count(window) * layers} * {block} * {blocks(window)}" for window in dict.fromkeys(groups)])


def of_memory(plan: Plan) -> Iterator[Formula]:
    held, work = plan.capacity, plan.workload
    share = plan.settings.free_share
    free = f"({plain(held.memory)} - {plain(held.weights)} - {plain(held.workspace)})"
    yield Formula(
        "Memory left for the cache, of a device",
        "memory × share that the engine takes - weights - activations - workspace"
        if share is None
        else "what weights and workspace leave × share of it, or what activations leave of it if that is less",
        f"{plain(held.memory)} * {plan.settings.utilization:g} - {plain(held.weights)} - "
        f"{plain(held.activations)} - {plain(held.workspace)}"
        if share is None
        else f"min({free} * {share:g}, {free} - {plain(held.activations)})",
        held.kv_pool,
        "bytes",
        "document 002, Memory Limits Batch Size",
    )
    d, tokens = plan.deployment, work.prompt + work.output
    one, block, rolling = _of_one(plan, tokens), plan.settings.block_size, plan.settings.rolling
    stage = max(
        stages(d.device, d.parallelism.pipeline),
        key=lambda each: kv_cache_bytes(each, tokens, d.precision, block, rolling=rolling),
    )
    yield Formula(
        "Cache of one request, of a device",
        "cache of a token in a layer of a device × tokens in whole blocks, in the layers of a stage",
        f"{_cached(plan, stage, tokens)}{_states(stage)}",
        one,
        "bytes",
        "document 000, KV Cache Formula; document 002, Sliding Window Attention",
    )
    whole = _shared(plan)
    prefix, own = _of_one(plan, whole), _of_one(plan, work.prompt - whole + work.output)
    most = f"floor(max(0, {plain(held.kv_pool)}) / {plain(one)})"
    if whole:
        most = f"max({most}, floor(max(0, {plain(held.kv_pool)} - {plain(prefix)}) / {plain(own)}))"
    yield Formula(
        "Largest batch",
        "memory left for the cache / cache of one request, of each data-parallel group"
        if not whole
        else "(memory left - cache of the shared prefix) / cache of what each request has of its own; where more fit "
        "so, nothing is shared",
        f"{most} * {d.parallelism.data}",
        plan.max_batch,
        "requests",
        "document 002, Memory Limits Batch Size",
    )


def _states(shape: ModelShape) -> str:
    """What recurrent layers add to the cache of a sequence, in bytes."""
    return f" + {plain(shape.state_bytes)}" if shape.state_bytes else ""


def _of_one(plan: Plan, tokens: int) -> int:
    return sequence_bytes(plan.deployment, tokens, plan.settings.block_size, plan.settings.rolling)


def of_ridge(plan: Plan) -> Iterator[Formula]:
    hardware, precision = plan.deployment.hardware, plan.deployment.precision
    peak = hardware.rate(precision.linear.compute)
    yield Formula(
        "Ridge",
        f"peak rate of products in {hardware.arithmetic(precision.linear.compute)} / bandwidth",
        f"{plain(peak)} / {plain(hardware.bytes_per_s)}",
        plan.ridge_flops_per_byte,
        "FLOP/byte",
        "document 002, Recap: Arithmetic Intensity; Williams, Waterman and Patterson 2009",
    )


def of_step(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    yield from _flops(plan, name, step)
    parts = total(step.work.values())
    yield Formula(
        f"Bytes of the {name}",
        "weights + cache read + cache written; of the embedding only the rows of the tokens",
        added([plain(n) for n in (parts.weight_bytes, parts.kv_read_bytes, parts.kv_write_bytes)]),
        step.bytes,
        "bytes",
        "document 001, chapter 8; document 003, 3.2 for the cache",
    )
    yield Formula(
        f"Arithmetic intensity of the {name}",
        "FLOPs / bytes",
        f"{plain(step.flops)} / {plain(step.bytes)}",
        step.intensity,
        "FLOP/byte",
        "Williams, Waterman and Patterson 2009; document 002, Recap: Arithmetic Intensity",
    )
    longest = max(step.time.parts, key=lambda part: part.seconds)
    yield from _part(plan, name, longest)
    terms = [*(plain(part.seconds * 1e3) for part in step.time.parts), plain(step.time.host_s * 1e3)]
    yield Formula(
        f"Least time of the {name}",
        "the longer of FLOPs / peak rate and bytes / bandwidth of each operation, in the same order",
        added([plain(step.floors_s[part.name] * 1e3) for part in step.time.parts]),
        step.floor_s * 1e3,
        "ms",
        "Williams, Waterman and Patterson 2009",
    )
    yield Formula(
        f"Time of the {name}",
        added([*(part.name.replace("_", " ") for part in step.time.parts), "host"]),
        added(terms),
        step.time.seconds * 1e3,
        "ms",
        "roofline of each operation",
    )


def of_cache_saved(plan: Plan) -> Formula:
    d, tokens = plan.deployment, plan.workload.mean_context + 1
    naive = total(step_work(d.shape, [Chunk(tokens)], d.precision, d.flash).values()).flops
    return Formula(
        "Arithmetic that the cache saves",
        f"FLOPs of a pass over all {tokens:,} tokens, which a token takes without a cache / FLOPs of the decode step "
        "for each sequence",
        f"{plain(naive)} / ({plain(plan.decode.flops)} / {plain(plan.batch)})",
        naive / (plan.decode.flops / plan.batch),
        "times",
        "document 001, chapter 5, section 2, and chapter 6, section 3",
    )


def _flops(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    shape, work, context = plan.deployment.shape, step.work, plan.workload.mean_context
    prompt, cached = plan.workload.prompt, plan.workload.cached
    new = prompt - cached if name == "prefill" else plan.batch
    layers = [op for op in LINEAR if op in work and op is not Operation.HEAD]
    attention = work[Operation.SCORES].flops + work[Operation.VALUES].flops
    linear = sum(work[op].flops for op in layers)
    rule = added([op.replace("_", " ") for op in layers]) + ", 2 × tokens × elements each; of experts the k of a token"
    numbers, section = added([plain(work[op].flops) for op in layers]), "Mixture of Experts"
    if shape.experts is None and shape.latent is None:
        rule, section = "2 × tokens × elements of the layers' matrices", "Linear Layers"
        numbers = f"2 * {plain(new)} * {plain(shape.matrices()['linear'])}"
    source = f"document 001, chapter 8: 2 × N × P; document 002, {section}"
    yield Formula(f"FLOPs of the {name}: products with weights", rule, numbers, linear, "FLOP", source)
    if shape.latent is None and not shape.kinds and set(shape.sliding_windows) == {None} and plan.deployment.flash:
        yield _attention(plan, name, new, attention)
    else:
        yield Formula(
            f"FLOPs of the {name}: attention",
            "scores + values, over the pairs that the mask and the window leave",
            f"{plain(work[Operation.SCORES].flops)} + {plain(work[Operation.VALUES].flops)}",
            attention,
            "FLOP",
            "document 002, Sliding Window Attention; DeepSeek-V2 2024 for latents",
        )
    rows = 1 if name == "prefill" else plan.batch
    head = work[Operation.HEAD].flops
    of_norm = LAYER_NORM_FLOPS if shape.norm_bias else RMS_NORM_FLOPS
    yield Formula(
        f"FLOPs of the {name}: head",
        "2 × tokens that want logits × hidden size × vocabulary",
        f"2 * {plain(rows)} * {plain(shape.hidden)} * {plain(shape.vocab)}",
        head,
        "FLOP",
        "document 002, High-Level Dataflow",
    )
    yield Formula(
        f"FLOPs of the {name}",
        f"products with weights + attention + head + norms, {of_norm} for each element",
        added([plain(linear), plain(attention), plain(head), plain(sum(work[op].flops for op in NORMALISATION))]),
        step.flops,
        "FLOP",
        f"document 001, chapter 8; context {context:,}" if name != "prefill" else "document 001, chapter 8",
    )


def _attention(plan: Plan, name: str, new: int, flops: int) -> Formula:
    shape, cached = plan.deployment.shape, plan.workload.cached
    pairs = (
        f"({new:,} * {cached:,} + {new:,} * ({new:,} + 1) / 2)"
        if name == "prefill"
        else f"{new:,} * ({plan.workload.mean_context:,} + 1)"
    )
    return Formula(
        f"FLOPs of the {name}: attention",
        "4 × layers × query heads × head dimension × pairs of a query and a key that it may see",
        f"4 * {shape.attention_layers} * {shape.heads} * {shape.head_dim} * {pairs}",
        flops,
        "FLOP",
        "document 001, chapter 8, where a prompt has all N × N pairs; the causal mask leaves half",
    )


def _part(plan: Plan, name: str, part: PartTime) -> Iterator[Formula]:
    """The operation that takes longest, as an example of how all are timed."""
    label = part.name.replace("_", " ")
    if part.network_s:
        return
    hardware, deployment = plan.deployment.hardware, plan.deployment
    if part.compute_s:
        operation = Operation.SCORES if part.name == "attention" else Operation(part.name)
        peak = hardware.rate(compute_format(operation, deployment.precision))
        yield Formula(
            f"Arithmetic of {label}, which takes most of the {name}",
            "FLOPs of a device / (peak rate × share of it that is reached)",
            f"{plain(part.work.flops)} / ({plain(peak)} * {plain(part.work.flops / (part.compute_s * peak))}) * 1000",
            part.compute_s * 1e3,
            "ms",
            FITTED,
        )
    bandwidth = hardware.bandwidth(deployment.working_set)
    reached = part.work.bytes / (part.memory_s * bandwidth)
    yield Formula(
        f"Memory traffic of {label} in the {name}",
        "bytes of a device / (bandwidth × share of it that is reached)",
        f"{plain(part.work.bytes)} / ({plain(bandwidth)} * {plain(reached)}) * 1000",
        part.memory_s * 1e3,
        "ms",
        FITTED,
    )
    sharpness = deployment.efficiency.sharpness
    compute, memory, start = (plain(each * 1e3) for each in (part.compute_s, part.memory_s, part.overhead_s))
    overlapped = sharpness != float("inf")
    yield Formula(
        f"Time of {label} in the {name}",
        "both at the same time, neither without loss: (arithmetic^p + bytes^p)^(1/p), and starting kernels"
        if overlapped
        else "the longer of both, and starting kernels",
        f"({compute}^{sharpness:g} + {memory}^{sharpness:g})^(1 / {sharpness:g}) + {start}"
        if overlapped
        else f"max({compute}, {memory}) + {start}",
        part.seconds * 1e3,
        "ms",
        "roofline, Williams, Waterman and Patterson 2009; p: " + FITTED,
    )
