"""What the process that tunes says is done and shown, and the server goes on without it where it dies."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from headway.cli.serve import serve as app
from headway.engine.config import EngineConfig
from headway.policy.cache.handle import KEY_VARIABLE
from headway.policy.objectives.service_class import BUILT_IN, ClassTable, ServiceClass
from headway.policy.step.bounds import Bounds
from headway.policy.step.scheduler_config import StepLimits
from headway.server import auto_tune
from headway.server.auto_tune import AutoTune, record_traffic
from headway.server.metrics.families import Families

DECIDING = """
import sys
from headway.policy.step.bounds import Told, begin_in, line_of
from headway.policy.step.scheduler_config import StepLimits

def say(told):
    sys.stdout.buffer.write(line_of(told))
    sys.stdout.buffer.flush()

begin = begin_in(sys.stdin.buffer.readline())
open(begin.traffic, "rb").close()
say(Told("tried", "trying it", "--max-num-seqs 8", StepLimits(8, 512, 50.0), begin.classes, "trying it", 0.5))
begin = begin_in(sys.stdin.buffer.readline())
say(Told("went back", "new files", "", StepLimits(16, 512, 50.0), begin.classes, "watching", 0.75))
sys.stdin.buffer.readline()
"""


class Engine(SimpleNamespace):
    """Notes what it is told."""

    def set_classes(self, classes: ClassTable, weights: dict[str, float], limits: StepLimits) -> None:
        self.config = replace(self.config, classes=classes, limits=limits)


@pytest.fixture
def engine() -> Engine:
    config = EngineConfig("m", max_num_seqs=64, limits=StepLimits(16), record_traffic=record_traffic())
    return Engine(config=config, ready=SimpleNamespace(device="cpu"))


async def until(holds: object) -> None:
    async with asyncio.timeout(20):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def test_what_is_decided_is_done_shown_and_taken_back(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "deciding.py").write_text(DECIDING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(auto_tune, "DECIDES", "deciding")
    tuning, registry = AutoTune(engine, Bounds(), Families("headway:", {})), CollectorRegistry()  # type: ignore[arg-type]
    registry.register(tuning)
    other = ClassTable((ServiceClass(name="other", window_ms=(0.0, 7.0)),))
    caplog.set_level(logging.INFO, "headway.server")

    async def run() -> None:
        running = asyncio.create_task(tuning.run())
        await until(lambda: tuning.done)
        assert engine.config.limits == StepLimits(8, 512, 50.0) and engine.config.classes == BUILT_IN
        assert tuning.look()["doing"] == "trying it" and tuning.look()["cpu_seconds"] == 0.5
        assert tuning.words == "Tunes itself: trying it; last: trying it"
        text = generate_latest(registry).decode()
        assert 'headway:auto_tune_setting{setting="max_num_seqs"} 8.0' in text
        assert 'headway:auto_tune_changes_total{outcome="tried"} 1.0' in text
        tuning.reload(other)
        await until(lambda: len(tuning.done) == 2)
        assert engine.config.classes == other and tuning.settings["other.window_ms"] == 7.0
        assert tuning._process is not None
        tuning._process.kill()
        await running

    asyncio.run(run())
    assert [each["kind"] for each in tuning.done] == ["tried", "went back", "went back"]
    assert "auto-tune: trying it" in caplog.messages
    assert "the process that tunes ended (code -9); the settings are those of the start, and stay" in caplog.text
    assert engine.config.limits == StepLimits(16, engine.config.batched_tokens("cpu"), 50.0, 64)
    assert tuning.look()["doing"] == "nothing: its process has ended"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--auto-tune-bounds", "share=0:0.2"], "--auto-tune-bounds bounds what --auto-tune does; add that"),
        (["--auto-tune", "--role", "decode"], "what another engine computes is not simulated; leave out --role"),
        (["--auto-tune", "--max-num-seqs", "8", "--auto-tune-bounds", "max-num-seqs=1:4"], "where it begins; widen"),
        (["--auto-tune", "--auto-tune-bounds", "nothing=1:4"], "'nothing' is no setting that the server changes"),
    ],
)
def test_what_does_not_go_together_is_one_line(given: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)
    ran = CliRunner().invoke(app, given)
    assert ran.exit_code == 2 and said in " ".join(ran.output.split()) and "Traceback" not in ran.output
