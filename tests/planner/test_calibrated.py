"""A plan on a calibrated machine: the defaults of `headway serve`, and bars from the calibration's own residuals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.calibration.samples import Kind
from headway.calibration.store import save
from headway.cost.memory import activation_bytes
from headway.engine.config import DEFAULTS
from headway.planner.formulas import formulas
from headway.planner.levers import find_levers
from headway.planner.make import make_plan
from headway.planner.request import PlanError, PlanRequest
from headway.policy.cache.sizing import CPU_SHARE, default_batched_tokens, sampling_bytes
from tests.calibration.machines import HARDWARE, a_machine
from tests.planner.command_line import CommandLine

MODEL = "llama-3.2-1b"


@pytest.fixture(autouse=True)
def stored(no_calibrated_machines: Path) -> None:
    save(a_machine())


def test_what_no_flag_says_is_the_engine_s_default() -> None:
    plan = make_plan(PlanRequest(MODEL, "mine", batch_size=2), brief=True)
    assert plan.limits.sequences == DEFAULTS.max_num_seqs
    assert plan.limits.batched_tokens == default_batched_tokens("cpu", DEFAULTS.max_num_seqs)
    assert plan.limits.prefill_stall_s == DEFAULTS.max_prefill_stall_ms / 1e3
    held = plan.capacity
    assert held.kv_pool == int((HARDWARE.memory_bytes - held.weights - held.workspace) * CPU_SHARE)
    assert "the defaults of Headway's server" in " ".join(plan.assumptions)
    assert "The host's work before the first step was not" in " ".join(plan.assumptions)


def test_flags_go_before_the_engine_s_defaults() -> None:
    asked = PlanRequest(
        MODEL, "mine", concurrency=2, max_num_batched_tokens=300, max_num_seqs=7, max_prefill_stall_ms=5.0
    )
    plan = make_plan(asked)
    assert (plan.limits.batched_tokens, plan.limits.sequences, plan.limits.prefill_stall_s) == (300, 7, 0.005)


def test_a_cpu_takes_half_of_what_is_free_or_the_share_of_all_that_is_asked_for() -> None:
    requests = [PlanRequest(MODEL, "mine", gpu_memory_utilization=share) for share in (None, 0.3, 0.6)]
    plain, *asked = (make_plan(request, brief=True) for request in requests)
    memory = plain.deployment.hardware.memory_bytes
    assert [plan.capacity.usable for plan in asked] == [int(memory * 0.3), int(memory * 0.6)]
    assert plain.capacity.kv_pool == int((memory - plain.capacity.weights - plain.capacity.workspace) * 0.5)


def test_the_sampler_s_memory_counts() -> None:
    """As the engine plans it; of other engines it is part of the workspace."""
    requests = [PlanRequest(MODEL, hardware, max_num_seqs=64) for hardware in ("mine", "H100-SXM")]
    here, elsewhere = (make_plan(request, brief=True) for request in requests)
    for plan, sampler in ((here, sampling_bytes(64, 128256, 131072)), (elsewhere, 0)):
        d, settings = plan.deployment, plan.settings
        step = activation_bytes(d.device, settings.max_num_batched_tokens, 64, d.precision, d.flash)
        assert plan.capacity.activations == step + sampler


def test_a_step_larger_than_half_of_what_is_free_leaves_less_for_the_cache() -> None:
    save(replace(a_machine(), hardware=replace(HARDWARE, memory_bytes=9 * 2**29)))
    plan = make_plan(PlanRequest(MODEL, "mine"))
    held = plan.capacity
    free = held.memory - held.weights - held.workspace
    assert held.kv_pool == free - held.activations < int(free * CPU_SHARE)
    left = next(each for each in formulas(plan) if each.name.startswith("Memory left"))
    assert left.value == held.kv_pool and left.lines[1].startswith("= min(")


def test_a_window_s_layers_keep_their_windows() -> None:
    """4,096 tokens lie in 257 blocks of 16, as the next one is not at the border of a block."""
    plan = make_plan(PlanRequest("mistral-7b-v0.1", "mine", prompt_tokens=8000, output_tokens=100), brief=True)
    assert plan.kv_cache_bytes == plan.kv_bytes_per_token * 257 * 16


def test_attention_sinks_bound_the_cache() -> None:
    """Sinks take a block, and the 4,080 tokens behind them 256, as they rarely begin where a block does."""
    given = {"attention_sinks": 4, "attention_window": 4096, "max_model_len": 100_000, "prompt_tokens": 60_000}
    plan = make_plan(PlanRequest("llama-3.1-8b", "mine", output_tokens=100, **given), brief=True)
    assert plan.kv_cache_bytes == plan.kv_bytes_per_token * (1 + 255 + 1) * 16
    with pytest.raises(PlanError, match="no sequence has more than 131072 tokens, and attention sees 131072"):
        make_plan(PlanRequest("llama-3.1-8b", "mine", attention_sinks=4))
    with pytest.raises(PlanError, match="attention_sinks is 16, but the model has learnt sinks; leave it out"):
        make_plan(PlanRequest("gpt-oss-20b", "mine", **given))


def test_bars_are_residuals_of_what_a_step_consists_of() -> None:
    """Where one kind alone scatters, a bar is as wide as that kind's share of the step."""
    kinds = {str(kind): (1.0, 1.0) for kind in Kind} | {str(Kind.LINEAR): (0.5, 2.0)}
    save(replace(a_machine(), residuals=kinds))
    plan = make_plan(PlanRequest(MODEL, "mine"), brief=True)
    linear = {"qkv", "output", "gate_up", "down", "head"}
    parts = plan.decode.time.parts
    share = sum(part.seconds - part.overhead_s for part in parts if part.name in linear) / plan.decode.time.seconds
    assert plan.bars.tpot == pytest.approx((1 - 0.5 * share, 1 + share))
    assert plan.tpot is not None and plan.tpot.high == pytest.approx(plan.tpot.value * plan.bars.tpot[1])


def test_bars_that_agree_are_the_bar() -> None:
    plan = make_plan(PlanRequest(MODEL, "mine"), brief=True)
    assert plan.bars.tpot == pytest.approx((0.9, 1.2))
    assert plan.bars.ttft[0] < 0.9 and plan.bars.ttft[1] > 1.2  # what was not measured here has the wider bar


def test_what_this_engine_has_not_is_said(headway: CommandLine) -> None:
    asked = ("plan", MODEL, "--hardware", "mine", "--max-num-seqs", 4, "--json")
    ran = headway(*asked, "--quantization", "fp8", "--kv-cache-dtype", "fp16")
    said = json.loads(ran.out)["warnings"]
    assert len(said) == 2 and "no fp8 weights" in said[0] and "no cache in fp16" in said[1]
    ran = headway(*asked, "--quantization", "int4", "--kv-cache-dtype", "int8")
    assert json.loads(ran.out)["warnings"] == []


def test_levers_are_what_serve_can_do() -> None:
    found = find_levers(PlanRequest(MODEL, "mine", batch_size=2, prompt_tokens=64, output_tokens=8))
    names = {lever.proposal.name for lever in found.ranked} | {name for name, why in found.left_out if "0.5 %" in why}
    assert {"int8 weights", "int4 weights", "int8 KV cache"} <= names
    reasons = dict(found.left_out)
    assert "n-gram drafts" in names
    assert "quarter of the parameters" in reasons["draft model"]
    for name in ("fp8 KV cache", "fp8 weights", "TP 2", "PP 2"):
        assert "`headway serve`" in reasons[name] and name not in names
    packed = find_levers(PlanRequest(MODEL, "mine", quantization="q8_0", prompt_tokens=64, output_tokens=8))
    assert "keeps the format" in dict(packed.left_out)["int4 weights"]


def test_another_engine_s_scheduling_can_be_asked_for_here() -> None:
    requests = [PlanRequest(MODEL, "mine", engine=engine) for engine in ("auto", "sglang")]
    ours, theirs = (make_plan(request, brief=True) for request in requests)
    assert (ours.engine.key, theirs.engine.key) == ("headway", "sglang")
    assert theirs.limits.sharing.prefill_first and theirs.deployment == ours.deployment


def test_a_machine_that_is_its_own_host_has_no_link_to_it() -> None:
    with pytest.raises(PlanError, match="is its own host"):
        make_plan(PlanRequest(MODEL, "mine", host_link_gb_per_s=31.5))


def test_a_bound_on_stalls_is_refused_where_nobody_can_be_held_up(headway: CommandLine) -> None:
    ran = headway("plan", MODEL, "--hardware", "mine", "--max-prefill-stall-ms", "20")
    assert "only with --concurrency or --request-rate" in ran.error()
