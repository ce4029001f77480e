"""Quality beside speed: the same windows for all, a change with its error, and tasks."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from headway.bundled import STORY
from headway.kernels.interface import KV_CACHE_DTYPES
from headway.kernels.weights import QUANTIZATIONS
from headway.quantize.calibration import excerpts
from headway.quantize.pooling import pool_heads
from headway.quantize.quality import changed, continuations
from tests.planner.command_line import CommandLine

SENTENCE = "The old house stood at the end of the lane, and nobody had lived in it for many years. "
SMALL = ("--windows", 4, "--tokens", 40, "--dtype", "float32", "--rounds", 0)


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def test_the_change_is_that_of_pairs() -> None:
    """Windows that differ a lot, and all get worse by the same: an error of zero."""
    change, error = changed([-1.1, -3.1, -2.1], [-1.0, -3.0, -2.0])
    assert (change, error) == (pytest.approx(math.exp(0.1) - 1), pytest.approx(0.0, abs=1e-12))
    change, error = changed([-1.1, -3.3], [-1.0, -3.0])
    assert error == pytest.approx(math.exp(0.2) * statistics.stdev([0.1, 0.3]) / math.sqrt(2))


def test_excerpts_are_spread_and_begin_with_words() -> None:
    text = " ".join(f"word{number:05d}" for number in range(1000))
    found = excerpts(text, 4, 100)
    assert [piece.split()[0] for piece in found] == ["word00000", "word00250", "word00500", "word00750"]
    assert all(piece in text for piece in found)


def test_continuations_are_those_of_the_text_and_of_others() -> None:
    windows = [list(range(number * 100, number * 100 + 40)) for number in range(6)]
    for at, task in enumerate(continuations(windows)):
        assert isinstance(task.answer, int) and task.choices[task.answer] == tuple(windows[at][-16:])
        assert len(set(task.choices)) == 4 and task.prompt == tuple(windows[at][:-16])


def rows_of(headway: CommandLine, output: Path, *more: object) -> list[dict[str, Any]]:
    ran = headway("bench", "quality", *SMALL, "--output", output, *more)
    assert ran.code == 0, ran.err
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    shown = [line for line in ran.out.splitlines() if any(f" {name} " in line for name in KV_CACHE_DTYPES)]
    assert len(shown) >= len(rows)
    return rows


def test_every_scheme_of_the_bundled_model(headway: CommandLine, tmp_path: Path) -> None:
    text = tmp_path / "text.gz"
    text.write_bytes(gzip.compress((SENTENCE * 40).encode()))
    rows = rows_of(headway, tmp_path / "found.json", STORY, "--text", text)
    assert [(r["quantization"], r["kv_cache_dtype"]) for r in rows] == [
        (quantization, dtype) for quantization in QUANTIZATIONS for dtype in KV_CACHE_DTYPES
    ]
    assert rows[0]["change"] == 0.0 and all(0 < abs(r["change"]) < 0.1 for r in rows[1:])
    assert len({r["perplexity"] for r in rows}) == len(rows)


def test_heads_that_are_repeated_change_nothing_and_means_do(headway: CommandLine, tmp_path: Path) -> None:
    """Document 002's table: MHA, GQA and MQA. The price of a conversion, before it is trained further."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "Once upon", "choices": [" a time", " purple"], "answer": 0}\n\n' * 2)
    only = ("--quantization", "none", "--kv-cache-dtype", "auto", "--kv-heads", "6,1")
    rows = rows_of(headway, tmp_path / "found.json", *only, "--tasks", tasks, "--rounds", 1)
    plain, mha, mqa = rows
    assert [row["label"] for row in rows] == ["none", "6 KV heads", "1 KV head"]
    assert abs(mha["change"]) < 1e-4 and mha["top1"] == plain["top1"]
    assert mqa["change"] > 0.2 and mqa["top1"] < plain["top1"]
    assert plain["solved"] == 1.0 and plain["decode"] > 0 and plain["prefill"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--text", "no-such-file"), "no-such-file cannot be read: No such file"),
        (("--text", "short"), "the text has 87 characters"),
        (("--tasks", "short"), "short, line 1: a task is"),
        (("--quantization", "int3"), "--quantization is 'int3'; it must be of none"),
        (("--kv-heads", "4"), "--kv-heads is 4; it must divide the 6 query heads"),
        (("--output", "nowhere/found.json"), "its folder is not there"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    headway: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text(SENTENCE)
    assert said in headway("bench", "quality", STORY, *SMALL, *arguments).error()


def test_a_checkpoint_without_kv_heads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')
    with pytest.raises(ValueError, match="no plain checkpoint of a model with KV heads"):
        pool_heads(tmp_path, tmp_path / "out", 2)
