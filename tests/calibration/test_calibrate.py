"""A whole calibration of this machine, with very little to measure; and the engine by itself."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime

import pytest
import torch

from headway import __version__
from headway.calibration import __main__ as command
from headway.calibration import machine
from headway.calibration.calibrate import calibrate
from headway.calibration.describe import hardware_of
from headway.calibration.host import HostBench, tiny_shape
from headway.calibration.measure import CalibrationError
from headway.calibration.samples import Kind
from headway.calibration.store import CalibratedMachine, StoreError, load, save
from headway.cost.attention import Chunk
from headway.cost.precision import Precision
from headway.cost.timing import Deployment
from headway.engine.executor import StepOutcome
from headway.policy.step.plan import StepPlan
from tests.calibration.little import LITTLE
from tests.calibration.machines import a_machine


def test_a_calibration_from_end_to_end(small_peaks: None) -> None:
    heard: list[tuple[str, float]] = []
    began = datetime.now(UTC).replace(microsecond=0)
    found = calibrate("mine", "cpu", 1, on_progress=lambda stage, done: heard.append((stage, done)), amount=LITTLE)

    assert CalibratedMachine.from_json(found.to_json()) == found
    assert load(save(found)) == found

    shares = [done for _, done in heard]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] == 1.0
    stages = [stage for stage, _ in heard]
    assert "products in bfloat16" in stages and "warming up: linear" in stages
    assert any(stage.startswith("round 2 of 2: ") for stage in stages)

    assert (found.threads, found.rounds) == (1, 2)
    assert began <= datetime.fromisoformat(found.date) <= datetime.now(UTC)
    assert set(found.versions) == {"headway", "torch", "numba", "python"}
    assert found.versions["headway"] == __version__

    hardware = found.hardware
    assert (hardware.key, hardware.kind, hardware.measured) == ("mine", "cpu", True)
    assert hardware.name == machine.processor_name()
    assert hardware.bytes_per_s == found.peaks.memory_read.best == hardware.reads[-1][1]
    assert hardware.flops_per_s["bf16"] == found.peaks.gemm_flops_per_s["bfloat16"].best
    assert all(0 < rate < math.inf for rate in hardware.flops_per_s.values())

    kinds = [each.piece.kind for each in found.samples]
    assert {kind: kinds.count(kind) for kind in Kind} == {
        Kind.STREAM: 1,
        Kind.LINEAR: 2 * len(found.peaks.gemm_flops_per_s) + 2,  # and with weights of int8 and int4, 1 token
        Kind.DECODE: 2,
        Kind.PROMPT: 2,
        Kind.ELEMENTS: 2,
        Kind.STEP: 4,
    }
    assert all(each.repeats == 2 and 0 < each.best <= each.median < math.inf for each in found.samples)
    assert set(found.fit_error) == set(map(str, Kind))
    assert all(0 <= error < math.inf for error in found.fit_error.values())

    reached = found.efficiency
    assert [tokens for tokens, _ in reached.linear] == [1, 8] and set(reached.linear_of) == {"fp32", "int8", "int4"}
    assert 0 < reached.kv_bytes <= 1 and 0 < reached.attention_flops <= 1 and reached.element_bytes > 0
    assert all(getattr(reached, name) >= 0 for name in ("score_s", "kernel_s", "step_s", "sequence_s"))
    step = Deployment(tiny_shape(4), Precision.of("bfloat16"), hardware, reached).step([Chunk(1, 20, sequences=4)])
    assert 0 < step.seconds < math.inf


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"name": "../x"}, StoreError, "name is '../x'"),
        ({"device": "tpu"}, CalibrationError, "device is 'tpu'"),
        ({"device": "cpu", "threads": 0}, CalibrationError, "threads is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        calibrate(**asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(CalibrationError, match="torch finds no CUDA device; use --device cpu"):
        calibrate(device="cuda")


def test_rates_that_torch_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of 0 would be one to divide by."""

    def unknown(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented")

    peaks = a_machine().peaks
    with_all = hardware_of("mine", peaks)
    assert set(with_all.flops_per_s) >= {"fp32", "bf16"} and min(with_all.flops_per_s.values()) > 0
    monkeypatch.setattr(torch, "mm", unknown)
    monkeypatch.setattr(torch, "_int_mm", unknown)
    without = hardware_of("mine", peaks)
    assert set(without.flops_per_s) == {"fp32", "bf16"}
    assert (without.arithmetic("fp16"), without.arithmetic("int8")) == ("bf16", "bf16")


def test_a_device_gives_its_entry_a_name() -> None:
    hardware = hardware_of(None, a_machine().peaks)
    assert (hardware.key, hardware.name, hardware.note) == ("a-processor", "A Processor", "Measured with 2 threads.")
    assert hardware.memory_bytes == 32 * 2**30 and hardware.reads == ((2**28, 40e9),)


def test_the_engine_decodes_as_many_sequences_as_asked() -> None:
    bench = HostBench(2, "cpu", 1, 5)
    for sequences in (1, 7, 1, 32):
        seconds = bench.seconds(sequences)
        assert len(seconds) == 5 and all(0 < each < 60 for each in seconds)
        assert not bench._core.has_work
    piece = bench.piece(7)
    assert (piece.kind, piece.layers, piece.sequences, piece.tokens) == (Kind.STEP, 2, 7, 7)


def test_the_timed_steps_are_those_of_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes alone, of all sequences, around the context that the cost model is given, with caches driven out."""
    steps: list[list[tuple[int, int]]] = []
    driven_out: list[int] = []
    bench = HostBench(1, "cpu", 1, 5, lambda: driven_out.append(len(steps)))
    run = bench._core.executor.run

    def listening(plan: StepPlan) -> StepOutcome:
        steps.append([(each.num_tokens, each.start) for each in plan.scheduled])
        return run(plan)

    monkeypatch.setattr(bench._core.executor, "run", listening)
    bench.seconds(3)
    timed = steps[-5:]
    assert driven_out == list(range(len(steps) - 5, len(steps)))
    assert all([tokens for tokens, _ in step] == [1, 1, 1] for step in timed)
    piece = bench.piece(3)
    assert statistics.mean(start for step in timed for _, start in step) == pytest.approx(piece.context, abs=1)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_cost_model_knows_the_model_that_runs(layers: int) -> None:
    runs = HostBench(layers, "cpu", 1, 1)._core.executor.model.config
    assert tiny_shape(layers) == runs.shape


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["calibration", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--machine --threads 0 --device cpu", "threads is 0; it must be at least 1"),
        ("--machine --threads 100000 --device cpu", "this process may use"),
        ("--machine --name ../x", "name is '../x'"),
    ],
)
def test_the_child_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert run_command(monkeypatch, *arguments.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("headway: ") and said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--machine --dtype float32", "--dtype does not apply to --machine"),
        ("--quick", "only with --machine"),
        ("--name mine", "only with --machine"),
        ("--machine --quick --full", "contradict each other"),
    ],
)
def test_the_child_refuses_flags_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert run_command(monkeypatch, *arguments.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_threads_are_not_those_of_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "--machine", "--threads", "2", "--device", "cuda") == 2
    assert "--threads is for CPUs" in capsys.readouterr().err
