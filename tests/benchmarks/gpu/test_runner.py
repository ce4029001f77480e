"""Parts whose processes crash, hang, write nonsense or stop: what they did counts, and the rest goes on."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu.runner import BEFORE, Outcome, run, run_shared

PRELUDE = """
    import json, os, signal, sys, time
    lines, done = open(sys.argv[1], "a", buffering=1), json.load(open(sys.argv[2]))
    def say(**record):
        lines.write(json.dumps(record) + "\\n")
    def task(name, rows=()):
        if name in done:
            return False
        say(began=name)
        return True
    def end(name, **about):
        say(task=name, row={"of": name})
        say(ended=name, **about)
"""
Runs = Callable[..., Outcome]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Runs a part that is this script, and returns what came of it."""

    def made(script: str, kept: Outcome | None = None, seconds: float = 30.0, task_seconds: float = 20.0) -> Outcome:
        file = tmp_path / "part.py"
        file.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(script))
        outcome = kept or Outcome()
        command = [sys.executable, str(file)]
        log = tmp_path / "log"
        run(lambda lines, done: [*command, str(lines), str(done)], outcome, log, tmp_path, seconds, task_seconds)
        return outcome

    return made


def test_tasks_that_end_are_kept_with_their_rows(runs: Runs) -> None:
    outcome = runs("""
        say(tasks=["a", "b", "c"])
        task("a"), end("a", seconds=1.5)
        task("b"), say(ended="b", error="ValueError: no")
        task("c"), say(ended="c", skipped="no space is left")
    """)
    assert outcome.tasks == {
        "a": {"rows": [{"of": "a"}], "seconds": 1.5},
        "b": {"rows": [], "error": "ValueError: no"},
        "c": {"rows": [], "skipped": "no space is left"},
    }
    assert outcome.errors == {"b": "ValueError: no"} and not outcome.cut and not outcome.left


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by SIGSEGV"),
        ("os._exit(3)", "its process ended with exit code 3"),
        ("sys.exit('an illegal address')", "an illegal address"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_crash_is_its_tasks_and_the_next_one_is_begun(runs: Runs, death: str, said: str) -> None:
    outcome = runs(f"""
        say(tasks=["a", "bad", "c"])
        if task("a"): end("a")
        if task("bad"):
            say(task="bad", row={{"half": 1}})
            {death}
        if task("c"): end("c")
    """)
    assert list(outcome.tasks) == ["a", "bad", "c"]
    assert said in outcome.errors["bad"] and list(outcome.errors) == ["bad"]
    assert [*outcome.tasks["bad"]["rows"], *outcome.tasks["c"]["rows"]] == [{"half": 1}, {"of": "c"}]


def test_a_process_that_ends_between_two_tasks_is_followed_by_another(runs: Runs) -> None:
    """This happens after an error that spoils the device for the process."""
    outcome = runs("""
        say(tasks=["bad", "c"])
        if task("bad"):
            say(ended="bad", error="CUDA error: an illegal memory access was encountered")
            sys.exit(1)
        if task("c"): end("c")
    """)
    assert list(outcome.tasks) == ["bad", "c"] and list(outcome.errors) == ["bad"]


def test_a_task_that_hangs_is_ended_with_what_it_has_started(runs: Runs, tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = runs(
        f"""
        import subprocess
        say(tasks=["stuck", "c"])
        if task("stuck"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
            time.sleep(60)
        if task("c"): end("c")
        """,
        task_seconds=1.0,
    )
    assert "no result after 1 s; it was ended" in outcome.errors["stuck"] and "c" in outcome.tasks
    assert time.monotonic() - began < 30
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_nonsense_is_passed_over(runs: Runs) -> None:
    outcome = runs("""
        print("\\x00\\xff what?")
        lines.write("not json\\n[]\\n3\\n{}\\n{\\"task\\": \\"a\\"}\\n{\\"task\\": \\"a\\", \\"row\\": 7}\\n")
        say(tasks=["a"])
        lines.write("\\xe9\\n")
        task("a"), end("a")
        lines.write("half a li")
    """)
    assert outcome.tasks == {"a": {"rows": [{"of": "a"}]}}


@pytest.mark.parametrize("script", ["print('hello'); sys.exit(4)", "import no_such_module", "say(tasks=['a'])"])
def test_a_part_that_does_nothing_has_failed(runs: Runs, script: str) -> None:
    outcome = runs(script)
    assert list(outcome.errors) == [BEFORE] and "its process ended with exit code" in outcome.errors[BEFORE]
    kept = runs("say(tasks=['a'])\ntask('a'), end('a')", outcome)
    assert list(kept.tasks) == ["a"]  # the next time says what is true then


def test_a_process_that_does_not_end_after_its_last_task_is_ended(runs: Runs) -> None:
    outcome = runs("say(tasks=['a'])\ntask('a'), end('a')\ntime.sleep(60)", task_seconds=1.0)
    assert list(outcome.tasks) == ["a"] and not outcome.errors and not outcome.cut


def test_what_the_time_does_not_suffice_for_is_left_and_run_another_time(runs: Runs) -> None:
    script = """
        say(tasks=["a", "slow", "c"])
        if task("a"): end("a")
        if task("slow"):
            time.sleep(SECONDS)
            end("slow")
        if task("c"): end("c")
    """
    first = runs(script.replace("SECONDS", "60"), seconds=2.0)
    assert list(first.tasks) == ["a"] and first.left == ["slow", "c"] and first.cut and not first.errors
    before = first.tasks["a"]
    runs(script.replace("SECONDS", "0"), first)
    assert list(first.tasks) == ["a", "slow", "c"] and not first.left and not first.cut
    assert first.tasks["a"] is before


def test_processes_share_the_tasks_of_a_part(tmp_path: Path) -> None:
    """Each task is run once, by one of them; what ends one process leaves the others alone."""
    file, log = tmp_path / "part.py", tmp_path / "log"
    file.write_text("""
import os, sys
from pathlib import Path
import json
from benchmarks.gpu import part

def crash():
    print("gone", flush=True)
    os._exit(3)

names = [f"task {number}" for number in range(9)]
tasks = {name: (lambda: [{"process": os.getpid()}]) for name in names} | {"task 4": crash}
part.run(tasks, json.loads(Path(sys.argv[2]).read_text()), part.Lines(Path(sys.argv[1])))
""")
    outcome = Outcome({"task 8": {"rows": [], "seconds": 1.0}})
    run_shared(lambda *files: [sys.executable, str(file), *map(str, files)], outcome, log, tmp_path, 30.0, 20.0, 3)
    assert sorted(outcome.tasks) == [f"task {number}" for number in range(9)]
    assert list(outcome.errors) == ["task 4"] and "exit code 3" in outcome.errors["task 4"]
    assert not outcome.left and not outcome.cut and "gone" in log.read_text()
    processes = [outcome.tasks[f"task {number}"]["rows"][0]["process"] for number in (0, 3, 1, 2, 5)]
    assert processes[0] == processes[1] and processes[3] == processes[4] and len(set(processes)) == 3
