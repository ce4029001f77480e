"""The file of recorded steps: what is refused, what a full disk does, and what a killed process leaves."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from headway.engine.config import EngineConfig
from headway.engine.record_file import RecordFile
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.recording import Step
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.simulator.recording import read_recordings


def begin(path: Path) -> RecordFile:
    """A file of records that has the record of its engine."""
    file = RecordFile(str(path))
    file.scheduler(EngineConfig("m"), "cpu", "int8", SchedulerConfig(4, 16, 64), KVBlocks(16, 4))
    return file


def steps(path: Path) -> list[list[int]]:
    """The times of the steps of each recording in the file."""
    return [[record.now for record in recording.records] for recording in read_recordings(path)]


def test_records_are_gathered_and_written_when_there_is_nothing_else_to_do(tmp_path: Path) -> None:
    file = begin(tmp_path / "steps")
    file.write(Step(1), idle=False)
    assert steps(tmp_path / "steps") == [[]]
    file.write(Step(2), idle=True)
    assert steps(tmp_path / "steps") == [[1, 2]]
    for now in range(3, 20_000):
        file.write(Step(now), idle=False)
    assert len(steps(tmp_path / "steps")[0]) > 10_000
    file.close()
    assert steps(tmp_path / "steps") == [list(range(1, 20_000))]


def test_half_a_line_is_left_out_and_the_next_engine_begins_its_own(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    file = begin(path)
    for now in range(3):
        file.write(Step(now), idle=True)
    file.close()
    os.truncate(path, path.stat().st_size - 5)
    assert steps(path) == [[0, 1]]
    file = begin(path)
    file.write(Step(7), idle=True)
    file.close()
    assert steps(path) == [[0, 1], [7]]


def test_a_full_disk_ends_the_recording_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, write = begin(tmp_path / "steps"), os.write

    def full(to: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(to, bytes(data)[:20])

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patches:
        patches.setattr(os, "write", full)
        for now in range(5):
            file.write(Step(now), idle=True)
    file.write(Step(9), idle=True)
    assert [record.getMessage() for record in caplog.records] == [
        f"recording of steps has stopped; cannot write {tmp_path / 'steps'}: No space left on device"
    ]
    assert steps(tmp_path / "steps") == [[]]


def test_what_is_no_place_for_a_recording_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("my notes\n")
    (tmp_path / "newer").write_text('{"type":"engine","format":99}\n')
    os.mkfifo(tmp_path / "pipe")
    held = begin(tmp_path / "held")
    for name, problem in {
        "text": "it exists and is not a recording",
        "newer": "it exists and is not a recording",
        "pipe": "it is not a file",
        "held": "another engine is recording there",
        "": "Is a directory",
        "none/steps": "No such file or directory",
    }.items():
        with pytest.raises(ValueError, match=problem) as refused:
            RecordFile(str(tmp_path / name))
        assert "\n" not in str(refused.value)
    held.close()
    assert (tmp_path / "text").read_text() == "my notes\n"


def test_what_can_t_be_read_is_said_in_a_line(tmp_path: Path) -> None:
    begin(tmp_path / "steps").close()
    engine = (tmp_path / "steps").read_bytes()
    (tmp_path / "text").write_text("my notes\n")
    (tmp_path / "spoilt").write_bytes(engine + b'{"type":"step"}\n{"type":"step","now":5}\n')
    (tmp_path / "newer").write_bytes(engine.replace(b'"format":1', b'"format":2'))
    (tmp_path / "empty").write_bytes(b"")
    for name, problem in {
        "none": "can't be read: No such file",
        "text": "line 1: this is not a record of an engine's steps",
        "spoilt": "line 2: this is not a record of an engine's steps",
        "newer": "line 1: recorded in format 2; this version reads 1",
        "empty": "has no recording in it",
    }.items():
        with pytest.raises(ValueError, match=problem):
            read_recordings(tmp_path / name)
