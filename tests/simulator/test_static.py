"""Static batching: batches that begin and end together, padded to the longest."""

from __future__ import annotations

import pytest

from headway.cost.attention import Chunk
from headway.policy.step.options import SchedulingOptions
from headway.simulator.deployed import Deployed, ServerOptions, deploy
from headway.simulator.server import Server
from headway.simulator.timing import Predicted
from headway.simulator.traffic import Arrival, arrival
from tests.simulator.test_run import LOAD, MODEL, simulate

MS = 1_000_000


def coming() -> list[Arrival]:
    return [arrival(0, 0, 100, 50), arrival(1, MS, 100, 10), arrival(2, 2 * MS, 300, 30, output_len=20)]


def made(**more: object) -> Deployed:
    options = {"model": "llama-3.1-8b", "hardware": "H100-SXM", "scheduler_profile": "static", **more}
    return deploy(ServerOptions(**options), SchedulingOptions(max_num_seqs=4))  # type: ignore[arg-type]


def run(deployed: Deployed, arrivals: list[Arrival]) -> Server:
    server = deployed.server()
    server.expect(iter(arrivals))
    server.run()
    return server


def test_a_batch_is_padded_and_ends_with_its_longest_answer() -> None:
    deployed = made()
    server = run(deployed, coming())
    first, short, long = server.answers
    assert [len(each.token_ns) for each in server.answers] == [50, 10, 20]
    assert [str(each.finish_reason) for each in server.answers] == ["length", "length", "stop"]
    assert short.ended_ns == long.ended_ns == long.token_ns[-1] > short.token_ns[-1]
    assert deployed.deployment is not None
    padded = Predicted(deployed.deployment).times_of((Chunk(300, 0, 1, 2),), first.ended_ns)
    assert short.token_ns[0] == long.token_ns[0] == padded.sampled_ns  # both waited for the batch before
    assert list(server.steps.sequences) == [1] * 50 + [2] * 20
    for each in server.answers:
        assert sum(each.ledger.phases_ns.values()) == each.ended_ns - each.arrived_ns


def test_a_batch_is_as_large_as_memory_and_seats_allow() -> None:
    crowd = [arrival(number, 0, 100, 60, output_len=4) for number in range(6)]
    assert max(run(made(), crowd).steps.sequences) == 4
    tight = made(kv_cache_memory=25 * 16 * 131_072, max_model_len=400)  # two of 160 tokens, which are 10 blocks each
    assert max(run(tight, crowd).steps.sequences) == 2
    given_up = [*coming()[:2], arrival(3, 2 * MS, 100, 10, cancel_ns=3 * MS)]
    assert [str(each.finish_reason) for each in run(made(), given_up).answers] == ["length", "length", "abort"]


def test_it_is_compared_with_continuous_batching() -> None:
    load = [*LOAD, "--max-num-seqs", "16", "--random-range-ratio", "0.5", "--no-save-result"]
    code, said = simulate(*MODEL, *load, "--what-if", "scheduler-profile=static")
    assert code == 0 and "B  scheduler-profile=static" in said
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()[:3] in ("A  ", "B  ")}
    ttft = {name: float(row[4].replace(",", "")) for name, row in rows.items() if len(row) > 5}
    assert ttft["B"] > 2 * ttft["A"]


@pytest.mark.parametrize("more", [("--scheduling-policy", "fcfs"), ("--explain-tail",), ("--max-queue-time", "3")])
def test_what_only_a_scheduler_does_is_refused(more: tuple[str, ...]) -> None:
    code, said = simulate(*MODEL, *LOAD, "--scheduler-profile", "static", *more)
    assert code == 2 and more[0] in said and len(said.splitlines()) == 1
