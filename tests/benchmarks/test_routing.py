"""What is sent to compare routings, and what is shown of it."""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks import routing
from headway.load.record import ClientHealth, RequestRecord, RunResult
from headway.load.request import PlannedRequest, Prompt
from headway.load.workload.build import build_workload
from headway.policy.fleet.routing import scorers_of
from headway.simulator.prompts import SketchSource

S = 1_000_000_000
LENGTHS = argparse.Namespace(
    turns="uniform:min=3,max=5",
    think_s="exponential:mean=2",
    input_len="uniform:min=20,max=60",
    output_len="uniform:min=4,max=8",
    requests=40,
    rate=2.0,
)


def test_every_routing_gets_the_same_times_and_lengths_in_other_words() -> None:
    first, second = (
        build_workload(routing.load_of(LENGTHS, 7, words).spec, SketchSource(), chat=False, context=1024).requests
        for words in (1, 2)
    )
    assert [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in first] == [
        (each.arrival_s, each.prompt_tokens, each.output_tokens) for each in second
    ]
    assert not {each.prompt.text for each in first} & {each.prompt.text for each in second}
    for name in routing.ROUTINGS:
        scorers_of(name)


def test_goodput_and_hits_are_those_of_all_runs_together() -> None:
    def run(*ttft_ms: float) -> RunResult:
        records = []
        for at, each in enumerate(ttft_ms):
            made = RequestRecord.of(PlannedRequest(at, Prompt(text="x"), 100, 1), S)
            made.sent_ns, made.prompt_tokens, made.cached_tokens, made.output_tokens = S, 100, 50 * at, 1
            made.chunk_ns.append(S + round(each * 1e6))
            made.chunk_tokens.append(1)
            made.end_ns = made.chunk_ns[0]
            records.append(made)
        return RunResult({}, records, S, 3 * S, ClientHealth())

    found = routing.figures([run(10, 400), run(20, 30)], {"ttft": 300.0, "tpot": 100.0})
    assert found["hits"] == 0.25 and found["goodput"] == 3 / 4 and found["failed"] == 0
    assert found["ttft_p50"] == np.percentile([10, 400, 20, 30], 50)
    shown = routing.table({"least-loaded": {"measured": found, "predicted": found | {"hits": 0.5}}})
    assert shown.splitlines()[-1] == "| `least-loaded` | 25 (25) | 389 (389) | 0.25 (0.5) | 0.75 (0.75) |"
