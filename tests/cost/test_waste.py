"""What is computed for nothing against steps counted one by one, and a batch written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.precision import Precision
from headway.cost.timing import Deployment
from headway.cost.waste import recompute_s, recompute_work, static_batch
from headway.cost.work import Work, step_work, total
from tests.cost.machines import DENSE, SHAPES, deployment

requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=4)
DEPLOYMENTS = {name: deployment(SHAPES[name]) for name in ("dense", "mixture", "windowed", "latent")}


def steps_s(on: Deployment, steps: list[list[Chunk]]) -> float:
    return sum(on.step(step).seconds for step in steps)


# Without a cache


@pytest.mark.parametrize("name", ["dense", "mixture", "windowed", "parallel_blocks", "biased"])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_a_pass_over_everything_is_the_work_of_every_step_before(name, tokens):
    """With a cache each token is computed once; without, once more for each token that follows. Latents are left out:
    they are unfolded for long prompts and not for single tokens."""
    cached = [
        total(step_work(SHAPES[name], [Chunk(1, n, logit_rows=int(n == tokens - 1))]).values()) for n in range(tokens)
    ]
    assert recompute_work(SHAPES[name], tokens).flops == sum(step.flops for step in cached)


@pytest.mark.parametrize("name", ["dense", "latent_mixture"])
def test_work_without_a_cache_is_that_of_a_prompt(name):
    """In the precision and with the attention that are asked for."""

    def prompt(precision: Precision | None, flash: bool) -> Work:
        return sum(step_work(SHAPES[name], [Chunk(50)], precision, flash).values(), Work())

    for precision in (None, Precision.named("float32"), Precision.named(quantization="fp8")):
        for flash in (True, False):
            assert recompute_work(SHAPES[name], 50, precision, flash) == prompt(precision, flash)
    assert prompt(None, False).bytes > prompt(None, True).bytes


@pytest.mark.parametrize("efficiency", [Efficiency.ideal(), Efficiency()], ids=["ideal", "lossy"])
@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize("output", [1, 2, 33, 65])
def test_seconds_without_a_cache_are_the_sum_of_all_passes(name, output, efficiency):
    on = deployment(SHAPES[name], efficiency=efficiency)
    passes = [[Chunk(length)] for length in range(30, 30 + output)]
    assert recompute_s(on, 30, output) == pytest.approx(steps_s(on, passes), rel=1e-12)


@pytest.mark.parametrize("name", ["dense", "windowed"])
@pytest.mark.parametrize(("prompt", "output"), [(1, 66), (20, 500), (1000, 131)])
def test_longer_answers_are_interpolated_closely(name, prompt, output):
    on = DEPLOYMENTS[name]
    passes = [[Chunk(length)] for length in range(prompt, prompt + output)]
    assert recompute_s(on, prompt, output) == pytest.approx(steps_s(on, passes), rel=1e-3)


def test_a_cache_is_worth_more_the_longer_the_answer():
    on = DEPLOYMENTS["dense"]
    gains = []
    for output in (1, 10, 60, 300):
        cached = steps_s(on, [[Chunk(500)], *([Chunk(1, 500 + i)] for i in range(output - 1))])
        gains.append(recompute_s(on, 500, output) / cached)
    assert gains[0] == pytest.approx(1) and gains == sorted(gains) and gains[-1] > 10


def test_an_answer_has_a_token():
    with pytest.raises(ValueError, match=r"^output tokens are 0; they must be at least 1$"):
        recompute_s(DEPLOYMENTS["dense"], 10, 0)


# Batches that begin and end together


def test_a_batch_by_hand():
    """Prompts of 3 and 5, answers of 4 and 2: two prompts of 5, then three steps, of which one needs one."""
    on = deployment(DENSE, efficiency=Efficiency())
    batch = static_batch(on, [(3, 4), (5, 2)])
    assert (batch.useful_tokens, batch.computed_tokens) == (6 + 6, 2 * 8)
    assert batch.wasted_tokens == pytest.approx(4 / 16)
    padded = [[Chunk(5, sequences=2)], *([Chunk(1, 5 + i, sequences=2)] for i in range(3))]
    assert batch.seconds == pytest.approx(steps_s(on, padded))
    leaving = [[Chunk(3), Chunk(5)], [Chunk(1, 3), Chunk(1, 5)], [Chunk(1, 4)], [Chunk(1, 5)]]
    assert batch.continuous_s == pytest.approx(steps_s(on, leaving))


@pytest.mark.parametrize("name", ["dense", "mixture", "windowed", "latent"])
def test_flops_are_those_of_each_request_alone(name):
    """Arithmetic does not care what shares a step."""
    shape, asked = SHAPES[name], [(30, 5), (12, 20), (1, 1)]

    def alone(prompt: int, output: int) -> int:
        steps = [Chunk(prompt), *(Chunk(1, n) for n in range(prompt, prompt + output - 1))]
        return sum(total(step_work(shape, [step]).values()).flops for step in steps)

    batch = static_batch(DEPLOYMENTS[name], asked)
    assert batch.useful_flops == pytest.approx(sum(alone(*each) for each in asked), rel=1e-12)
    assert batch.computed_flops == pytest.approx(3 * alone(30, 20), rel=1e-12)
    assert batch.wasted_flops == pytest.approx(1 - batch.useful_flops / batch.computed_flops)


@settings(max_examples=60)
@given(asked=requests, name=st.sampled_from(sorted(DEPLOYMENTS)))
def test_waste_is_a_share_and_none_only_where_all_are_alike(asked, name):
    batch = static_batch(DEPLOYMENTS[name], asked)
    alike = len(set(asked)) == 1
    for waste in (batch.wasted_tokens, batch.wasted_flops):
        assert 0 <= waste < 1 and (waste == 0) == alike
    assert batch.useful_tokens >= sum(prompt for prompt, _ in asked)
    assert (batch.seconds == batch.continuous_s) if alike else (batch.seconds > batch.continuous_s)


@settings(max_examples=40)
@given(asked=requests, data=st.data())
def test_the_order_does_not_matter_and_short_ones_waste_more(asked, data):
    on = DEPLOYMENTS["dense"]
    batch, shuffled = static_batch(on, asked), static_batch(on, data.draw(st.permutations(asked)))
    assert (shuffled.wasted_tokens, shuffled.wasted_flops) == (batch.wasted_tokens, batch.wasted_flops)
    assert shuffled.seconds == pytest.approx(batch.seconds)
    assert shuffled.continuous_s == pytest.approx(batch.continuous_s)
    longest = (max(prompt for prompt, _ in asked), max(output for _, output in asked))
    with_longest, with_shortest = static_batch(on, [*asked, longest]), static_batch(on, [*asked, (1, 1)])
    assert with_longest.wasted_tokens <= batch.wasted_tokens <= with_shortest.wasted_tokens


@pytest.mark.parametrize("asked", [[], [(0, 5)], [(3, 2), (5, 0)]], ids=str)
def test_a_batch_needs_requests_that_ask_for_something(asked):
    with pytest.raises(ValueError, match=r"^requests are .*; each needs at least 1 prompt token and 1 output token$"):
        static_batch(DEPLOYMENTS["dense"], asked)
