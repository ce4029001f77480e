"""What can be asked of a plan, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headway.planner.request import PlanError, PlanRequest, Speculation, parse_slo


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 0),
        ("tensor_parallel_size", 0),
        ("pipeline_parallel_size", -1),
        ("data_parallel_size", 0),
        ("prompt_tokens", 0),
        ("output_tokens", 0),
        ("cached_tokens", -1),
        ("cached_tokens", 1024),
        ("output_spread", 1.5),
        ("output_spread", math.nan),
        ("batch_size", 0),
        ("concurrency", -3),
        ("request_rate", 0.0),
        ("request_rate", math.inf),
        ("request_rate", math.nan),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_model_len", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", math.nan),
        ("block_size", 0),
        ("price_per_hour", 0.0),
        ("price_per_hour", -1.0),
        ("price_per_hour", math.nan),
        ("slo", {"speed": 3.0}),
        ("slo", {"ttft": 0.0}),
        ("slo", {"ttft": 1e10}),
        ("count", 100_001),
        ("prompt_tokens", 10**9),
        ("concurrency", 10**9),
        ("batch_size", 10**7),
        ("max_num_seqs", 8193),
        ("block_size", 10**9),
        ("request_rate", 1e-300),
        ("request_rate", 1e7),
        ("price_per_hour", 1e-300),
        ("price_per_hour", 1e300),
    ],
)
def test_a_value_out_of_its_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field) as said:
        PlanRequest("llama-3.1-8b", "H100-SXM", **{field: value})
    assert "\n" not in str(said.value)


def test_two_loads_are_refused() -> None:
    with pytest.raises(PlanError, match="batch_size and request_rate are different"):
        PlanRequest("llama-3.1-8b", "H100-SXM", batch_size=2, request_rate=1.0)


def test_names_of_engines_and_precisions_count_in_any_case() -> None:
    request = PlanRequest("llama-3.1-8b", "H100-SXM", engine="vLLM", quantization="FP8", kv_cache_dtype="Auto")
    assert (request.engine, request.quantization, request.kv_cache_dtype) == ("vllm", "fp8", "auto")


@pytest.mark.parametrize(("tokens", "acceptance"), [(0, 0.5), (17, 0.5), (4, -0.1), (4, 1.1), (4, math.nan)])
def test_speculation_out_of_range(tokens: int, acceptance: float) -> None:
    with pytest.raises(PlanError, match=r"must be between|probability"):
        Speculation(tokens, acceptance)


def test_objectives_are_read() -> None:
    assert parse_slo(["ttft:200,tpot:50"]) == parse_slo(["ttft:200", "tpot:50"]) == {"ttft": 200.0, "tpot": 50.0}
    assert parse_slo(["e2el:1.5e3"]) == {"e2el": 1500.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        (",", "empty"),
        ("ttft", "KEY:MS"),
        ("ttft:fast", "not a number"),
        ("ttft:0", "slo: ttft:0.0 is not a limit; give milliseconds above 0"),
        ("ttft:inf", "slo: ttft:inf is not a limit"),
        ("ttft:nan", "slo: ttft:nan is not a limit"),
        ("speed:3", "ttft, tpot, e2el"),
        ("ttft:1,ttft:2", "twice"),
    ],
)
def test_objectives_that_cannot_be_used(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse_slo([text])
