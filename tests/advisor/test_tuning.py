"""Tuning keeps what is proven, drops what is not, goes on where it was, and writes what it found."""

from __future__ import annotations

import io
import json
import math
import random
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from headway.advisor.tuning import tune
from headway.advisor.tuning.candidates import Prediction, candidates
from headway.advisor.tuning.options import TuneOptions, duration
from headway.advisor.tuning.race import FAILED, MOST_PAIRS, Race, attainment, distances, furthest, loss
from headway.advisor.tuning.report import config_lines, lines, meets, write
from headway.advisor.tuning.subjects import LEARN_SEEDS, start_command
from headway.bench.journal import Journal
from headway.bench.options import Claims
from headway.changes import applied, change_of, typed
from headway.engine.config import ModelOptions
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.workload.arrival_flags import ArrivalFlags
from headway.load.workload.spec import WorkloadSpec
from headway.policy.step.options import SchedulingOptions
from tests.advisor.evidences import record

OBJECTIVES = {"ttft": 100.0, "tpot": 10.0}


# --- how good a run is -------------------------------------------------------------------------------------


def test_the_worst_figure_over_its_objective_counts() -> None:
    records = [record(0, 50.0, 11, 5.0), record(1, 200.0, 11, 5.0), record(2, 50.0, 11, 40.0)]
    for each in records:
        each.scheduled_ns = each.sent_ns
    failed = RequestRecord(3, failure=Failure(FailureKind.CUT, "cut"))
    found = distances([*records, failed], OBJECTIVES)
    assert found == pytest.approx([math.log(0.5), math.log(2.0), math.log(4.0), FAILED])
    assert attainment(found) == 0.25 and furthest(found).tolist() == [3]
    assert loss(found[:3]) == pytest.approx(math.log(4.0)) and loss(np.array([])) == FAILED


def test_a_clear_gain_is_proven_after_a_few_pairs_and_noise_never_is() -> None:
    clear = [0.40, 0.43, 0.38, 0.41]
    assert Race((0.4,)).verdict == "undecided" and Race((0.4,)).interval == (0.0, math.inf)
    assert Race(tuple(clear)).verdict == "better" and Race(tuple(-each for each in clear)).verdict == "worse"
    assert Race(tuple(clear)).times == pytest.approx(math.exp(0.405))
    assert Race((0.001, -0.001, 0.0005, -0.0004)).verdict == "no gain"
    assert Race((0.3, -0.2, 0.1)).verdict == "undecided"


def test_of_candidates_that_make_no_difference_few_are_kept_over_all_looks() -> None:
    chance, wrong = random.Random(1), 0
    for _ in range(400):
        gains: tuple[float, ...] = ()
        while Race(gains).verdict == "undecided" and len(gains) < MOST_PAIRS:
            gains += (chance.gauss(0.0, 0.2),)
        wrong += Race(gains).verdict == "better"
    assert wrong <= 10  # half of ERRORS, as the other half are called worse


# --- what is tried -----------------------------------------------------------------------------------------


def test_candidates_change_one_flag_and_can_all_be_served() -> None:
    now = SchedulingOptions(max_num_seqs=300, enable_prefix_caching=False)
    found = list(candidates(now, "cpu"))
    assert len({each.typed for each in found}) == len(found) > 10
    assert "--enable-prefix-caching" in {each.typed for each in found}
    for each in found:
        then = applied(now, [each])
        assert then != now and then.batched_tokens("cpu") >= then.max_num_seqs
    assert not any(each.field == "enable_prefix_caching" for each in candidates(SchedulingOptions(), "cpu"))


def test_a_prediction_has_a_bar_that_grows_with_its_spread() -> None:
    change = change_of(SchedulingOptions, "max_num_seqs", 64)
    narrow, wide = Prediction.of(change, [0.2, 0.2]), Prediction.of(change, [0.1, 0.3])
    assert narrow.times == pytest.approx(wide.times) and narrow.low > wide.low and narrow.high < wide.high
    assert Prediction.of(change, [0.0, 0.0]).high == 1.0  # every decision is the same
    assert Prediction.of(change, [0.02, 0.02]).high > 1.03 > Prediction.of(change, [0.002, 0.001]).high


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "ten", "5d", "-3m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration(text)


# --- the whole ---------------------------------------------------------------------------------------------


class Machine:
    """A server whose slowest requests take so many times the allowed time, by its settings; with some noise."""

    device, tunable = "cpu", None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self._chance = 0, random.Random(3)
        self.believed: Callable[[SchedulingOptions], float] | None = self.true
        monkeypatch.setattr(tune, "subject_of", self._of)

    def _of(self, options: TuneOptions, _: object) -> Machine:
        self._given = options.scheduling
        return self

    async def learn(self) -> list[list[RequestRecord]]:
        return await self.measured(self._given, LEARN_SEEDS)

    async def measured(self, scheduling: SchedulingOptions, seeds: Sequence[int]) -> list[list[RequestRecord]]:
        self.runs += len(seeds)
        return [self.records(self.true(scheduling) * math.exp(self._chance.gauss(0.0, 0.02))) for _ in seeds]

    async def simulated(self, scheduling: SchedulingOptions, _: int) -> list[RequestRecord] | None:
        return None if self.believed is None else self.records(self.believed(scheduling))

    def true(self, scheduling: SchedulingOptions) -> float:
        return (4.0 if scheduling.max_num_seqs < 32 else 1.0) * (
            1.0 if scheduling.max_prefill_stall_ms == 25.0 else 1.5
        )

    @staticmethod
    def records(times: float) -> list[RequestRecord]:
        records = [record(number, 90.0 * times, 11, 4.0, decode_compute=30.0) for number in range(20)]
        for each in records:
            each.scheduled_ns = each.sent_ns
        return records


@pytest.fixture
def options(tmp_path: Path) -> TuneOptions:
    return TuneOptions(
        ModelOptions(),
        SchedulingOptions(max_num_seqs=16),
        ArrivalFlags(),
        WorkloadSpec(),
        Claims(objectives=OBJECTIVES),
        output=tmp_path / "tuned",
    )


def run(options: TuneOptions) -> tune.Tuned:
    return tune.run_tuning(options, Console(file=io.StringIO()))


def test_what_helps_is_found_and_kept(options: TuneOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    found = run(options)
    assert {each.field for each in found.changes} == {"max_num_seqs", "max_prefill_stall_ms"}
    assert applied(options.scheduling, found.changes).max_prefill_stall_ms == 25.0
    assert meets(found.after, 0.99) and not meets(found.before, 0.99)
    assert len({trial.prediction.change.typed for trial in found.trials}) == len(found.trials)  # none is tried twice


def test_what_the_simulator_promises_in_vain_is_dropped(options: TuneOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.believed = lambda scheduling: 0.5 if scheduling.scheduling_policy == "fcfs" else 1.0
    machine.true = lambda scheduling: 1.0  # type: ignore[method-assign]
    found = run(options)
    assert found.changes == [] and found.trials[0].prediction.change.value == "fcfs"
    assert not any(trial.kept for trial in found.trials)
    text = "\n".join(lines(options, found))
    assert "No change was proven" in text and "--scheduling-policy fcfs" in text


def test_an_interrupted_tuning_goes_on_without_measuring_again(
    options: TuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    whole = run(options)
    measured, journal = machine.runs, options.output / "journal.jsonl"
    kept = journal.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(kept) if '"race ' in line)
    journal.write_text("".join(kept[:last]) + kept[last][:20])  # killed in the middle of a line
    again = run(options)
    assert typed(again.changes) == typed(whole.changes) and 0 < machine.runs - measured < measured
    assert run(options).trials == run(options).trials  # all is known now


def test_a_journal_of_other_options_is_refused(options: TuneOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    run(options)
    options.scheduling = SchedulingOptions(max_num_seqs=8)
    with pytest.raises(ValueError, match="other options; give another --output"):
        run(options)


def test_a_budget_that_is_spent_ends_it(options: TuneOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    options.budget_s = 1e-6
    found = run(options)
    assert found.trials == [] and "budget of 1e-06 s" in found.why and found.left


def test_config_and_report_are_written(options: TuneOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    options.model_options = ModelOptions(kv_cache_memory=2**26, kv_cache_dtype="int8")
    found = run(options)
    config, report = write(options, found)
    said = tomllib.loads(config.read_text())
    assert said["kv-cache-memory"] == 2**26 and said["kv-cache-dtype"] == "int8" and said["max-num-seqs"] >= 32
    assert "kept by tuning" in config.read_text() and "as given" in "\n".join(config_lines(options, found))
    text = report.read_text()
    assert all(f"## {title}" in text for title in ("What helped, and by how much", "What remains, and why"))
    assert f"headway serve --config {config}" in text and "| kept |" in text and "decode_compute" in text


def test_a_journal_keeps_what_was_added(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a" / "j.jsonl", {"x": 1})
    journal.add("q", [1.5], 2.0)
    assert Journal(tmp_path / "a" / "j.jsonl", {"x": 1}).answer("q") == [1.5]
    assert Journal(tmp_path / "a" / "j.jsonl", {"x": 1}).seconds == 2.0
    (tmp_path / "bad.jsonl").write_text("no\n" + json.dumps({"about": {}}) + "\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        Journal(tmp_path / "bad.jsonl", {})


# --- other servers -----------------------------------------------------------------------------------------

START = "serve 'my model' --port {port} -np {max_num_seqs} -b {max_num_batched_tokens}"


def test_a_start_command_gets_the_settings() -> None:
    found = start_command(START, SchedulingOptions(max_num_seqs=4, max_num_batched_tokens=512), "cuda", 80)
    assert found == ["serve", "my model", "--port", "80", "-np", "4", "-b", "512"]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("serve --port {port} -np {seats}", "has {seats}, which is no setting"),
        ("serve -np {max_num_seqs}", "has no {port}"),
        ("serve --port {port}", "no setting to tune"),
        ("serve 'x --port {port} {max_num_seqs}", "cannot be split into words"),
    ],
)
def test_a_start_command_that_cannot_be_tuned_is_one_line(options: TuneOptions, start: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(options, start=start)
    with pytest.raises(ValueError, match="names its own"):
        replace(options, start=START, model="story")


def test_what_cannot_be_simulated_is_tried_from_the_nearest_on(
    options: TuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    machine.believed, machine.tunable = None, frozenset({"max_num_seqs"})  # type: ignore[assignment]
    options = replace(options, start="serve --port {port} -np {max_num_seqs}")
    found = run(options)
    assert [trial.prediction.change.value for trial in found.trials][:2] == [32, 64]
    assert typed(found.changes) == "--max-num-seqs 32" and {each.prediction.high for each in found.trials} == {math.inf}
    written = {path.name: path.read_text() for path in write(options, found)}
    assert written["start.txt"] == "serve --port '{port}' -np 32\n"
    assert "not simulated" in written["report.md"] and "Serve with `serve --port" in written["report.md"]


@pytest.mark.slow
def test_another_server_is_started_and_tuned(options: TuneOptions) -> None:
    start = f"{sys.executable} -m headway serve --port {{port}} --max-num-seqs {{max_num_seqs}}"
    workload = WorkloadSpec(num_prompts=24, random_input_len=16, random_output_len=24)
    scheduling, claims = SchedulingOptions(max_num_seqs=1), Claims(objectives={"ttft": 50.0})
    begun = replace(options, start=start, workload=workload, scheduling=scheduling, claims=claims, budget_s=5.0)
    found = run(begun)
    assert found.before[0]["percentiles_ms"]["ttft"] and found.trials[0].prediction.change.value == 2
    assert len(found.trials[0].race.gains) >= 2 and write(begun, found)
    bad = replace(options, start="/no/such/server {port} {max_num_seqs}", output=options.output / "bad")
    with pytest.raises(ValueError, match="cannot start /no/such/server: No such file"):
        run(bad)


def test_tuning_needs_objectives() -> None:
    with pytest.raises(ValueError, match="give --goodput"):
        TuneOptions(ModelOptions(), SchedulingOptions(), ArrivalFlags(), WorkloadSpec(), Claims())
