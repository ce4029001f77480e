"""Searches, other servers, causes of the tail, and traces: what `headway simulate` says beyond one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.bench.results import load_json
from headway.policy.step.accounting import StepTimes
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.simulator.changes import changed, parse_what_ifs
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.timing import CachedPrompts, DecodesFirst
from headway.simulator.what_if import COUNTERFACTUALS
from tests.simulator.test_run import LOAD, MODEL, simulate

SHORT = ["--num-prompts", "150", "--random-input-len", "600", "--random-output-len", "60", "--request-rate", "30"]
# Few blocks: requests wait for them, and give them up.
CRAMPED = ["--kv-cache-memory", "300M", "--max-model-len", "1024", "--max-num-queued-reqs", "none"]
CRAMPED += ["--max-num-queued-tokens", "none", "--scheduling-policy", "fcfs"]


class Tokens:
    """A step takes a microsecond for each token that it computes."""

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        assert plan.work == work_of(plan.scheduled)
        took = 1000 * sum(item.num_tokens for item in plan.scheduled)
        return StepTimes(now, now + took, now + took)


@pytest.mark.slow
def test_the_highest_rate_is_found_with_new_seeds_for_each_look(tmp_path: Path) -> None:
    files = ["--result-dir", tmp_path, "--result-filename", "run.json"]
    load = ["--random-input-len", "2000", "--random-output-len", "4", "--num-prompts", "100"]
    search = ["--find-max-rate", "--goodput", "ttft:200", "--slo-attainment", "0.6"]
    code, said = simulate(*MODEL, *load, *files, *search)
    (path,) = tmp_path.iterdir()  # of all probes, one result
    found, run = json.loads(path.read_text())["headway"]["search"], load_json(path)
    assert code == 0 and found["rate"] == run.settings["request_rate"]
    probes = sum(trial["probes"] for trial in found["trials"])
    assert run.settings["seed"] <= probes and probes > 4
    rates = [trial["rate"] for trial in found["trials"]]
    assert max(rates) > 1.5 * min(rates) and "requests/s" in said
    assert said.count("Result: ") == 1
    assert simulate(*MODEL, *load, "--find-max-rate", "--no-save-result")[0] == 2  # without objectives


def test_what_ifs_are_rows_beside_what_was_asked(tmp_path: Path) -> None:
    files = ["--result-dir", tmp_path, "--result-filename", "run.json"]
    changes = ["--what-if", "max-num-seqs=1", "--what-if", "hardware=H200,scheduling_policy=fcfs"]
    code, said = simulate(*MODEL, *LOAD, *files, *changes, columns=80)
    asked, fewer, other = (load_json(tmp_path / f"run-{number}.json") for number in (1, 2, 3))
    legend = ("A  as asked", "B  max-num-seqs=1", "C  hardware=H200,scheduling_policy=fcfs")
    assert code == 0 and all(line in said.splitlines() for line in legend)
    assert max(len(line) for line in said.splitlines() if not line.startswith("Result: ")) <= 80
    assert "client" not in said  # no client was measured
    assert asked.server["max_num_seqs"] == 256 and fewer.server["max_num_seqs"] == 1
    assert other.server["hardware"] == "H200"
    arrivals = [[record.scheduled_ns for record in run.records] for run in (asked, fewer, other)]
    assert arrivals[0] == arrivals[1] == arrivals[2]
    assert fewer.duration_s > asked.duration_s


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--what-if", "max-num-seq=4"], "did you mean max-num-seqs?"),
        (["--what-if", "max-num-seqs"], "write FLAG=VALUE"),
        (["--what-if", "max-num-seqs=0"], "--max-num-seqs is 0; it must be at least 1"),
        (["--what-if", "max-num-seqs=few"], "it must be a whole number"),
        (["--what-if", "scheduling-policy=fast"], "choose one of"),
        (["--what-if", "enable-prefix-caching=perhaps"], "it must be true or false"),
        (["--what-if", "kv-cache-memory=much"], "is not a size"),
        (["--what-if", "hardware=H1000"], "--what-if hardware=H1000: hardware 'H1000' is not known"),
        (["--what-if", "max-num-seqs=4", "--explain-tail"], "exclude each other"),
        (["--sweep", "rate:1,2", "--trace-output", "trace.json"], "--trace-output needs a single run"),
        (["--trace-output", "/"], "no file can be made there"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: list[str], says: str) -> None:
    code, said = simulate(*MODEL, "--num-prompts", "5", *arguments, "--no-save-result")
    assert code == 2 and says in said and len(said.strip().splitlines()) == 1


def test_what_other_names_are_taken_for_is_said() -> None:
    code, said = simulate("llama-3-8b", "--hardware", "H100", "--num-prompts", "2", "--no-save-result")
    assert code == 0 and "llama-3-8b is taken as llama-3.1-8b, and H100 is taken as H100-SXM." in said
    assert "is taken as" not in simulate(*MODEL, "--num-prompts", "2", "--no-save-result")[1]


def test_a_change_has_the_type_of_its_flag() -> None:
    (asked,) = parse_what_ifs(["kv-cache-memory=2G,enable-prefix-caching=false,max-prefill-stall-ms=5,hardware=H200"])
    plain = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM"), SchedulingOptions()
    server, scheduling = changed(*plain, asked.changes)
    assert (server.kv_cache_memory, server.hardware) == (2 * 2**30, "H200")
    assert scheduling == SchedulingOptions(enable_prefix_caching=False, max_prefill_stall_ms=5.0)
    assert server.given == {"kv_cache_memory", "enable_prefix_caching", "max_prefill_stall_ms", "hardware"}


def test_the_tail_is_explained_by_what_the_same_requests_would_have_been() -> None:
    code, said = simulate(*MODEL, *SHORT, *CRAMPED, "--explain-tail", "--no-save-result")
    rows = [line for line in said.splitlines() if line.strip().startswith(("as it was", "with"))]
    assert code == 0 and len(rows) == 1 + len(COUNTERFACTUALS)
    assert all(title in said for title in COUNTERFACTUALS)
    waits, roomy = (float(row.split()[-3].replace(",", "")) for row in rows[:2])
    assert roomy < 0.1 * waits  # TTFT was mostly waiting for blocks


def test_counterfactual_servers_lack_their_cause_alone() -> None:
    server = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM", max_model_len=2048, kv_cache_memory=10**9)
    scheduling = SchedulingOptions(max_num_seqs=32, scheduling_policy="priority")
    plain = deploy(server, scheduling)
    made = {title: how(server, scheduling) for title, how in COUNTERFACTUALS.items()}
    roomy = made["without preemption"].scheduler
    assert roomy.blocks.num_blocks >= 32 * roomy.blocks.blocks_for(2048) and roomy.policy.orders.displaces == 0
    assert plain.scheduler.policy.orders.displaces > 0
    assert made["with twice the KV cache"].scheduler.blocks.num_blocks == 2 * plain.scheduler.blocks.num_blocks
    assert all(each.scheduler.config == plain.scheduler.config for each in made.values())


def test_time_of_others_prompts_and_of_cached_ones_is_left_out() -> None:
    decodes = [ScheduledSequence(0, 10, [1], True, 1), ScheduledSequence(1, 20, [1, 2], True, 2)]
    prompts = [ScheduledSequence(2, 0, [1] * 100, False, 1), ScheduledSequence(3, 50, [1] * 30, False, 0)]
    both = StepPlan([*decodes, *prompts], work=work_of([*decodes, *prompts]))
    alone = StepPlan(prompts, work=work_of(prompts))

    def took(timing: DecodesFirst | CachedPrompts, plan: StepPlan) -> int:
        return timing.times(plan, 7).sampled_ns - 7

    assert took(DecodesFirst(Tokens()), both) == 3000 and took(DecodesFirst(Tokens()), alone) == 100_000
    assert took(CachedPrompts(Tokens()), both) == 5000 and took(CachedPrompts(Tokens()), alone) == 2000
    assert len(both.scheduled) == 4  # what the scheduler completes is as it was


def test_a_trace_has_every_step_and_every_request(tmp_path: Path) -> None:
    trace = tmp_path / "new" / "trace.json"
    files = ["--result-dir", tmp_path, "--result-filename", "run.json"]
    code, _ = simulate(*MODEL, *LOAD, *files, "--trace-output", trace)
    result, events = load_json(tmp_path / "run.json"), json.loads(trace.read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert code == 0 and len(steps) == result.server["metrics"]["step"]["count"]
    assert sum(step["args"]["tokens"] for step in steps) == 60 * 500 + 60 * 11
    began = {event["id"]: event for event in events if event["ph"] == "b" and event["name"].startswith("request")}
    ended = {event["id"]: event for event in events if event["ph"] == "e" and event["name"].startswith("request")}
    assert began.keys() == ended.keys() and len(began) == 60
    for number, event in began.items():
        lasted = (ended[number]["ts"] - event["ts"]) / 1e3
        assert sum(event["args"]["ledger_ms"].values()) == pytest.approx(lasted)
