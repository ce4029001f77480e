"""The parts of `make gpu` on a processor, with shapes so small that it does them in seconds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu.part import Flaw, Lines, Machine, Skipped
from benchmarks.gpu.parts import PARTS, ROOT
from benchmarks.gpu.record import Record
from benchmarks.gpu.runner import Outcome
from headway.kernels.cpu.kernels import CpuKernels
from headway.models.config import ModelConfig
from tests.calibration.machines import a_machine

pytest.importorskip("triton")
from benchmarks.gpu import agreement, experiment, kernels, limits, part, steps, tables
from benchmarks.gpu.compiled import Launch


@pytest.fixture
def small(tmp_path: Path) -> Machine:
    return Machine("cpu", True, tmp_path, {"copy": 20e9, "gemm bfloat16": 400e9})


def done(tasks: part.Tasks) -> dict[str, list[dict[str, Any]]]:
    """The rows of all tasks that are not left out."""
    found = {}
    for name, task in tasks.items():
        try:
            found[name] = list(task())
        except Skipped:
            continue
    return found


def record_of(tmp_path: Path, parts: dict[str, dict[str, list[dict[str, Any]]]]) -> Record:
    record = Record(tmp_path / "gpu.json", {}, "c0ffee", {})
    for name, tasks in parts.items():
        record.add(name, Outcome({task: {"rows": rows} for task, rows in tasks.items()}), [], 1.0)
    return record


def test_limits(small: Machine, tmp_path: Path) -> None:
    found = done(limits.tasks(small))
    rows = {row["name"]: row for each in found.values() for row in each}
    assert set(rows) == {"copy", "read", "launch", "gemm bfloat16", "gemm float16", "gemm float32"}
    assert all(0 < row["median"] <= row["rate"] < math.inf for row in rows.values())
    assert "gemm bfloat16" in tables.limits(record_of(tmp_path, {"limits": found}))


@pytest.mark.parametrize("with_formats", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_are_held_against_the_nearer_limit(
    small: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_formats: bool
) -> None:
    if not with_formats:
        monkeypatch.setattr(kernels.formats, "kernels", lambda *_: {})
    found = done(kernels.tasks(small))
    rows = [row for each in found.values() for row in each]
    kinds = {row["kernel"] for row in rows}
    assert kinds >= {"stream", "linear", "attention of decodes", "attention over prompts", "store", "take"}
    for row in rows:
        shares = row["bytes_per_s"] / 20e9, row["flops_per_s"] / 400e9
        assert row["share"] == pytest.approx(max(shares)) and row["of"] == ("copies", "products")[shares[1] > shares[0]]
    assert "tiny products of a layer, 4 tokens: linear" in tables.kernels(record_of(tmp_path, {"kernels": found}))


def test_the_largest_launch_of_a_kernel_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is split ends with a small kernel that merges the parts."""
    monkeypatch.setattr("benchmarks.gpu.compiled.resources", lambda ptx: (len(ptx), 0))
    compiled = [
        SimpleNamespace(asm={"ptx": "x" * size}, metadata=SimpleNamespace(num_warps=4, shared=0)) for size in (40, 7)
    ]
    found = [Launch(name, (1,), each) for name, each in zip(("attention", "merge") * 2, compiled * 2, strict=True)]
    assert kernels.largest(found) == {**found[0].row(), "registers": 40}
    assert kernels.largest([]) is None


def test_a_kernel_too_large_for_the_memory_is_left_out(small: Machine) -> None:
    with pytest.raises(Skipped, match="the pool has no room for a layer"):
        list(kernels._rows(small, list))


def test_steps_are_beside_limits_and_predictions(small: Machine, tmp_path: Path) -> None:
    found = done(steps.tasks(small))
    (decode,), (prompt,) = found["decode 2 x 64"], found["prompt of 32"]
    assert (decode["batch"], decode["of"], prompt["tokens"], prompt["of"]) == (2, "copies", 32, "products")
    assert decode["share"] == pytest.approx(decode["bytes"] / decode["seconds"] / 20e9)
    assert prompt["share"] == pytest.approx(prompt["flops"] / prompt["seconds"] / 400e9)
    assert set(found["start"][0]["stages"]) >= {"convert", "kv_allocation", "warm_up"}
    entry = {"machine": json.loads(a_machine().to_json()), "fit_error": {"stream": 0.1}}
    shown = tables.steps(record_of(tmp_path, {"steps": found, "calibration": {"calibrate": [entry]}}))
    header, *lines = shown.splitlines()[1:]
    assert header.split() == ["ms", "share", "predicted", "ms", "error"]
    assert all(line.rstrip().endswith("%") and len(line.split()) >= 7 for line in lines)


def test_steps_that_do_not_fit_are_left_out(small: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_room", lambda machine, grid: 200)
    with pytest.raises(Skipped, match="the cache of 2 sequences of 64 tokens does not fit beside the weights"):
        list(steps.tasks(small)["decode 2 x 64"]())


@pytest.mark.slow
def test_agreement(small: Machine) -> None:
    found = done(agreement.tasks(small))
    assert found["tiny, float32"][0]["rms_error"] < 1e-5 < 1e-3 < found["tiny, bfloat16"][0]["of_torch"]
    assert [row["same"] for row in found["tokens of tiny, float32"]] == [2, 2, 2]


@pytest.mark.parametrize("name", agreement.MODELS)
def test_the_models_that_are_compared_are_served(name: str) -> None:
    config = ModelConfig.from_dict(agreement.MODELS[name])
    assert config.shape.vocab > max(max(prompt) for prompt in agreement.PROMPTS)
    assert any(cache.window for cache in config.caches) == ("window" in name)


def test_disagreement_is_a_flaw(small: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that is two hundredths off, in one layer."""
    rms_norm = CpuKernels.rms_norm
    monkeypatch.setattr(CpuKernels, "rms_norm", lambda self, x, weight, eps: rms_norm(self, x, weight, eps) * 1.02)
    with pytest.raises(Flaw, match="off those of plain torch in float32"):
        list(agreement.tasks(small)["tiny, float32"]())


def test_tokens_that_are_others_in_company_are_a_flaw(small: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_tokens", lambda llm, prompts: [[len(prompts)]] * len(prompts))
    tasks = agreement.tasks(small)
    with pytest.raises(Flaw, match="others in a batch, after a cached prefix, in chunks than alone"):
        list(tasks["tokens of tiny, float32"]())
    assert [row["same"] for row in tasks["tokens of tiny, bfloat16"]()] == [0, 0, 0]


def test_a_model_that_the_engine_cannot_run_is_left_out_by_name(
    small: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architectures": ["NoSuchForCausalLM"], "hidden_size": 8}
    monkeypatch.setitem(experiment.SHAPES, "new-model", config)
    with pytest.raises(Skipped, match="new-model: architectures is"):
        list(experiment._profile(small, "new-model"))


def lines_of(tmp_path: Path, tasks: part.Tasks, before: Iterable[str] = ()) -> list[dict[str, Any]]:
    path = tmp_path / "lines"
    part.run(tasks, before, Lines(path))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_task_that_raises_does_not_end_the_others(tmp_path: Path) -> None:
    def bad() -> Iterable[part.Row]:
        yield {"half": 1}
        raise Flaw("spills\n" + "x\n" * 20)

    def not_here() -> Iterable[part.Row]:
        raise Skipped("no space is left")

    found = lines_of(tmp_path, {"bad": bad, "not": not_here, "good": lambda: [{"a": 1}], "old": bad}, ["old"])
    assert found[:2] == [{"tasks": ["bad", "not", "good", "old"]}, {"began": "bad"}]
    assert found[2:4] == [{"task": "bad", "row": {"half": 1}}, {"ended": "bad", "error": "Flaw: spills" + "\nx" * 5}]
    assert found[5] == {"ended": "not", "skipped": "no space is left"}
    assert [record.get("ended") for record in found[6:]] == [None, None, "good"]


def test_a_spoilt_process_is_left(tmp_path: Path) -> None:
    def bad() -> Iterable[part.Row]:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(SystemExit):
        part.run({"bad": bad, "good": list}, [], Lines(tmp_path / "lines"))
    assert "good" not in (tmp_path / "lines").read_text().splitlines()[-1]


def test_rows_that_make_no_table_take_no_other_one_along(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"limits": {"copy": [{"of": "another version"}]}, "calibration": {}})
    shown = tables.report(record, ["limits", "calibration"], tmp_path / "log")
    assert "limits: what it measured is in the results" in shown and "Nothing failed." in shown


def test_what_is_left_out_for_one_reason_is_one_line(tmp_path: Path) -> None:
    record = record_of(tmp_path, {})
    record.add("tests", Outcome({f"test_{n}": {"rows": [], "skipped": "no GPU"} for n in range(9)}), [], 1.0)
    shown = tables.report(record, ["tests", "served"], tmp_path / "log")
    assert "tests: test_0, test_1, test_2 and 6 more: no GPU\n" in shown
    assert "Tests: 0 passed, 0 failed, 9 skipped" in shown


COMPILE = """
from benchmarks.gpu.compiled import Machine, driver, tasks
prompt = "llama-3.1-8b, a prompt"
kept = {f"attention bfloat16, {prompt}", f"attention float32, {prompt}", "rows of 896, bfloat16"}
found = {name: task for name, task in tasks(Machine("cpu", True)).items() if name in kept}
assert len(found) == len(kept)
for task in found.values():
    for row in task():
        print(row, driver.active.get_current_target())
"""


def compiling(tmp_path: Path, *arguments: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_compile_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    """Prompts take the largest tiles; a kernel that spills or takes too much shared memory raises a Flaw."""
    shown = compiling(tmp_path, "-c", COMPILE)
    names = ("_attention_kernel", "_merge_kernel", "rms_norm_kernel", "add_rms_norm_kernel", "gate_kernel",
             "rotate_kernel", "store_kernel")  # fmt: skip
    assert all(name in shown for name in names) and "arch=90" in shown


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90", "120"])
def test_all_kernels_compile_for(tmp_path: Path, capability: str) -> None:
    compiling(tmp_path, "-m", "benchmarks.gpu.compiled", capability)


@pytest.mark.slow
def test_all_parts_run_on_a_processor(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    assert set(json.loads(file.read_text())["parts"]) == {part.name for part in PARTS}
    for title in ("Limits", "Kernels as compiled", "Agreement", "Steps of the engine", "predicted ms", "Calibration",
                  "Served", "Loading, seconds", "Stages of a request", "Nothing failed."):  # fmt: skip
        assert title in done.stdout
