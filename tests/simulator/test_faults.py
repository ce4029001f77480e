"""Engines that die on the virtual clock, and the campaign of `benchmarks/faults.py`: what must always hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.faults import Violation, campaign, live
from headway.policy.admission.queue_bound import Place
from headway.policy.admission.quota import Quotas
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.sizing import PoolSize
from headway.policy.objectives.slo import SloPolicy
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import FinishReason
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.sequences import Sequences
from headway.simulator import engine
from headway.simulator.answers import EngineDied
from headway.simulator.server import Server, Simulated, simulate
from headway.simulator.traffic import Arrival, arrival

MS = 1_000_000


def scheduler() -> Scheduler:
    return SchedulingOptions(max_num_seqs=4, scheduling_policy="fcfs").scheduler("cuda", PoolSize(200, 512))


class DiesOnce:
    """Steps of 10 ms; in the one with this number the engine dies after 4 ms, and the next is there 100 ms later."""

    def __init__(self, step: int) -> None:
        self.left = step

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        self.left -= 1
        if self.left == 0:
            raise EngineDied(now + 4 * MS, now + 104 * MS)
        return StepTimes(now, now + 10 * MS, now + 10 * MS)


def ran(*coming: Arrival, dies_in: int = 4) -> Simulated:
    return simulate(scheduler(), coming, DiesOnce(dies_in), next_engine=scheduler)


def test_requests_go_on_after_their_tokens_when_the_engine_has_died() -> None:
    both = ran(arrival(0, 0, 20, 6), arrival(1, 25 * MS, 20, 9, output_len=2))
    one, other = both.answers
    # 0 has three tokens when the engine dies in the fourth step, at 34 ms; the next one is there at 134 ms.
    assert [at // MS for at in one.token_ns] == [10, 20, 30, 144, 154, 164]
    assert [at // MS for at in other.token_ns] == [144, 154] and other.finish_reason is FinishReason.STOP
    assert one.finish_reason is FinishReason.LENGTH and both.steps.engines_lost == 1
    assert one.ledger.phases_ns[Phase.ENGINE_LOST] == 34 * MS
    assert one.ledger.phases_ns[Phase.ENGINE_RESTART] == 100 * MS
    assert one.ledger.total_ns == sum(one.ledger.phases_ns.values()) == 164 * MS
    assert one.steps == 6 and other.steps == 2  # the step that the engine died in counts for nobody


def test_while_there_is_no_engine_requests_are_refused_and_may_be_given_up() -> None:
    late, given_up = arrival(1, 60 * MS, 20, 6), arrival(2, 1 * MS, 20, 6, cancel_ns=50 * MS)
    dying = arrival(3, 31 * MS, 20, 6, cancel_ns=32 * MS)  # both are on their way to the engine when it dies
    answers = {answer.request_id: answer for answer in ran(arrival(0, 0, 20, 6), given_up, dying, late).answers}
    assert "next one is not ready yet" in answers["1"].refused and not answers["1"].is_final
    assert [answers[name].finish_reason for name in ("2", "3")] == [FinishReason.ABORT] * 2
    assert answers["2"].ended_ns == 50 * MS and answers["3"].ended_ns == 34 * MS
    assert answers["2"].ledger.phases_ns[Phase.ENGINE_RESTART] == 16 * MS
    assert len(answers["0"].token_ns) == 6


def test_without_a_next_engine_it_is_said_that_this_one_died() -> None:
    with pytest.raises(EngineDied, match="back at 134000000"):
        simulate(scheduler(), [arrival(0, 0, 20, 6)], DiesOnce(4))


@pytest.mark.parametrize("requests", [1000, pytest.param(2500, marks=pytest.mark.slow)])
def test_nothing_is_violated_in_any_world(requests: int) -> None:
    found = campaign(requests, first_seed=10_000)
    assert found["requests"] >= requests and found["violations"] == 0
    assert found["faults"].keys() >= {"crash", "freeze", "files change", "clock steps back", "quota clock steps"}
    assert {"stop", "length", "refused", "abort", "timeout"} <= found["choices_by_end"].keys()


def test_a_seed_is_always_the_same_world() -> None:
    (one, ended), (again, ended_again) = live(7), live(7)
    assert (one.requests, one.faults, ended) == (again.requests, again.faults, ended_again)
    assert one.classes == again.classes and len(one.fleet.replicas) == len(again.fleet.replicas)


def test_a_campaign_goes_on_with_further_worlds() -> None:
    whole = campaign(400, first_seed=3)
    first = campaign(1, first_seed=3)
    rest = campaign(400 - first["requests"], first_seed=0, before=first)
    assert rest | {"seconds": 0} == whole | {"seconds": 0}


def _leaks(original: Callable[..., Any]) -> Callable[..., Any]:
    def release(self: KVBlocks, blocks: list[int]) -> None:
        original(self, blocks[:-1] if len(blocks) > 3 else blocks)

    return release


def _loses_time(original: Callable[..., Any]) -> Callable[..., Any]:
    def mark(self: Ledger, phase: Phase, now: int) -> None:
        original(self, phase, now)
        if phase is Phase.SAMPLING:
            self.last_ns += 1

    return mark


def _serves_the_first_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *arguments: original(self, *arguments) if self.get(0) else []


def _charges_one_more(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number, tokens, *more: original(self, number, tokens and tokens + 1, *more)


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (Quotas, "settle", _charges_one_more),
        (SloPolicy, "starved", lambda original: lambda self, *state: None),
        (Server, "fail", lambda original: lambda self, now: original(self, now)[1:]),
        (KVBlocks, "release", _leaks),
        (Place, "close", lambda original: lambda self, now: None),
        (Ledger, "mark", _loses_time),
        (Sequences, "candidates", _serves_the_first_alone),
    ],
)
def test_what_is_planted_is_found(
    owner: type, name: str, planted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, planted(getattr(owner, name)))
    monkeypatch.setattr(engine, "STUCK_NS", 10_000_000_000)
    with pytest.raises(Violation, match="seed "):
        campaign(3000, first_seed=0)
