"""Why a plan cannot work, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.cost.capacity import capacity, remedies
from headway.cost.parallel import machines
from headway.cost.precision import ENGINE_CHECKPOINTS, ENGINE_KV_DTYPES, ENGINE_QUANTIZATIONS
from headway.planner.plan import Plan
from headway.planner.words import gigabytes, many
from headway.report.style import number

# The usual settings of an engine that decide about memory.
SHARE, BLOCK, TOKENS = 0.9, 16, 2048


def problem(plan: Plan) -> str | None:
    """Why a plan cannot work and what would help, in one or two sentences; None where it can work."""
    if not plan.capacity.fits:
        return _too_large(plan)
    if not plan.fits:
        return _too_many(plan)
    return _too_fast(plan) if plan.load == "rate" and plan.ttft is None else None


def _too_large(plan: Plan) -> str:
    held, work = plan.capacity, plan.workload
    helps = (*_settings(plan), *remedies(plan.deployment, work.prompt, work.output, plan.settings, work.cached))
    return (
        f"{plan.model} does not fit: each device has {gigabytes(held.usable)} of usable memory; weights need "
        f"{gigabytes(held.weights)}, activations and workspace {gigabytes(held.activations + held.workspace)}, and "
        f"{gigabytes(held.shortfall)} are missing, even for one request of {work.prompt + work.output:,} tokens. "
        + (f"It would fit with {'; or with '.join(helps)}." if helps else "No known option makes it fit.")
    )


def _settings(plan: Plan) -> Iterator[str]:
    """Settings of the engine that are worse for memory than the usual ones, where these would do."""
    now, tokens = plan.settings, min(TOKENS, plan.limits.batched_tokens)
    for flag, settings in (
        (f"--gpu-memory-utilization {SHARE:g}", replace(now, utilization=max(SHARE, now.utilization), free_share=None)),
        (f"--block-size {BLOCK}", replace(now, block_size=min(BLOCK, now.block_size))),
        (
            f"--max-num-batched-tokens {TOKENS}",
            replace(now, max_num_batched_tokens=tokens, max_num_seqs=min(now.max_num_seqs, tokens)),
        ),
    ):
        work = plan.workload
        changed = capacity(plan.deployment, work.prompt, work.output, settings, work.cached)
        if changed.fits:
            yield f"{flag} ({changed.max_batch:,} requests at once)"


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
        f"{number(plan.load_value)} requests/s is more than the {number(plan.saturation_rate)} that can be served: the "
        f"queue grows without limit, and so does TTFT. This rate needs {replicas:,} replicas, --tensor-parallel-size "
        f"{sizes.tensor} --count {replicas * sizes.devices}; or lower the rate."
    )


def warnings(plan: Plan) -> tuple[str, ...]:
    """What works, and may well be worse than the figures say."""
    return tuple(_warnings(plan))


def _warnings(plan: Plan) -> Iterator[str]:
    d, spread = plan.deployment, plan.deployment.parallelism
    link, group = d.hardware.link, spread.tensor * spread.data
    if link is not None and (nodes := machines(group, link)) > 1:
        shared = "tensor" if machines(spread.tensor, link) > 1 else "expert"
        yield (
            f"{group} devices are more than the {link.max_devices} that {link.kind} joins, so {shared} parallelism "
            f"goes over {nodes} machines, at {d.network.bytes_per_s / 1e9:g} GB/s of a device between them "
            "(--network-gb-per-s); pipeline stages send far less."
        )
    if d.hardware.measured:
        name, known = plan.quantization, (*ENGINE_QUANTIZATIONS, *ENGINE_CHECKPOINTS)
        if name not in known:
            yield f"This engine has no {name} weights here, only {', '.join(known)}; the plan assumes another engine."
        if plan.request.kv_cache_dtype not in ENGINE_KV_DTYPES:
            yield f"This engine has no cache in {plan.kv_cache_dtype}, only {', '.join(ENGINE_KV_DTYPES)}."
