"""Predicted beside measured steps: that the engine runs the steps that are predicted, and how errors are counted."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import plan_live
from benchmarks.plan_live import Compared, LiveEngine, Point, Visit, points, summary
from headway.calibration.store import save
from tests.calibration.machines import a_machine

TINY: dict[str, object] = {
    **plan_live.LLAMA_160M,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def engine() -> LiveEngine:
    return LiveEngine(TINY, batch=4, context=64, prompt=40, threads=1)


def test_decodes_are_of_so_many_sequences_after_so_many_tokens(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the runner is asked for in the middle step is what is predicted; nothing stays behind."""
    steps = []
    run = engine.runner.run

    def watched(plan):
        steps.append([(each.num_tokens, each.start) for each in plan.scheduled])
        return run(plan)

    monkeypatch.setattr(engine.runner, "run", watched)
    free = engine._core.scheduler.blocks.num_free
    for _ in range(2):
        steps.clear()
        seconds, context = engine.decode(48, 3, budget_s=0.0)
        assert len(seconds) == 3 and min(seconds) > 0
        assert steps[-2] == [(1, context)] * 3
        assert engine._core.scheduler.blocks.num_free == free


def test_prompts_are_computed_whole(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    run = engine.runner.run

    def watched(plan):
        steps.append([each.num_tokens for each in plan.scheduled])
        return run(plan)

    monkeypatch.setattr(engine.runner, "run", watched)
    seconds = engine.prefill(40, budget_s=0.0)
    assert len(seconds) == 1 and steps == [[40]]


def test_the_cache_is_full_of_numbers(engine: LiveEngine) -> None:
    """Attention over nothing but zeros would take another time."""
    for cache in engine.runner.caches:
        for blocks in (cache.keys, cache.values):
            assert float((blocks == 0).to(torch.float32).mean()) < 0.01


def test_a_point_s_error_is_the_median_over_its_rounds() -> None:
    compared = Compared(Point("m", 1, 64, 2), [Visit(10.0, 10.0), Visit(20.0, 10.0), Visit(40.0, 30.0)])
    assert (compared.median, compared.spread, compared.predicted) == (20.0, (10.0, 40.0), 10.0)
    assert compared.error == pytest.approx(-0.25)  # of 0, -0.5 and -0.25


def test_the_summary_is_by_model_and_phase() -> None:
    rows = [
        Compared(Point("m", tokens, 64, 1), [Visit(1.0, predicted)])
        for tokens, predicted in ((1, 1.1), (1, 0.7), (1, 1.2), (64, 2.0))
    ]
    decode, prefill = summary(rows)
    assert (decode["phase"], decode["points"], prefill["phase"], prefill["points"]) == ("decode", 3, "prefill", 1)
    assert decode["median_error"] == pytest.approx(statistics.median([0.1, 0.3, 0.2]))
    assert decode["worst_error"] == pytest.approx(0.3) and decode["bias"] == pytest.approx(0.1)
    assert prefill["median_error"] == pytest.approx(1.0)


def test_every_point_of_the_grid_is_visited() -> None:
    grid = points("m", (1, 2), (16, 32), (8,))
    assert len(grid) == len(set(grid)) == 5
    assert {(each.batch, each.context) for each in grid if each.phase == "decode"} == {
        (1, 16), (1, 32), (2, 16), (2, 32),
    }  # fmt: skip


def test_a_run_writes_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry, output = tmp_path / "entry.json", tmp_path / "live.json"
    save(a_machine(), entry)
    monkeypatch.setitem(plan_live.MODELS, "llama-160m", TINY)
    grid = ["--batches", "1", "2", "--contexts", "16", "--prompts", "8"]
    short = ["--rounds", "2", "--point-seconds", "0", "--models", "llama-160m"]
    plan_live.main([*grid, *short, "--entry", str(entry), "--output", str(output)])
    kept = json.loads(output.read_text())
    assert [len(each["visits"]) for each in kept["points"]] == [2, 2, 2]
    assert all(each["predicted_ms"] > 0 and each["measured_ms"] > 0 for each in kept["points"])
    assert "llama-160m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--batches 0", "--batches is [0]; it must be at least 1"),
        ("--contexts 17", "whole blocks of 16"),
        ("--prompts 1", "a prompt of one token is a decode"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan_live.main(arguments.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_an_entry_that_cannot_be_read_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(plan_live.MODELS, "llama-160m", TINY)
    with pytest.raises(SystemExit, match=r"^plan_live: cannot read .*missing\.json"):
        plan_live.main(["--models", "llama-160m", "--entry", str(tmp_path / "missing.json")])
