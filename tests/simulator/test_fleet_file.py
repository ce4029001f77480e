"""Fleets from a file: several kinds of servers, servers that fail, and prompts that are computed for others."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from headway.bench.results import load_json
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.sizing import PoolSize
from headway.policy.fleet.routing import router_of
from headway.policy.objectives.service_class import BUILT_IN
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ledger import Phase
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.policy.step.request import FinishReason
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.step_time import StepWork
from headway.simulator.answers import Answer
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.engine import Host
from headway.simulator.fleet import Failure, Fleet, Handover, Replica
from headway.simulator.fleet_file import FleetFile, read_fleet_file
from headway.simulator.members import members
from headway.simulator.server import Server
from headway.simulator.timing import ReceivedPrompts
from headway.simulator.traffic import Arrival, arrival
from tests.simulator.test_run import LOAD, MODEL, simulate

MS, SECOND = 1_000_000, 1_000_000_000


class Tokens:
    """A step takes 5 ms, and a millisecond for each token of a prompt."""

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        took = 5 * MS + MS * sum(item.num_tokens for item in plan.scheduled if not item.decoding)
        return StepTimes(now, now + took, now + took)

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return StepTimes(now, now + 5 * MS, now + 5 * MS)


def engine() -> Scheduler:
    return SchedulingOptions(max_num_seqs=6, scheduling_policy="fcfs").scheduler("cuda", PoolSize(60, 512))


def replica(role: str = "", weight: float = 1.0, handover: Handover | None = None) -> Replica:
    timing = ReceivedPrompts(Tokens()) if role == "decode" else Tokens()
    server = Server(engine(), timing, QueueLimits(), Host(), None, None, engine)
    return Replica(server, role, weight, handover or Handover())


def ran(replicas: list[Replica], coming: list[Arrival], failures: list[Failure], routing: str = "round-robin") -> Fleet:
    fleet = Fleet(replicas, router_of(routing, BUILT_IN), failures=failures)
    fleet.run(coming)
    for answer in fleet.answers:
        assert sum(answer.ledger.phases_ns.values()) == answer.ledger.total_ns == answer.ended_ns - answer.arrived_ns
    for each in replicas:
        each.server.scheduler.check()
        assert not each.server.scheduler.has_work and not each.server.queues.of_all.choices
        assert not each.server.queues.of_all.tokens
    return fleet


def by_name(fleet: Fleet) -> dict[str, Answer]:
    assert len({(answer.request_id, answer.index) for answer in fleet.answers}) == len(fleet.answers)
    return {answer.request_id: answer for answer in fleet.answers}


def test_of_a_server_that_fails_what_is_begun_is_cut_and_the_rest_goes_elsewhere() -> None:
    # 0 and 2 go to the first server, which is gone from 28 to 100 ms: 0 has tokens then, 2 has not.
    coming = [arrival(0, 0, 10, 9), arrival(1, 0, 10, 2), arrival(2, 27 * MS, 10, 2), arrival(3, 50 * MS, 1, 2)]
    coming += [arrival(4, 51 * MS, 1, 2), arrival(5, 100 * MS, 1, 2), arrival(6, 101 * MS, 1, 2)]
    two = [replica(), replica()]
    fleet = ran(two, coming, [Failure(28 * MS, 0, 100 * MS)])
    found = by_name(fleet)
    assert found["0"].finish_reason is FinishReason.ERROR and [at // MS for at in found["0"].token_ns] == [15, 20, 25]
    assert found["0"].ended_ns == 28 * MS == found["0"].ledger.phases_ns[Phase.ENGINE_LOST]
    again = found["2"]
    assert again.arrived_ns == 27 * MS and [at // MS for at in again.token_ns] == [43, 48]
    assert again.ledger.phases_ns[Phase.ENGINE_LOST] == MS
    assert all(found[name].finish_reason is FinishReason.LENGTH for name in "123456")
    assert [each.routed for each in two] == [3, 5] and two[0].failures == 1
    assert [len(each.server.answers) for each in two] == [2, 5]  # one has moved


def test_while_no_server_is_there_requests_fail_and_are_counted() -> None:
    fleet = ran([replica()], [arrival(0, 10 * MS, 5, 2), arrival(1, 60 * MS, 5, 2)], [Failure(0, 0, 50 * MS)])
    found = by_name(fleet)
    assert found["0"].refused == "no server is there" and found["0"].finish_reason is FinishReason.ERROR
    assert found["0"].ended_ns == 10 * MS and len(found["1"].token_ns) == 2


def test_failures_after_the_last_request_do_not_come() -> None:
    forever = FleetFile((), every_s=1.0).failures_of(0, 0.0, seed=1)
    assert list(islice(forever, 3)) == []  # of no replica
    one = replica()
    ran([one], [arrival(0, 0, 5, 2)], [Failure(SECOND * at, 0, SECOND * at) for at in range(1, 50)])
    assert one.failures == 0


def test_prompts_are_computed_on_one_server_and_answers_on_another() -> None:
    handover = Handover(token_bytes=1000.0, bytes_per_s=1e6, latency_s=0.001)  # a millisecond a token, and one more
    first, second = replica("prefill", handover=handover), replica("decode")
    fleet = ran([first, second], [arrival(0, 0, 10, 4), arrival(1, 0, 20, 2, sampling={"n": 2})], [])
    found = by_name(fleet)
    # Both prompts are computed in a step of 35 ms. The first is sent by 46 ms, the other after it by 67 ms.
    assert [at // MS for at in found["0"].token_ns] == [52, 57, 62, 67]  # of its prompt one token is computed again
    assert found["0"].ledger.phases_ns[Phase.KV_TRANSFER] == 11 * MS
    assert found["1"].ledger.phases_ns[Phase.KV_TRANSFER] == 32 * MS
    assert [answer.token_ns[0] // MS for answer in fleet.answers] == [52, 73, 79]
    assert len(fleet.answers) == 3 and [each.routed for each in (first, second)] == [2, 2]


def test_all_but_the_last_chunk_is_sent_while_the_next_one_is_computed() -> None:
    chunks = Handover(token_bytes=1000.0, bytes_per_s=1e6, chunk_tokens=10)  # a millisecond a token
    whole = replace(chunks, chunk_tokens=0)
    assert whole.until_ns(40, 0, 80 * MS, 0) == 120 * MS and whole.until_ns(40, 0, 80 * MS, 100 * MS) == 140 * MS
    # Quicker than computing, so that the last chunk is left; slower, so that sending goes on from the first one on.
    assert chunks.until_ns(40, 0, 80 * MS, 0) == 90 * MS and chunks.until_ns(40, 0, 20 * MS, 0) == 45 * MS
    assert chunks.until_ns(40, 0, 20 * MS, 30 * MS) == 70 * MS  # another one is sent before
    assert chunks.until_ns(5, 0, 10 * MS, 0) == 15 * MS and chunks.until_ns(41, 0, 80 * MS, 0) == 81 * MS


def test_requests_whose_keys_and_values_are_lost_begin_anew() -> None:
    handover = Handover(token_bytes=1000.0, bytes_per_s=1e6)
    servers = [replica("prefill", handover=handover), replica("prefill", handover=handover), replica("decode")]
    servers.append(replica("decode"))
    # 0 is on the first server when that fails, and on the third before its first token when that fails.
    failures = [Failure(3 * MS, 0, SECOND), Failure(32 * MS, 2, SECOND), Failure(34 * MS, 0, SECOND)]
    fleet = ran(servers, [arrival(0, 0, 10, 3)], failures)
    answer = by_name(fleet)["0"]
    # On the second server to 18 ms, sent by 28 ms; lost; there again to 32 + 15 ms (10 if it is cached), and sent.
    assert answer.finish_reason is FinishReason.LENGTH and len(answer.token_ns) == 3 and answer.arrived_ns == 0
    assert answer.ledger.phases_ns[Phase.KV_TRANSFER] == 20 * MS and Phase.ENGINE_LOST in answer.ledger.phases_ns
    assert [each.failures for each in servers] == [2, 0, 1, 0]


def test_a_request_that_is_refused_or_given_up_with_its_prompt_unfinished_ends_there() -> None:
    too_long, gone = arrival(0, 0, 600, 3), arrival(1, 0, 20, 3, cancel_ns=MS)
    late = arrival(2, 0, 10, 3, cancel_ns=40 * MS)  # on its way between the servers
    handover = Handover(token_bytes=1000.0, bytes_per_s=1e5)
    found = by_name(ran([replica("prefill", handover=handover), replica("decode")], [too_long, gone, late], []))
    assert "600 tokens" in found["0"].refused and found["1"].finish_reason is FinishReason.ABORT
    assert found["2"].finish_reason is FinishReason.ABORT and not found["2"].token_ns


def test_preempted_sequences_compute_what_they_had_received() -> None:
    timing = ReceivedPrompts(Tokens())
    prompt = ScheduledSequence(3, 0, [1] * 20, False, 1)
    plan = StepPlan(scheduled=[prompt], work=work_of([prompt]))
    assert timing.times(plan, 0).sampled_ns == 6 * MS
    plan.preempted = [3]
    assert timing.times(plan, 0).sampled_ns == 25 * MS


@pytest.mark.parametrize("routing", ["least-loaded", "class-aware", "prefix-affinity"])
def test_who_weighs_more_gets_more(routing: str) -> None:
    rng = random.Random(1)
    coming = [arrival(number, number * 2 * MS, rng.randrange(1, 20), 30) for number in range(300)]
    servers = [replica(weight=3.0), replica(weight=1.0)]
    ran(servers, coming, [], routing)
    assert 1.7 < servers[0].routed / servers[1].routed < 4.5


def test_random_failures_are_the_same_for_a_seed_and_come_as_often_as_said(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(
        "[[replica]]\ncount = 4\n[[failure]]\nreplica = 2\nat_s = 5\ndown_s = 1\n"
        "[random_failures]\nevery_s = 90\ndown_s = 10\n"
    )
    file = read_fleet_file(str(tmp_path / "fleet.toml"))
    found = list(islice(file.failures_of(SECOND, 2.0, seed=1), 2001))
    assert found == list(islice(file.failures_of(SECOND, 2.0, seed=1), 2001))
    assert found != list(islice(file.failures_of(SECOND, 2.0, seed=2), 2001))
    assert Failure(6 * SECOND, 2, 9 * SECOND) in found and [each.at_ns for each in found] == sorted(
        each.at_ns for each in found
    )
    assert found[-1].at_ns / SECOND == pytest.approx(2000 * 100 / 4, rel=0.1)
    down = [(each.back_ns - each.at_ns) / SECOND - 2 for each in found]
    assert sum(down) / len(down) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there are no replicas"),
        ("replica = 3", "write [[replica]]"),
        ("[[replica]]\ncount = 0", "line 2: count is 0; give a whole number from 1"),
        ("[[replica]]\nhardwear = 'L40S'", "line 2: 'hardwear' does not change a flag of the server; did you mean"),
        ("[[replica]]\nmax_num_seqs = 'many'", "line 2: --max-num-seqs is 'many'; it must be a whole number"),
        ("[[replica]]\nmodel = 'qwen3-8b'", "line 2: model is the same for all servers"),
        ("[[replica]]\nrole = 'draft'", "line 2: role is 'draft'; choose one of prefill, decode"),
        ("[[replica]]\nrole = 'prefill'", "give all of them one, and each role to some"),
        ("[[replica]]\nrole = 'prefill'\n[[replica]]\nrole = 'decode'\n[[replica]]", "give all of them one"),
        ("[[replica]]\nmax_num_seqs = [1]", "line 2: max_num_seqs is [1]; write a number"),
        (
            "[[replica]]\n[[failure]]\nreplica = 1\nat_s = 1\ndown_s = 1",
            "line 3: replica is 1; give a whole number from",
        ),
        ("[[replica]]\n[[failure]]\nreplica = 0\nat_s = -1\ndown_s = 1", "line 4: at_s is -1; give a number from 0"),
        ("[[replica]]\n[[failure]]\nreplica = 0", "at_s is missing"),
        ("[[replica]]\n[[failure]]\nserver = 0", "line 3: 'server' is unknown; a failure has replica, at_s, down_s"),
        ("[[replica]]\n[random_failures]\ndown_s = 3", "every_s is missing"),
        ("[[servers]]", "line 1: 'servers' is unknown; the file has replica, failure, random_failures"),
        ("[[replicas", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        read_fleet_file(str(tmp_path / "fleet.toml"))
    assert "fleet.toml" in str(error.value)


def test_servers_of_a_kind_are_as_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(
        "[[replica]]\ncount = 2\nrole = 'prefill'\nnetwork_gb_per_s = 25.0\n"
        "[[replica]]\nhardware = 'L40S'\nrole = 'decode'\nmax-num-seqs = 9\nenable_prefix_caching = false\n"
    )
    file = read_fleet_file(str(tmp_path / "fleet.toml"))
    options = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM")
    one, same, other = members(file.kinds, deploy, options, SchedulingOptions())
    assert one.deployed.timing is same.deployed.timing and one.deployed.scheduler is not same.deployed.scheduler
    assert one.deployed.about["hardware"] == "H100-SXM" and other.deployed.about["hardware"] == "L40S"
    assert other.deployed.scheduler.config.max_num_seqs == 9
    assert not other.deployed.scheduler.blocks.enable_prefix_caching
    # 32 layers of 8 heads of 128 numbers, keys and values, of 2 bytes.
    chunk_tokens = one.deployed.scheduler.config.max_num_batched_tokens
    assert one.replica().handover == Handover(131072.0, 25e9, one.replica().handover.latency_s, chunk_tokens)
    assert isinstance(other.replica().server._timing, ReceivedPrompts)


def test_the_command_simulates_a_fleet(tmp_path: Path) -> None:
    mixed, apart = tmp_path / "mixed.toml", tmp_path / "apart.toml"
    mixed.write_text(
        "[[replica]]\nprice_per_hour = 4.0\n[[replica]]\nhardware = 'L40S'\ncount = 2\nprice_per_hour = 1.0\n"
        "[[failure]]\nreplica = 0\nat_s = 0.5\ndown_s = 0.5\n"
    )
    apart.write_text("[[replica]]\nrole = 'prefill'\n[[replica]]\nrole = 'decode'\n")
    files = ["--result-dir", tmp_path, "--startup-seconds", "0.2"]
    code, said = simulate(*MODEL, *LOAD, *files, "--fleet", mixed, "--result-filename", "mixed.json", "--verbose")
    run = load_json(tmp_path / "mixed.json")
    assert code in (0, 1) and run.server["failures"] == [1, 0, 0]
    assert [kind["hardware"] for kind in run.server["kinds"]] == ["H100-SXM", "L40S"]
    assert run.server["price_per_hour"] == pytest.approx(6.0)
    weights = [kind["weight"] for kind in run.server["kinds"]]
    assert 2 < weights[0] / weights[1] < 6
    words = " ".join(said.split())
    assert "3 replicas (1 x H100-SXM, 2 x L40S)" in words and "replica 0 failed 1 time" in words
    cut = [record for record in run.records if not record.ok]
    assert all(record.failure is not None and record.failure.kind == "cut" for record in cut)

    changes = ["--what-if", "network-gb-per-s=0.5", "--result-filename", "apart.json"]
    code, said = simulate(*MODEL, *LOAD, *files, "--fleet", apart, *changes)
    quick, slow = (load_json(tmp_path / f"apart-{number}.json") for number in (1, 2))
    assert code == 0 and all(record.ok for record in (*quick.records, *slow.records))

    def transfers(records: list[object]) -> float:
        phases = [record.timings["phases_ns"] for record in records]  # type: ignore[attr-defined]
        return sum(each["kv_transfer"] for each in phases) / len(phases)

    assert transfers(list(slow.records)) > 20 * transfers(list(quick.records)) > 0
    code, said = simulate(*MODEL, *LOAD, "--fleet", mixed, "--replicas", "2", "--no-save-result")
    assert code == 2 and "--fleet defines the replicas" in said
    apart.write_text("[[replica]]\nkv_cache_memory = '1M'\n")
    code, said = simulate(*MODEL, *LOAD, "--fleet", apart, "--no-save-result")
    assert code == 2 and "Traceback" not in said
