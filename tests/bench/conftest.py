"""The command line, and a scripted server for tests that need no options of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.command_line import CommandLine
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    return CommandLine(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="session")
def bench_server() -> Iterator[ScriptedServer]:
    """It pretends to be vLLM; an answer's first token comes after 10 ms, and the others 2 ms apart."""
    with ScriptedServer(kind="vllm", script=script(ttft_s=0.01, gap_s=0.002), max_model_len=4096) as server:
        yield server


@pytest.fixture
def scripted(bench_server: ScriptedServer) -> ScriptedServer:
    bench_server.forget()
    return bench_server
