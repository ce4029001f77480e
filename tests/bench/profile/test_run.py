"""The whole of it: a real server with the bundled model, ended in every way."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from headway.bench.profile import run
from headway.bench.profile.local_server import LocalServer
from headway.bench.profile.machine import measure_peaks, read_peaks
from headway.bench.profile.options import ProfileOptions
from headway.bench.profile.run import run_profile, serve_arguments
from headway.calibration.peaks import MachinePeaks
from headway.load.errors import BenchError
from tests.bench.command_line import skip_layout
from tests.bench.profile.made import PEAKS, QWEN


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileOptions:
    """Two short lengths of the bundled model, and a machine that is known already."""
    skip_layout(monkeypatch)
    (tmp_path / "machine.json").write_bytes(PEAKS.to_json())
    return ProfileOptions(
        prompt_lens=(5, 40),
        output_len=4,
        repeats=3,
        naive=True,
        kv_cache_memory=2**24,
        calibration=tmp_path / "machine.json",
        result_dir=tmp_path / "results",
        result_name="one",
    )


@pytest.fixture
def servers(monkeypatch) -> list[LocalServer]:
    """All servers that were made, with the process ids that they had."""
    made: list[LocalServer] = []

    class Noted(LocalServer):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            made.append(self)

        async def _start(self):
            try:
                await super()._start()
            finally:
                self.had_pid = self.pid

    monkeypatch.setattr(run, "LocalServer", Noted)
    return made


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


async def test_a_profile_of_the_bundled_model(options, servers, monkeypatch):
    monkeypatch.setenv("HEADWAY_API_KEY", "of another server")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = quiet()
    result = await run_profile(options, console)
    assert result.ok and not result.interrupted
    assert [each.prompt_tokens for each in result.lengths] == [5, 40]
    for each in result.lengths:
        assert (each.completed, each.output_tokens, each.failures) == (3, 4, {})
        assert 0 < each.medians_ms["ttft_ms"] <= each.medians_ms["ttlt_ms"]
        assert min(each.stages_ms[key] for key in ("input", "prefill", "decode", "sampling")) > 0
        assert each.prefill.measured_ms > 0 and each.decode.measured_ms > 0
    assert {"import", "convert", "warm_up"} <= result.engine_stages.keys()
    assert "imports" in result.startup.api_stages and result.startup.seconds > 0
    assert result.pool_bytes == result.startup.num_blocks * 16 * 2560 <= 2**24
    assert result.naive is not None and result.naive.prompt_tokens == 40
    assert len(result.naive.naive_ms) == len(result.naive.cached_ms) == 4 and result.naive.times > 0
    check_report(options.result_dir / "one")
    printed = console.file.getvalue()
    for title in (
        "Model loading",
        "Latency, one request at a time",
        "Stages of a request",
        "Largest possible gain",
        "Without a KV",
    ):
        assert title in printed
    assert not is_running(servers[0].had_pid)


def check_report(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == ["figures", "profile.html", "profile.json"]
    assert len(list((folder / "figures").glob("*.png"))) == 7
    saved = json.loads((folder / "profile.json").read_text())
    assert [each["prompt_tokens"] for each in saved["prompt_lengths"]] == [5, 40]
    assert saved["settings"]["repeats"] == 3


@pytest.mark.slow
async def test_stopped_in_the_middle_it_keeps_what_was_measured(options, servers, monkeypatch, capsys):
    stop, done = asyncio.Event(), []

    async def stop_after_three(*arguments):
        *others, advance = arguments

        def on_done() -> None:
            done.append(1)
            advance()
            if len(done) == 3:
                stop.set()

        return await send_all(*others, on_done)

    send_all = run.send_all
    monkeypatch.setattr(run, "send_all", stop_after_three)
    monkeypatch.setattr(run, "LINES_IN_A_LOG", 1000)
    result = await run_profile(dataclasses.replace(options, repeats=500), quiet(), stop)
    assert "3 of 1000 requests\n" in capsys.readouterr().err
    assert result.interrupted and result.ok
    assert sum(each.completed for each in result.lengths) == 3
    saved = json.loads((options.result_dir / "one" / "profile.json").read_text())
    assert saved["interrupted"] is True
    assert not is_running(servers[0].had_pid)


async def test_stopped_before_anything_was_measured_it_writes_nothing(options, servers):
    stop = asyncio.Event()
    profiling = asyncio.create_task(run_profile(options, quiet(), stop))
    while not servers or servers[0].pid is None:
        await asyncio.sleep(0.01)
    stop.set()
    with pytest.raises(BenchError, match="stopped before anything was measured; nothing was written"):
        await profiling
    assert not is_running(servers[0].had_pid)
    assert list(options.result_dir.iterdir()) == []


async def test_cancelled_it_leaves_no_server(options, servers):
    profiling = asyncio.create_task(run_profile(options, quiet()))
    while not servers or servers[0].pid is None:
        await asyncio.sleep(0.01)
    profiling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await profiling
    assert not is_running(servers[0].had_pid)


async def test_a_server_that_refuses_is_quoted(options, capsys):
    wrong = dataclasses.replace(options, serve_arguments=("--max-num-batched-tokens", "3", "--max-num-seqs", "8"))
    with pytest.raises(BenchError, match=r"^the server did not start: .*--max-num-batched-tokens is 3"):
        await run_profile(wrong, quiet())
    assert "starting the server ...\n" in capsys.readouterr().err  # a sign of life without a terminal


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "no such model"}, "'no such model': no such folder"),
        ({"prompt_lens": (0,)}, "--prompt-lens has 0"),
        ({"max_model_len": 32}, "a prompt of 40 tokens and an answer of 4 do not fit in a context of 32 tokens"),
        ({"prompt_lens": (1021,)}, "a prompt of 1021 tokens and an answer of 4 do not fit in a context of 1024 tokens"),
        ({"calibration": Path("/no/such/file")}, "--calibration /no/such/file: No such file or directory"),
        (
            {"dtype": "float32"},
            "has measured products in bfloat16, but the model runs in float32; measure again with --dtype float32",
        ),
        (
            {"result_dir": Path("/dev/null/results")},
            "cannot write the report to /dev/null/results/one: Not a directory",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_before_a_server_is_started(options, servers, changes, said):
    with pytest.raises(BenchError) as error:
        await run_profile(dataclasses.replace(options, **changes), quiet())
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not servers


def test_serve_gets_what_was_asked_for():
    given = {"num_threads": 2, "dtype": "float32", "kv_cache_dtype": "int8", "kv_cache_memory": 4096}
    options = ProfileOptions(**given, quantization="int4", serve_arguments=("--block-size", "32"))
    assert serve_arguments(options, QWEN) == [
        *("qwen", "--served-model-name", "Qwen/Qwen2.5-0.5B", "--dtype", "float32", "--quantization", "int4"),
        *("--kv-cache-dtype", "int8", "--load-format", "auto", "--weight-cache", "--device", "auto"),
        *("--kv-cache-memory", "4096", "--threads", "2", "--block-size", "32"),
    ]


def test_a_file_that_is_no_calibration_is_named(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"device": "cpu"}')
    with pytest.raises(BenchError, match=r"x.json is not the output of `python -m headway.calibration`"):
        read_peaks(file)


async def test_a_calibration_that_fails_is_quoted(monkeypatch):
    with pytest.raises(BenchError, match="measuring the machine failed with code 2: dtype is int3; choose of float32"):
        await measure_peaks("cpu", "int3", None)


async def test_a_calibration_is_read(monkeypatch, tmp_path):
    """From a stand-in for the process that measures."""
    script = f"import sys; sys.stderr.write('reads of 4 MiB\\n'); sys.stdout.buffer.write({PEAKS.to_json()!r})"
    real, heard = asyncio.create_subprocess_exec, []

    async def stand_in(python, *arguments, **more):
        assert arguments == ("-m", "headway.calibration", "--device", "cpu", "--dtype", "float32", "--threads", "3")
        return await real(python, "-c", script, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stand_in)
    peaks = await measure_peaks("cpu", "float32", 3, heard.append)
    assert isinstance(peaks, MachinePeaks) and peaks == PEAKS
    assert heard == ["reads of 4 MiB"]
