"""Drafts in a simulation: the same tokens in fewer steps, as fast as the cost model says, and never much slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.cost import speculative
from headway.planner.request import PlanError
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.scheduler_config import StepLimits
from headway.policy.step.speculative_config import SpeculativeConfig
from headway.simulator.deployed import Deployed, ServerOptions, chances, deploy
from headway.simulator.drafts import Drafts
from headway.simulator.server import Server
from headway.simulator.traffic import arrival

NGRAM = SpeculativeConfig()
DRAFT = SpeculativeConfig(method="draft_model", model="llama-3.2-1b")
OPTIONS = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM", max_model_len=4096)


def deployed(config: SpeculativeConfig | None, *acceptance: float, **options: Any) -> Deployed:
    changes = {"speculative_config": config, "acceptance": acceptance or None, **options}
    return deploy(replace(OPTIONS, **changes), SchedulingOptions(max_num_seqs=64))


def run(of: Deployed, batch: int, output: int = 400, prompt: int = 100) -> tuple[Server, float]:
    """A server that has answered so many requests, and the mean nanoseconds between two of their tokens."""
    server = of.server()
    server.expect(iter([arrival(number, 0, prompt, output, output_len=output) for number in range(batch)]))
    server.run()
    for answer in server.answers:
        assert len(answer.token_ns) == output and list(answer.token_ns) == sorted(answer.token_ns)
        assert sum(answer.ledger.phases_ns.values()) == answer.ended_ns - answer.arrived_ns
    of.scheduler.check()
    spent = [(answer.token_ns[-1] - answer.token_ns[0]) / (output - 1) for answer in server.answers]
    return server, sum(spent) / len(spent)


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", [NGRAM, DRAFT], ids=["ngram", "draft"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_the_speedup_is_near_that_of_the_cost_model_and_never_a_loss(
    config: SpeculativeConfig, batch: int, acceptance: float
) -> None:
    _, plain_ns = run(deployed(None), batch)
    of = deployed(config, acceptance)
    server, ns = run(of, batch)
    assert of.deployment is not None and of.drafts is not None and server.drafts is not None
    costs = of.deployment, of.drafts.model, batch, 300
    best = speculative.best_tokens(*costs, acceptance)
    predicted = speculative.tpot_s(*costs, 0, 0.0) / speculative.tpot_s(*costs, best, acceptance)
    assert plain_ns / ns >= 0.98
    assert plain_ns / ns <= 1.1 * predicted
    if acceptance == 0.9:
        assert plain_ns / ns >= 0.65 * predicted, "some steps are for learning"
        assert server.drafts.accepted > 0.4 * server.drafts.tried > 0


@pytest.mark.parametrize("config", [NGRAM, DRAFT], ids=["ngram", "draft"])
def test_no_more_drafts_are_tried_than_the_limits_of_the_moment_allow(config: SpeculativeConfig) -> None:
    counts = []
    for most in (64, 2, 0):
        of = deployed(config, 0.9)
        of.scheduler.set_classes(of.scheduler.config.classes, {}, StepLimits(most_drafts=most))
        server, _ = run(of, 1)
        assert server.drafts is not None
        counts.append((server.drafts.tried, max(server.steps.tokens[1:])))
    (many, longest), (fewer, short), none = counts
    assert many > fewer > 0 and longest > 3 >= short and none == (0, 1)


def test_a_long_prompt_is_computed_by_the_draft_too() -> None:
    short, long = (run(deployed(DRAFT, 0.9), 1, prompt=prompt)[1] for prompt in (100, 3000))
    assert short < long < 1.3 * short


def test_a_draft_model_takes_memory() -> None:
    plain, drafted = deployed(None, max_model_len=None), deployed(DRAFT, 0.5, max_model_len=None)
    blocks = [replace(each).scheduler.blocks.num_blocks for each in (plain, drafted)]
    assert blocks[1] <= blocks[0]
    small = (
        deploy(
            replace(OPTIONS, speculative_config=DRAFT, acceptance=(0.5,), kv_cache_memory=1 << 30), SchedulingOptions()
        ),
        deploy(replace(OPTIONS, kv_cache_memory=1 << 30), SchedulingOptions()),
    )
    assert small[0].scheduler.blocks.num_blocks == pytest.approx(0.8 * small[1].scheduler.blocks.num_blocks, rel=0.02)


def test_chances_go_on_with_the_last() -> None:
    plan = deployed(NGRAM, 0.9, 0.4).drafts
    assert plan is not None and [plan.chance(at) for at in range(4)] == [0.9, 0.4, 0.4, 0.4]
    assert isinstance(deployed(NGRAM, 0.9).server().drafts, Drafts)
    assert deployed(None).server().drafts is None


@pytest.mark.parametrize("text", ["", "a", "0.5,", "1.5", "-1", "0.5;0.4"])
def test_what_is_no_chance_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a probability from 0 to 1"):
        chances(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"acceptance": (0.5,)}, "--acceptance works only with --speculative-config"),
        ({"speculative_config": NGRAM}, "--speculative-config needs --acceptance"),
        (
            {"speculative_config": SpeculativeConfig.of({"model": "no-such"}), "acceptance": (0.5,)},
            "draft model 'no-such' is not known",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        deploy(replace(OPTIONS, **changes), SchedulingOptions())
