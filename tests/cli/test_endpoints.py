"""`headway serve --for KIND` and `--show-config`: recommended defaults, below all that was said."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from headway.cli import main
from headway.cli.serve import ENDPOINTS
from headway.config_files.classes import read_class_file

KINDS = ("interactive", "batch", "rag", "agents", "embeddings")


class Serve:
    """`headway serve` in this process, which prints and ends."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str) -> tuple[int, str]:
        self._monkeypatch.setattr(sys, "argv", ["headway", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out + said.err

    def shown(self, *arguments: str) -> tuple[str, dict[str, object]]:
        """What --show-config prints, as text and as TOML."""
        code, out = self(*arguments, "--show-config")
        assert code == 0, out
        return out, tomllib.loads(out)


@pytest.fixture
def serve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Serve:
    return Serve(capsys, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_of_a_kind_are_a_config_that_can_be_served(serve: Serve, kind: str, tmp_path: Path) -> None:
    out, config = serve.shown("--for", kind)
    assert out.count(f"# --for {kind}") == len(config) >= 4
    file = tmp_path / "serve.toml"
    file.write_text(out)
    assert serve.shown("--config", str(file))[1] == config
    assert read_class_file(str(config["service-classes"])).table.default


def test_windows_and_caps_are_those_of_the_document() -> None:
    interactive = read_class_file(str(ENDPOINTS / "interactive.classes.toml")).table.default_class
    assert interactive.window_ms == (2.0, 5.0) and 256 <= interactive.max_output_tokens <= 512
    batch = read_class_file(str(ENDPOINTS / "batch.classes.toml")).table.default_class
    assert batch.window_ms == (20.0, 40.0) and batch.max_output_tokens > 512


def test_what_was_said_goes_before_the_defaults_of_a_kind(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.toml"
    file.write_text("max-num-seqs = 64\nmax-prefill-stall-ms = 40.0\n")
    for order in (("--for", "batch", "--config", str(file)), ("--config", str(file), "--for", "batch")):
        out, config = serve.shown(*order, "--max-prefill-stall-ms", "7")
        assert (config["max-num-seqs"], config["max-prefill-stall-ms"], config["protected-kv"]) == (64, 7.0, 0.8)
        assert f"# --config {file}" in out and "# the command line" in out
    monkeypatch.setenv("HEADWAY_API_KEY", "hidden")
    out, config = serve.shown("--for", "rag")
    assert "hidden" not in out and "api-key is given by the environment and not shown" in out
    assert "api-key" not in config


def test_a_kind_that_is_none_is_one_line(serve: Serve) -> None:
    code, out = serve("--for", "fun")
    assert code == 2 and "--for is 'fun'; choose one of interactive, batch, rag, agents, embeddings" in out


def test_nothing_that_was_said_is_an_empty_config(serve: Serve) -> None:
    assert serve.shown() == ("\n", {}) and serve.shown("--port", "9000")[1] == {"port": 9000}
