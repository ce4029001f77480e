"""What is started for the comparison of prompts on servers of their own, and what is shown of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import handover
from headway.gateway.servers import read_up_file
from headway.load.workload.mix import load_mix


def test_contestants_have_as_many_threads_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "write_weights", lambda shape, folder: tmp_path / shape)
    for name in handover.CONTESTANTS:
        path = tmp_path / "up.toml"
        path.write_text(handover.up_file(name, "tiny", 4, 512))
        read = read_up_file(str(path))
        threads = [int(flag.partition("=")[2]) for each in read.servers for flag in each.flags if "threads" in flag]
        assert sum(threads) == 4 and len({each.served_as for each in read.servers}) == 1
        assert [each.role for each in read.gateway.backends] == ([""] if name == "one" else ["prefill", "decode"])
        assert read.gateway.handover == ("auto" if name == "one" else name)


def test_the_classes_of_the_mix_are_those_of_the_table() -> None:
    names = [each.name for each in load_mix(handover.MIX).classes]
    assert [f"{handover.GOODPUT} {name}" for name in names] == list(handover.KEYS[3:5])
    figures = dict.fromkeys(handover.KEYS, 1.0)
    shown = handover.table({"one": [figures, {**figures, "ttft": 3.0}]})
    assert "| one | 2 (1 to 3) |" in shown
