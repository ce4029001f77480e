"""Formulas of weights, cache, memory, and the work and time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from headway.cost.capacity import sequence_bytes
from headway.cost.memory import kv_cache_bytes
from headway.cost.parallel import stages
from headway.cost.precision import Format
from headway.cost.shape import ModelShape
from headway.cost.timing import LINEAR, PartTime
from headway.cost.work import LAYER_NORM_FLOPS, NORMALISATION, RMS_NORM_FLOPS, Operation, compute_format, total
from headway.planner.formula import Formula, Number, added, bracketed, given, larger, ms, rounded, smaller
from headway.planner.plan import Plan, PlannedStep
from headway.policy.cache.kv_groups import group_windows, layers_per_group

EXACT = "counted from the shape, exactly"
FITTED = "efficiency: cost/tables/efficiency.toml"
ROOFLINE = "Williams, Waterman and Patterson 2009"
CHAPTER_8 = "document 001, chapter 8"
CACHE = "document 000, KV Cache Formula"
WINDOWS = "document 002, Sliding Window Attention"
LIMITS = "document 002, Memory Limits Batch Size"


def in_words(names: Iterable[str]) -> str:
    """A sum of what is named so."""
    return " + ".join(name.replace("_", " ") for name in names)


def of_weights(plan: Plan) -> Iterator[Formula]:
    shape, precision = plan.deployment.shape, plan.deployment.precision
    parts = {name: count for name, count in shape.parameters().items() if count}
    yield Formula("Parameters", in_words(parts), added(map(given, parts.values())), "", EXACT)
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
        added(_kept_in(plan, name, count, format_) for name, count, format_ in groups).rounded_to(plan.weights_bytes),
        "bytes",
        "document 000, Memory Components; 4.25 bits of MXFP4: document 000, Models",
    )


def _kept_in(plan: Plan, part: str, count: int, format_: Format) -> Number:
    """Bytes of so many parameters; in a packed format, of padded panels with the scales of rows."""
    bits = given(format_.bits_per_element)
    if format_.rows == 1:
        return given(count) * bits / 8
    return added(
        given(number) * given(rows) * (given(width) * bits + format_.row_bits) / 8
        for number, rows, width in map(format_.filled_up, plan.deployment.shape.projections()[part])
        if number * rows * width
    )


def of_cache(plan: Plan) -> Iterator[Formula]:
    shape, bits = plan.deployment.shape, given(plan.deployment.precision.kv.bits_per_element)
    if shape.latent is None:
        rule = "2 × layers × KV heads × head dimension × bytes of an element"
        of_token = added(
            2 * given(part.attention_layers) * part.kv_heads * part.head_dim * bits / 8
            for part in shape.parts
            if part.projected_kv
        )
        source = f"{CACHE}; document 002, KV Cache Memory Requirements; document 003, 3.3"
    else:
        rule = "layers × (latent + rotary key) × bytes of an element"
        of_token = given(shape.layers) * (given(shape.latent.kv_rank) + shape.latent.rope_dim) * bits / 8
        source = "document 002, Multi-head Latent Attention; DeepSeek-V2 2024, section 2.1"
    yield Formula("Cache of a token", rule, of_token.rounded_to(plan.kv_bytes_per_token), "bytes", source)
    work, whole, batch = plan.workload, _shared(plan), given(plan.batch)
    of_batch = bracketed(_cached(plan, shape, work.prompt + work.output)) * batch
    if whole:
        prefix = bracketed(_cached(plan, shape, whole))
        own = bracketed(_cached(plan, shape, work.prompt - whole + work.output))
        groups = min(plan.batch, plan.deployment.parallelism.data)
        of_batch = smaller(of_batch, prefix * groups + own * batch)
    yield Formula(
        "Cache of the batch",
        "(cache of a token in a layer × tokens in whole blocks, in all layers, + states) × sequences; what all share "
        "is held once",
        of_batch,
        "bytes",
        f"{CACHE}; PagedAttention 2023 for the blocks; {WINDOWS}",
    )


def _shared(plan: Plan) -> int:
    """Tokens of the prefix that all requests share, in whole blocks."""
    return plan.workload.cached // plan.settings.block_size * plan.settings.block_size


def _cached(plan: Plan, shape: ModelShape, tokens: int) -> Number:
    """Bytes of cache of so many tokens in all layers, and the states of recurrent ones."""
    kv, block = plan.deployment.precision.kv, plan.settings.block_size
    blocks = rounded(math.ceil, given(tokens) / block)
    terms = []
    if plan.settings.rolling and any(shape.cache_windows):
        terms.append(given(kv.bytes_of(shape.kv_elements_per_place)) * bracketed(_kept(shape, blocks, block)))
    else:
        for part in shape.parts:
            if part.projected_kv:
                kept = given(part.attention_layers) * block * blocks if part.attention_layers else given(0)
                terms.append(given(kv.bytes_of(part.kv_elements_per_layer)) * bracketed(kept))
    return added([*terms, given(shape.state_bytes)] if shape.state_bytes else terms)


def _kept(shape: ModelShape, whole: Number, block: int) -> Number:
    """Tokens that layers with windows keep, in whole blocks and for the layers that a group has room for.

    They keep what the window sees, wherever blocks begin.

    Args:
        whole: blocks of all tokens.
    """
    windows, sinks = shape.cache_windows, shape.attention_sinks
    layers, groups = layers_per_group(windows), group_windows(windows)

    def blocks(window: int | None) -> Number:
        if window is None:
            return whole
        first = sinks.sinks if sinks is not None and window == sinks.window else 0
        kept = [Number(first, str(first)) / block] if first else []
        kept.append(Number(window - first - 1, str(window - first - 1)) / block)
        return smaller(whole, added(rounded(math.ceil, each) for each in kept) + 1)

    return added(given(groups.count(window) * layers) * block * blocks(window) for window in dict.fromkeys(groups))


def of_memory(plan: Plan) -> Iterator[Formula]:
    held, work, share = plan.capacity, plan.workload, plan.settings.free_share
    memory, weights, workspace = given(held.memory), given(held.weights), given(held.workspace)
    if share is None:
        rule = "memory × share that the engine takes - weights - activations - workspace"
        left = memory * given(plan.settings.utilization) - weights - given(held.activations) - workspace
    else:
        rule = "what weights and workspace leave × share of it, or what activations leave of it if that is less"
        free = bracketed(memory - weights - workspace)
        left = smaller(free * given(share), free - given(held.activations))
    name = "Memory left for the cache, of a device"
    yield Formula(name, rule, left.rounded_to(held.kv_pool), "bytes", LIMITS)
    d, tokens = plan.deployment, work.prompt + work.output
    one, block, rolling = _of_one(plan, tokens), plan.settings.block_size, plan.settings.rolling
    stage = max(
        stages(d.device, d.parallelism.pipeline),
        key=lambda each: kv_cache_bytes(each, tokens, d.precision, block, rolling=rolling),
    )
    yield Formula(
        "Cache of one request, of a device",
        "cache of a token in a layer of a device × tokens in whole blocks, in the layers of a stage",
        _cached(plan, stage, tokens),
        "bytes",
        f"{CACHE}; {WINDOWS}",
    )
    rule = "memory left for the cache / cache of one request, of each data-parallel group"
    pool, whole = given(held.kv_pool), _shared(plan)
    most = rounded(math.floor, larger(0, pool) / given(one))
    if whole:
        rule = (
            "(memory left - cache of the shared prefix) / cache of what each request has of its own; where more fit "
            "so, nothing is shared"
        )
        prefix, own = given(_of_one(plan, whole)), given(_of_one(plan, work.prompt - whole + work.output))
        most = larger(most, rounded(math.floor, larger(0, pool - prefix) / own))
    yield Formula("Largest batch", rule, most * d.parallelism.data, "requests", LIMITS)


def _of_one(plan: Plan, tokens: int) -> int:
    return sequence_bytes(plan.deployment, tokens, plan.settings.block_size, plan.settings.rolling)


def of_ridge(plan: Plan) -> Formula:
    hardware, precision = plan.deployment.hardware, plan.deployment.precision
    return Formula(
        "Ridge",
        f"peak rate of products in {hardware.arithmetic(precision.linear.compute)} / bandwidth",
        given(hardware.rate(precision.linear.compute)) / given(hardware.bytes_per_s),
        "FLOP/byte",
        f"document 002, Recap: Arithmetic Intensity; {ROOFLINE}",
    )


def of_step(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    yield from _flops(plan, name, step)
    parts = total(step.work.values())
    yield Formula(
        f"Bytes of the {name}",
        "weights + cache read + cache written; of the embedding only the rows of the tokens",
        added(map(given, (parts.weight_bytes, parts.kv_read_bytes, parts.kv_write_bytes))),
        "bytes",
        f"{CHAPTER_8}; document 003, 3.2 for the cache",
    )
    yield Formula(
        f"Arithmetic intensity of the {name}",
        "FLOPs / bytes",
        given(step.flops) / given(step.bytes),
        "FLOP/byte",
        f"{ROOFLINE}; document 002, Recap: Arithmetic Intensity",
    )
    longest = max(step.time.parts, key=lambda part: part.seconds)
    yield from _part(plan, name, longest)
    yield Formula(
        f"Least time of the {name}",
        "the longer of FLOPs / peak rate and bytes / bandwidth of each operation, in the same order",
        added(ms(step.floors_s[part.name]) for part in step.time.parts),
        "ms",
        ROOFLINE,
    )
    yield Formula(
        f"Time of the {name}",
        in_words([*(part.name for part in step.time.parts), "host"]),
        added(map(ms, [*(part.seconds for part in step.time.parts), step.time.host_s])),
        "ms",
        "roofline of each operation",
    )


def _flops(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    shape, work, context = plan.deployment.shape, step.work, plan.workload.mean_context
    new = plan.workload.prompt - plan.workload.cached if name == "prefill" else plan.batch
    layers = [op for op in LINEAR if op in work and op is not Operation.HEAD]
    if shape.experts is None and shape.latent is None:
        rule, section = "2 × tokens × elements of the layers' matrices", "Linear Layers"
        linear = 2 * given(new) * given(shape.matrices()["linear"])
    else:
        rule = f"{in_words(layers)}, 2 × tokens × elements each; of experts the k of a token"
        section = "Mixture of Experts"
        linear = added(given(work[op].flops) for op in layers)
    source = f"{CHAPTER_8}: 2 × N × P; document 002, {section}"
    yield Formula(f"FLOPs of the {name}: products with weights", rule, linear, "FLOP", source)
    if is_plain(shape) and plan.deployment.flash:
        rule = "4 × layers × query heads × head dimension × pairs of a query and a key that it may see"
        each, queries = 4 * given(shape.attention_layers) * shape.heads * shape.head_dim, given(new)
        if name == "prefill":
            attention = each * (queries * given(plan.workload.cached) + queries * (queries + 1) / 2)
        else:
            attention = each * queries * (given(context) + 1)
        source = f"{CHAPTER_8}, where a prompt has all N × N pairs; the causal mask leaves half"
    else:
        rule = "scores + values, over the pairs that the mask and the window leave"
        attention = given(work[Operation.SCORES].flops) + given(work[Operation.VALUES].flops)
        source = f"{WINDOWS}; DeepSeek-V2 2024 for latents"
    yield Formula(f"FLOPs of the {name}: attention", rule, attention, "FLOP", source)
    head = 2 * given(1 if name == "prefill" else plan.batch) * given(shape.hidden) * given(shape.vocab)
    yield Formula(
        f"FLOPs of the {name}: head",
        "2 × tokens that want logits × hidden size × vocabulary",
        head,
        "FLOP",
        "document 002, High-Level Dataflow",
    )
    of_norm = LAYER_NORM_FLOPS if shape.norm_bias else RMS_NORM_FLOPS
    parts = [linear.value, attention.value, head.value, sum(work[op].flops for op in NORMALISATION)]
    if Operation.RECURRENT in work:
        parts.append(work[Operation.RECURRENT].flops)
    yield Formula(
        f"FLOPs of the {name}",
        f"products with weights + attention + head + norms, {of_norm} for each element"
        + (" + recurrent layers" if Operation.RECURRENT in work else ""),
        added(map(given, parts)),
        "FLOP",
        f"{CHAPTER_8}; context {context:,}" if name != "prefill" else CHAPTER_8,
    )


def is_plain(shape: ModelShape) -> bool:
    """Whether all layers attend to everything, without latents."""
    return shape.latent is None and not shape.kinds and set(shape.sliding_windows) == {None}


def _part(plan: Plan, name: str, part: PartTime) -> Iterator[Formula]:
    """The operation that takes longest, as an example of how all are timed."""
    label = part.name.replace("_", " ")
    if part.network_s:
        return
    hardware, deployment = plan.deployment.hardware, plan.deployment
    if part.compute_s:
        operation = Operation.SCORES if part.name == "attention" else Operation(part.name)
        peak = hardware.rate(compute_format(operation, deployment.precision))
        reached = given(part.work.flops / (part.compute_s * peak))
        yield Formula(
            f"Arithmetic of {label}, which takes most of the {name}",
            "FLOPs of a device / (peak rate × share of it that is reached)",
            given(part.work.flops) / (given(peak) * reached) * 1000,
            "ms",
            FITTED,
        )
    bandwidth = hardware.bandwidth(deployment.working_set)
    reached = given(part.work.bytes / (part.memory_s * bandwidth))
    yield Formula(
        f"Memory traffic of {label} in the {name}",
        "bytes of a device / (bandwidth × share of it that is reached)",
        given(part.work.bytes) / (given(bandwidth) * reached) * 1000,
        "ms",
        FITTED,
    )
    compute, memory, p = ms(part.compute_s), ms(part.memory_s), given(deployment.efficiency.sharpness)
    if math.isinf(p.value):
        rule, both = "the longer of both, and starting kernels", larger(compute, memory)
    else:
        rule = "both at the same time, neither without loss: (arithmetic^p + bytes^p)^(1/p), and starting kernels"
        both = (compute**p + memory**p) ** (1 / p)
    yield Formula(
        f"Time of {label} in the {name}", rule, both + ms(part.overhead_s), "ms", f"roofline, {ROOFLINE}; p: {FITTED}"
    )
