"""What a result says of its machine, and that a result of another kind of processor is never overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
"""


def test_the_processor_and_its_instructions_are_named(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(XEON)
    about = machine.about(tmp_path / "cpuinfo")
    assert about["processor"] == "Intel(R) Xeon(R) Processor"
    assert about["features"] == ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"]
    assert machine.about(tmp_path / "none")["processor"]
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    assert machine.about(tmp_path / "arm")["features"] == ["asimddp", "i8mm"]


@pytest.mark.parametrize(
    ("processor", "features", "name"),
    [
        ("Intel(R) Xeon(R) Processor", ["amx_int8"], "intel-xeon-amx"),
        ("Intel(R) Xeon(R) Processor", ["avx512f"], "intel-xeon"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", [], "intel-core-i7-8700"),
        ("AMD EPYC", [], "amd-epyc"),
    ],
)
def test_kinds_of_processors_have_names_for_files(processor: str, features: list[str], name: str) -> None:
    assert machine.kind({"processor": processor, "features": features}) == name


def test_a_result_of_another_processor_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "offline.json"
    ours: dict[str, Any] = {"processor": "Intel(R) Xeon(R) Processor", "features": ["amx_int8"]}
    monkeypatch.setattr(machine, "about", lambda: ours)
    assert machine.own_file(output) == output
    machine.save({"machine": ours}, output)
    assert machine.own_file(output) == output
    machine.save({"machine": {"processor": "AMD EPYC"}}, output)  # as results were before features were named
    assert machine.own_file(output) == tmp_path / "offline_intel-xeon-amx.json"
    output.write_text("{")
    assert machine.own_file(output) == output


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "new" / "result.json"
    checkout = str(machine.RESULTS.parent.parent)
    machine.save({"checkout": checkout, "file": f"{checkout}/x"}, output)
    assert json.loads(output.read_text()) == {"checkout": ".", "file": "x"}
    machine.save({"log": str(Path.home() / "x")}, output)
    with pytest.raises(TypeError):
        machine.save({"log": object()}, output)
    assert json.loads(output.read_text()) == {"log": "~/x"}
    assert list(output.parent.iterdir()) == [output]
