"""Ctrl-C and SIGTERM, whenever they come: what was measured is kept, and nothing looks like a crash."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.bench.results import load_json
from tests.bench.command_line import Ran, Subprocess, wait_until
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
SOON_S = 30.0  # far more than it takes, far less than the runs below would


@pytest.fixture
def slow() -> Iterator[ScriptedServer]:
    """A hundred tokens take a quarter of a minute."""
    with ScriptedServer(script=script(ttft_s=0.02, gap_s=0.15)) as server:
        yield server


def start(folder: Path, server: ScriptedServer, *arguments: object) -> Subprocess:
    common = ("--base-url", server.url, "--random-input-len", 8, "--num-warmups", 0)
    return Subprocess(folder / "results", "bench", *common, *arguments)


def wait_for_requests(server: ScriptedServer, tokens: int, count: int) -> None:
    def came() -> bool:
        entries = server.logs()["requests"].values()
        return sum(entry["body"].get("max_tokens") == tokens for entry in entries) >= count

    wait_until(came)


def stop(run: Subprocess, number: signal.Signals) -> Ran:
    began = time.monotonic()
    run.send(number)
    ran = run.ended(SOON_S)
    assert time.monotonic() - began < SOON_S
    assert ran.code == 130, (ran.out, ran.err)
    return ran


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_in_the_middle_of_a_run(slow: ScriptedServer, tmp_path: Path, number: signal.Signals) -> None:
    """Answers are under way that take longer than the two seconds they get, others have ended."""
    report = tmp_path / "run.html"
    with_report = ("--report", report) if number is signal.SIGINT else ()  # which takes a while to draw
    mix = tmp_path / "two.toml"
    classes = [("short", 3), ("long", 100)]
    mix.write_text(
        "".join(
            f'[[class]]\nname = "{name}"\nshare = 1\nrandom_input_len = 8\nrandom_output_len = {tokens}\n'
            for name, tokens in classes
        )
    )
    run = Subprocess(
        tmp_path / "results", "bench", "--base-url", slow.url, "--mix", mix, "--num-warmups", 0,
        "--request-rate", 40, "--num-prompts", 1000, "--csv", *with_report,
    )  # fmt: skip
    wait_for_requests(slow, 3, 5)
    wait_for_requests(slow, 100, 5)
    ran = stop(run, number)
    assert "Stopping" in ran.err and "INTERRUPTED" in ran.out and "Not valid" in ran.out
    (path,) = ran.files(".json")
    result = load_json(path)
    assert result.interrupted
    kinds = {record.failure.kind.value if record.failure else "ok" for record in result.records}
    assert kinds == {"ok", "abandoned"}
    assert all(record.ok for record in result.records if record.class_name == "short" and record.chunk_ns)
    assert len(ran.files(".csv")) == 1
    assert not with_report or "INTERRUPTED" in report.read_text()


def test_twice(slow: ScriptedServer, tmp_path: Path) -> None:
    run = start(tmp_path, slow, "--random-output-len", 100, "--num-prompts", 4)
    wait_for_requests(slow, 100, 4)
    run.send(signal.SIGINT)
    assert run.process.stderr is not None
    assert "Stopping" in run.process.stderr.readline()
    began = time.monotonic()
    ran = stop(run, signal.SIGINT)
    # The first one alone would have given requests under way their two seconds, and saved a result.
    assert not ran.files(".json") and "lost" in ran.err and time.monotonic() - began < SOON_S


@SIGNALS
def test_while_the_server_does_not_answer(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        run = Subprocess(tmp_path / "results", "bench", "--base-url", address, "--ready-check-timeout-sec", 600)
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            ran = stop(run, number)
    assert "nothing was measured" in ran.err and not ran.files("")


@pytest.mark.parametrize(
    ("number", "also"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGINT, ("--sweep", "rate:1,2")),
        pytest.param(signal.SIGINT, ("--find-max-rate", "--goodput", "ttft:100"), marks=pytest.mark.slow),
    ],
)
def test_while_prompts_are_made(
    scripted: ScriptedServer, tmp_path: Path, number: signal.Signals, also: tuple[str, ...]
) -> None:
    """Millions of them, of which the event loop hears nothing while it lasts."""
    run = start(tmp_path, scripted, "--num-prompts", 20_000_000, *also)
    wait_until(lambda: bool(scripted.logs()["requests"]))
    time.sleep(0.3)
    ran = stop(run, number)
    assert "nothing was measured" in ran.err and not ran.files("")
