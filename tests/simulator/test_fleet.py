"""Several simulated servers behind a router, and how many are enough."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headway.bench.results import load_json
from headway.load.measures.trials import ProbeOutcome
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.sizing import PoolSize
from headway.policy.fleet.routing import SCORERS, router_of
from headway.policy.fleet.scaling import Scaler, ScalingRule
from headway.policy.step.ledger import Phase
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.request import NEVER
from headway.report import style
from headway.simulator.answers import Answer
from headway.simulator.engine import Host
from headway.simulator.fleet import Fleet, Scaling
from headway.simulator.replicas import MOST_REPLICAS, fewest_replicas
from headway.simulator.server import Server, simulate
from headway.simulator.timing import Fixed
from headway.simulator.traffic import Arrival, arrival, made_prompt
from tests.simulator.test_run import LOAD, MODEL
from tests.simulator.test_run import simulate as command

MS = 1_000_000
HOST = Host(request_ns=MS, token_ns=1e4, message_ns=1000)


def server(limits: QueueLimits | None = None, step_ns: int = 7 * MS) -> Server:
    scheduler = SchedulingOptions(max_num_seqs=6).scheduler("cuda", PoolSize(60, 512))
    return Server(scheduler, Fixed(step_ns), limits or QueueLimits(choices=40), HOST, None, None)


def traffic(count: int, seed: int = 1) -> Iterator[Arrival]:
    rng, now = random.Random(seed), 0
    for number in range(count):
        now += int(rng.expovariate(1 / (20 * MS)))
        prompt = made_prompt(number, rng.randrange(1, 300), [(rng.randrange(3), 64)])
        gives_up = now + rng.randrange(500 * MS) if rng.random() < 0.1 else None
        yield arrival(number, now, prompt, rng.randrange(1, 60), cancel_ns=gives_up, sampling={"n": rng.choice([1, 2])})


def said(answers: list[Answer]) -> list[tuple[object, ...]]:
    return [
        (a.request_id, a.index, list(a.token_ns), a.finish_reason, a.refused, a.ledger.phases_ns, a.cached_tokens)
        for a in answers
    ]


def routed(fleet: Fleet) -> list[int]:
    return [replica.routed for replica in fleet.replicas]


def test_a_fleet_of_one_is_a_server() -> None:
    alone = server()
    single = simulate(alone.scheduler, traffic(300), Fixed(7 * MS), QueueLimits(choices=40), HOST)
    one = server()
    fleet = Fleet([one], router_of("round-robin", one.scheduler.config.classes))
    fleet.run(traffic(300))
    assert said(fleet.answers) == said(single.answers) and any(answer.refused for answer in fleet.answers)
    assert list(one.steps.sampled_ns) == list(single.steps.sampled_ns)
    assert fleet.now == single.ended_ns and routed(fleet) == [300]


@pytest.mark.parametrize("routing", SCORERS)
def test_each_request_is_answered_once_by_one_server(routing: str) -> None:
    servers = [server() for _ in range(3)]
    fleet = Fleet(servers, router_of(routing, servers[0].scheduler.config.classes))
    fleet.run(traffic(400))
    names = [(answer.request_id, answer.index) for answer in fleet.answers]
    assert len(set(names)) == len(names) and len({name for name, _ in names}) == 400 == sum(routed(fleet))
    assert [int(name) for name, _ in names] == sorted(int(name) for name, _ in names)  # in order of arrival
    # What a prefix cache knows may leave others idle while there is room.
    assert min(routed(fleet)) > (10 if routing == "prefix-hits" else 60)
    assert sum(len(each.answers) for each in servers) == len(names)
    for each in servers:
        each.scheduler.check()
        assert not each.scheduler.has_work and not each.queues.of_all.choices and not each.queues.of_all.tokens
    for answer in fleet.answers:
        assert answer.refused or answer.finish_reason
        assert sum(answer.ledger.phases_ns.values()) == answer.ledger.total_ns


def test_a_request_is_routed_by_what_is_there_when_it_comes() -> None:
    """While one server is in a long step, the other has ended its request and gets the next."""
    long, short = server(step_ns=100 * MS), server(step_ns=5 * MS)
    fleet = Fleet([long, short], router_of("least-loaded", long.scheduler.config.classes))
    fleet.run([arrival(number, at * MS, 2, 1) for number, at in enumerate((0, 1, 50, 90))])
    assert routed(fleet) == [1, 3] and [answer.request_id for answer in long.answers] == ["0"]
    assert [answer.token_ns[0] // MS for answer in fleet.answers] == [101, 7, 56, 96]


def test_slack_knows_the_objective_of_a_request_s_class() -> None:
    """The built-in class wants its first token after a second, when one of the servers never has it."""
    late, timely = server(step_ns=3000 * MS), server(step_ns=20 * MS)
    fleet = Fleet([late, timely], router_of("slack=2,round-robin", late.scheduler.config.classes))
    fleet.run([arrival(number, number * 8000 * MS, 20, 2) for number in range(100)])
    assert routed(fleet)[0] < 25  # until it is learnt


def test_clients_send_their_next_request_to_any_server() -> None:
    def after(answers: list[Answer]) -> list[Arrival]:
        number = int(answers[0].request_id)
        return [arrival(number + 2, answers[0].ended_ns, 2, 3)] if number < 18 else []

    servers = [server(), server()]
    fleet = Fleet(servers, router_of("round-robin", servers[0].scheduler.config.classes), after)
    fleet.run([arrival(0, 0, 2, 3), arrival(1, 0, 2, 3)])
    assert len(fleet.answers) == 20 and routed(fleet) == [10, 10]
    assert all(answer.ledger.phases_ns.get(Phase.QUEUE_CAPACITY, 0) == 0 for answer in fleet.answers)


def test_answers_of_very_many_requests_need_not_be_kept() -> None:
    told: list[Answer] = []

    def after(answers: list[Answer]) -> list[Arrival]:
        told.extend(answers)
        return []

    servers = [server(), server()]
    fleet = Fleet(servers, router_of("round-robin", servers[0].scheduler.config.classes), after, keeps_answers=False)
    fleet.run(traffic(50))
    assert len({answer.request_id for answer in told}) == 50 and routed(fleet) == [25, 25]
    assert not fleet.answers and not any(each.answers for each in servers)


def test_a_fleet_grows_with_a_burst_and_shrinks_after_it() -> None:
    """A burst, then a request every second: replicas come after their start-up, and the last go first."""
    second = 1000 * MS
    scaling = Scaling(Scaler(ScalingRule(1, 4, choices=8, down_after_s=3.0)), server, startup_ns=100 * MS)
    fleet = Fleet([server()], router_of("round-robin", server().scheduler.config.classes), scaling=scaling)
    burst = [arrival(number, MS * number, 20, 40) for number in range(400)]
    fleet.run([*burst, *(arrival(1000 + at, (2 + at) * second, 20, 2) for at in range(10))])
    first, *later = fleet.replicas
    assert len(later) == 3 and all(answer.finish_reason or answer.refused for answer in fleet.answers)
    assert first.left_ns == NEVER and all(replica.left_ns < 8 * second for replica in later)
    for replica in later:
        assert replica.ready_ns == replica.started_ns + 100 * MS and replica.routed
        assert min(answer.arrived_ns for answer in replica.server.answers) >= replica.ready_ns
        assert max(answer.arrived_ns for answer in replica.server.answers) < replica.left_ns
        assert 3 * second < replica.lasted_ns(0, fleet.now) < 8 * second
    assert first.lasted_ns(0, fleet.now) == fleet.now and not first.server.queues.of_all.choices


def test_a_replica_that_leaves_ends_what_it_has() -> None:
    scaling = Scaling(Scaler(ScalingRule(1, 2, choices=2, down_after_s=0.0)), server, startup_ns=0)
    fleet = Fleet([server()], router_of("least-loaded", server().scheduler.config.classes), scaling=scaling)
    two, long = arrival(0, 0, 20, 2, sampling={"n": 2}), arrival(1, MS, 20, 200)
    fleet.run([two, long, arrival(2, 100 * MS, 20, 2), arrival(3, 101 * MS, 20, 2)])
    assert [len(answer.token_ns) for answer in fleet.answers] == [2, 2, 200, 2, 2]
    second = fleet.replicas[1]
    assert second.left_ns == 100 * MS < second.server.now and second.routed == 1
    assert second.lasted_ns(0, 10**12) == second.server.now - MS


def test_the_command_scales_and_counts_what_was_there(tmp_path: Path) -> None:
    files = ["--result-dir", tmp_path, "--result-filename", "run.json", "--price-per-hour", "2"]
    grows = ["--max-replicas", "5", "--scale-at", "1", "--startup-seconds", "0.2", "--scale-down-seconds", "1"]
    code, said = command(*MODEL, *LOAD, *files, *grows)
    server = load_json(tmp_path / "run.json").server
    hours = load_json(tmp_path / "run.json").duration_s / 3600
    assert code == 0 and 1 < server["replicas"] <= 5 and hours < server["replica_hours"] < server["replicas"] * hours
    fleet = f"{server['replicas']} replicas, {style.number(server['replica_hours'])} replica-hours, "
    assert f"{fleet}{style.number(server['price_per_hour'])} an hour" in " ".join(said.split())
    assert " per 1M output tokens" in said
    for wrong, says in (
        (["--scale-at", "3"], "needs --max-replicas"),
        (["--max-replicas", "2", "--replicas", "3"], "--replicas is 3 and --max-replicas 2"),
    ):
        code, printed = command(*MODEL, *LOAD, *wrong, "--no-save-result")
        assert code == 2 and says in printed


def test_more_replicas_answer_more_and_cost_more(tmp_path: Path) -> None:
    files = ["--result-dir", tmp_path, "--price-per-hour", "2", "--request-rate", "inf", "--num-prompts", "60"]
    load = [*LOAD[4:], "--max-num-seqs", "4", "--max-num-queued-reqs", "none"]
    code, _ = command(*MODEL, *load, *files, "--result-filename", "one.json")
    several = ["--replicas", "3", "--routing", "prefix-affinity", "--trace-output", tmp_path / "trace.json"]
    assert code == 0 and command(*MODEL, *load, *files, "--result-filename", "three.json", *several)[0] == 0
    one, three = (load_json(tmp_path / f"{name}.json") for name in ("one", "three"))
    assert 2 < one.duration_s / three.duration_s < 3.2
    assert three.server["replicas"] == 3 and sum(three.server["routed"]) == 60 and min(three.server["routed"]) > 5
    assert three.server["replica_hours"] == pytest.approx(3 * three.duration_s / 3600)
    assert one.server["metrics"]["generation_tokens"] == three.server["metrics"]["generation_tokens"] == 720
    assert max(three.server["metrics"]["gauges_over_time"]["utilisation"]) <= 1
    assert "server 3" in (tmp_path / "trace.json").read_text()


def outcome(missed: float, seed: int, steady: bool = True) -> ProbeOutcome:
    rng = np.random.default_rng(seed)
    return ProbeOutcome(0.0, np.where(rng.random(2000) < missed, 2.0, 0.5), steady, reason="" if steady else "slower")


@pytest.mark.parametrize("needed", [1, 2, 5, 8, 23])
def test_the_fewest_replicas_that_hold_are_found(needed: int) -> None:
    asked: list[tuple[int, int]] = []

    def probe(replicas: int, seed: int) -> ProbeOutcome:
        asked.append((replicas, seed))
        return outcome(0.001 if replicas >= needed else 0.2, seed, replicas > needed // 3)

    found = fewest_replicas(probe, 0.99)
    assert found.fewest == needed and len(set(asked)) == len(asked)
    assert all(trial.low >= 0.99 for replicas, trial in found.trials.items() if replicas >= needed)


def test_what_is_on_the_edge_takes_more_seeds_and_is_not_claimed() -> None:
    found = fewest_replicas(lambda replicas, seed: outcome(0.01 if replicas < 4 else 0.0, seed), 0.99)
    assert found.fewest == 4 and len(found.trials[2].probes) > len(found.trials[4].probes)
    never = fewest_replicas(lambda replicas, seed: outcome(1.0, seed), 0.99)
    assert never.fewest is None and never.reason == f"{MOST_REPLICAS} are not enough" and MOST_REPLICAS >= 512
    few = fewest_replicas(lambda replicas, seed: ProbeOutcome(0.0, np.full(6, 0.5)), 0.99)
    assert few.fewest is None and "48 requests" in few.reason and list(few.trials) == [1]


def test_the_command_says_how_many_replicas_are_enough() -> None:
    load = ["--random-input-len", "2000", "--random-output-len", "4", "--num-prompts", "150", "--request-rate", "60"]
    search = ["--find-replicas", "--goodput", "ttft:150", "--slo-attainment", "0.7", "--price-per-hour", "2"]
    code, printed = command(*MODEL, *load, *search, "--no-save-result")
    assert code == 0 and "Smallest number of replicas that meets the objectives for 70 % of the requests: " in printed
    fewest = int(printed.split("of the requests: ")[1].split(".")[0])
    assert 2 <= fewest <= 8 and f"{48 * fewest}" in printed and "at once" not in printed
    lenient = ["--find-replicas", "--goodput", "ttft:600000", "--slo-attainment", "0.7"]
    code, printed = command(*MODEL, *load[:-2], *lenient, "--no-save-result")
    assert code == 0 and "All requests came at once; --request-rate" in " ".join(printed.split())
    assert "price" not in printed
    for wrong, says in (
        (search[:1], "needs objectives"),
        ([*search, "--replicas", "2"], "leave out --replicas and --max-replicas"),
    ):
        code, printed = command(*MODEL, *load, *wrong, "--no-save-result")
        assert code == 2 and says in printed
