"""What clients see of alike requests agrees with a reckoning that moves every request by itself, step by step."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.requests import Limits, RequestShape
from headway.cost.timing import Deployment
from headway.policy.step.step_budget import PREFILL_FIRST
from headway.simulator import serving, timing
from headway.simulator.serving import PERCENTILES, Served, closed_loop, open_loop, saturated
from tests.cost.machines import DENSE, LATENT, MACHINE, MIXTURE, WINDOWED, deployment

QUIET = Efficiency(token_s=0.0, request_s=0.0)
SLOW_HOST = Efficiency(step_s=2e-4, sequence_s=3e-5, token_s=4e-7, request_s=7e-4)
DEPLOYMENTS = {
    "dense": deployment(DENSE, efficiency=QUIET),
    "slow host": deployment(DENSE, efficiency=SLOW_HOST),
    "experts": deployment(MIXTURE, efficiency=QUIET),
    "windows": deployment(WINDOWED, efficiency=QUIET),
    "latent": deployment(LATENT, efficiency=SLOW_HOST),
}
ENDLESS = replace(MACHINE, bytes_per_s=1e30, flops_per_s={"bf16": 1e30})
LOSSLESS = replace(Efficiency.ideal(), step_s=1e-3, token_s=2e-6, request_s=7e-4)
CONSTANT = deployment(hardware=ENDLESS, efficiency=LOSSLESS)
FIELDS = (
    "ttft_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_s",
    "tpot_p90_s",
    "e2e_s",
    "e2e_p50_s",
    "requests_per_s",
    "running",
)
FEWER = settings(max_examples=settings.default.max_examples // 3)


@pytest.fixture(autouse=True, scope="module")
def exact_contexts() -> Iterator[None]:
    """Mean contexts are rounded so that fewer steps are timed; such small models would feel it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "CONTEXT", 1)
        yield


def burst(on: Deployment, workload: RequestShape, requests: int, limits: Limits = Limits()) -> Served:  # noqa: B008
    """All at once, and no more after them."""
    return open_loop(on, workload, [0.0] * requests, limits)


@dataclass
class Request:
    number: int
    sent: float
    ready: float
    prompt: int
    output: int
    computed: int
    tokens: int = 0
    first: float = -1.0
    last: float = -1.0


@dataclass
class Step:
    """`held` sequences have begun and not ended, of which `sequences` take part; `left_waiting`: others wait."""

    end: float
    seconds: float
    sequences: int
    held: int
    prompt_tokens: int
    decoded: int
    left_waiting: bool


@dataclass
class Run:
    """All requests of a run in the order in which they ended, and its steps."""

    ended: list[Request]
    now: float
    steps: list[Step]

    def served(self, skip: int = 0) -> Served:
        counted = self.ended[skip:]
        began = self.ended[skip - 1].last if skip else 0.0
        steps = [step for step in self.steps if step.end - step.seconds >= began - 1e-12 or self.now <= began]
        busy = sum(step.seconds for step in steps)
        rate = len(counted) / (self.now - began) if self.now > began else len(self.ended) / self.now
        figures = {
            "ttft": [each.first - each.sent for each in counted],
            "tpot": [(each.last - each.first) / max(1, each.output - 1) for each in counted],
            "e2e": [each.last - each.sent for each in counted],
        }
        return Served(
            **{f"{name}_s": statistics.fmean(values) for name, values in figures.items()},
            **{f"{name}_p{p}_s": float(np.percentile(v, p)) for name, v in figures.items() for p in PERCENTILES},
            requests_per_s=rate,
            running=sum(step.seconds * step.sequences for step in steps) / busy,
        )


def simulate(
    on: Deployment, workload: RequestShape, limits: Limits, arrivals: Sequence[float], until: int, again: float
) -> Run:
    """One step after the other, each sequence a chunk of its own."""
    efficiency, intake, sent, began = on.efficiency, 0.0, 0, 0.0
    coming: list[Request] = []
    waiting: list[Request] = []
    decoding: list[Request] = []
    run = Run([], 0.0, [])

    def send(when: float) -> None:
        nonlocal intake, sent
        intake = max(intake, when) + efficiency.token_s * workload.prompt
        output = workload.output_of(sent)
        coming.append(Request(sent, when, intake + efficiency.request_s, workload.prompt, output, workload.cached))
        sent += 1

    for when in arrivals:
        send(when)
    while len(run.ended) < until:
        by = began if limits.ahead else run.now
        if not waiting and not decoding and coming[0].ready > by:
            by = run.now = max(run.now, coming[0].ready)
        while coming and coming[0].ready <= by:
            waiting.append(coming.pop(0))
        budget, room = limits.batched_tokens - len(decoding), limits.sequences - len(decoding)
        chunks = [Chunk(1, each.prompt + each.tokens - 1) for each in decoding]
        prompts = []
        for each in waiting:
            if budget <= 0 or room <= 0:
                break
            tokens = min(budget, each.prompt - each.computed)
            whole = each.computed + tokens == each.prompt
            chunks.append(Chunk(tokens, each.computed, int(whole)))
            prompts.append((each, tokens, whole))
            budget, room = budget - tokens, room - 1
        seconds = on.step(chunks).seconds
        prompt_tokens = sum(tokens for _, tokens, _ in prompts)
        begun = [each for each in waiting if each.computed > workload.cached]
        held = len(decoding) + len(prompts) + sum(each not in [one for one, *_ in prompts] for each in begun)
        left = len(prompts) < len(waiting)
        began, run.now = run.now, run.now + seconds
        run.steps.append(Step(run.now, seconds, len(chunks), held, prompt_tokens, len(decoding), left))
        ended = []
        for each in decoding:
            each.tokens += 1
            if each.tokens == each.output:
                each.last = run.now
                ended.append(each)
        decoding = [each for each in decoding if each.tokens < each.output]
        for each, tokens, whole in prompts:
            each.computed += tokens
            if whole:
                waiting.remove(each)
                each.tokens, each.first = 1, run.now
                if each.output == 1:
                    each.last = run.now
                    ended.append(each)
                else:
                    decoding.append(each)
        run.ended += ended
        for _ in range(int(min(len(ended), again))):
            again -= 1
            send(run.now)
    return run


def assert_alike(ours: Served, theirs: Served, within: float = 0.01, but: Sequence[str] = ()) -> None:
    for name in FIELDS:
        if name not in but:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=within, abs=1e-12), name


workloads = st.builds(
    lambda prompt, output, cached, spread: RequestShape(prompt, output, int(cached * prompt), spread),
    st.integers(1, 300),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.0, 0.5, 0.99]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
budgets = st.sampled_from([1, 3, 16, 50, 200, 8192])
limits = st.builds(Limits, budgets, st.sampled_from([1, 2, 5, 256]), ahead=st.booleans())


def near_the_end_of_a_step(run: Run, share: float) -> bool:
    """Whether a request comes within this share of a step of its end: what is rounded decides where it falls."""
    return any(1e-12 < abs(each.ready - step.end) < share * step.seconds for each in run.ended for step in run.steps)


def few_chunks(workload: RequestShape, limits: Limits) -> bool:
    """The simulator is slow: prompts that are cut into hundreds of chunks are left out."""
    return workload.prompt - workload.cached <= 20 * limits.batched_tokens


@pytest.mark.parametrize("name", DEPLOYMENTS)
@given(workload=workloads, limits=limits, clients=st.integers(1, 10), prompts=st.integers(1, 30))
@FEWER
def test_a_closed_loop_is_as_reckoned_until_its_last_prompt(name, workload, limits, clients, prompts):
    assume(few_chunks(workload, limits))
    ours = closed_loop(DEPLOYMENTS[name], workload, clients, prompts, limits)
    at_once = [0.0] * min(clients, prompts)
    run = simulate(DEPLOYMENTS[name], workload, limits, at_once, prompts, prompts - len(at_once))
    assert len(run.ended) == prompts
    assume(not near_the_end_of_a_step(run, 0.02))
    assert_alike(ours, run.served())


@pytest.mark.parametrize("name", DEPLOYMENTS)
@given(workload=workloads, limits=limits, requests=st.integers(1, 16))
@FEWER
def test_a_burst_is_served_as_reckoned(name, workload, limits, requests):
    assume(few_chunks(workload, limits))
    ours = burst(DEPLOYMENTS[name], workload, requests, limits)
    assert_alike(ours, simulate(DEPLOYMENTS[name], workload, limits, [0.0] * requests, requests, 0).served())


@pytest.mark.parametrize("name", DEPLOYMENTS)
@given(
    workload=workloads,
    limits=limits,
    gaps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=14),
    scale=st.sampled_from([1e-5, 1e-4, 1e-3, 1e-2]),
)
@FEWER
def test_requests_that_come_at_any_time_see_what_is_reckoned(name, workload, limits, gaps, scale):
    """But for those that come when a step is about to end: where many are taken in one go, they may fall one beside."""
    assume(few_chunks(workload, limits))
    arrivals = [round(scale * each, 9) for each in itertools.accumulate(gaps)]
    ours = open_loop(DEPLOYMENTS[name], workload, arrivals, limits)
    run = simulate(DEPLOYMENTS[name], workload, limits, arrivals, len(arrivals), 0)
    assume(not near_the_end_of_a_step(run, 0.05))
    assert_alike(ours, run.served())


@given(
    workload=workloads,
    limits=limits,
    gaps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=14),
    skip=st.integers(0, 3),
)
@FEWER
def test_where_all_steps_take_equally_long_nothing_differs(workload, limits, gaps, skip):
    """Nothing is lost then by taking many steps in one go, and each arrival falls into the step that it falls into."""
    assume(few_chunks(workload, limits) and skip < len(gaps))
    arrivals = [round(0.05 * each, 9) for each in itertools.accumulate(gaps)]
    ours = open_loop(CONSTANT, workload, arrivals, limits, skip)
    run = simulate(CONSTANT, workload, limits, arrivals, len(arrivals), 0)
    assume(not near_the_end_of_a_step(run, 1e-6))
    assert_alike(ours, run.served(skip), within=1e-3)


@given(workload=workloads, limits=limits, requests=st.integers(1, 16), again=st.booleans())
@FEWER
def test_the_reckoning_keeps_the_rules_of_engines(workload, limits, requests, again):
    """Steps stay within both limits, counting prompts under way, and nothing idles while there is work."""
    assume(few_chunks(workload, limits))
    on = DEPLOYMENTS["slow host"]
    run = simulate(on, workload, limits, [0.0] * requests, (1 + again) * requests, math.inf if again else 0)
    for step in run.steps:
        assert step.prompt_tokens + step.decoded <= limits.batched_tokens
        assert step.sequences <= step.held <= limits.sequences
        full = step.prompt_tokens + step.decoded == limits.batched_tokens or step.held == limits.sequences
        assert full or not step.left_waiting
    assert len({each.number for each in run.ended}) == len(run.ended) >= requests
    assert all(each.tokens == each.output == workload.output_of(each.number) for each in run.ended)
    by_first_token = sorted(run.ended, key=lambda each: (each.first, each.number))
    assert [each.number for each in by_first_token] == sorted(each.number for each in run.ended)
    decoded = sum(step.decoded for step in run.steps)
    computed = sum(step.prompt_tokens for step in run.steps)
    if not again:
        assert decoded == sum(each.output - 1 for each in run.ended)
        assert computed == requests * (workload.prompt - workload.cached)


@given(workload=workloads, name=st.sampled_from(list(DEPLOYMENTS)))
@FEWER
def test_one_client_waits_for_each_step_in_turn(workload, name):
    """By hand: the prompt's step, then one step for each further token, at a context that grows by one."""
    on = DEPLOYMENTS[name]
    alone = replace(workload, spread=0.0)
    served = closed_loop(on, alone, 1, 3)
    prompt, cached, output = alone.prompt, alone.cached, alone.output
    ttft = on.step([Chunk(prompt - cached, cached)]).seconds
    ttft += on.efficiency.token_s * prompt + on.efficiency.request_s
    decodes = sum(on.step([Chunk(1, prompt + token)]).seconds for token in range(output - 1))
    assert served.ttft_s == pytest.approx(ttft, rel=1e-4)
    assert served.ttft_p50_s == pytest.approx(ttft, rel=1e-4)
    assert served.tpot_s == pytest.approx(decodes / max(1, output - 1), rel=0.01)
    assert served.e2e_s == pytest.approx(ttft + decodes, rel=0.01)
    assert served.requests_per_s == pytest.approx(1 / served.e2e_s, rel=1e-4)
    assert served.running == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(("prompt", "output"), [(1, 2), (7, 4), (100, 10), (20, 100)])
def test_a_run_of_steps_takes_as_long_as_its_middle_one(prompt, output):
    """Where each step takes a little longer than the one before, by as much, nothing is lost: an odd number of them."""
    on = deployment(hardware=replace(MACHINE, flops_per_s={"bf16": 1e30, "fp32": 1e30}))
    served = closed_loop(on, RequestShape(prompt, output), 3, 3)
    decodes = [on.step([Chunk(1, prompt + token, sequences=3)]).seconds for token in range(output - 1)]
    assert served.tpot_s == pytest.approx(statistics.fmean(decodes), rel=1e-4)
    assert served.ttft_s == pytest.approx(on.step([Chunk(prompt, sequences=3)]).seconds, rel=1e-4)
    assert served.requests_per_s == pytest.approx(3 / served.e2e_s, rel=1e-4)


@given(workload=workloads, requests=st.integers(1, 12))
@FEWER
def test_one_sequence_at_a_time_is_a_queue(workload, requests):
    on, alone = DEPLOYMENTS["dense"], replace(workload, spread=0.0)
    one = closed_loop(on, alone, 1, 3)
    queue = burst(on, alone, requests, Limits(sequences=1))
    assert queue.requests_per_s == pytest.approx(1 / one.e2e_s, rel=1e-4)
    assert queue.ttft_s == pytest.approx(one.ttft_s + (requests - 1) / 2 * one.e2e_s, rel=1e-4)
    assert queue.running == pytest.approx(1.0, rel=1e-4)


@given(workload=workloads, requests=st.integers(1, 40), name=st.sampled_from(list(DEPLOYMENTS)))
@FEWER
def test_little_s_law_holds_exactly_for_a_burst(workload, requests, name):
    """Sequences in the engine on average = rate * time in the engine, all of whom begin with the first step."""
    efficiency = replace(DEPLOYMENTS[name].efficiency, token_s=0.0, request_s=0.0)
    on = replace(DEPLOYMENTS[name], efficiency=efficiency)
    served = burst(on, workload, requests, Limits(batched_tokens=requests * workload.prompt, sequences=requests))
    assert served.running == pytest.approx(served.requests_per_s * served.e2e_s, rel=1e-4)


@given(workload=workloads, concurrency=st.integers(1, 32))
@FEWER
def test_little_s_law_holds_for_clients_in_a_loop(workload, concurrency):
    """Clients = rate * time from one request to the next, up to the requests that are under way at both ends."""
    served = closed_loop(DEPLOYMENTS["slow host"], replace(workload, spread=0.0), concurrency, 12 * concurrency)
    assert served.requests_per_s * served.e2e_s == pytest.approx(concurrency, rel=0.1)


@given(workload=workloads, name=st.sampled_from(list(DEPLOYMENTS)))
@FEWER
def test_more_clients_are_served_faster_and_wait_longer(workload, name):
    on, alike = DEPLOYMENTS[name], replace(workload, spread=0.0)
    runs = [closed_loop(on, alike, concurrency, 4 * concurrency) for concurrency in (1, 2, 4, 8, 16, 32)]
    for fewer, more in itertools.pairwise(runs):
        assert more.requests_per_s >= 0.99 * fewer.requests_per_s
        assert more.e2e_s >= 0.99 * fewer.e2e_s
        assert more.running >= 0.99 * fewer.running


@given(workload=workloads, limits=limits, requests=st.integers(1, 30))
@FEWER
def test_a_latency_is_its_first_token_and_the_rest(workload, limits, requests):
    served = burst(DEPLOYMENTS["dense"], replace(workload, spread=0.0), requests, limits)
    assert served.e2e_s == pytest.approx(served.ttft_s + (workload.output - 1) * served.tpot_s, rel=1e-4)
    assert 0.0 < served.running <= min(requests, limits.sequences) + 1e-9
    assert served.tpot_s > 0.0 or workload.output == 1


def test_a_cached_prefix_saves_its_tokens_and_no_more():
    on, whole = DEPLOYMENTS["dense"], RequestShape(256, 4)
    cached = closed_loop(on, replace(whole, cached=192), 1, 3)
    assert cached.ttft_s == pytest.approx(on.step([Chunk(64, 192)]).seconds, rel=1e-4)
    assert cached.ttft_s < closed_loop(on, whole, 1, 3).ttft_s
    assert cached.tpot_s == pytest.approx(closed_loop(on, whole, 1, 3).tpot_s, rel=1e-4)


def test_a_budget_below_the_limit_of_sequences_bounds_those_that_decode():
    """At most as many decode as the budget has tokens, as each began with at least one of its tokens."""
    on, workload = DEPLOYMENTS["dense"], RequestShape(3, 50)
    narrow = burst(on, workload, 20, Limits(batched_tokens=4, sequences=256))
    assert narrow.running <= 4.0
    assert narrow.requests_per_s < burst(on, workload, 20).requests_per_s


def test_answers_spread_evenly_around_their_mean():
    workload = RequestShape(1, 100, spread=0.4)
    lengths = [workload.output_of(number) for number in range(2000)]
    assert statistics.fmean(lengths) == pytest.approx(100, abs=2)
    assert (min(lengths), max(lengths)) == (60, 140)
    assert all(150 <= sum(low <= each < low + 8 for each in lengths) <= 250 for low in range(61, 130, 8))
    assert {RequestShape(1, 100).output_of(number) for number in range(100)} == {100}
    assert min(RequestShape(1, 1, spread=1.0).output_of(number) for number in range(100)) == 1


def test_where_all_that_count_end_in_one_step_their_rate_is_that_of_the_run():
    """Three alike come at once and end at once: nothing passes between the first's end and the others'."""
    served = open_loop(DEPLOYMENTS["dense"], RequestShape(10, 5), [0.0] * 3, skip=1)
    assert served.requests_per_s == pytest.approx(3 / served.e2e_s, rel=1e-4)


# Few for many


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize("bounds", [Limits(8192, 8), Limits(50, 8), Limits(8192, 6, sharing=PREFILL_FIRST)])
def test_a_saturated_server_is_a_crowd_of_clients_that_never_ends(name, bounds):
    """The rate of many rounds without their begin and end, and a TPOT by Little's law."""
    on, workload = DEPLOYMENTS[name], RequestShape(40, 30)
    found = saturated(on, workload, bounds)
    run = simulate(on, replace(workload, spread=0.3), bounds, [0.0] * 20, 600, math.inf)
    if bounds.sharing is PREFILL_FIRST:  # which the reckoning does not know: prompts alone, and decodes alone
        prompt, decode = on.step([Chunk(40)]).seconds, on.step([Chunk(1, 55, sequences=6)]).seconds
        rate = 6 / (6 * prompt + 29 * decode)
        assert found.requests_per_s == pytest.approx(rate, rel=0.03)
    else:
        assert found.requests_per_s == pytest.approx(run.served(100).requests_per_s, rel=0.03)
        assert found.running == pytest.approx(run.served(100).running, rel=0.05)
    assert found.tpot_s == pytest.approx(found.running / found.requests_per_s / 30)
    assert found.ttft_s == found.ttft_p99_s == found.e2e_s == math.inf


def test_each_of_very_many_clients_stands_for_some_that_are_alike(monkeypatch):
    on, workload = DEPLOYMENTS["slow host"], RequestShape(40, 30, spread=0.3)
    every = closed_loop(on, workload, 32, 320, Limits(800, 32))
    monkeypatch.setattr(serving, "MOST_FOLLOWED", 16)
    half = closed_loop(on, workload, 32, 320, Limits(800, 32))
    assert half.requests_per_s == pytest.approx(every.requests_per_s, rel=0.03)
    assert half.running == pytest.approx(every.running, rel=0.05)
    assert half.tpot_s == pytest.approx(every.tpot_s, rel=0.05) and half.ttft_s == pytest.approx(every.ttft_s, rel=0.2)


def test_rounds_between_the_first_and_the_last_may_stand_for_more():
    """Of requests that are all alike nothing changes; of three rounds the second counts as often as is said."""
    on, workload = DEPLOYMENTS["dense"], RequestShape(64, 10)
    limits = Limits(64, 8)
    ten, three = closed_loop(on, workload, 4, 40, limits), closed_loop(on, workload, 4, 12, limits, stands_for=8)
    assert three.tpot_s == pytest.approx(ten.tpot_s, rel=0.03)
    plain = closed_loop(on, workload, 4, 12, limits)
    first, later = closed_loop(on, workload, 4, 4, limits).ttft_s, three.ttft_s
    assert min(first, plain.ttft_s) >= later and first > later
