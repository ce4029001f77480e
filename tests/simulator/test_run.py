"""`headway simulate` from its flags to its files, in this process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.bench import reporting
from headway.bench.results import load_json
from headway.calibration import store
from headway.cli.simulate import app
from headway.policy.cache.sizing import BATCHED_TOKENS
from headway.policy.step.options import SchedulingOptions
from headway.simulator.clients import BEGAN_NS
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.log import StepLog
from headway.simulator.metrics import gauges_of
from tests.calibration.machines import a_machine

MODEL = ["llama-3.1-8b", "--hardware", "H100-SXM"]
LOAD = ["--request-rate", "20", "--num-prompts", "60", "--random-input-len", "500", "--random-output-len", "12"]
KEYS = ("request_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "completed", "headway")


def simulate(*arguments: str | Path, columns: int = 160) -> tuple[int, str]:
    ran = CliRunner().invoke(app, [*map(str, arguments), "--verbose"], env={"COLUMNS": str(columns)})
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return ran.exit_code, ran.output


def test_a_run_gives_the_results_of_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[dict[str, object]] = []
    monkeypatch.setattr(reporting, "report_page", lambda *runs, **options: pages.append(options))
    monkeypatch.setattr(reporting, "write_page", lambda *page: None)
    files = ["--result-dir", tmp_path, "--result-filename", "run.json", "--csv", "--report", tmp_path / "run.html"]
    code, said = simulate(*MODEL, *LOAD, *files, "--goodput", "ttft:500", "tpot:50")
    assert code == 0 and "Valid: 60 of 60 requests answered" in said and "busy with steps" in said
    assert "The client itself" not in said
    values = json.loads((tmp_path / "run.json").read_text())
    assert all(key in values for key in KEYS) and values["completed"] == 60
    result = load_json(tmp_path / "run.json")
    assert result.server["hardware"] == "H100-SXM" and result.settings["backend"] == "simulate"
    metrics = result.server["metrics"]
    assert metrics["generation_tokens"] == 720 and metrics["requests_finished"] == {"length": 60}
    assert 0 < metrics["gauges"]["utilisation"]["mean"] <= 1 and metrics["gauges_over_time"]["kv_cache_usage"]
    assert all(sum(record.timings["phases_ns"].values()) == record.timings["e2e_ns"] for record in result.records)
    assert pages[0]["title"] == "headway simulate: llama-3.1-8b on H100-SXM"
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 61
    again = ["--result-filename", "again.json", "--result-dir", tmp_path]
    simulate(*MODEL, *LOAD, *again, "--goodput", "ttft:500", "tpot:50")
    assert load_json(tmp_path / "again.json").records == result.records


def test_a_sweep_is_a_run_at_each_load(tmp_path: Path) -> None:
    load = ["--num-prompts", "40", "--random-input-len", "500", "--random-output-len", "12"]
    files = ["--result-dir", tmp_path, "--result-filename", "run.json"]
    code, said = simulate(*MODEL, *load, *files, "--sweep", "rate:2,50", "--goodput", "ttft:60")
    slow, fast = (load_json(tmp_path / f"run-{number}.json") for number in (1, 2))
    assert code == 0 and [result.settings["request_rate"] for result in (slow, fast)] == [2, 50]
    assert [[record.planned_output_tokens for record in result.records] for result in (slow, fast)] == [[12] * 40] * 2
    assert slow.duration_s > 5 * fast.duration_s
    assert "too few requests to decide" in said and "2 (100 %)" in said
    users = ["--sweep", "concurrency:1,4", "--no-save-result"]
    assert simulate(*MODEL, *load, *users)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["llama-9", "--hardware", "H100-SXM"], "model 'llama-9' is not known"),
        (["llama-3.1-8b", "--hardware", "H1000"], "hardware 'H1000' is not known"),
        (["llama-3.1-70b", "--hardware", "H100-SXM"], "llama-3.1-70b does not fit"),
        ([*MODEL, "--kv-cache-memory", "1M"], "raise --kv-cache-memory"),
        ([*MODEL, "--max-num-seqs", "300", "--max-num-batched-tokens", "200"], "--max-num-seqs is 300"),
        ([*MODEL, "--dataset-name", "azure"], "needs --dataset-path"),
        ([*MODEL, "--dataset-name", "azure", "--dataset-path", "TRACE"], "line 3"),
        ([*MODEL, "--report", "TRACE/is.html"], "no file can be made there"),
        ([*MODEL, "--sweep", "concurrency:2", "--max-concurrency", "3"], "leave out --max-concurrency"),
        ([*MODEL, "--swap-space", "1e9"], "--swap-space is 1e+09 GiB"),
        ([*MODEL, "--scale-down-seconds", "9"], "--scale-down-seconds needs --max-replicas"),
        ([*MODEL, "--mix", "nothing"], "there is no bundled mix 'nothing'"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,10,5\nyesterday,10,5\n")
    arguments = [each.replace("TRACE", str(trace)) for each in arguments]
    code, said = simulate(*arguments, "--num-prompts", "5", "--no-save-result")
    assert code == 2 and says in said and len(said.strip().splitlines()) == 1


def test_requests_that_can_never_fit_are_counted_and_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:46.1,100,5", "2023-11-16 18:15:46.2,3000,5", "2023-11-16 18:15:47.0,100,9000"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    code, said = simulate(
        *MODEL, "--dataset-name", "azure", "--dataset-path", trace, "--max-model-len", "2000", "--no-save-result"
    )
    assert code == 1 and "client_error" in said
    assert "the prompt has 3000 tokens" in said or "max_tokens is 9000" in said
    assert "1 of 3 requests answered" in said


def test_a_mix_with_classes_runs_under_its_slo_policy(tmp_path: Path) -> None:
    classes = tmp_path / "classes.toml"
    classes.write_text('[[class]]\nname = "chat"\nttft_ms = 300\n[[class]]\nname = "batch"\n')
    mix = tmp_path / "mix.toml"
    parts = [
        f'[[class]]\nname = "{name}"\nshare = 0.5\nservice_class = "{name}"\ninput_len = 300\noutput_len = 8\n'
        for name in ("chat", "batch")
    ]
    mix.write_text('description = "two"\n' + "".join(parts))
    options = ["--service-classes", classes, "--scheduling-policy", "slo", "--max-num-seqs", "4"]
    code, said = simulate(
        *MODEL, "--mix", mix, "--request-rate", "40", "--num-prompts", "40", *options, "--no-save-result"
    )
    assert code == 0 and "chat" in said and "batch" in said


def test_gauges_are_those_of_each_second() -> None:
    steps = StepLog()
    for planned, sampled, running in ((0, 250, 1), (500, 1500, 2), (3200, 3300, 3)):
        steps.planned_ns.append(BEGAN_NS + planned * 1_000_000)
        steps.sampled_ns.append(BEGAN_NS + sampled * 1_000_000)
        steps.running.append(running)
        steps.waiting.append(0)
        steps.blocks.append(running)
    gauges = gauges_of(steps, BEGAN_NS + 3_300_000_000, 10)
    assert [at for at, _ in gauges] == [1, 2, 3, 4]
    assert [values["utilisation"] for _, values in gauges] == pytest.approx([0.75, 0.5, 0, 0.1])
    assert [values["running"] for _, values in gauges] == [1, 2, 2, 3]
    assert gauges[1][1]["kv_cache_usage"] == 0.2
    assert gauges_of(StepLog(), BEGAN_NS, 10) == []


def test_a_calibrated_machine_is_simulated_with_its_own_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    store.save(a_machine("mine"))
    load = ["--max-concurrency", "2", "--num-prompts", "4", "--random-input-len", "60", "--random-output-len", "4"]
    files = ["--result-dir", tmp_path, "--result-filename", "run.json"]
    code, _ = simulate("qwen2.5-0.5b", "--hardware", "mine", *load, *files)
    server = load_json(tmp_path / "run.json").server
    assert code == 0 and server["efficiency"] == "as calibrated"
    assert server["max_num_batched_tokens"] == BATCHED_TOKENS["cpu"]
    assert server["num_blocks"] * server["block_size"] >= server["max_model_len"]


def test_the_pool_is_what_the_memory_leaves() -> None:
    def blocks(**options: Any) -> int:
        server = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM", max_model_len=8192, **options)
        return deploy(server, SchedulingOptions(max_num_seqs=1024)).scheduler.blocks.num_blocks

    of_token = 2 * 32 * 8 * 128 * 2  # keys and values in bf16
    assert blocks(kv_cache_memory=64 * 2**30) == 64 * 2**30 // (16 * of_token)
    assert blocks() > blocks(gpu_memory_utilization=0.5) > 0
    assert blocks(tensor_parallel_size=2) > 2 * blocks()  # each device has half of the weights, too


TENANTS = """
[[tenant]]
name = "quiet"
[[tenant]]
name = "loud"
requests_per_minute = 60
"""


def of_tenants(path: Path, seconds: int = 6) -> list[str | Path]:
    """A trace in which one tenant sends 1 request a second and the other 20, more than the seats can serve."""
    rows = [{"timestamp": 1000 * at, "tenant": "quiet"} for at in range(seconds)]
    rows += [{"timestamp": 50 * at, "tenant": "loud"} for at in range(20 * seconds)]
    lines = [json.dumps(row | {"input_length": 1500, "output_length": 60}) + "\n" for row in rows]
    path.write_text("".join(lines))
    return [
        "--dataset-name",
        "mooncake",
        "--dataset-path",
        path,
        "--max-num-seqs",
        "4",
        "--max-num-queued-reqs",
        "none",
    ]


def test_a_file_of_tenants_is_tried_on_traffic_of_several(tmp_path: Path) -> None:
    """Limits and turns are those of a live server: one is refused beyond its limit, the other is not kept waiting."""
    tenants, load = tmp_path / "tenants.toml", of_tenants(tmp_path / "trace.jsonl")
    tenants.write_text(TENANTS)
    options = ["--result-dir", tmp_path, "--csv", "--scheduling-policy", "fcfs"]

    def run(name: str, *more: str | Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
        _, said = simulate(*MODEL, *load, *options, "--result-filename", f"{name}.json", *more)
        ours = json.loads((tmp_path / f"{name}.json").read_text())["headway"]
        return said, {each["name"]: each for each in ours["summaries"]}, ours["server"]["metrics"]

    said, views, metrics = run("limited", "--tenants", tenants)
    loud, quiet = views["tenant loud"], views["tenant quiet"]
    assert (quiet["completed"], quiet["failures"]) == (6, {})
    # 60 saved up, and one more each second; what comes at the edge of a second is let in.
    assert loud["completed"] == 60 + 5 and loud["failures"] == {"refused": 120 - 65}
    assert "Tenants" in said and "refused by a limit" in said and "tenant 'loud' is over the limit" in said
    of_loud = metrics["tenants"]["loud"]
    assert of_loud["requests_settled"] == 65 and of_loud["tokens_settled"] == 65 * 1560
    assert of_loud["tokens_reserved"] == of_loud["tokens_settled"] + of_loud["tokens_refunded"]
    assert 0 < metrics["fairness_lead_tokens"] <= metrics["fairness_bound_tokens"]
    records = load_json(tmp_path / "limited.json").records
    passed = Counter[str]()
    for record in records:
        passed[record.tenant] += (record.timings or {})["passed_over"]
    assert records[0].tenant == "quiet" and passed["loud"] > 10 > passed["quiet"]
    assert ",quiet," in (tmp_path / "limited.csv").read_text()

    tenants.write_text(TENANTS.replace("requests_per_minute = 60", ""))
    said = run("short-queue", "--tenants", tenants, "--max-num-queued-reqs", "30")[0]
    assert "of tenant loud are in the server, and at most" in " ".join(said.split()), "it may not fill the queue"
    waits = [run(name, *more)[1]["tenant quiet"]["from_schedule"]["ttft_ms"]["maximum"]
             for name, more in (("turns", ("--tenants", tenants)), ("none", ()))]  # fmt: skip
    assert waits[0] < waits[1] / 4, "without turns it waits behind the flood"


@pytest.mark.slow
def test_what_if_the_tenants_had_other_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(TENANTS)
    second.write_text(TENANTS.replace("= 60", "= 600"))
    load = [*of_tenants(tmp_path / "trace.jsonl"), "--no-save-result", "--tenants", first]
    _, said = simulate(*MODEL, *load, "--what-if", f"tenants={second.name}")
    assert "A  as asked" in said and "B  tenants=second.toml" in said
    rows = [line.split() for line in said.splitlines() if line.startswith((" A ", " B "))]
    assert [row[1] for row in rows] == ["71", "126"]
    code, said = simulate(*MODEL, *load, "--what-if", f"tenants={tmp_path}/none.toml")
    assert code == 2 and "none.toml" in said
    (tmp_path / "other.toml").write_text('[[tenant]]\nname = "quiet"\n')
    code, said = simulate(*MODEL, *load[:-1], tmp_path / "other.toml")
    assert code == 2 and "requests of tenant 'loud', but --tenants only has default, quiet" in said
