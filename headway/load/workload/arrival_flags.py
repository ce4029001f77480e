"""What an arrival process is, and the flags that describe one. Without numpy, so that `--help` is quick."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

from headway.flags import Flag

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Times = NDArray[np.float64]

TRACES = ("azure", "mooncake", "burstgpt")  # datasets with times of their own
ARRIVALS = ("poisson", "gamma", "constant", "on-off", "ramp", "all-at-once", "trace")
_load = functools.partial(Flag, panel="Load")


@dataclass(frozen=True, slots=True)
class ArrivalFlags:
    """What the command line says of when requests are sent."""

    request_rate: Annotated[
        float | None, _load("Requests per second, or inf for all at once. Poisson arrivals by default.", common=True)
    ] = None
    arrival: Annotated[
        str | None, _load("Arrival process. Default: chosen from the other flags.", choices=ARRIVALS)
    ] = None
    burstiness: Annotated[float | None, _load("Shape of gamma arrivals: 1 is Poisson, less is burstier.")] = None
    on_seconds: Annotated[float | None, _load("Seconds of a burst, for on-off arrivals.")] = None
    off_seconds: Annotated[float | None, _load("Seconds between two bursts.")] = None
    ramp_up_strategy: Annotated[
        str | None, _load("How a ramp goes from its first rate to its last.", choices=("linear", "exponential"))
    ] = None
    ramp_up_start_rps: Annotated[float | None, _load("Requests per second at the start of a ramp.")] = None
    ramp_up_end_rps: Annotated[float | None, _load("Requests per second at the end of a ramp.")] = None


class Arrival(Protocol):
    """An arrival process."""

    @property
    def mean_rate(self) -> float | None:
        """Arrivals per second over a long time; None where there is no such number."""
        ...

    def offsets(self, count: int, rng: np.random.Generator) -> Times:
        """The first `count` arrival times, of shape [count].

        Raises:
            BenchError: when the process has fewer arrivals than that.
        """
        ...

    def offsets_until(self, duration_s: float, rng: np.random.Generator) -> Times:
        """All arrival times t with t < duration_s.

        Raises:
            BenchError: when a duration does not limit the process.
        """
        ...

    def describe(self) -> str:
        """A few words for titles and results."""
        ...
