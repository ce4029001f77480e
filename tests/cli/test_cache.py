"""`headway cache`: what it lists, what it deletes, and what it leaves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli import app


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models' weights, one version of kernels, a GGUF file's folder with a link, and a file of somebody else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "headway"
    for name, size in (("weights/a.weights", 3_000_000), ("weights/b.weights", 500), ("kernels/v1/x.native", 20_000)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"0" * size)
    (tmp_path / "model.gguf").write_bytes(b"0" * 10**6)
    (folder / "gguf" / "model-1").mkdir(parents=True)
    (folder / "gguf" / "model-1" / "model.gguf").symlink_to(tmp_path / "model.gguf")
    (folder / "mine.txt").write_text("mine")
    an_hour_ago = time.time() - 7300
    os.utime(folder / "weights" / "a.weights", (an_hour_ago, an_hour_ago))
    return folder


def run(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["cache", *arguments])
    return ended.exit_code, ended.output


def test_it_lists_sizes_and_ages(cache: Path) -> None:
    code, said = run()
    assert code == 0 and run("list") == (code, said)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert lines[0].startswith(f"{cache}: 3.02 MB")
    assert "weights: 3 MB, packed weights, which a start reads instead of packing them" in lines
    assert lines.index("a.weights 3 MB used 2 hours ago") < lines.index("b.weights 500 B used just now")
    assert "v1 20 kB used just now" in lines
    assert "mine" not in said


def test_it_deletes_all_that_it_lists_and_no_more(cache: Path, tmp_path: Path) -> None:
    code, said = run("clear", "--yes")
    assert code == 0 and said.startswith("deleted 3.02 MB (weights, kernels, gguf)")
    assert sorted(path.name for path in cache.rglob("*")) == ["gguf", "kernels", "mine.txt", "weights"]
    assert (tmp_path / "model.gguf").stat().st_size == 10**6, "the file behind the link stays"
    assert run("clear", "-y") == (0, f"{cache} has nothing of this\n")
    assert run() == (0, f"{cache}: 0 B\n")


@pytest.mark.parametrize(
    ("what", "left"),
    [
        (["weights"], ["model-1", "v1"]),
        (["a.weights"], ["b.weights", "model-1", "v1"]),
        (["kernels", "model-1"], ["a.weights", "b.weights"]),
    ],
)
def test_kinds_and_names_are_deleted_alone(what: list[str], left: list[str], cache: Path) -> None:
    assert run("clear", *what, "--yes")[0] == 0
    kinds = (cache / "weights", cache / "kernels", cache / "gguf")
    assert sorted(path.name for kind in kinds for path in kind.iterdir()) == left


def test_nothing_is_deleted_unasked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(cache.rglob("*"))
    assert run("clear") == (2, "headway: this would delete 3.02 MB (weights, kernels, gguf); say so with --yes\n")
    monkeypatch.setattr("headway.cli.cache._is_asked", lambda: True)
    ended = CliRunner().invoke(app, ["cache", "clear"], input="n\n")
    assert ended.exit_code == 1 and "Delete 3.02 MB (weights, kernels, gguf)" in ended.output
    assert sorted(cache.rglob("*")) == before
    assert CliRunner().invoke(app, ["cache", "clear"], input="y\n").exit_code == 0
    assert not list((cache / "weights").iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drop"], "cache can list or clear, not 'drop'"),
        (["clear", "model"], "'model' is not in the cache; name a kind, weights, kernels, gguf, or what headway cache"),
        (["clear", "../mine.txt"], "'../mine.txt' is not in the cache"),
        (["list", "--yes"], "--yes goes with clear"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], says: str, cache: Path) -> None:
    code, said = run(*arguments)
    assert code == 2 and said.startswith(f"headway: {says}") and said.count("\n") == 1


def test_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert run() == (0, f"{tmp_path / 'none' / 'headway'}: 0 B\n")
