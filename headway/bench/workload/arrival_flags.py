"""The arrival process that the command line's flags describe."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from headway.bench.errors import BenchError
from headway.bench.workload.arrivals import AllAtOnce, Arrival, Constant, Gamma, OnOff, Poisson, Ramp
from headway.bench.workload.traces import TRACES
from headway.flags import Flag

ARRIVALS = ("poisson", "gamma", "constant", "on-off", "ramp", "all-at-once", "trace")


_load = functools.partial(Flag, panel="Load")


@dataclass(frozen=True, slots=True)
class ArrivalFlags:
    """What the command line says of when requests are sent."""

    request_rate: Annotated[
        float | None,
        _load("Requests per second, or inf for all at once. Poisson arrivals by default.", min=0, common=True),
    ] = None
    arrival: Annotated[
        str | None, _load("Arrival process. Default: chosen from the other flags.", choices=ARRIVALS)
    ] = None
    burstiness: Annotated[float | None, _load("Shape of gamma arrivals: 1 is Poisson, less is burstier.")] = None
    on_seconds: Annotated[float | None, _load("Seconds of a burst, for on-off arrivals.")] = None
    off_seconds: Annotated[float | None, _load("Seconds between two bursts.")] = None
    ramp_up_strategy: Annotated[
        str | None,
        _load("How a ramp goes from its first rate to its last.", choices=("linear", "exponential")),
    ] = None
    ramp_up_start_rps: Annotated[float | None, _load("Requests per second at the start of a ramp.")] = None
    ramp_up_end_rps: Annotated[float | None, _load("Requests per second at the end of a ramp.")] = None


def make_arrival(flags: ArrivalFlags, dataset_name: str | None = None) -> Arrival | None:
    """The process that the flags describe; None leaves times to the dataset or to a closed loop.

    Without `arrival` the flags that were given tell: a ramp's, the phases', a burstiness other than 1, and else Poisson
    at `request_rate`. An infinite rate is "all-at-once", no rate at all None.

    Args:
        dataset_name: whose times "trace" means; None where there is not one dataset but a mix.

    Raises:
        BenchError: naming a flag that is missing, or one that does not belong to the process.
    """
    kind = flags.arrival
    said = {f"--{name.replace('_', '-')}": value for name, value in asdict(flags).items() if name != "arrival"}
    if flags.burstiness == 1 and kind != "gamma":
        del said["--burstiness"]
    given = {flag: value for flag, value in said.items() if value is not None}
    kind = _kind_of(given) if kind is None else kind
    if kind is None:
        return None
    if kind == "poisson" and flags.request_rate == math.inf:
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
