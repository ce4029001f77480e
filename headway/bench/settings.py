"""The settings that are saved with a result."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from headway.bench.options import BenchOptions, Claims, Output
from headway.bench.session import Session
from headway.load.workload.build import Workload
from headway.load.workload.spec import DATASET_FIELDS, WorkloadSpec


def settings_of(
    options: BenchOptions,
    session: Session,
    spec: WorkloadSpec,
    workload: Workload,
    max_concurrency: int | None,
    cache_salt: str = "",
) -> dict[str, Any]:
    """JSON-able, and enough to see the command that made a run; without keys and other secrets."""
    target, endpoint = options.target, session.server.endpoint
    of_target = {
        "backend": target.backend,
        "base_url": target.url,
        "endpoint": endpoint.route,
        "model": endpoint.model or "",
        "tokenizer": target.tokenizer_name,
        "tokens": session.tokens,
        "ignore_eos": endpoint.ignore_eos,
        "extra_body": target.body_fields,
        "cache_salt": cache_salt or None,
        "reuse_prefix_cache": options.reuse_prefix_cache,
        **({} if endpoint.generates else {"random_batch_size": options.random_batch_size}),
        "num_warmups": options.num_warmups,
        "probe_rate": options.probe_rate,
    }
    return of_target | settings_of_load(spec, workload, max_concurrency, options.claims, options.output)


def settings_of_load(
    spec: WorkloadSpec, workload: Workload, max_concurrency: int | None, claims: Claims, output: Output
) -> dict[str, Any]:
    """The settings that do not depend on which server is asked."""
    arrival = spec.arrival
    return {
        "label": output.label,
        "metadata": output.metadata,
        "workload": workload.description,
        "arrivals": workload.arrivals,
        "request_rate": arrival.mean_rate if arrival is not None else None,
        "burstiness": getattr(arrival, "burstiness", 1.0),
        "max_concurrency": max_concurrency,
        "num_prompts": len(workload.requests),
        "duration": spec.duration_s,
        "time_scale": spec.time_scale,
        "seed": spec.seed,
        "prompt_seed": spec.seed_of_prompts,
        "fingerprint": workload.fingerprint(),
        **_dataset(spec),
        "notes": workload.notes,
        "goodput": dict(claims.objectives),
        "goodput_by_class": {name: limits for name, limits in workload.classes.items() if limits},
        "price_per_hour": claims.price_per_hour,
    }


def _dataset(spec: WorkloadSpec) -> dict[str, Any]:
    """The dataset, and of its options those that were changed; or the mix."""
    if spec.mix is not None:
        return {"mix": str(spec.mix)}
    changed = {name: getattr(spec, name) for name, default in DATASET_FIELDS.items() if getattr(spec, name) != default}
    return {"dataset_name": spec.dataset_name} | {name: _plain(value) for name, value in changed.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        describe = getattr(value, "describe", None)
        return describe() if describe is not None else str(value)
    return value
