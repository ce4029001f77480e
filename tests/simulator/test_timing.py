"""Steps of a simulation take as long as the cost model says of their work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cost import catalogue
from headway.cost.attention import Chunk
from headway.cost.precision import Precision
from headway.cost.timing import Deployment
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.policy.step.step_time import StepWork
from headway.simulator.timing import Predicted


def deployment(model: str) -> Deployment:
    hardware = catalogue.find_hardware("H100-SXM")
    shape, efficiency = catalogue.find_model(model).shape, catalogue.efficiency(hardware, "vllm")
    return Deployment(shape, Precision.named("bfloat16", "none", "auto"), hardware, replace(efficiency, step_s=1e-3))


def decode(start: int) -> ScheduledSequence:
    return ScheduledSequence(0, start, [1], True, 1)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mistral-7b", "gpt-oss-20b"])
def test_a_step_is_that_of_its_chunks(model: str) -> None:
    """Decodes are taken together, between the sizes of the model's windows, and nothing is lost by it."""
    made, contexts = deployment(model), [40, 900, 1100, 5000, 9000]
    prompts = [ScheduledSequence(1, 512, [1] * 100, False, 1), ScheduledSequence(2, 0, [1] * 70, False, 0, 20)]
    plan = StepPlan([*map(decode, contexts), *prompts])
    chunks = [*(Chunk(1, context) for context in contexts), Chunk(100, 512, 1), Chunk(70, 0, 20)]
    expected = made.step(chunks)
    again = Predicted(made)
    times = again.times(plan, 1000)
    assert times.sampled_ns - 1000 == pytest.approx(expected.seconds * 1e9, rel=5e-4)
    assert times.launched_ns - 1000 == pytest.approx(expected.host_s * 1e9, abs=1)
    assert Predicted(made).times(plan, 1000) == times == again.times(plan, 1000)
    sampling = next(part.seconds for part in expected.parts if part.name == "sampling")
    assert times.sampled_ns - times.computed_ns == pytest.approx(sampling * 1e9, abs=1)


def test_a_plan_of_drafts_is_a_chunk_of_several_rows() -> None:
    made = deployment("llama-3.1-8b")
    plan = StepPlan([ScheduledSequence(0, 300, [1, 2, 3], True, 3)])
    assert Predicted(made).chunks(plan.scheduled) == [Chunk(3, 300, 3)]


def test_what_decodes_have_in_common_is_read_once() -> None:
    """As the scheduler counts it: half of four sequences have 8,192 tokens in the same blocks."""
    made = deployment("llama-3.1-8b")
    scheduled, work = [decode(9008)] * 4, StepWork(decode_tokens=4, decode_context=4 * 9009)
    repeated = StepWork(decode_tokens=4, decode_context=4 * 9009, repeated_context=8192)
    times = Predicted(made).times(StepPlan(scheduled, work=repeated), 0)
    expected = made.step([Chunk(1, 9008, 1, 4, 8192 // 3 // 512 * 512)])
    assert times.sampled_ns == pytest.approx(expected.seconds * 1e9, rel=1e-6)
    assert times == Predicted(made).decode_times(repeated, lambda: [9008] * 4, 0)
    assert times.sampled_ns < Predicted(made).times(StepPlan(scheduled, work=work), 0).sampled_ns
    alone = StepWork(decode_tokens=1, decode_context=9009, repeated_context=8192)  # with a pinned prefix
    assert Predicted(made).decode_times(alone, lambda: [9008], 0) == Predicted(made).times(StepPlan([decode(9008)]), 0)
