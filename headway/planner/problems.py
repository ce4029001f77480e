"""Why a plan cannot work, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from headway.cost.capacity import capacity, remedies
from headway.planner.plan import Plan
from headway.planner.words import gigabytes, many
from headway.report.style import number

# The usual settings of an engine that decide about memory.
SHARE, BLOCK, TOKENS = 0.9, 16, 2048


def problem(plan: Plan) -> str | None:
    """One or two sentences; None where it can."""
    if not plan.capacity.fits:
        return _too_large(plan)
    if not plan.fits:
        return _too_many(plan)
    return _too_fast(plan) if plan.load == "rate" and plan.ttft is None else None


def _too_large(plan: Plan) -> str:
    held, work = plan.capacity, plan.workload
    helps = (
        *_settings(plan),
        *remedies(
            plan.deployment,
            work.prompt,
            work.output,
            utilization=plan.request.gpu_memory_utilization,
            block_size=plan.request.block_size,
            max_num_batched_tokens=plan.limits.batched_tokens,
            max_num_seqs=plan.limits.sequences,
        ),
    )
    return (
        f"{plan.model} does not fit: each device has {gigabytes(held.usable)} to use, of which weights take "
        f"{gigabytes(held.weights)}, activations and workspace {gigabytes(held.activations + held.workspace)}; for one "
        f"request of {work.prompt + work.output:,} tokens {gigabytes(held.shortfall)} are missing. "
        + (f"It would fit with {'; or with '.join(helps)}." if helps else "Nothing that is known here makes it fit.")
    )


def _settings(plan: Plan) -> Iterator[str]:
    """Settings of the engine that are worse for memory than the usual ones, where these would do."""
    share, block = plan.request.gpu_memory_utilization, plan.request.block_size
    tokens, sequences = plan.limits.batched_tokens, plan.limits.sequences
    for flag, settings in (
        (f"--gpu-memory-utilization {SHARE:g}", (max(SHARE, share), block, tokens)),
        (f"--block-size {BLOCK}", (share, min(BLOCK, block), tokens)),
        (f"--max-num-batched-tokens {TOKENS}", (share, block, min(TOKENS, tokens))),
    ):
        changed = capacity(
            plan.deployment,
            plan.workload.prompt,
            plan.workload.output,
            utilization=settings[0],
            block_size=settings[1],
            max_num_batched_tokens=settings[2],
            max_num_seqs=min(sequences, settings[2]),
        )
        if changed.fits:
            yield f"{flag} ({changed.max_batch:,} at once)"


def _too_many(plan: Plan) -> str:
    tokens = plan.workload.prompt + plan.workload.output
    return (
        f"A batch of {plan.batch:,} does not fit: memory holds {many(plan.max_batch, 'sequence')} of {tokens:,} "
        "tokens. "
        f"Use --batch-size {plan.max_batch}, or make room: with a --kv-cache-dtype of fewer bits, or with more devices "
        "for a replica."
    )


def _too_fast(plan: Plan) -> str:
    each, sizes = plan.saturation_rate / plan.replicas, plan.deployment.parallelism
    replicas = int(plan.load_value // each) + 1
    return (
        f"{number(plan.load_value)} requests/s are more than can be served, {number(plan.saturation_rate)}: the queue "
        f"grows without end, and so does TTFT. It takes {replicas:,} replicas, --tensor-parallel-size "
        f"{sizes.tensor} --count {replicas * sizes.devices}, for this rate, or a lower one."
    )
