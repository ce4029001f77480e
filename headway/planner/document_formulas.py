"""The figures of a step as documents 001 to 003 define them, beside ours, and why both differ.

Their formulas are of models whose layers all attend to everything, without experts or latents.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.cost.work import RMS_NORM_FLOPS, Operation
from headway.planner.formula import Formula, plain
from headway.planner.plan import Plan, PlannedStep

_PER_BYTE = "FLOP/byte"


def of_documents(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    """The documents' arithmetic intensities of a step, of its attention and of its norms."""
    shape = plan.deployment.shape
    if shape.latent is None and not shape.kinds and set(shape.sliding_windows) == {None} and shape.experts is None:
        yield _whole(plan, name)
        yield from _attention(plan, name, step)
    yield from _norms(name, step)
    if name != "prefill":
        yield _cache_alone(plan)
        if plan.workload.cached and plan.batch > 1:
            yield _shared_prefix(plan, step)


def _whole(plan: Plan, name: str) -> Formula:
    shape, weights = plan.deployment.shape, plan.weights_bytes
    parameters, width, kv = shape.num_parameters, shape.heads * shape.head_dim, plan.kv_bytes_per_token
    if name == "prefill":
        tokens = plan.workload.prompt
        pairs, flops = f"{tokens:,}^2", 2 * tokens * parameters + 4 * shape.attention_layers * tokens**2 * width
        moved, kept, new = weights + kv * tokens, f"{plain(kv)} * {tokens:,}", tokens
        rule = (
            "(2 × N × P + 4 × L × N² × d) / (weights + cache written): all N × N pairs, where the causal mask leaves "
            "half; and a cache that is written, and not read by those who come after a token as well"
        )
    else:
        batch, context = plan.batch, plan.workload.mean_context
        pairs, flops = f"{batch:,} * {context:,}", 2 * batch * parameters
        flops += 4 * shape.attention_layers * batch * context * width
        moved, kept, new = weights + kv * batch * context, f"{plain(kv)} * {batch:,} * {context:,}", batch
        rule = (
            "(2 × P + 4 × L × N × d) / (weights + cache read), both of all sequences: of P the embedding counts whole, "
            "where only the rows of the tokens are read"
        )
    return Formula(
        f"Arithmetic intensity of the {name}, as document 001 counts it",
        rule,
        f"(2 * {plain(new)} * {plain(parameters)} + 4 * {shape.attention_layers} * {pairs} * {plain(width)}) / "
        f"({plain(weights)} + {kept})",
        flops / moved,
        _PER_BYTE,
        "document 001, chapter 8",
    )


def _attention(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    shape, work = plan.deployment.shape, step.work[Operation.SCORES] + step.work[Operation.VALUES]
    yield Formula(
        f"Arithmetic intensity of attention in the {name}",
        "FLOPs / bytes of queries, keys, values and results",
        f"{plain(work.flops)} / {plain(work.bytes)}",
        work.intensity,
        _PER_BYTE,
        "counted from the shape, exactly",
    )
    width, kept = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if name == "prefill":
        tokens = plan.workload.prompt
        rule = "p × d / (d + d_kv): the causal mask leaves half of the pairs, and so half of this of a whole prompt"
        numbers, value = f"{tokens:,} * {width:,} / ({width:,} + {kept:,})", tokens * width / (width + kept)
    else:
        rule = "query heads / KV heads: keys and values alone, in 16 bits; queries and results are little beside them"
        numbers, value = f"{shape.heads} / {shape.kv_heads}", shape.heads / shape.kv_heads
    yield Formula(
        f"Arithmetic intensity of attention in the {name}, as document 002 counts it",
        rule,
        numbers,
        value,
        _PER_BYTE,
        "document 002, Attention Arithmetic Intensity",
    )


def _norms(name: str, step: PlannedStep) -> Iterator[Formula]:
    work = step.work[Operation.NORMS]
    yield Formula(
        f"Arithmetic intensity of norms in the {name}",
        "FLOPs / bytes: elements are read and written in their dtype, and the residual that is added as well",
        f"{plain(work.flops)} / {plain(work.bytes)}",
        work.intensity,
        _PER_BYTE,
        "counted from the shape, exactly",
    )
    yield Formula(
        f"Arithmetic intensity of norms in the {name}, as document 002 counts it",
        f"{RMS_NORM_FLOPS} FLOPs for each element (square, sum, scale, weight) / 1: as if it took one byte; a norm "
        "alone in 16 bits moves 4, and one with the residual 8",
        f"{RMS_NORM_FLOPS} / 1",
        float(RMS_NORM_FLOPS),
        _PER_BYTE,
        "document 002, Summary: Decode is the Bottleneck",
    )


def _cache_alone(plan: Plan) -> Formula:
    hardware, context = plan.deployment.hardware, plan.workload.mean_context
    rate = hardware.bytes_per_s * plan.deployment.parallelism.tensor * plan.deployment.parallelism.pipeline
    return Formula(
        "TPOT of one request, as document 003 counts it",
        "cache of its context / bandwidth of a replica: without the weights, which every step reads as well",
        f"{plain(plan.kv_bytes_per_token)} * {context:,} / {plain(rate)} * 1000",
        plan.kv_bytes_per_token * context / rate * 1e3,
        "ms",
        "document 003, 3.2",
    )


def _shared_prefix(plan: Plan, step: PlannedStep) -> Formula:
    again = plan.kv_bytes_per_token * plan.workload.cached * (plan.batch - 1)
    return Formula(
        "Bytes of the decode step, if the shared prefix were read once",
        "bytes of the decode step - cache of the prefix × further sequences; here each reads it, as in engines without "
        "cascade attention",
        f"{plain(step.bytes)} - {plain(plan.kv_bytes_per_token)} * {plan.workload.cached:,} * ({plan.batch:,} - 1)",
        step.bytes - again,
        "bytes",
        "document 002, Attention Doesn't Batch Well: prefix sharing",
    )
