"""Which process the flags describe."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headway.load.errors import BenchError
from headway.load.workload.arrival_flags import Arrival, ArrivalFlags
from headway.load.workload.arrivals import AllAtOnce, Constant, Gamma, OnOff, Poisson, Ramp, make_arrival


def made(dataset_name: str | None = None, **flags: Any) -> Arrival | None:
    return make_arrival(ArrivalFlags(**flags), dataset_name)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"request_rate": 5.0}, Poisson(5.0)),
        ({"request_rate": 5.0, "burstiness": 1.0}, Poisson(5.0)),
        ({"request_rate": 5.0, "burstiness": 0.5}, Gamma(5.0, 0.5)),
        ({"arrival": "gamma", "request_rate": 5.0, "burstiness": 1.0}, Gamma(5.0, 1.0)),
        ({"request_rate": math.inf}, AllAtOnce()),
        ({"arrival": "all-at-once"}, AllAtOnce()),
        ({"arrival": "all-at-once", "request_rate": math.inf}, AllAtOnce()),
        ({"arrival": "constant", "request_rate": 5.0}, Constant(5.0)),
        ({"request_rate": 5.0, "on_seconds": 1.0, "off_seconds": 2.0}, OnOff(5.0, 1.0, 2.0)),
        ({"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.0}, Ramp(1.0, 9.0)),
        (
            {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.0},
            Ramp(1.0, 9.0, "exponential"),
        ),
        ({"arrival": "trace", "dataset_name": "azure"}, None),
        ({"request_rate": 5.0, "dataset_name": "azure"}, Poisson(5.0)),
    ],
)
def test_flags_make_a_process(flags: dict[str, Any], expected: Arrival | None) -> None:
    assert made(**flags) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"arrival": "poisson"}, "--arrival poisson needs --request-rate"),
        ({"arrival": "gamma", "request_rate": 5.0}, "--arrival gamma needs --burstiness"),
        ({"on_seconds": 5.0, "request_rate": 1.0}, "--arrival on-off needs --off-seconds"),
        ({"ramp_up_start_rps": 5.0}, "--arrival ramp needs --ramp-up-end-rps"),
        (
            {"arrival": "trace", "request_rate": 5.0, "dataset_name": "mooncake"},
            "--request-rate is 5.0, which does not apply to --arrival trace",
        ),
        ({"arrival": "trace", "dataset_name": "random"}, "--arrival trace needs a dataset with times: .*azure"),
        ({"arrival": "trace"}, "--arrival trace needs a dataset with times"),
        ({"arrival": "constant", "request_rate": 5.0, "burstiness": 2.0}, "--burstiness is 2.0"),
        ({"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 5.0}, "--request-rate is 5.0"),
        ({"arrival": "sometimes"}, "--arrival is 'sometimes'; it must be one of poisson, gamma"),
        ({"request_rate": math.inf, "burstiness": 0.5}, "request rate is inf"),
        ({"request_rate": 0.0}, "request rate is 0"),
    ],
)
def test_flags_that_do_not_go_together_are_named(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError, match=words):
        made(**flags)
