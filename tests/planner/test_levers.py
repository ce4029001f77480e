"""Levers: every figure is one of a plan with the lever's flags, and the ranking follows from them."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from typing import Any

import pytest

from headway.planner.changes import draft_model
from headway.planner.levers import LEAST_GAIN, Levers, choose_objective, find_levers
from headway.planner.levers_report import to_json
from headway.planner.make import make_plan
from headway.planner.numbers import gain_of, numbers_of
from headway.planner.request import PlanError, PlanRequest, Speculation
from tests.planner.command_line import CommandLine

# Small limits keep the plans quick.
LIGHT: dict[str, Any] = {"prompt_tokens": 128, "output_tokens": 16, "max_num_seqs": 16}
FLAGS = "--prompt-tokens 128 --output-tokens 16 --max-num-seqs 16"


def request(model: str = "llama-3.1-8b", hardware: str = "H100-SXM", **settings: Any) -> PlanRequest:
    return PlanRequest(model, hardware, **{**LIGHT, **settings})


@pytest.fixture(scope="module")
def clients() -> Levers:
    return find_levers(request(concurrency=8))


@pytest.fixture(scope="module")
def batch() -> Levers:
    return find_levers(request(batch_size=4), "tpot")


@pytest.fixture(scope="module")
def too_large() -> Levers:
    return find_levers(request("llama-3.1-70b", concurrency=4, count=1))


def test_figures_are_those_of_a_plan_with_the_flags(clients: Levers) -> None:
    for lever in clients.ranked:
        made = make_plan(replace(clients.base.request, **lever.proposal.settings))
        assert lever.numbers == numbers_of(made), lever.proposal.name
        assert lever.gain == gain_of(clients.numbers, numbers_of(made), clients.objective)


def test_the_command_line_shows_the_same_with_the_flags_typed(headway: CommandLine, batch: Levers) -> None:
    """A later flag takes the place of an earlier one, as a user would type it behind the others."""
    plain = f"plan llama-3.1-8b --hardware H100-SXM --batch-size 4 {FLAGS} --json"
    base = json.loads(headway(*shlex.split(plain)).out)
    assert len(batch.ranked) > 8
    for lever in batch.ranked:
        shown = json.loads(headway(*shlex.split(f"{plain} {lever.flags}")).out)
        tpot = shown["speculation"]["tpot_ms"] if shown["speculation"] else shown["tpot_ms"]
        assert lever.gain == pytest.approx(base["tpot_ms"] / tpot), lever.proposal.name
        assert lever.numbers.ttft_s == pytest.approx(shown["ttft_ms"] / 1e3)


def test_ranked_by_gain_and_every_kind_is_there(clients: Levers) -> None:
    gains = [lever.gain or 0.0 for lever in clients.ranked]
    assert gains == sorted(gains, reverse=True)
    kinds = {lever.proposal.kind for lever in clients.ranked}
    assert kinds >= {"weights", "speculation", "prefix", "parallel", "load", "hardware"}
    assert len([lever for lever in clients.ranked if lever.proposal.kind == "hardware"]) == 3


@pytest.mark.slow
def test_every_gain_has_a_bar_that_is_wider_on_other_hardware(clients: Levers) -> None:
    """Plans of one engine and architecture share half of their squared error."""
    arms = {}
    for lever in clients.ranked:
        assert lever.gain is not None and lever.gain_range is not None
        low, high = lever.gain_range
        assert low < lever.gain < high
        arms[lever.proposal.kind] = math.log(high / low)
    assert arms["hardware"] > 1.2 * arms["weights"]
    queued = find_levers(request(request_rate=0.5))
    assert all(lever.gain_range is None for lever in queued.ranked)  # in brief, such plans have no bars


def test_json_says_what_each_change_needs(clients: Levers) -> None:
    told = {lever["kind"]: lever for lever in json.loads(to_json(clients))["levers"]}
    needs = {kind: told[kind]["needs"] for kind in ("weights", "load", "hardware")}
    assert needs == {"weights": "restart", "load": "another load", "hardware": "other hardware"}
    assert told["weights"]["changes"][0]["where"] == "Deployment" and len(told["weights"]["gain_range"]) == 2


def test_throughput_is_that_of_a_device(clients: Levers) -> None:
    """Twice the devices that give less than twice the tokens are no gain."""
    double = next(lever for lever in clients.ranked if lever.proposal.name == "TP 2")
    assert double.numbers.devices == 2 and "--count 2" in double.flags
    assert clients.numbers.tokens_per_s and double.numbers.tokens_per_s
    assert clients.numbers.tokens_per_s < double.numbers.tokens_per_s < 2 * clients.numbers.tokens_per_s
    assert double.gain is not None and double.gain < 1


def test_replicas_merge_before_devices_are_bought() -> None:
    found = find_levers(request(concurrency=8, count=4, tensor_parallel_size=1), "tpot")
    four = next(lever for lever in found.ranked if lever.proposal.name == "TP 4")
    assert four.numbers.devices == 4 and four.plan.replicas == 1
    assert "same devices" in four.proposal.assumes


def test_chain_puts_the_best_together(clients: Levers) -> None:
    assert len(clients.chain) >= 2
    before = clients.base
    for lever in clients.chain:
        changed = replace(before.request, **lever.proposal.settings)
        assert numbers_of(make_plan(changed)) == lever.numbers
        assert lever.gain is not None and lever.gain >= LEAST_GAIN
        assert lever.gain == gain_of(numbers_of(before), lever.numbers, clients.objective)
        assert lever.numbers.devices == clients.numbers.devices
        before = lever.plan
    kinds = [lever.proposal.kind for lever in clients.chain]
    assert len(kinds) == len(set(kinds)) and not {"load", "hardware"} & set(kinds)


def test_chain_is_the_plan_with_all_of_its_flags(headway: CommandLine, batch: Levers) -> None:
    plain = f"plan llama-3.1-8b --hardware H100-SXM --batch-size 4 {FLAGS} --json"
    base, both = (json.loads(headway(*shlex.split(typed)).out) for typed in (plain, f"{plain} {batch.chain_flags}"))
    tpot = both["speculation"]["tpot_ms"] if both["speculation"] else both["tpot_ms"]
    assert len(batch.chain) >= 2
    assert batch.chain_gain == pytest.approx(base["tpot_ms"] / tpot)
    product = 1.0
    for lever in batch.chain:
        assert lever.gain is not None
        product *= lever.gain
    assert batch.chain_gain == pytest.approx(product)


def test_fewer_bits_gain_no_more_than_the_bytes_that_they_save(batch: Levers) -> None:
    gains = {lever.proposal.name: lever.gain or 0.0 for lever in batch.ranked}
    assert 1.2 < gains["fp8 weights"] < 2
    assert gains["fp8 weights"] < gains["int4 weights"] < 4


def test_speculation_takes_the_best_number_of_tokens(batch: Levers) -> None:
    for lever in batch.ranked:
        if lever.proposal.kind == "speculation":
            asked, made = lever.proposal.settings["speculation"], lever.plan.speculated
            assert made is not None and asked.tokens == made.best_tokens
            assert lever.numbers.tpot_s == pytest.approx(made.tpot_s)  # a batch decodes alone
            assert lever.numbers.ttft_s == batch.numbers.ttft_s


def test_speculation_leaves_what_the_prompts_of_others_take_of_tpot() -> None:
    made = make_plan(request(concurrency=8, speculation=Speculation(3, 0.7)))
    found, decode = numbers_of(made), made.decode.time.seconds
    assert made.tpot and made.speculated and found.tpot_s
    assert made.tpot.value - decode == pytest.approx(found.tpot_s - decode / made.speculated.speedup)


def test_left_out_with_a_reason() -> None:
    found = find_levers(request("gpt-oss-20b", batch_size=1, prompt_tokens=8, kv_cache_dtype="fp8"))
    reasons = dict(found.left_out)
    assert reasons["fp8 weights"] == "weights have 4 bits already"
    assert reasons["fp8 KV cache"] == "the cache has 8 bits already"
    assert "less than a block" in reasons["prefix cache"]
    assert "quarter of the parameters" in reasons["draft model"]
    assert "no --slo" in reasons["cheaper hardware that meets the SLO"]
    assert not {lever.proposal.name for lever in found.ranked} & reasons.keys()


def test_a_plan_that_takes_as_many_devices_as_it_needs_keeps_them(headway: CommandLine) -> None:
    """Fewer would do for weights of fewer bits, and then the same flags would mean other devices."""
    asked = request("llama-3.1-70b", batch_size=1)
    found = find_levers(asked)
    assert found.base.devices == 2 and asked.count is None
    weights = next(lever for lever in found.ranked if lever.proposal.name == "fp8 weights")
    assert weights.plan.devices == 2 and weights.flags == "--count 2 --quantization fp8"
    assert found.chain_flags.count("--count") == 1
    assert all(lever.plan.devices == 2 for lever in found.ranked if lever.proposal.kind == "hardware")


def test_formats_that_the_hardware_does_not_multiply_in_are_widened() -> None:
    found = find_levers(request(hardware="A100-80GB-SXM", batch_size=1))
    schemes = {lever.proposal.name: lever.flags for lever in found.ranked if lever.proposal.kind == "weights"}
    assert schemes == {
        "fp8 weights": "--quantization fp8-weight-only",
        "int8 weights": "--quantization int8",
        "int4 weights": "--quantization int4",
    }


def test_a_model_that_does_not_fit_is_ranked_by_what_makes_it_fit(too_large: Levers) -> None:
    assert too_large.base.problem and too_large.objective == "throughput"
    assert too_large.ranked and all(lever.gain is None and lever.plan.fits for lever in too_large.ranked)
    rates = [(lever.numbers.tokens_per_s or 0.0) / lever.numbers.devices for lever in too_large.ranked]
    assert rates == sorted(rates, reverse=True)
    assert too_large.chain[0].proposal.kind == "weights"  # the devices that are there, not the fastest in the catalogue


def test_nothing_helps(headway: CommandLine) -> None:
    """A model that is far too large for any device of the catalogue."""
    ran = headway("plan", "levers", "deepseek-v3", "--hardware", "T4", "--count", 1)
    assert ran.code == 1 and "No single change helps." in ran.out
    found = find_levers(request("deepseek-v3", "T4", batch_size=1, count=1))
    assert json.loads(to_json(found))["levers"] == []
    assert any(name == "int4 weights" and "not fit" in reason for name, reason in found.left_out)


@pytest.mark.slow
def test_more_requests_than_can_be_served_are_ranked_by_what_can() -> None:
    base = request(hardware="L4", request_rate=50.0, slo={"ttft": 200.0})
    found = find_levers(base)
    assert (found.objective, found.why) == ("throughput", "the load is more than can be served")
    assert found.ranked[0].gain and found.ranked[0].gain > 10
    by_ttft = find_levers(base, "ttft")
    assert by_ttft.numbers.ttft_s is None and all(lever.gain is None for lever in by_ttft.ranked)
    assert by_ttft.ranked[0].numbers.ttft_s and by_ttft.ranked[0].proposal.kind == "hardware"
    assert by_ttft.chain == () and by_ttft.chain_gain is None  # none keeps up on this device


def test_cost_needs_a_price() -> None:
    with pytest.raises(PlanError, match="no price of GB200 is known"):
        find_levers(request(hardware="GB200", batch_size=1), "cost")
    assert find_levers(request(hardware="GB200", batch_size=1, price_per_hour=9.0), "cost").ranked[0].gain


@pytest.mark.parametrize(
    ("slo", "wanted", "objective"),
    [
        ({}, None, "throughput"),
        ({"ttft": 1e6, "tpot": 1e6}, None, "throughput"),
        ({"ttft": 1e6, "tpot": 0.01}, None, "tpot"),
        ({"e2el": 0.01, "tpot": 0.01}, None, "e2el"),
        ({"tpot": 0.01}, "cost", "cost"),
    ],
)
def test_objective(slo: dict[str, float], wanted: str | None, objective: str) -> None:
    assert choose_objective(make_plan(request(slo=slo)), wanted)[0] == objective


def test_unknown_objective_and_request() -> None:
    with pytest.raises(PlanError, match="objective is 'fun'; it must be one of ttft, tpot"):
        find_levers(request(), "fun")
    with pytest.raises(PlanError, match="not known"):
        find_levers(request("llama-9"))


def test_largest_load_that_meets_the_objectives() -> None:
    base = make_plan(request(concurrency=4))
    assert base.tpot is not None
    limit = base.tpot.value * 1e3 * 1.5
    found = find_levers(request(concurrency=4, slo={"tpot": limit}, max_num_seqs=64))
    load = next(lever for lever in found.ranked if lever.proposal.kind == "load")
    most = load.proposal.settings["concurrency"]
    assert most > 4 and load.misses == ()
    above = make_plan(replace(found.base.request, concurrency=round(most * 1.05) + 1))
    assert above.slo_met == {"tpot": False}


def test_levers_that_spoil_an_objective_come_last() -> None:
    base = make_plan(request(batch_size=4))
    assert base.tpot is not None
    found = find_levers(request(batch_size=4, slo={"tpot": base.tpot.value * 1e3 * 1.001}))
    assert found.objective == "throughput"
    spoils = [bool(lever.misses) for lever in found.ranked]
    assert spoils == sorted(spoils)
    assert not any(lever.misses for lever in found.chain)


def test_cheaper_hardware_that_meets_the_objectives() -> None:
    found = find_levers(request(batch_size=1, slo={"tpot": 1000.0, "ttft": 5000.0}))
    cheapest = next(lever for lever in found.ranked if "cheapest" in lever.proposal.name)
    assert cheapest.misses == ()
    assert cheapest.plan.price_per_hour and found.base.price_per_hour
    assert cheapest.plan.price_per_hour < found.base.price_per_hour


@pytest.mark.parametrize(
    ("model", "draft"),
    [("llama-3.1-70b", "llama-3.2-1b"), ("qwen2.5-7b", "qwen2.5-0.5b"), ("llama-2-7b", None), ("mistral-7b", None)],
)
def test_draft_is_of_the_same_family(model: str, draft: str | None) -> None:
    assert draft_model(make_plan(request(model, hardware="MI300X"))) == draft


def test_command_prints_and_gives_json(headway: CommandLine) -> None:
    typed = f"plan levers qwen2.5-7b --hardware A10 --batch-size 2 {FLAGS} --objective cost"
    shown = headway(*shlex.split(typed))
    assert shown.code == 0 and "Ranked by the price of a million output tokens (as asked for)." in shown.out
    assert "--quantization int4" in shown.out and "The best combination" in shown.out
    found = json.loads(headway(*shlex.split(f"{typed} --json")).out)
    assert found["objective"] == "cost" and found["base"]["devices"] == 1
    first = found["levers"][0]
    old, new = (each["cost_per_million_output_tokens"] for each in (found["base"], first))
    assert first["gain"] == pytest.approx(old / new) and first["gain"] > 1
    assert {"name", "reason"} == found["left_out"][0].keys()


def test_command_says_what_is_wrong(headway: CommandLine) -> None:
    assert (
        "objective is 'fun'"
        in headway("plan", "levers", "llama-3.1-8b", "--hardware", "H100", "--objective", "fun").error()
    )


def test_somebody_hears_of_every_plan() -> None:
    heard: list[int] = []
    find_levers(request(batch_size=1), on_plan=heard.append)
    assert heard == list(range(1, len(heard) + 1)) and len(heard) > 30
