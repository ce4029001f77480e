"""The figures of a step as documents 001 to 003 define them, beside ours, and why both differ.

Their formulas are of models whose layers all attend to everything, without experts or latents.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.cost.attention import read_once
from headway.cost.work import RMS_NORM_FLOPS, Operation
from headway.planner.formula import Formula, given
from headway.planner.plan import Plan, PlannedStep
from headway.planner.step_formulas import CHAPTER_8, EXACT, is_plain

_PER_BYTE = "FLOP/byte"


def of_documents(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    """The documents' arithmetic intensities of a step, of its attention and of its norms."""
    shape = plan.deployment.shape
    if is_plain(shape) and shape.experts is None:
        yield _whole(plan, name)
        yield from _attention(plan, name, step)
    yield from _norms(name, step)
    if name != "prefill":
        yield _cache_alone(plan)
        if is_plain(shape) and read_once(plan.workload.cached) and plan.batch > 1:
            yield _shared_prefix(plan, step)


def _whole(plan: Plan, name: str) -> Formula:
    shape, weights, kv = plan.deployment.shape, given(plan.weights_bytes), given(plan.kv_bytes_per_token)
    parameters, width = given(shape.num_parameters), given(shape.heads * shape.head_dim)
    tokens, batch, context = map(given, (plan.workload.prompt, plan.batch, plan.workload.mean_context))
    if name == "prefill":
        linear, attention = 2 * tokens * parameters, 4 * given(shape.attention_layers) * tokens**2 * width
        moved = weights + kv * tokens
        rule = (
            "(2 × N × P + 4 × L × N² × d) / (weights + cache written): all N × N pairs, where the causal mask leaves "
            "half; and a cache that is written, and not read by those who come after a token as well"
        )
    else:
        linear, attention = 2 * batch * parameters, 4 * given(shape.attention_layers) * batch * context * width
        moved = weights + kv * batch * context
        rule = (
            "(2 × P + 4 × L × N × d) / (weights + cache read), both of all sequences: of P the embedding counts whole, "
            "where only the rows of the tokens are read"
        )
    title = f"Arithmetic intensity of the {name}, as document 001 counts it"
    return Formula(title, rule, (linear + attention) / moved, _PER_BYTE, CHAPTER_8)


def _attention(plan: Plan, name: str, step: PlannedStep) -> Iterator[Formula]:
    shape, work = plan.deployment.shape, step.work[Operation.SCORES] + step.work[Operation.VALUES]
    title, rule = (
        f"Arithmetic intensity of attention in the {name}",
        "FLOPs / bytes of queries, keys, values and results",
    )
    yield Formula(title, rule, given(work.flops) / given(work.bytes), _PER_BYTE, EXACT)
    if name == "prefill":
        rule = "p × d / (d + d_kv): the causal mask leaves half of the pairs, and so half of this of a whole prompt"
        width, kept = given(shape.heads * shape.head_dim), given(shape.kv_heads * shape.head_dim)
        counted = given(plan.workload.prompt) * width / (width + kept)
    else:
        rule = "query heads / KV heads: keys and values alone, in 16 bits; queries and results are little beside them"
        counted = given(shape.heads) / given(shape.kv_heads)
    source = "document 002, Attention Arithmetic Intensity"
    yield Formula(f"{title}, as document 002 counts it", rule, counted, _PER_BYTE, source)


def _norms(name: str, step: PlannedStep) -> Iterator[Formula]:
    work, title = step.work[Operation.NORMS], f"Arithmetic intensity of norms in the {name}"
    rule = "FLOPs / bytes: elements are read and written in their dtype, and the residual that is added as well"
    yield Formula(title, rule, given(work.flops) / given(work.bytes), _PER_BYTE, EXACT)
    yield Formula(
        f"{title}, as document 002 counts it",
        f"{RMS_NORM_FLOPS} FLOPs for each element (square, sum, scale, weight) / 1: as if it took one byte; a norm "
        "alone in 16 bits moves 4, and one with the residual 8",
        given(RMS_NORM_FLOPS) / 1,
        _PER_BYTE,
        "document 002, Summary: Decode is the Bottleneck",
    )


def _cache_alone(plan: Plan) -> Formula:
    hardware, context = plan.deployment.hardware, given(plan.workload.mean_context)
    rate = hardware.bytes_per_s * plan.deployment.parallelism.tensor * plan.deployment.parallelism.pipeline
    return Formula(
        "TPOT of one request, as document 003 counts it",
        "cache of its context / bandwidth of a replica: without the weights, which every step reads as well",
        given(plan.kv_bytes_per_token) * context / given(rate) * 1000,
        "ms",
        "document 003, 3.2",
    )


def _shared_prefix(plan: Plan, step: PlannedStep) -> Formula:
    prefix = given(plan.kv_bytes_per_token) * given(read_once(plan.workload.cached))
    return Formula(
        "Bytes of the decode step, if each sequence read the shared prefix",
        "bytes of the decode step + cache of the prefix × further sequences; here attention reads whole parts of it "
        "once for all, which engines without cascade attention do not",
        given(step.bytes) + prefix * (given(plan.batch) - 1),
        "bytes",
        "document 002, Attention Doesn't Batch Well: prefix sharing",
    )
