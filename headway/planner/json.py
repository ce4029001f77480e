"""A plan as a JSON object: docs/plan.md says what each key means."""

from __future__ import annotations

import json
import math
from typing import Any

from headway.planner.answer import load_note
from headway.planner.plan import Estimate, Plan, PlannedStep
from headway.planner.tables import part_work
from headway.simulator.serving import PERCENTILES


def to_json(plan: Plan) -> str:
    """One object, indented. Figures that have no value are null."""
    return json.dumps(as_object(plan), indent=2, allow_nan=False)


def as_object(plan: Plan) -> dict[str, Any]:
    """Bytes, FLOPs and counts as they are; times in the unit that ends the key."""
    return (
        _what(plan)
        | _memory(plan)
        | _work(plan)
        | _speed(plan)
        | _money(plan)
        | {
            "loading_s": {
                "storage": plan.loading.storage_s,
                "deserialize": plan.loading.deserialize_s,
                "transfer": plan.loading.transfer_s,
                "layout": plan.loading.layout_s,
                "total": plan.loading.seconds,
                "overlapped": plan.loading.least_s,
                "storage_bytes_per_s": plan.storage_bytes_per_s,
            },
            "speculation": _speculation(plan),
            "operations": {"prefill": _operations(plan.prefill), "decode": _operations(plan.decode)},
            "assumptions": list(plan.assumptions),
            "warnings": list(plan.warnings),
        }
    )


def _what(plan: Plan) -> dict[str, Any]:
    parallelism, stall_ms = plan.deployment.parallelism, plan.limits.prefill_stall_s * 1e3
    return {
        "model": plan.model,
        "hardware": plan.hardware_key,
        "engine": plan.engine.key,
        "devices": plan.devices,
        "replicas": plan.replicas,
        "tensor_parallel_size": parallelism.tensor,
        "pipeline_parallel_size": parallelism.pipeline,
        "data_parallel_size": parallelism.data,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "prompt_tokens": plan.workload.prompt,
        "output_tokens": plan.workload.output,
        "cached_tokens": plan.workload.cached,
        "output_spread": plan.workload.spread,
        "load": plan.load,
        "load_value": plan.load_value,
        "batch": plan.batch,
        "context": plan.workload.mean_context,
        "max_num_batched_tokens": plan.limits.batched_tokens,
        "max_num_seqs": plan.limits.sequences,
        "max_prefill_stall_ms": stall_ms if math.isfinite(stall_ms) else None,
        "fits": plan.fits,
        "problem": plan.problem,
    }


def _memory(plan: Plan) -> dict[str, Any]:
    held, shape = plan.capacity, plan.deployment.shape
    return {
        "parameters": shape.num_parameters,
        "active_parameters": shape.active_parameters,
        "weights_bytes": plan.weights_bytes,
        "weights_bytes_per_device": held.weights,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "activation_bytes": held.activations,
        "workspace_bytes": held.workspace,
        "adapter_bytes": plan.settings.adapter_bytes,
        "memory_bytes_per_device": held.memory,
        "usable_bytes_per_device": held.usable,
        "kv_pool_bytes_per_device": held.kv_pool,
        "shortfall_bytes": held.shortfall,
        "max_batch": plan.max_batch,
        "max_context": held.max_context,
    }


def _work(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, planned, step in (("prefill", plan.prefill, "prefill"), ("decode", plan.decode, "decode_step")):
        found |= {
            f"flops_{step}": planned.flops,
            f"bytes_{step}": planned.bytes,
            f"activation_bytes_{step}": planned.activation_bytes,
            f"intensity_{name}": planned.intensity,
            f"bound_{name}": planned.bound,
            f"{step}_ms": planned.time.seconds * 1e3,
            f"{step}_floor_ms": planned.floor_s * 1e3,
        }
    return found | {
        "ridge_flops_per_byte": plan.ridge_flops_per_byte,
        "compute_bound_batch": plan.compute_bound_batch,
        "compute_bound_batch_weights": plan.compute_bound_weights,
    }


def _speed(plan: Plan) -> dict[str, Any]:
    served = plan.served if plan.ttft else None
    return (
        _estimate("ttft_ms", plan.ttft, 1e3)
        | {
            **{
                f"{name}_p{percent}_ms": getattr(served, f"{of_served}_p{percent}_s") * 1e3 if served else None
                for name, of_served in (("ttft", "ttft"), ("tpot", "tpot"), ("ttlt", "e2e"))
                for percent in PERCENTILES
            },
            "ttft_note": load_note(plan),
        }
        | _estimate("tpot_ms", plan.tpot, 1e3)
        | _estimate("ttlt_ms", plan.ttlt, 1e3)
        | _estimate("output_tokens_per_s", plan.output_tokens_per_s, 1.0)
        | {
            "running": plan.served.running if plan.served else None,
            "pipeline_bubble": plan.bubble if plan.output_tokens_per_s is not None else None,
            "saturation_requests_per_s": plan.saturation_rate if plan.capacity.fits else None,
            "slo": {name: {"limit_ms": limit, "met": plan.slo_met[name]} for name, limit in plan.request.slo.items()},
            "slo_met": all(plan.slo_met.values()) if plan.slo_met else None,
        }
    )


def _estimate(key: str, estimate: Estimate | None, factor: float) -> dict[str, float | None]:
    if estimate is None:
        return {key: None, f"{key}_low": None, f"{key}_high": None}
    high = estimate.high * factor
    return {
        key: estimate.value * factor,
        f"{key}_low": estimate.low * factor,
        f"{key}_high": high if math.isfinite(high) else None,
    }


def _money(plan: Plan) -> dict[str, Any]:
    costs = plan.costs
    return {
        "price_per_hour": plan.price_per_hour,
        "price_source": plan.price_source or None,
        "cost_per_million_output_tokens": costs.per_million_output_tokens,
        "split_cost_per_million_input_tokens": costs.split_input,
        "split_cost_per_million_output_tokens": costs.split_output,
        "tokens_per_s_per_watt": costs.tokens_per_s_per_watt,
        "kwh_per_million_output_tokens": costs.kwh_per_million,
    }


def _speculation(plan: Plan) -> dict[str, Any] | None:
    if (found := plan.speculated) is None:
        return None
    return {
        "tokens_per_step": found.accepted,
        "tpot_ms": found.tpot_s * 1e3,
        "speedup": found.speedup,
        "best_tokens": found.best_tokens,
        "break_even_acceptance": found.break_even,
    }


def _operations(step: PlannedStep) -> list[dict[str, Any]]:
    rows = []
    for part in step.time.parts:
        work = part_work(step, part.name)
        rows.append(
            {
                "name": part.name,
                "flops": work.flops if work else 0,
                "weight_bytes": work.weight_bytes if work else 0,
                "activation_bytes": work.activation_bytes if work else 0,
                "kv_bytes": work.kv_read_bytes + work.kv_write_bytes if work else 0,
                "ms": part.seconds * 1e3,
                "floor_ms": step.floors_s.get(part.name, 0.0) * 1e3,
                "bound": part.bound,
            }
        )
    return rows
