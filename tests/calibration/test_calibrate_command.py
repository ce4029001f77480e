"""`headway calibrate`: what it stores and prints, its exit codes, and what it leaves when it is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from headway.calibration.store import CalibratedMachine, load, save
from tests.calibration.machines import a_machine
from tests.planner.command_line import CommandLine

ROOT = Path(__file__).parents[2]
SOON_S = 30.0
PYTHON = sys.executable
# A plan with few sequences at once is quick: the most that can be served is soon found.
PLAN = ("plan", "llama-3.2-1b", "--max-num-seqs", 4, "--hardware")

Child = Callable[[str], None]


def in_this_folder(config: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(config), "COLUMNS": "100"}


def script(path: Path, program: str) -> Path:
    """A file that runs a program in Python where `python -m headway.calibration` is expected."""
    path.write_text(f"#!{PYTHON}\nimport os, signal, sys\ndel sys.argv[1:3]\n{program}\n")
    path.chmod(0o755)
    return path


def run_calibrate(config: Path, *flags: str, measuring: str = PYTHON) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it; `measuring` is the Python of the process that measures."""
    program = f"import sys; sys.executable = {measuring!r}; from headway.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "calibrate", "--device", "cpu", "--name", "here", *flags],
        capture_output=True,
        text=True,
        env=in_this_folder(config),
        cwd=config,
        timeout=110,
    )


def check_ran(ran: subprocess.CompletedProcess[str], config: Path) -> None:
    assert (ran.returncode, ran.stderr) == (0, "")
    entry = config / "headway" / "hardware" / "here.json"
    machine = load(entry)
    assert (machine.hardware.key, machine.hardware.kind) == ("here", "cpu")
    for part in (machine.hardware.name, "This engine on it", "between kernels", "Median error", f"Written to {entry}"):
        assert part in ran.stdout
    assert ran.stdout.splitlines()[-1] == "To plan with it: headway plan MODEL --hardware here"
    assert max(map(len, ran.stdout.splitlines()[:-2])) <= 100
    assert [each.name for each in entry.parent.iterdir()] == ["here.json"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """This machine, by the real processes with little to do, once: where its entries are, and what was said."""
    config = tmp_path_factory.mktemp("config")
    python = script(config.parent / "little", "from tests.calibration.little import main\nmain()")
    return config, run_calibrate(config, measuring=str(python))


def test_this_machine_is_measured_and_stored(measured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    config, ran = measured
    check_ran(ran, config)


@pytest.mark.slow
def test_this_machine_is_measured_quickly(tmp_path: Path) -> None:
    check_ran(run_calibrate(tmp_path, "--quick"), tmp_path)


@pytest.mark.parametrize(
    "more", ["", "--dtype float32", "--quantization int8", "--quantization int4", "--dtype float16"]
)
def test_plans_use_it(
    measured: tuple[Path, subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    headway: CommandLine,
    more: str,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(measured[0]))
    ran = headway(*PLAN, "HERE", "--verbose", *more.split())
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("llama-3.2-1b on 1 × here, ")
    assert "of steps were measured on this machine" in " ".join(ran.out.split())


def test_a_plan_s_figures_are_those_of_the_entry(
    measured: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch, headway: CommandLine
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(measured[0]))
    figures = json.loads(headway(*PLAN, "here", "--json").out)
    assert (figures["hardware"], figures["engine"]) == ("here", "headway")
    assert figures["tpot_ms"] > 0 and figures["ttft_ms"] > 0
    assert "did you mean here?" in headway(*PLAN, "her").error()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Child:
    """Replace the process that measures by one that runs a given Python program."""

    def become(program: str) -> None:
        monkeypatch.setattr(sys, "executable", str(script(tmp_path / "child", program)))

    return become


def printing(machine: CalibratedMachine) -> str:
    return f"print({machine.to_json().decode()!r})"


def test_json_is_the_entry_and_nothing_else(headway: CommandLine, child: Child, entries: Path) -> None:
    child(f"print('0.1000 making pieces ready', file=sys.stderr)\n{printing(a_machine())}")
    ran = headway("calibrate", "--json")
    assert (ran.code, ran.err.strip()) == (0, "")
    assert json.loads(ran.out) == json.loads((entries / "mine.json").read_text())
    assert CalibratedMachine.from_json(ran.out) == a_machine()


def test_flags_reach_the_child(headway: CommandLine, child: Child, tmp_path: Path) -> None:
    child(f"open({str(tmp_path / 'heard')!r}, 'w').write(' '.join(sys.argv[1:]))\n{printing(a_machine())}")
    for flags, heard in (
        ("", "--machine --device auto"),
        ("--quick --device cpu", "--machine --quick --device cpu"),
        ("--full --name mine --threads 1", "--machine --full --name mine --threads 1 --device auto"),
    ):
        assert headway("calibrate", *flags.split()).code == 0
        assert (tmp_path / "heard").read_text() == heard


KERNELS = {
    "ways": {"bfloat16": "tiles", "attention": "widened"},
    "gflops": {
        "bfloat16": {
            "vdpbf16ps": {"1": 10.0, "6": 63.0},
            "widened": {"1": 11.0, "6": 84.0},
            "tiles": {"1": 9.0, "6": 500.0},
        }
    },
    "path": "/there/cpu.ways.json",
}


def test_kernels_are_a_table_of_what_was_timed(headway: CommandLine, child: Child, tmp_path: Path) -> None:
    child(f"open({str(tmp_path / 'heard')!r}, 'w').write(' '.join(sys.argv[1:]))\nprint({json.dumps(KERNELS)!r})")
    ran = headway("calibrate", "--kernels")
    assert (ran.code, (tmp_path / "heard").read_text()) == (0, "--kernels")
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["bfloat16", "tiles"] in rows and ["tiles", "9", "500"] in rows and ["attention", "widened"] in rows
    assert rows.count(["widened", "11", "84"]) == 1 and "/there/cpu.ways.json" in ran.out
    assert json.loads(headway("calibrate", "--kernels", "--json").out) == KERNELS


def test_a_second_run_says_that_it_replaced_the_first(headway: CommandLine, child: Child, entries: Path) -> None:
    child(printing(a_machine()))
    assert f"Written to {entries / 'mine.json'}\n" in headway("calibrate").out
    child(printing(replace(a_machine(), rounds=77)))
    assert f"Replaced {entries / 'mine.json'}\n" in headway("calibrate").out
    assert load(entries / "mine.json").rounds == 77


def test_output_is_written_there_alone(headway: CommandLine, child: Child, entries: Path, tmp_path: Path) -> None:
    child(printing(a_machine()))
    ran = headway("calibrate", "--output", tmp_path / "there.json")
    assert ran.code == 0 and f"Written to {tmp_path / 'there.json'}" in ran.out
    assert "To plan with it" not in ran.out
    assert load(tmp_path / "there.json") == a_machine() and not entries.exists()


def test_an_entry_may_have_a_name_of_the_catalogue(headway: CommandLine) -> None:
    """What was measured here goes before what a data sheet says."""
    save(a_machine("h200"))
    assert headway(*PLAN, "H200").out.startswith("llama-3.2-1b on 1 × h200, ")


def test_plans_find_each_of_several_entries(headway: CommandLine, entries: Path) -> None:
    for key in ("zen", "a-first", "mine.2"):
        save(a_machine(key))
    (entries / "notes.txt").write_text("not an entry")
    (entries / ".mine.json.left").write_text("{")
    for key in ("zen", "a-first", "mine.2"):
        assert headway(*PLAN, key).out.startswith(f"llama-3.2-1b on 1 × {key}, ")


@pytest.mark.parametrize("columns", [50, 80, 140])
def test_tables_keep_to_the_terminal_and_warn(headway: CommandLine, child: Child, columns: int) -> None:
    child(printing(a_machine(busy="other processes used 1.5 cores while the machine was measured")))
    ran = headway("calibrate", columns=columns)
    *tables, _, _ = ran.out.splitlines()
    assert max(map(len, tables)) <= columns
    said = " ".join(ran.out.split())
    assert "the machine was busy: other processes used 1.5 cores" in said
    assert "calibrate again when it is quiet" in said


def test_the_tables_show_the_entry_s_figures(headway: CommandLine, child: Child) -> None:
    child(printing(a_machine()))
    said = headway("calibrate", columns=160).out
    assert "A Processor, 2 threads" in said and "the machine was busy" not in said
    rows = {label: figure.split() for label, figure, *_ in lines_of_cells(said)}
    for label, figures in {
        "memory": ["32", "GiB"],
        "reads of 256 MiB": ["40", "GB/s"],
        "products in fp32": ["300", "GFLOP/s"],
        "products in bf16": ["800", "GFLOP/s"],
        "a call": ["4", "µs"],
        "linear, 1 token": ["110%"],
        "linear, 8 tokens": ["75%"],
        "cache reads": ["60%"],
        "attention's products": ["40%"],
        "scores": ["0.2", "ns"],
        "single elements": ["170%"],
        "a step": ["300", "µs"],
        "a sequence": ["5", "µs"],
    }.items():
        assert rows[label] == figures
    assert "stream 1%, linear 2%" in " ".join(said.split())


def lines_of_cells(text: str) -> Iterator[list[str]]:
    """The cells of each line that has three."""
    for line in text.splitlines():
        found = re.split(r"\s{2,}", line.strip())
        if len(found) == 3:
            yield found


def test_an_answer_larger_than_a_pipe_holds_nothing_up(headway: CommandLine, child: Child, entries: Path) -> None:
    large = replace(a_machine(), samples=20 * a_machine().samples)
    assert len(large.to_json()) > 2**17
    child(f"{printing(large)}\nsys.stdout.flush()\nprint('1.0000 done', file=sys.stderr)")
    assert headway("calibrate").code == 0
    assert load(entries / "mine.json") == large


def test_warnings_of_the_child_are_no_progress(headway: CommandLine, child: Child) -> None:
    lines = ["2026-01-01 something is deprecated", "", "1.5 GB of memory", "0.5000 round 1 of 4: linear"]
    child(f"for line in {lines!r}: print(line, file=sys.stderr)\n{printing(a_machine())}")
    ran = headway("calibrate", "--json")
    assert (ran.code, ran.err.strip()) == (0, "")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print('headway: no such device', file=sys.stderr); sys.exit(2)", "headway: no such device"),
        ("raise RuntimeError('boom')", "measuring ended with code 1: RuntimeError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "measuring ended with code -9: it said nothing"),
    ],
)
def test_a_child_that_fails_is_one_line(
    headway: CommandLine, child: Child, entries: Path, program: str, says: str
) -> None:
    child(program)
    assert headway("calibrate").error().endswith(says)
    assert not entries.exists()


BAD = """
--quick --full | contradict each other
--threads 0 | --threads
--threads many | --threads
--device tpu | --device
--name ../up | use lower-case letters
--name Upper | use lower-case letters
--name= | use lower-case letters
--output /no/such/folder/x.json | there is no such folder; make it
--output . | which is not a file
--output /dev/null | which is not a file
--kernels --quick | give no other option than --json
--bogus | --bogus
extra | extra
""".strip().splitlines()


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_before_anything_is_measured(headway: CommandLine, child: Child, line: str) -> None:
    child("raise RuntimeError('it was started')")
    arguments, _, says = line.partition(" | ")
    assert says in headway("calibrate", *arguments.split()).error()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_line(headway: CommandLine, entries: Path) -> None:
    assert "torch finds no CUDA device; use --device cpu" in headway("calibrate", "--device", "cuda").error()
    assert not entries.exists()


def test_help_says_what_it_does(headway: CommandLine) -> None:
    ran = headway("calibrate", "--help")
    assert ran.code == 0
    for flag in ("--name", "--device", "--threads", "--quick", "--full", "--output", "--json"):
        assert flag in ran.out


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_when_it_is_stopped(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """The child measures by then, or is about to; it is in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "calibrate", "--device", "cpu", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=in_this_folder(tmp_path),
        cwd=tmp_path,
    )
    try:
        measuring = working_child(psutil.Process(process.pid))
        process.send_signal(sent)
        out, err = process.communicate(timeout=SOON_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err.strip()) == (code, "", "")
    gone, alive = psutil.wait_procs([measuring], timeout=SOON_S)
    assert gone and not alive
    assert list(tmp_path.iterdir()) == []


def working_child(parent: psutil.Process) -> psutil.Process:
    """The child, when it has spent some time of a processor."""
    ends = time.monotonic() + SOON_S
    while time.monotonic() < ends:
        for each in parent.children():
            if sum(each.cpu_times()[:2]) > 0.5:
                return each
        time.sleep(0.02)
    raise AssertionError(f"there was no child at work after {SOON_S:g} s")


def test_the_guide_names_every_field_and_flag(headway: CommandLine) -> None:
    guide = (ROOT / "docs" / "calibrate.md").read_text()
    for key in json.loads(a_machine().to_json()):
        assert f"`{key}`" in guide, key
    for flag in ("--name", "--device", "--threads", "--quick", "--full", "--output", "--json"):
        assert f"`{flag}" in guide, flag
