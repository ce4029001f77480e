"""Plans: figures of the documents, and how figures of a plan hang together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.cost import catalogue
from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Price
from headway.cost.precision import Precision
from headway.cost.price import cost_per_million
from headway.cost.requests import RequestShape
from headway.cost.speculative import tpot_s
from headway.cost.timing import Deployment
from headway.planner import resolve as resolving
from headway.planner.make import make_plan
from headway.planner.models import find_model
from headway.planner.plan import Plan
from headway.planner.request import PlanError, PlanRequest, Speculation
from headway.planner.steps import prompt_steps


def planned(model: str = "llama-3.1-8b", hardware: str = "H100-SXM", **given: Any) -> Plan:
    return make_plan(PlanRequest(model, hardware, **given))


def briefly(model: str = "llama-3.1-8b", hardware: str = "H100-SXM", **given: Any) -> Plan:
    """The same, without the most that can be served, which takes most of the time."""
    return make_plan(PlanRequest(model, hardware, **given), brief=True)


def test_llama_8b_as_document_002_has_it() -> None:
    """KV Cache Memory Requirements: 128 KB a token, 16 GB at 128K; weights of 16 GB; 156 FLOP/byte of an A100."""
    plan = briefly(hardware="A100-80GB-SXM", prompt_tokens=4000, output_tokens=96)
    assert plan.kv_bytes_per_token == 128 * 1024
    assert plan.kv_cache_bytes == 2**29
    assert plan.weights_bytes == pytest.approx(16e9, rel=0.01)
    assert plan.ridge_flops_per_byte == pytest.approx(156, rel=0.03)
    assert 90 < plan.max_batch < 128  # the document's 128 leave nothing for activations, nor a tenth of the memory
    assert plan.prefill.bound == "compute" and plan.decode.bound == "memory"


@pytest.mark.parametrize(("model", "kv"), [("qwen2.5-7b", 57344), ("gpt-oss-20b", 49152)])
def test_cache_of_a_token_as_document_000_has_it(model: str, kv: int) -> None:
    assert briefly(model).kv_bytes_per_token == kv


def test_llama_405b_decodes_at_two_flops_a_byte_at_100k() -> None:
    """Document 001, chapter 8: 1.635e12 FLOPs over 861.6 GB are 1.9 FLOP/byte."""
    plan = briefly("llama-3.1-405b", count=16, tensor_parallel_size=8, pipeline_parallel_size=2, prompt_tokens=100_000)
    assert plan.decode.flops == pytest.approx(1.635e12, rel=0.02)
    assert plan.decode.bytes == pytest.approx(861.6e9, rel=0.02)
    assert plan.decode.intensity == pytest.approx(1.9, rel=0.03)
    assert plan.decode.bound == "memory"


def test_llama_405b_prefills_100k_as_document_001_counts() -> None:
    """Chapter 8: 1.64e17 FLOPs over 861.6 GB are 190,000 FLOP/byte.

    The causal mask leaves half of its 8.26e16 for attention, and attention reads the cache that it has written.
    """
    plan = briefly("llama-3.1-405b", count=16, tensor_parallel_size=8, pipeline_parallel_size=2, prompt_tokens=100_000)
    read = sum(part.kv_read_bytes for part in plan.prefill.work.values())
    assert plan.prefill.bytes - read == pytest.approx(861.6e9, rel=0.02)
    assert plan.prefill.flops + 8.26e16 / 2 == pytest.approx(1.64e17, rel=0.02)
    assert (plan.prefill.flops + 8.26e16 / 2) / (plan.prefill.bytes - read) == pytest.approx(190_000, rel=0.02)
    assert plan.prefill.bound == "compute"


def test_a_batch_of_one_is_its_phases_one_after_the_other() -> None:
    plan = briefly(prompt_tokens=2000, output_tokens=100)
    assert plan.ttft is not None and plan.tpot is not None and plan.ttlt is not None
    efficiency = plan.deployment.efficiency
    intake = efficiency.request_s + 2000 * efficiency.token_s
    assert plan.ttft.value == pytest.approx(intake + plan.prefill.time.seconds)
    assert plan.tpot.value == plan.decode.time.seconds
    assert plan.ttlt.value == pytest.approx(plan.ttft.value + 99 * plan.tpot.value)
    assert plan.output_tokens_per_s is not None
    assert plan.output_tokens_per_s.value == pytest.approx(100 / plan.ttlt.value)


def test_the_mean_context_stands_for_all_decode_steps() -> None:
    for model in ("llama-3.1-8b", "gpt-oss-20b"):  # the second with windows of 128
        plan = briefly(model, prompt_tokens=64, output_tokens=512, batch_size=8)
        steps = [plan.deployment.step([Chunk(1, 64 + done, 1, 8)]).seconds for done in range(511)]
        assert plan.decode.time.seconds == pytest.approx(sum(steps) / len(steps), rel=0.01)


def test_a_long_prompt_goes_in_chunks() -> None:
    whole = briefly(prompt_tokens=6000, max_num_batched_tokens=8192)
    parts = briefly(prompt_tokens=6000, max_num_batched_tokens=2000)
    assert (parts.prefill.flops, parts.prefill.bytes) == (whole.prefill.flops, whole.prefill.bytes)
    read, once = (
        sum(part.work.weight_bytes for part in plan.prefill.time.parts if part.name != "head")
        for plan in (parts, whole)
    )
    assert read == pytest.approx(3 * once, rel=0.01)
    assert parts.ttft is not None and whole.ttft is not None and parts.ttft.value > whole.ttft.value


def test_cached_tokens_are_not_computed() -> None:
    cold, warm = briefly(prompt_tokens=4000), briefly(prompt_tokens=4000, cached_tokens=3000)
    assert cold.prefill.flops > 3.5 * warm.prefill.flops
    assert warm.ttft is not None and cold.ttft is not None and warm.ttft.value < cold.ttft.value
    assert warm.decode.flops == cold.decode.flops


def test_parts_of_a_phase_add_up() -> None:
    plan = briefly("mixtral-8x7b", count=2, batch_size=16)
    for phase in (plan.prefill, plan.decode):
        assert sum(part.seconds for part in phase.time.parts) + phase.time.host_s == pytest.approx(phase.time.seconds)
        assert sum(part.flops for part in phase.work.values()) == phase.flops
        assert sum(part.bytes for part in phase.work.values()) == phase.bytes + phase.activation_bytes
        assert sum(phase.floors_s.values()) == pytest.approx(phase.floor_s)
        assert phase.floor_s < phase.time.seconds


def test_work_is_of_the_whole_model_however_it_is_spread() -> None:
    one, four = briefly(), briefly(count=4, tensor_parallel_size=4)
    assert (one.prefill.flops, one.decode.bytes) == (four.prefill.flops, four.decode.bytes)
    assert four.capacity.weights < one.capacity.weights / 3
    assert one.tpot is not None and four.tpot is not None and four.tpot.value < one.tpot.value


def test_replicas_share_clients_and_add_up() -> None:
    one = planned(concurrency=16)
    four = planned(concurrency=64, count=4, tensor_parallel_size=1)
    assert four.replicas == 4 and one.tpot is not None and four.tpot is not None
    assert four.tpot.value == pytest.approx(one.tpot.value)
    assert one.output_tokens_per_s is not None and four.output_tokens_per_s is not None
    assert four.output_tokens_per_s.value == pytest.approx(4 * one.output_tokens_per_s.value)
    assert four.saturation_rate == pytest.approx(4 * one.saturation_rate)


def test_more_clients_mean_more_tokens_and_slower_ones() -> None:
    plans = [briefly(concurrency=clients) for clients in (1, 8, 64)]
    rates = [plan.output_tokens_per_s.value for plan in plans if plan.output_tokens_per_s]
    tpots = [plan.tpot.value for plan in plans if plan.tpot]
    assert rates == sorted(rates) and tpots == sorted(tpots) and len(set(tpots)) == 3


def test_clients_beyond_memory_wait() -> None:
    plan = planned("llama-2-13b", "A100-40GB-SXM", concurrency=64, prompt_tokens=3000, output_tokens=500)
    assert plan.fits and plan.max_batch < 10
    assert plan.served is not None and plan.served.running <= plan.max_batch
    assert plan.ttft is not None and plan.tpot is not None and plan.ttft.value > 100 * plan.tpot.value
    assert any("at once; the others wait" in each for each in plan.assumptions)


def test_a_rate_below_saturation_is_served_whole() -> None:
    plan = planned(request_rate=2.0)
    assert plan.problem is None and plan.ttft is not None and plan.output_tokens_per_s is not None
    assert plan.output_tokens_per_s.value == pytest.approx(2.0 * 256)
    assert plan.saturation_rate > 2.0


def test_queues_grow_with_the_rate_and_so_do_their_bars() -> None:
    most = planned(output_tokens=32).saturation_rate
    plans = [planned(output_tokens=32, request_rate=most * share) for share in (0.2, 0.6, 0.9)]
    ttfts = [plan.ttft for plan in plans if plan.ttft]
    assert [each.value for each in ttfts] == sorted(each.value for each in ttfts)
    assert all(each.low < each.value < each.high for each in ttfts)
    relative = [each.high / each.value for each in ttfts]
    assert relative[2] == float("inf") > relative[0]


def test_a_rate_above_saturation_has_no_first_token() -> None:
    plan = planned(request_rate=1000.0)
    assert plan.fits and plan.ttft is None and plan.ttlt is None
    assert plan.problem is not None and "grows without limit" in plan.problem and "--count" in plan.problem
    assert plan.output_tokens_per_s is not None
    assert plan.output_tokens_per_s.value == pytest.approx(plan.saturation_rate * 256)


def test_above_saturation_faster_steps_would_serve_more_of_what_is_asked_for() -> None:
    most = planned().saturation_rate
    for asked in (1.05 * most, 1000.0):
        tokens = planned(request_rate=asked).output_tokens_per_s
        assert tokens is not None and tokens.low < tokens.value < tokens.high <= asked * 256


def test_a_crowd_of_clients_only_makes_the_queue_longer() -> None:
    """Little's law: each client more waits for one answer more, and nothing else changes."""
    few, many = (planned(concurrency=clients, max_num_seqs=16) for clients in (32, 1_000_000))
    assert few.ttft is not None and many.ttft is not None and few.tpot is not None and many.tpot is not None
    assert (many.tpot.value, many.saturation_rate) == (few.tpot.value, few.saturation_rate)
    assert many.ttft.value - few.ttft.value == pytest.approx((1_000_000 - 32) / few.saturation_rate)
    assert many.served is not None and many.served.ttft_p50_s > 0.9 * many.ttft.value


def test_no_clients_are_served_faster_than_at_saturation() -> None:
    plans = [planned(concurrency=clients, max_num_seqs=32, output_tokens=64) for clients in (32, 48, 64, 200)]
    rates = [plan.output_tokens_per_s.value / 64 for plan in plans if plan.output_tokens_per_s]
    assert max(rates) <= plans[0].saturation_rate * (1 + 1e-9)


def test_prompts_in_too_many_steps_are_refused_at_once() -> None:
    with pytest.raises(PlanError, match="raise --max-num-batched-tokens"):
        planned(prompt_tokens=100_000, max_num_batched_tokens=16, max_num_seqs=16)


def test_an_engine_that_wastes_memory_is_told_so() -> None:
    for given, helps in (
        ({"gpu_memory_utilization": 0.2}, "--gpu-memory-utilization 0.9"),
        ({"block_size": 65_536, "gpu_memory_utilization": 0.3}, "--block-size 16"),
        ({"max_num_batched_tokens": 1_000_000}, "--max-num-batched-tokens 2048"),
    ):
        plan = planned(count=1, **given)  # type: ignore[arg-type]
        assert plan.problem is not None and f"{helps} (" in plan.problem
    usual = planned("llama-3.1-70b", count=1)
    assert usual.problem is not None and "--gpu-memory-utilization" not in usual.problem


def test_the_replicas_that_it_says_are_enough() -> None:
    most = planned(output_tokens=32).saturation_rate
    short = planned(output_tokens=32, request_rate=2.5 * most)
    assert short.problem is not None and "--tensor-parallel-size 1 --count 3" in short.problem
    enough = planned(output_tokens=32, request_rate=2.5 * most, count=3, tensor_parallel_size=1)
    assert enough.problem is None


def test_a_model_that_does_not_fit_says_by_how_much_and_predicts_nothing() -> None:
    plan = planned("llama-3.1-70b", count=1)
    assert not plan.fits and plan.problem is not None
    assert (
        "does not fit" in plan.problem
        and "missing, even for one" in plan.problem
        and "It would fit with" in plan.problem
    )
    assert (plan.ttft, plan.tpot, plan.output_tokens_per_s, plan.served) == (None, None, None, None)
    assert plan.costs.per_million_output_tokens is None and plan.saturation_rate == 0.0
    assert plan.weights_bytes > plan.capacity.usable
    assert plan.prefill.flops > 0


def test_a_batch_that_does_not_fit_is_told_from_a_model_that_does_not() -> None:
    plan = planned("llama-2-13b", "A100-40GB-SXM", batch_size=64, prompt_tokens=3000, output_tokens=500)
    assert plan.capacity.fits and not plan.fits and plan.tpot is None
    assert plan.problem is not None and f"--batch-size {plan.max_batch}" in plan.problem
    fitting = planned("llama-2-13b", "A100-40GB-SXM", batch_size=plan.max_batch, prompt_tokens=3000, output_tokens=500)
    assert fitting.fits and fitting.problem is None


def test_costs() -> None:
    plan = briefly(batch_size=32, price_per_hour=2.0, count=2, tensor_parallel_size=2)
    assert plan.price_per_hour == 4.0 and plan.output_tokens_per_s is not None
    tokens_per_s = plan.output_tokens_per_s.value
    assert plan.costs.per_million_output_tokens == pytest.approx(cost_per_million(4.0, tokens_per_s))
    # Divided among prompts and answers the hour costs as much as whole.
    assert plan.costs.split_input is not None and plan.costs.split_output is not None
    requests_per_hour = tokens_per_s / 256 * 3600
    hour = requests_per_hour * (1024 * plan.costs.split_input + 256 * plan.costs.split_output) / 1e6
    assert hour == pytest.approx(4.0)
    watts = plan.deployment.hardware.tdp_w
    if watts is not None:
        assert plan.costs.tokens_per_s_per_watt == pytest.approx(tokens_per_s / (2 * watts))


def test_objectives_are_held_against_the_estimates() -> None:
    plan = briefly(slo={"ttft": 1000.0, "tpot": 0.1, "e2el": 1e6})
    assert plan.slo_met == {"ttft": True, "tpot": False, "e2el": True}
    assert briefly("llama-3.1-70b", count=1, slo={"ttft": 1e9}).slo_met == {"ttft": False}
    assert briefly(output_tokens=1, concurrency=2, slo={"tpot": 0.1}).slo_met == {"tpot": True}


def test_a_decode_step_turns_compute_bound_where_it_says() -> None:
    plan = briefly("llama-3.1-70b", count=4, prompt_tokens=128, output_tokens=128)
    batch = plan.compute_bound_batch
    assert batch is not None
    assert plan.deployment.step([Chunk(1, plan.workload.mean_context, 1, batch)]).bound == "compute"
    assert plan.deployment.step([Chunk(1, plan.workload.mean_context, 1, batch - 1)]).bound != "compute"
    assert briefly("llama-2-7b", prompt_tokens=3000).compute_bound_batch is None  # all heads' keys, for each sequence


def test_weights_turn_compute_bound_near_the_ridge() -> None:
    """Document 002, Why Batching Works: B = 156 on an A100."""
    plan = briefly(hardware="A100-80GB-SXM")
    assert plan.compute_bound_weights == pytest.approx(plan.ridge_flops_per_byte, rel=0.35)


def test_speculation() -> None:
    plan = briefly(speculation=Speculation(4, 0.8, "llama-3.2-1b"))
    found = plan.speculated
    assert found is not None and plan.tpot is not None and found.break_even is not None
    assert found.accepted == pytest.approx(sum(0.8**i for i in range(5)))
    assert found.speedup == pytest.approx(plan.tpot.value / found.tpot_s)
    assert found.break_even < 0.8 and found.speedup > 1.0
    free = briefly(speculation=Speculation(4, 0.8)).speculated
    assert free is not None and free.speedup > found.speedup


def test_a_draft_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="draft model 'nope' is not known"):
        briefly(speculation=Speculation(4, 0.8, "nope"))


def test_pipeline_stages_work_beside_each_other() -> None:
    one, two = briefly(batch_size=64), briefly(batch_size=64, count=2, pipeline_parallel_size=2)
    assert (two.lanes, two.lane_batch, two.batch) == (1, 32, 64)
    assert one.output_tokens_per_s is not None and two.output_tokens_per_s is not None
    assert two.output_tokens_per_s.value > 1.2 * one.output_tokens_per_s.value
    assert two.capacity.weights < 0.6 * one.capacity.weights


def test_answers_of_one_token_have_no_tpot_under_load() -> None:
    plan = briefly(output_tokens=1, concurrency=4)
    assert plan.tpot is None and plan.ttft is not None and plan.ttlt is not None
    assert plan.ttlt.value == pytest.approx(plan.ttft.value)


def test_clients_that_cannot_be_divided_evenly() -> None:
    """Six clients on four replicas: two have two of them, and two have one."""
    two = briefly(concurrency=2)
    six = briefly(concurrency=6, count=4, tensor_parallel_size=1)
    assert two.output_tokens_per_s is not None and six.output_tokens_per_s is not None
    assert six.output_tokens_per_s.value == pytest.approx(3 * two.output_tokens_per_s.value)


def test_stages_share_the_memory() -> None:
    plan = briefly(
        "llama-2-13b", "A100-40GB-SXM", pipeline_parallel_size=2, concurrency=500, prompt_tokens=3000, output_tokens=500
    )
    assert plan.served is not None and plan.served.running <= plan.max_batch < 500


def test_data_parallel_groups_each_have_their_own_memory() -> None:
    plan = briefly("mixtral-8x7b", tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
    assert plan.devices == 4 and plan.max_batch == 2 * plan.capacity.max_batch > 0


def test_a_list_price_is_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = replace(catalogue.find_hardware("H100-SXM"), price=Price(3.0, "a shop", "2026-01-01"))
    monkeypatch.setattr(resolving, "find_hardware", lambda *_: (listed, Efficiency(), None))
    plan = briefly(count=4)
    assert (plan.price_per_hour, plan.price_source) == (12.0, "a shop, 2026-01-01")
    bare = replace(listed, price=None, tdp_w=None)
    monkeypatch.setattr(resolving, "find_hardware", lambda *_: (bare, Efficiency(), None))
    free = briefly(count=4)
    assert free.price_per_hour is None and free.costs.per_million_output_tokens is None
    assert free.costs.tokens_per_s_per_watt is None


@pytest.mark.parametrize("load", [{"batch_size": 4}, {"concurrency": 4}])
def test_a_prompt_pays_for_the_time_that_it_takes_alone(load: dict[str, Any]) -> None:
    plan = briefly(price_per_hour=3.6, max_num_batched_tokens=1024, **load)
    assert plan.costs.split_input is not None
    of_a_prompt = plan.costs.split_input * 1024 / 1e6
    assert of_a_prompt == pytest.approx(3.6 / 3600 * plan.prefill.time.seconds)


def test_a_draft_is_kept_in_the_plain_dtype() -> None:
    plan = briefly(quantization="fp8", speculation=Speculation(3, 0.7, "llama-3.2-1b"))
    draft = Deployment(
        find_model("llama-3.2-1b").shape, Precision(), plan.deployment.hardware, plan.deployment.efficiency
    )
    assert plan.speculated is not None
    assert plan.speculated.tpot_s == pytest.approx(
        tpot_s(plan.deployment, draft, 1, plan.workload.mean_context, 3, 0.7)
    )


@pytest.mark.parametrize(
    ("cached", "budget", "requests", "steps"),
    [
        (0, 400, 4, [[Chunk(100, 0, 1, 4)]]),
        (40, 400, 2, [[Chunk(60, 40, 1, 2)]]),
        (0, 250, 3, [[Chunk(100, 0, 1, 2), Chunk(50, 0, 0)], [Chunk(50, 50, 1)]]),
        (0, 60, 1, [[Chunk(60, 0, 0)], [Chunk(40, 60, 1)]]),
    ],
)
def test_prompts_are_packed_into_steps(cached: int, budget: int, requests: int, steps: list[list[Chunk]]) -> None:
    assert prompt_steps(RequestShape(100, 1, cached), budget, requests) == steps


# Shared prefixes, pipelines, machines, storage, and TTFT under load


def test_a_shared_prefix_is_held_once() -> None:
    """3,900 of 4,000 tokens are 243 whole blocks; each request has 12 tokens of the next one, and 200 of its own."""
    plan = make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", prompt_tokens=4000, output_tokens=100, cached_tokens=3900))
    token, pool = plan.kv_bytes_per_token, plan.capacity.kv_pool
    assert plan.max_batch == (pool - 3888 * token) // (224 * token) > 1900
    assert plan.kv_cache_bytes == 3888 * token + 224 * token
    apart = make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", prompt_tokens=4000, output_tokens=100))
    assert apart.max_batch == pool // (4112 * token) < 120


def test_batches_of_a_pipeline_queue_for_its_slowest_stage() -> None:
    """Half of the sequences in each step make it faster, but not by as much as if none met another's prompts."""
    asked = PlanRequest("llama-3.1-8b", "H100-SXM", concurrency=64)
    one = make_plan(asked)
    two = make_plan(replace(asked, count=2, pipeline_parallel_size=2))
    assert one.bubble == 0.0 < two.bubble < 0.5
    assert one.tpot is not None and two.tpot is not None
    assert 1.1 * two.decode.time.seconds < two.tpot.value < one.tpot.value
    assert any("stages are idle" in each for each in two.assumptions)


def test_tensor_parallelism_over_machines_is_planned_with_a_warning() -> None:
    asked = PlanRequest("llama-3.1-405b", "H100-SXM", tensor_parallel_size=16, batch_size=4)
    plan = make_plan(asked)
    assert plan.problem is None and plan.ttft is not None and plan.tpot is not None
    (said,) = plan.warnings
    assert "16 devices are more than the 8 that NVLink 4 joins" in said and "50 GB/s" in said
    slower = make_plan(replace(asked, network_gb_per_s=5.0))
    assert slower.ttft is not None and slower.ttft.value > plan.ttft.value
    assert make_plan(replace(asked, tensor_parallel_size=8, quantization="fp8")).warnings == ()
    assert make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", count=16)).deployment.parallelism.tensor == 1


def test_storage_of_twice_the_rate_is_read_in_half_the_time() -> None:
    slow, fast = (make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", storage_gb_per_s=rate)).loading for rate in (1, 2))
    assert slow.storage_s == 2 * fast.storage_s and slow.layout_s == fast.layout_s


def test_clients_are_a_benchmark_from_its_start_to_its_end() -> None:
    """One prompt in ten waits for those of all other clients, who begin at the same time."""
    plan = make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", concurrency=64))
    assert plan.ttft is not None and plan.served is not None
    assert (plan.ttft.low, plan.ttft.high) == tuple(plan.ttft.value * bar for bar in plan.bars.ttft_clients)
    assert plan.served.ttft_p50_s < plan.ttft.value == plan.served.ttft_s < plan.served.ttft_p99_s
    # 64 prompts one after the other: eight of them are a step.
    assert plan.served.ttft_p99_s > 0.8 * 64 * 1024 * 2 * 8e9 / 989e12
    assert any("TTFT under load" in each for each in plan.assumptions)


def test_a_client_alone_keeps_its_narrow_bar() -> None:
    plan = make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", concurrency=1))
    assert plan.ttft is not None
    assert plan.ttft.high == plan.ttft.value * plan.bars.ttft[1]
    assert not any("TTFT under load" in each for each in plan.assumptions)


def test_nvfp4_takes_four_and_a_half_bits_and_the_rate_of_fp4() -> None:
    b300, h100 = (make_plan(PlanRequest("llama-3.1-8b", key, quantization="nvfp4")) for key in ("B300", "H100-SXM"))
    linear = b300.deployment.precision.linear
    assert linear.bits_per_element == 4.5 and b300.deployment.hardware.arithmetic(linear.compute) == "nvfp4"
    assert h100.deployment.hardware.arithmetic(linear.compute) == "bf16"
    assert b300.weights_bytes == h100.weights_bytes
