"""The comparison of schedulings: who is started how, what counts of a run, and who is held against whom."""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path

import pytest

from benchmarks import classes, servers
from benchmarks.rounds import Rounds
from headway.load.record import FailureKind, RunResult
from headway.load.workload.mix import load_mix
from headway.policy.objectives.service_class import table_of
from tests.bench.records import failed, request, run
from tests.benchmarks.peers import program

OBJECTIVES = {"interactive": {"ttft": 100.0, "tpot": 20.0}, "offline": {"e2el": 5000.0}}


def a_run(seed: int = 1) -> RunResult:
    """A run of 2 s with three chats, of which one is late and one is cancelled, and `seed` offline requests."""
    records = [
        request(0, [50, 60, 70], due=0, class_name="interactive"),
        request(1, [150, 160], due=0, class_name="interactive"),
        failed(2, FailureKind.CANCELLED, due=500, end=550, class_name="interactive"),
    ]
    records += [request(3 + i, [1900, 3900], due=0, class_name="offline") for i in range(seed)]
    settings = {"goodput_by_class": OBJECTIVES}
    return run(records, seconds=4.0, settings=settings, probes=[request(0, [30, 40])])


def test_contestants_are_rows_of_flags() -> None:
    slo, fcfs, small, *_, vllm, vllm_small = classes.contestants([256], vllm=True)
    assert slo.flags == ("--scheduling-policy", "slo", "--service-classes", classes.CLASSES)
    assert (fcfs.name, fcfs.flags, fcfs.budget) == ("headway fcfs", ("--scheduling-policy", "fcfs"), False)
    assert small.flags[-2:] == vllm_small.flags == ("--max-num-batched-tokens", "256") and small.budget
    assert (vllm.engine, vllm.flags) == ("vllm", ())
    assert [each.engine for each in classes.contestants([256, 512], vllm=False)] == ["headway"] * 4


def test_a_server_is_told_the_objectives_that_it_is_judged_by(tmp_path: Path) -> None:
    mixes = classes.parse([]).mixes
    table = table_of(tomllib.loads(classes.service_classes(mixes)))
    for mix in map(load_mix, mixes):
        for each in mix.classes:
            of_server, limits = table.named(each.name), each.objectives
            assert each.extra_body == {"service_class": each.name}
            told = {"ttft": of_server.ttft_ms, "tpot": of_server.tpot_ms}
            assert {key: limit for key, limit in told.items() if limit < float("inf")} == {
                key: limit for key, limit in limits.items() if key != "e2el"
            }
    assert [each.name for each in table] == ["interactive", "batch", "offline"]
    other = tmp_path / "other.toml"
    other.write_text('[[class]]\nname = "batch"\nshare = 1\ngoodput = { ttft = 1 }\n')
    with pytest.raises(SystemExit, match=r"class 'batch' of .*other\.toml has other objectives"):
        classes.service_classes([*mixes, other])


def test_goodput_is_of_the_time_in_which_requests_came() -> None:
    found = classes.figures(a_run(seed=2), seconds=2.0)
    assert (found["goodput"], found["goodput interactive"], found["goodput offline"]) == (1.5, 0.5, 1.0)
    assert found["met interactive"] == pytest.approx(1 / 3) and found["met offline"] == 1
    assert (found["cancelled"], found["failed"], found["client_bound"]) == (1, 0, 0)
    assert found["itl"] == pytest.approx(10) and 149 <= found["ttft"] <= 150 and found["stranger"] == pytest.approx(30)
    # Only the first token of each offline request had come by then.
    assert found["tokens"] == pytest.approx((4 * 10 + 5 + 2) / 2)


def test_the_best_budget_is_that_of_the_highest_median() -> None:
    rounds = Rounds()
    rows = classes.contestants([256, 512], vllm=False)
    goodput = {"headway slo": [4.0, 5.0], "headway fcfs": [1.0, 2.0]}
    goodput |= {"headway fcfs, 256 tokens": [3.0, 3.0], "headway fcfs, 512 tokens": [2.0, 3.5]}
    for name, values in goodput.items():
        for value in values:
            rounds.add("mix", name, {"goodput": value, "goodput interactive": value, "tokens": 100.0}
                       | dict.fromkeys(("itl", "ttft", "stranger"), 7.0))  # fmt: skip
    measured = rounds.values["mix"]
    assert classes.best_budget(measured, rows, "headway") == "headway fcfs, 256 tokens"
    said = classes.verdicts("mix", measured, rows, "headway slo")
    beside, budget = said.splitlines()
    times = "mix: headway slo has {} times the goodput of {} 1.00 times its tokens/s"
    assert beside == times.format("3.00 (2.50 .. 4.00)", "headway fcfs and")
    assert budget == times.format("1.50 (1.33 .. 1.67)", "headway fcfs, 256 tokens, its best static budget, and")
    assert "| headway fcfs | 1.50 (1.00 .. 2.00) | 1.50 (1.00 .. 2.00) | 7.00 |" in classes.table(
        "mix", measured, "headway slo"
    )


@pytest.mark.slow
def test_a_sitting_takes_turns_and_is_saved_after_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    binary, mute = program(tmp_path, "fake"), program(tmp_path, "mute")
    mute.write_text("#!/bin/sh\nexit 3\n")
    turns: list[tuple[str, str, int]] = []
    told: list[str] = []

    def launch(_: str, port: int, settings: servers.Settings) -> servers.Launch:
        return servers.Launch([str(binary), "--port", str(port)], {})

    def put_mix(
        server: servers.Server, mix: Path, _: object, load: float, seconds: float, seed: int
    ) -> tuple[RunResult, float]:
        if seed:
            turns.append((server.name, f"{mix.stem} {load:g}", seed))
        if "--service-classes" in server.arguments:
            told.append(Path(server.arguments[server.arguments.index("--service-classes") + 1]).read_text())
        return a_run(seed), 0.0

    monkeypatch.setitem(servers.ENGINES, "headway", launch)
    monkeypatch.setattr(servers, "version", lambda *_: "1")
    monkeypatch.setattr(classes, "put_mix", put_mix)
    monkeypatch.setattr(classes, "write_weights", lambda *_: None)
    monkeypatch.setattr(servers, "write_weights", lambda *_: tmp_path)
    output = tmp_path / "classes.json"
    chosen = ["--budgets", "--vllm", str(mute), "--seconds", "2", "--loads", "1", "2", "--output", str(output)]
    with pytest.raises(SystemExit, match="vllm ended with exit code 3"):
        classes.main([*chosen, "--rounds", "2", "--mixes", str(classes.MIXES / "tuned.toml")])
    content = json.loads(output.read_text())
    assert (content["rounds_finished"], list(content["died"])) == (2, ["vllm"])
    assert list(content["values"]) == ["tuned", "tuned, 2x"] and content["machine"]["processor"]
    assert content["values"]["tuned"]["headway fcfs"]["goodput offline"] == [0.5, 1.0]
    assert [(name, seed) for name, load, seed in turns if load == "tuned 1"] == [
        ("headway slo", 1), ("headway fcfs", 1), ("headway fcfs", 2), ("headway slo", 2)
    ]  # fmt: skip
    assert 'name = "interactive"\nttft_ms = 1000' in told[0]
    assert output.with_suffix(".png").stat().st_size > 5000
    assert "tuned, 2x: headway slo has 1.00 times the goodput of headway fcfs" in capsys.readouterr().out
    mixes = ["--mixes", str(classes.MIXES / "tuned.toml")]
    classes.main([*chosen, *mixes, "--rounds", "1", "--append", "--only", "headway slo"])
    content = json.loads(output.read_text())
    assert [each["name"] for each in content["contestants"]] == ["headway slo", "headway fcfs"]
    assert len(content["values"]["tuned"]["headway slo"]["goodput"]) == 3
    with pytest.raises(SystemExit, match="was measured with other settings"):
        classes.main([*chosen, "--append"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "0"], "--seconds is 0.0; it must be above 0"),
        (["--loads", "1", "-2"], "--loads is [1.0, -2.0]; it must be above 0"),
        (["--only", "vllm"], "--only 'vllm' is no contestant; there are headway slo"),
        (["--vllm", "/nowhere"], "--vllm '/nowhere' is not a program"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        classes.parse(arguments)
    assert said in capsys.readouterr().err
