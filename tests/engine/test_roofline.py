"""The least time of steps: by the machine that was calibrated, for the batch that ran."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.calibration.machine import processor_name
from headway.calibration.store import save
from headway.cost.attention import Chunk
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.work import step_work, total
from headway.engine.roofline import StepRoofline, roofline_of
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.policy.step.step_time import StepWork
from tests.calibration.machines import a_machine
from tests.engine.test_core import ask, engine

SHAPE = ModelShape(2, 1024, 16, 4, 64, 3072, 4096)
CPU = (torch.device("cpu"), torch.float32, "none", torch.float32)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "headway" / "hardware"


def measured(key: str = "mine", name: str = "", factor: float = 1.0) -> Path:
    """Keep a machine, of this processor's name unless another is given."""
    machine = a_machine(key)
    hardware = replace(
        machine.hardware, name=name or processor_name(), bytes_per_s=factor * machine.hardware.bytes_per_s
    )
    return save(replace(machine, hardware=hardware))


def plan(*items: tuple[int, int, int]) -> StepPlan:
    """A plan with parts of so many tokens, after so many, of which so many sample."""
    return StepPlan(
        scheduled=[
            ScheduledSequence(number, start, [1] * tokens, start > 0, samples)
            for number, (tokens, start, samples) in enumerate(items)
        ]
    )


def test_a_decode_takes_at_least_the_time_to_read_weights_and_cache() -> None:
    measured()
    roofline = roofline_of(SHAPE, *CPU)
    assert roofline is not None and roofline.machine == "mine"
    least = [roofline.least_ns(plan((1, context, 1))) for context in (1, 500, 1000)]
    work = total(step_work(SHAPE, [Chunk(1, 1000)], Precision.of("float32")).values())
    bytes_per_s = a_machine().hardware.bytes_per_s
    assert least[2] == pytest.approx(1e9 * work.bytes / bytes_per_s, rel=0.2)
    assert least[0] < least[1] < least[2]
    both = plan((1, 1000, 1), (1, 1200, 1), (1, 7, 0))
    together = StepPlan(both.scheduled, work=StepWork(repeated_context=900))
    saved = 900 * 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4
    assert roofline.least_ns(both) - roofline.least_ns(together) == pytest.approx(1e9 * saved / bytes_per_s, rel=0.2)
    prompt = roofline.least_ns(plan((512, 0, 1)))
    assert prompt > 3 * least[2] and roofline.least_ns(plan((512, 0, 1), (1, 500, 1))) > prompt


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"hardware": 5}', b"\xff\xfe", b'{"hardware": {"key": "x"}}', b"[" * 100_000]
)
def test_files_that_cannot_be_read_are_passed_over(config: Path, content: bytes) -> None:
    config.mkdir(parents=True)
    (config / "broken.json").write_bytes(content)
    (config / "folder.json").mkdir()
    assert roofline_of(SHAPE, *CPU) is None
    measured()
    assert roofline_of(SHAPE, *CPU) is not None


def test_the_machine_is_this_one_as_it_was_measured_last() -> None:
    assert roofline_of(SHAPE, *CPU) is None
    measured("other", name="A Processor That Nobody Has")
    assert roofline_of(SHAPE, *CPU) is None
    os.utime(measured("older"), (1, 1))
    measured("newer")
    found = roofline_of(SHAPE, *CPU)
    assert found is not None and found.machine == "newer"


def test_a_format_that_was_not_measured_has_no_roofline() -> None:
    measured()
    assert roofline_of(SHAPE, CPU[0], torch.float32, "a format that there is not", torch.float32) is None


def test_one_step_in_sixteen_is_compared_with_it() -> None:
    measured()
    roofline = roofline_of(SHAPE, *CPU)
    assert isinstance(roofline, StepRoofline)
    core, clock = engine(roofline=roofline)
    before = core.scheduler.decisions[-1].planned_ns
    ask(core, clock, "100", 3, 60, "offline")
    stats = [core.step().stats for _ in range(48)]
    told = [each.least_ns for each in stats if each.least_ns]
    assert len(told) == 3 and told == sorted(told)
    later = [each for each in core.scheduler.decisions if each.planned_ns > before]
    assert sum("the roofline is" in each.in_words() for each in later) == 3
