"""Plans side by side."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headway.planner.compare import ROWS, SHARED, marks, merged, parse_plans, told_apart
from headway.planner.make import make_plan
from headway.planner.plan import Estimate, Plan
from headway.planner.request import PlanError, PlanOptions, PlanRequest, Speculation, SpeculationFlags
from tests.planner.command_line import CommandLine

LIGHT: dict[str, Any] = {"prompt_tokens": 128, "output_tokens": 16, "max_num_seqs": 16}


def planned(model: str = "llama-3.1-8b", hardware: str = "H100-SXM", **settings: Any) -> Plan:
    return make_plan(PlanRequest(model, hardware, **{**LIGHT, **settings}))


def flags(*texts: str) -> list[dict[str, Any]]:
    return [each.flags for each in parse_plans(texts)]


def test_what_is_left_out_is_that_of_the_first_plan() -> None:
    assert flags("llama-3.1-8b@2xH100-SXM:tp=2", "@A100-80GB-SXM", "qwen2.5-7b", "qwen3-8b@4xL4") == [
        {"model": "llama-3.1-8b", "hardware": "H100-SXM", "count": 2, "tensor_parallel_size": 2},
        {"model": "llama-3.1-8b", "hardware": "A100-80GB-SXM"},
        {"model": "qwen2.5-7b", "hardware": "H100-SXM", "count": 2},
        {"model": "qwen3-8b", "hardware": "L4", "count": 4},
    ]


def test_options_are_the_flags_of_a_plan() -> None:
    first, _ = flags(
        "./folder/model@H100:quantization=fp8,kv-cache-dtype=fp8,gpu_memory_utilization=0.8,enable-expert-parallel,"
        "flash-attention=false,num-speculative-tokens=3,acceptance-rate=0.7,concurrency=8",
        "@L4",
    )
    assert first == {
        "model": "./folder/model",
        "hardware": "H100",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.8,
        "enable_expert_parallel": True,
        "flash_attention": False,
        "num_speculative_tokens": 3,
        "acceptance_rate": 0.7,
        "concurrency": 8,
    }


@pytest.mark.parametrize("name", ["MI300X", "RTX-4090", "rtx4090", "RTX-PRO-6000"])
def test_names_with_an_x_and_a_number_have_no_count(name: str) -> None:
    assert flags(f"a@{name}", f"a@8x{name}") == [
        {"model": "a", "hardware": name},
        {"model": "a", "hardware": name, "count": 8},
    ]


def test_own_flags_go_before_shared_ones_and_an_own_load_replaces_theirs() -> None:
    shared, speculation = PlanOptions(concurrency=16, prompt_tokens=64), SpeculationFlags(acceptance_rate=0.5)
    own, other = parse_plans(["a@H100:batch-size=4,dtype=float16,num-speculative-tokens=3", "@L4"])
    expected = PlanRequest("a", "H100", Speculation(3, 0.5), batch_size=4, prompt_tokens=64, dtype="float16")
    assert merged(shared, speculation, own) == expected
    expected = PlanRequest("a", "L4", concurrency=16, prompt_tokens=64)
    assert merged(shared, SpeculationFlags(), other) == expected


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["llama-3.1-8b@H100-SXM"], "takes two plans or more"),
        (["llama-3.1-8b", "@H100-SXM"], "has no hardware"),
        (["@H100-SXM", "@H200"], "has no model"),
        (["llama-3.1-8b@H100-SXM:", "@H200"], "nothing after its colon"),
        (["llama-3.1-8b@H100-SXM:tp", "@H200"], "gives 'tensor_parallel_size' no value"),
        (["llama-3.1-8b@H100-SXM:tp=two", "@H200"], "is not a whole number"),
        (["llama-3.1-8b@H100-SXM:gpu-memory-utilization=most", "@H200"], "is not a number"),
        (["llama-3.1-8b@H100-SXM:flash-attention=maybe", "@H200"], "give true or false"),
        (["llama-3.1-8b@H100-SXM:model=x", "@H200"], "no flag of one plan"),
        (["llama-3.1-8b@H100-SXM:slo=x", "@H200"], "give --slo once"),
        (["llama-3.1-8b@H100-SXM", ""], "plan '' is empty"),
        (["llama-3.1-8b@H100-SXM", "@H200:quantisation=fp8"], "did you mean quantization?"),
        (["llama-3.1-8b@H100-SXM", "@0xH200"], "count is 0"),
        (["llama-3.1-8b@H100-SXMx4", "@H200"], "goes first: 4xH100-SXM"),
        (["llama-3.1-8b@H100-SXM", "llama-9@H200"], "plan 'llama-9@H200': model 'llama-9' is not known"),
        (["llama-3.1-8b@H100-SXM", "@H200:tp=3,count=3"], "plan '@H200:tp=3,count=3': --tensor-parallel-size is 3"),
    ],
)
def test_bad_input_is_one_line(headway: CommandLine, typed: list[str], says: str) -> None:
    assert says in headway("plan", "compare", *typed).error()


def test_an_unknown_option_names_one_that_is_known() -> None:
    with pytest.raises(PlanError, match=r"sets 'weights'.*such as quantization=fp8"):
        parse_plans(["a@b:weights=fp8", "@c"])


def estimate(value: float, arm: float) -> Estimate:
    return Estimate(value, value / arm, value * arm)


def test_plans_of_the_same_engine_and_architecture_are_told_apart_sooner() -> None:
    same, other, elsewhere = planned(), planned(quantization="fp8"), planned(hardware="L40S")
    arm = 1.2
    apart = math.exp(math.log(arm) * math.sqrt(2 * (1 - SHARED)))
    assert told_apart(same, estimate(1.0, arm), other, estimate(apart * 1.001, arm))
    assert not told_apart(same, estimate(1.0, arm), other, estimate(apart * 0.999, arm))
    assert not told_apart(same, estimate(1.0, arm), elsewhere, estimate(apart * 1.001, arm))
    assert told_apart(same, estimate(1.0, arm), elsewhere, estimate(arm**1.42, arm))


def test_arms_that_point_at_each_other_count() -> None:
    one, other = planned(), planned(hardware="L40S")
    low = Estimate(1.0, 0.1, 1.05)
    high = Estimate(1.2, 1.15, 9.0)
    assert told_apart(one, low, other, high)
    assert told_apart(other, high, one, low)
    assert not told_apart(one, Estimate(1.0, 0.95, 1.5), other, Estimate(1.2, 0.8, 1.25))
    assert not told_apart(one, Estimate(1.0, 0.95, math.inf), other, Estimate(9.0, 8.0, 9.5))


def test_marks_follow_from_the_figures() -> None:
    plans = [planned(), planned(hardware="L4"), planned("llama-3.1-405b", count=1), planned(hardware="H100-SXM")]
    rows = {row.key: row for row in ROWS}
    assert marks(rows["tpot_ms"], plans) == ["best", "", "", "best"]
    assert marks(rows["output_tokens_per_s"], plans) == ["best", "", "", "best"]
    assert plans[2].price_per_hour == plans[0].price_per_hour
    assert not any(marks(row, plans)[2] for row in ROWS)  # it does not fit
    assert marks(rows["weights_bytes"], plans[:1] * 2) == ["", ""]  # nothing to tell


def test_one_that_does_not_fit_does_not_stop_the_others(headway: CommandLine) -> None:
    typed = [
        "llama-3.1-8b@H100-SXM",
        "llama-3.1-405b@1xH100-SXM",
        "@L4",
        "--prompt-tokens",
        "128",
        "--output-tokens",
        "16",
    ]
    shown = headway("plan", "compare", *typed, "--concurrency", "4")
    assert shown.code == 0
    assert "llama-3.1-405b does not fit" in " ".join(shown.out.split())
    assert "Side by side" in shown.out and " *" in shown.out
    assert json.loads(headway("plan", "compare", *typed, "--json").out)[1]["best"] == []
    none = headway("plan", "compare", "llama-3.1-405b@1xH100-SXM", "@1xL4")
    assert none.code == 1


def test_speculation_counts(headway: CommandLine) -> None:
    typed = ["llama-3.1-8b@H100-SXM", ":num-speculative-tokens=3,acceptance-rate=0.7", "--concurrency", "4"]
    shared = ["--prompt-tokens", "128", "--output-tokens", "16", "--max-num-seqs", "16"]
    plain, faster = json.loads(headway("plan", "compare", *typed, *shared, "--json").out)
    assert plain["compared"]["tpot_ms"] == pytest.approx(plain["tpot_ms"])
    saved = plain["decode_step_ms"] - faster["speculation"]["tpot_ms"]
    assert faster["compared"]["tpot_ms"] == pytest.approx(plain["tpot_ms"] - saved)
    assert faster["compared"]["ttlt_ms"] == pytest.approx(plain["ttlt_ms"] - 15 * saved)
    times = plain["ttlt_ms"] / faster["compared"]["ttlt_ms"]
    assert faster["compared"]["output_tokens_per_s"] == pytest.approx(times * plain["output_tokens_per_s"])
    dollars = "cost_per_million_output_tokens"
    assert faster["compared"][dollars] == pytest.approx(plain[dollars] / times)
    assert "tpot_ms" in faster["best"] and "tpot_ms" not in plain["best"]
    assert "Figures include speculative decoding" in " ".join(headway("plan", "compare", *typed, *shared).out.split())


def test_json_is_a_list_of_plans(headway: CommandLine) -> None:
    shared = ["--prompt-tokens", "128", "--output-tokens", "16", "--concurrency", "4", "--max-num-seqs", "16"]
    ran = headway("plan", "compare", "llama-3.1-8b@H100-SXM", "@L4:quantization=fp8", *shared, "--json")
    first, second = json.loads(ran.out)
    alone = json.loads(headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", *shared, "--json").out)
    assert first["plan"] == "llama-3.1-8b@H100-SXM" and second["quantization"] == "fp8"
    assert {key: first[key] for key in alone} == alone
    assert "tpot_ms" in first["best"] and "weights_bytes" in second["best"]
    for each in (first, second):
        assert {key: each["compared"][key] for key in each["compared"] if key in each} == pytest.approx(
            {key: each[key] for key in each["compared"] if key in each}
        )
        assert each["compared"]["output_tokens_per_s_per_device"] == each["output_tokens_per_s"]
    assert not set(first["best"]) & set(first["close_to_best"])
