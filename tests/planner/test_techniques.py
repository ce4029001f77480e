"""What techniques gain and cost, against closed forms by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headway.load.workload.lengths import longest_tokens, mean_tokens, parse_length
from headway.planner.make import make_plan
from headway.planner.request import PlanRequest, Speculation
from headway.planner.technique_formulas import of_techniques
from tests.planner.command_line import CommandLine


def found(model: str = "llama-3.1-8b", **more: Any) -> dict[str, float]:
    return {each.name: each.value for each in of_techniques(make_plan(PlanRequest(model, "H100-SXM", **more)))}


def test_naive_inference_takes_as_long_as_document_001_says() -> None:
    """Chapter 5: 744 TFLOP for a token after 1,000 others, and 2.5 hours for the 1,000,001st at 1 PFLOPS."""
    counted = "of a token without a cache, as document 001 counts it"
    short = found("llama-3.1-405b", prompt_tokens=999, output_tokens=1)
    assert short[f"Products with weights {counted}"] == pytest.approx(744e12, rel=1e-3)
    long = found("llama-3.1-405b", prompt_tokens=1_000_000, output_tokens=1, max_model_len=1_100_000, count=16)
    assert long[f"Time {counted}"] * 989.4 / 1000 / 3600 == pytest.approx(2.5, rel=0.01)
    assert short["Arithmetic that the cache saves"] == pytest.approx(1000, rel=0.02)


def test_the_longest_of_a_batch() -> None:
    """Of B whole numbers from 1 to 100, x is the longest with probability (x/100)^B - ((x-1)/100)^B."""
    lengths = parse_length("uniform:min=1,max=100")
    for batch in (1, 2, 32):
        by_hand = sum(x * ((x / 100) ** batch - ((x - 1) / 100) ** batch) for x in range(1, 101))
        assert longest_tokens(lengths, batch) == pytest.approx(by_hand, rel=0.01)
    assert mean_tokens(lengths) in (50, 51) and longest_tokens(parse_length("200"), 8) == pytest.approx(200)


def test_static_batching_pads_prompts_and_waits_for_the_longest_answer() -> None:
    even = found(batch_size=3, output_tokens=100, output_spread=0.5)
    assert even["Longest answer of a batch"] == pytest.approx(125)  # 100 × (1 + 0.5 × 2 / 4)
    assert even["Padding of prompts in a static batch"] == 0.0
    assert even["Steps of seats whose answer has ended in a static batch"] == pytest.approx(0.2)
    lengths = {"input_len": "lognormal:mean=1155,cv=1,max=8000", "output_len": "lognormal:mean=211,cv=0.8,max=2000"}
    plan = make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", batch_size=32, **lengths))
    assert plan.workload.output == mean_tokens(parse_length(lengths["output_len"])) and plan.output_tokens_per_s
    uneven = {each.name: each.value for each in of_techniques(plan)}
    assert uneven["Padding of prompts in a static batch"] > 0.6
    assert uneven["Output tokens/s of static batching"] < 0.4 * plan.output_tokens_per_s.value


def test_swap_prefix_pipeline_and_ring() -> None:
    one = found(prompt_tokens=1000, output_tokens=200)  # 1,100 tokens are 69 blocks of 16
    assert one["Swap of a preempted sequence"] == pytest.approx(2 * 1104 * 131_072 / (63e9 * 0.85) * 1e3)
    assert one["Recompute of a preempted sequence"] > one["Swap of a preempted sequence"]
    ring = one["Prefill with its tokens divided among 8 devices (context parallelism)"]
    assert ring == pytest.approx(
        make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", prompt_tokens=1000)).prefill.time.seconds * 125
    )
    cached = found(prompt_tokens=1000, cached_tokens=512, batch_size=8)
    assert cached["Memory that the shared prefix saves"] == 512 * 7 * 131_072
    assert cached["FLOPs that the cached prefix saves"] == pytest.approx(512 * 2 * 6.98e9, rel=0.03)
    staged = found(pipeline_parallel_size=4, batch_size=4, tensor_parallel_size=1)
    assert staged["Bubble of a pipeline that fills and empties"] == pytest.approx(3 / 7)
    interleaved = "The same, interleaved: each device has 2 parts of the layers"
    assert staged[interleaved] == pytest.approx(3 / 11) and staged["Straggler: the slowest stage"] > 1


def test_a_remote_draft_pays_for_its_link() -> None:
    plan = make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", speculation=Speculation(4, 0.7, "llama-3.2-1b")))
    assert plan.speculated is not None
    values = {each.name: each.value for each in of_techniques(plan)}
    link, accepted = plan.deployment.hardware.link, plan.speculated.accepted
    assert link is not None
    wait = 2 * link.latency_s + 4 * 128_256 * 2 / link.bytes_per_s
    near, far = (value for name, value in values.items() if name.startswith("TPOT with the draft"))
    assert near == pytest.approx((plan.speculated.tpot_s + wait / accepted) * 1e3)
    assert far > near


def test_a_model_as_mha_and_mqa(headway: CommandLine) -> None:
    """Document 002: MQA has 1/32 of the cache of MHA, and GQA with 8 heads 1/4."""
    sizes = [
        make_plan(PlanRequest("llama-3.1-8b", "H100-SXM", kv_heads=heads)).kv_bytes_per_token for heads in (32, 8, 1)
    ]
    assert sizes[0] == 4 * sizes[1] == 32 * sizes[2] == 524_288
    asked = ("plan", "deepseek-v2", "--hardware", "H100-SXM", "--kv-heads")
    assert "a latent in place of KV heads" in headway(*asked, 1).error()
    assert "does not divide the 32 query heads" in headway("plan", "llama-3.1-8b", *asked[2:], 3).error()
    both = ("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--input-len", 200, "--prompt-tokens", 200)
    assert "give one of them" in headway(*both).error()
    levers = headway("plan", "levers", "llama-3.1-8b", "--hardware", "A100-80GB-PCIe", "--batch-size", 128).out
    assert "--kv-heads 1 (" in levers and "needs another model" in levers
