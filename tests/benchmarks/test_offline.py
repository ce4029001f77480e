"""The benchmark's arithmetic, without an engine: what counts as decode and prefill, and how ratios are formed."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import offline, offline_worker
from benchmarks.checkpoint import SHAPES, write_checkpoint
from headway.models.config import ModelConfig
from headway.text.tokenizer import Tokenizer


class Scripted:
    """An engine whose steps take as long as the test says."""

    version = "scripted"

    def __init__(self, steps: list[tuple[float, list[int]]]) -> None:
        self.steps = steps
        self.prompts: list[list[list[int]]] = []

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[tuple[float, list[int]]]:
        self.prompts.append(prompts)
        began = offline_worker.time.perf_counter()
        return [(began + at, counts) for at, counts in self.steps]


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_worker.time, "perf_counter", lambda: 100.0)


@pytest.mark.usefixtures("frozen_clock")
def test_decode_counts_only_after_the_last_prompt_has_begun() -> None:
    engine = Scripted([(1.0, [1, 0]), (2.0, [2, 1]), (2.5, [3, 2]), (4.0, [4, 4])])
    rates = offline_worker.measure(engine, 512, batch=2, prompt=10, new=4, seed=0)
    assert rates == {"decode": 5 / 2.0, "prefill": 20 / 2.0, "seconds": 4.0}


@pytest.mark.usefixtures("frozen_clock")
def test_prefill_alone_has_no_decode_rate() -> None:
    rates = offline_worker.measure(Scripted([(0.5, [1])]), 512, batch=1, prompt=512, new=1, seed=0)
    assert rates == {"decode": None, "prefill": 1024.0, "seconds": 0.5}


@pytest.mark.usefixtures("frozen_clock")
def test_an_engine_that_stops_early_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match=r"asked for 4 tokens of each of 2 prompts, got \[4, 3\]"):
        offline_worker.measure(Scripted([(1.0, [1, 1]), (2.0, [4, 3])]), 512, batch=2, prompt=8, new=4, seed=0)


def test_prompts_differ_within_a_batch_and_between_rounds_but_not_between_engines() -> None:
    first, second = Scripted([(1.0, [1, 1])]), Scripted([(1.0, [1, 1])])
    for engine in (first, second):
        for seed in (1, 2):
            offline_worker.measure(engine, 512, batch=2, prompt=16, new=1, seed=seed)
    assert first.prompts == second.prompts
    distinct = {tuple(prompt) for batch in first.prompts for prompt in batch}
    assert len(distinct) == 4


def test_ratios_compare_medians_and_neighbouring_rounds() -> None:
    results = offline.Results()
    point = offline.points([4], 128, 64, 512)[0]
    for ours, theirs in ((10.0, 5.0), (40.0, 40.0), (30.0, 10.0)):
        results.add(point, "headway", ours)
        results.add(point, "peer", theirs)
    mine, other = results.summary("headway")
    assert (mine["engine"], mine["median"], mine["low"], mine["high"], mine["ratio"]) == ("headway", 30, 10, 40, 1)
    assert (other["median"], other["ratio"], other["ratio_low"], other["ratio_high"]) == (10, 3, 1, 3)
    assert offline.table([mine, other], "headway").splitlines()[-1] == (
        "| decode, batch 4 | peer | 10.0 | 5.0 .. 40.0 | 3.00 | 1.00 .. 3.00 |"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "vllm"], "'vllm' is not NAME=PYTHON"),
        (["--peer", "vllm=/no/such/python"], "is not NAME=PYTHON"),
        (["--peer", f"unheard-of={sys.executable}"], "'unheard-of' is not an engine"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--batches", "4", "0"], "--batches is 0; it must be at least 1"),
        (["--new-tokens", "1"], "--new-tokens is 1; a decode rate needs at least 2"),
        (["--no-headway"], "nothing to measure"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        offline.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoint_is_one_that_headway_reads(shape: str, tmp_path: Path) -> None:
    folder = write_checkpoint(shape, tmp_path)
    config = ModelConfig.from_folder(folder)
    assert config.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("one token a byte") == tokenizer.encode("one") + tokenizer.encode(" token a byte")
    assert len(tokenizer.encode("one token a byte")) == 16


def test_a_whole_sitting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "tiny.json"
    shape = "--shape tiny --batches 1 3 --prompt-len 9 --new-tokens 5 --prefill-len 32 --rounds 2 --threads 1"
    offline.main([*shape.split(), "--output", str(output)])
    report = json.loads(output.read_text())
    assert list(report["rates"]) == ["decode, batch 1", "decode, batch 3", "prefill, 1 x 32"]
    assert all(len(rates["headway"]) == 2 and min(rates["headway"]) > 0 for rates in report["rates"].values())
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match=r"(?s)headway ended with exit code 1;.*config.json"):
        offline.Worker("headway", sys.executable, [str(tmp_path), "bfloat16", "1"])
