"""`make gpu` with parts and machines of these tests: exit codes, messages, what is kept and what is run again."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import environment, record
from benchmarks.gpu.parts import Part

GPU = {
    "name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "multiprocessors": 132, "l2_bytes": 52428800,
    "free_bytes": 79 << 30, "total_bytes": 80 << 30,
}  # fmt: skip
FILE = "nvidia-h100-80gb-hbm3"


def machine(**changes: Any) -> dict[str, Any]:
    return {
        "python": {"executable": "/usr/bin/python3", "version": "3.12.3"}, "missing": [], "problems": {},
        "torch": {"version": "2.11.0", "cuda": "13.0"}, "triton": "3.6.0", "driver": "580.1", "gpus": [GPU],
        **changes,
    }  # fmt: skip


@dataclass(frozen=True)
class Scripted(Part):
    """Its one process appends a letter to a file, and says what it is told to."""

    ran: Path = Path()
    records: tuple[dict[str, Any], ...] = ({"tasks": ["a"]}, {"began": "a"}, {"ended": "a"})

    def command(self, lines: Path, done: Path, machine: Path) -> list[str]:
        said = "".join(json.dumps(each) + "\n" for each in self.records)
        code = f"open({str(self.ran)!r}, 'a').write('x'); open({str(lines)!r}, 'a').write({said!r})"
        return [sys.executable, "-c", code]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is found of the machine; a test changes it."""
    found = machine()
    monkeypatch.setattr(environment, "look", lambda packages: found)
    monkeypatch.setattr(record, "fingerprint", lambda root: found.get("sources", "one"))
    return found


@pytest.fixture
def good(tmp_path: Path) -> Scripted:
    return Scripted("good", "does well", 30, 20, ran=tmp_path / "good")


@pytest.fixture
def bad(tmp_path: Path) -> Scripted:
    records = ({"tasks": ["a"]}, {"began": "a"}, {"ended": "a", "error": "CompilationError: at 12:4\nno such thing"})
    return Scripted("bad", "fails", 30, 20, ran=tmp_path / "bad", records=records)


def runs(part: Scripted) -> int:
    return len(part.ran.read_text()) if part.ran.exists() else 0


def test_all_is_well(looked: dict, good: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--results", str(tmp_path)], [good]) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3 (compute capability 9.0), driver 580.1, torch 2.11.0, Triton 3.6.0" in said
    assert "Nothing failed." in said
    kept = json.loads((tmp_path / f"{FILE}.json").read_text())
    assert kept["machine"]["gpus"] == [GPU] and set(kept["parts"]) == {"good"}
    assert {"date", "commit", "version", "seconds"} <= set(kept["parts"]["good"])
    assert kept["parts"]["good"]["tasks"] == {"a": {"rows": []}}


def test_what_failed_is_listed_and_the_next_part_runs(
    looked: dict, good: Scripted, bad: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--results", str(tmp_path)], [bad, good]) == 1
    said = capsys.readouterr().out
    assert "FAILED: 1\nbad: a\n    CompilationError: at 12:4\n    no such thing\n" in said
    assert f"Full output: {tmp_path / FILE}.log" in said
    assert "== bad" in (tmp_path / f"{FILE}.log").read_text()
    assert runs(good) == 1


def test_a_part_that_is_done_is_not_run_again(
    looked: dict, good: Scripted, bad: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--results", str(tmp_path)]
    assert command.main(flags, [bad, good]) == 1
    assert command.main(flags, [bad, good]) == 1  # what failed is shown again, and not run again
    assert (runs(bad), runs(good)) == (1, 1)
    assert "bad: done before" in capsys.readouterr().out
    assert command.main(["good", "--again", *flags], [bad, good]) == 0
    assert (runs(bad), runs(good)) == (1, 2)
    for changed in ({"sources": "two"}, {"triton": "3.7.0"}, {"driver": "590.0"}):
        looked |= changed
        command.main(["good", *flags], [bad, good])
    assert runs(good) == 5
    (tmp_path / f"{FILE}.json").write_text("{nothing that can be read")
    assert command.main(["good", *flags], [bad, good]) == 0 and runs(good) == 6


def test_another_gpu_has_another_file(looked: dict, good: Scripted, tmp_path: Path) -> None:
    command.main(["--results", str(tmp_path)], [good])
    looked["gpus"] = [{**GPU, "name": "NVIDIA A10G"}]
    command.main(["--results", str(tmp_path)], [good])
    assert runs(good) == 2 and {path.stem for path in tmp_path.glob("*.json")} == {FILE, "nvidia-a10g"}


def test_a_part_whose_packages_are_missing_is_left_out_by_name(
    looked: dict, good: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Scripted("served", "serves", 30, 20, needs=("uvicorn", "fastapi"), ran=tmp_path / "served")
    looked["missing"] = ["fastapi"]
    assert command.main(["--results", str(tmp_path)], [served, good]) == 0
    assert "served: there is no fastapi" in capsys.readouterr().out
    assert (runs(served), runs(good)) == (0, 1)
    looked["missing"] = []
    assert command.main(["--results", str(tmp_path)], [served, good]) == 0
    assert (runs(served), runs(good)) == (1, 1)


def test_the_budget_is_of_all_parts_together(
    looked: dict, good: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Scripted("later", "comes later", 30, 20, ran=tmp_path / "later")
    monkeypatch.setattr(command.time, "monotonic", iter([0.0, *[5.0] * 4, *[95.0] * 40]).__next__)
    monkeypatch.setattr(
        "benchmarks.gpu.runner.run", lambda command, outcome, *rest: outcome.tasks.update(a={"rows": []})
    )
    assert command.main(["--results", str(tmp_path), "--seconds", "100"], [good, later]) == 1
    assert "Left for want of time; the same command goes on with it:\n  later: all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"missing": ["msgspec", "uvicorn"]}, "/usr/bin/python3 has no msgspec: install them for this Python"),
        ({"missing": ["torch", "triton"], "gpus": []}, "has no torch, triton"),
        ({"torch": {"version": "2.13.0+cpu", "cuda": None}, "gpus": []}, "torch 2.13.0+cpu of /usr/bin/python3 is"),
        ({"gpus": []}, "torch finds no CUDA GPU: run this on a machine with one"),
        ({"problems": {"triton": "ImportError: libcuda"}}, "triton cannot be imported by /usr/bin/python3: Im"),
        (
            {"gpus": [{**GPU, "free_bytes": 3 << 30}]},
            "NVIDIA H100 80GB HBM3 has 3.0 GiB free of 80.0; it takes 8: end what else uses it",
        ),
    ],
)  # fmt: skip
def test_where_nothing_can_be_run_one_line_says_what_to_do(
    looked: dict, good: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str], found: dict, said: str
) -> None:
    looked |= found
    assert command.main(["--results", str(tmp_path)], [good]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("gpu: ") and said in err
    assert runs(good) == 0 and not list(tmp_path.glob("*.json"))


def test_an_interrupted_part_goes_on_another_time(
    looked: dict, good: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: Any, outcome: Any, *rest: Any) -> None:
        outcome.tasks["first"] = {"rows": [{"us": 1}]}
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.gpu.runner.run", interrupted)
        assert command.main(["--results", str(tmp_path)], [good]) == 130
    assert command.main(["--results", str(tmp_path)], [good]) == 0
    assert set(json.loads((tmp_path / f"{FILE}.json").read_text())["parts"]["good"]["tasks"]) == {"first", "a"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["nonsense"], "there is no part nonsense; choose of good"), (["--seconds", "1"], "at least 10")],
)
def test_bad_flags_are_refused(good: Scripted, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(flags, [good])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_looked_at() -> None:
    found = environment.look(("torch", "no_such_package"))
    assert found["missing"] == ["no_such_package"] and found["torch"]["version"] and found["problems"] == {}
    assert found["python"]["executable"] == sys.executable


def test_sources_are_known_by_what_they_say(tmp_path: Path) -> None:
    for folder in ("headway", "benchmarks/results", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    file = tmp_path / "headway" / "a.py"
    file.write_text("one")
    first = record.fingerprint(tmp_path)
    (tmp_path / "benchmarks" / "results" / "x.json").write_text("a result is no source")
    assert record.fingerprint(tmp_path) == first
    file.write_text("two")
    assert record.fingerprint(tmp_path) != first
    assert record.commit(tmp_path) == "unknown"
