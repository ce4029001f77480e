"""The arrival process that the command line's flags describe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from headway.bench.errors import BenchError
from headway.bench.workload.arrivals import AllAtOnce, Arrival, Constant, Gamma, OnOff, Poisson, Ramp
from headway.bench.workload.traces import TRACES

ARRIVALS = ("poisson", "gamma", "constant", "on-off", "ramp", "all-at-once", "trace")


def make_arrival(
    kind: str | None = None,
    *,
    request_rate: float | None = None,
    burstiness: float | None = None,
    on_s: float | None = None,
    off_s: float | None = None,
    ramp_up_strategy: str | None = None,
    ramp_up_start_rps: float | None = None,
    ramp_up_end_rps: float | None = None,
    dataset_name: str | None = None,
) -> Arrival | None:
    """The process that the command line's flags describe; None leaves times to the dataset or to a closed loop.

    Args:
        kind: one of ARRIVALS, or None to tell from the flags that were given: a ramp's, the phases', a burstiness
            other than 1, and else Poisson at `request_rate`. An infinite rate is "all-at-once", no rate at all None.
        dataset_name: whose times "trace" means; None where there is not one dataset but a mix.

    Raises:
        BenchError: naming a flag that is missing, or one that does not belong to the process.
    """
    given = {
        "--request-rate": request_rate,
        "--burstiness": None if burstiness == 1 and kind != "gamma" else burstiness,
        "--on-seconds": on_s,
        "--off-seconds": off_s,
        "--ramp-up-strategy": ramp_up_strategy,
        "--ramp-up-start-rps": ramp_up_start_rps,
        "--ramp-up-end-rps": ramp_up_end_rps,
    }
    given = {flag: value for flag, value in given.items() if value is not None}
    kind = _kind_of(given) if kind is None else kind
    if kind is None:
        return None
    if kind == "poisson" and request_rate == math.inf:
        kind = "all-at-once"
    build: dict[str, tuple[Callable[..., Arrival | None], Sequence[str], Sequence[str]]] = {
        "poisson": (Poisson, ["--request-rate"], []),
        "gamma": (Gamma, ["--request-rate", "--burstiness"], []),
        "constant": (Constant, ["--request-rate"], []),
        "on-off": (OnOff, ["--request-rate", "--on-seconds", "--off-seconds"], []),
        "ramp": (Ramp, ["--ramp-up-start-rps", "--ramp-up-end-rps"], ["--ramp-up-strategy"]),
        "all-at-once": (AllAtOnce, [], []),
        "trace": (lambda: None, [], []),
    }
    if kind not in build:
        raise BenchError(f"--arrival is '{kind}'; it must be one of {', '.join(ARRIVALS)}")
    if kind == "trace" and dataset_name not in TRACES:
        raise BenchError(f"--arrival trace needs a dataset with times: --dataset-name {', '.join(TRACES)}")
    make, needed, optional = build[kind]
    if kind == "all-at-once" and given.get("--request-rate") == math.inf:
        del given["--request-rate"]
    return make(*_values_of(kind, given, needed, optional))


def _values_of(kind: str, given: dict[str, Any], needed: Sequence[str], optional: Sequence[str]) -> list[Any]:
    for flag in needed:
        if flag not in given:
            raise BenchError(f"--arrival {kind} needs {flag}")
    for flag, value in given.items():
        if flag not in [*needed, *optional]:
            raise BenchError(f"{flag} is {value}, which --arrival {kind} has no use for; leave one of the two out")
    return [given[flag] for flag in [*needed, *optional] if flag in given]


def _kind_of(given: dict[str, Any]) -> str | None:
    if any(flag.startswith("--ramp-up") for flag in given):
        return "ramp"
    if "--on-seconds" in given or "--off-seconds" in given:
        return "on-off"
    if "--burstiness" in given:
        return "gamma"
    return "poisson" if "--request-rate" in given else None
