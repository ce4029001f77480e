"""`headway bench --start --vary`: each setting of a server under each load, and going on where it was."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.bench.start_command import words
from tests.bench.command_line import CommandLine, Subprocess, wait_until

MOCK = f"{shlex.quote(sys.executable)} -m headway bench mock --port {{port}} --ttft-ms {{ttft}} --itl-ms 1 {{more}}"
LOAD = ("--random-input-len", 4, "--random-output-len", 6, "--num-warmups", 0)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_cells_are_written_one_by_one_and_the_same_command_goes_on(headway: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    asked = ("bench", "--start", MOCK, "--vary", "more=", *LOAD, "--num-prompts", 10, "--sweep", "concurrency:1,2")
    first = Subprocess(folder, *asked, "--vary", "ttft=20,40")
    wait_until(lambda: len(list(folder.glob("sweep-*/*.json"))) > 0)
    first.send(signal.SIGINT)
    stopped = first.ended()
    assert stopped.code == 130 and "the same command goes on" in " ".join(stopped.err.split())
    (sweep,) = folder.iterdir()
    kept = {path: path.read_bytes() for path in sweep.glob("*.json")}
    assert 1 <= len(kept) < 4
    page = tmp_path / "page.html"
    # A further value is measured beside what is missing, in the same folder; a server that does not start is named.
    more = ("--vary", "ttft=20,40,soon", "--report", page, "--result-dir", folder)
    ran = headway(*asked, *more, results=False)
    assert ran.code == 1 and f"{len(kept)} of 6 runs are there already" in ran.out
    assert "not measured: more= ttft=soon: the server did not start" in ran.out and "is not a number" in ran.out
    files = sorted(sweep.glob("*.json"))
    assert len(files) == 4 and all(path.read_bytes() == content for path, content in kept.items())
    found = {(run["headway"]["settings"]["label"], run["max_concurrency"]): run for run in map(read, files)}
    for label, least in (("more= ttft=20", 20), ("more= ttft=40", 40)):
        assert all(found[label, load]["median_ttft_ms"] >= least for load in (1, 2))
    assert "4 runs" in ran.out and page.stat().st_size > 10_000
    assert headway("bench", "pareto", *files, results=False).code == 0


def test_a_name_alone_may_be_several_words_or_none() -> None:
    values = {"port": "80", "more": "--a 'b c'", "none": ""}
    assert words("serve --port={port} {more} {none} x{none}", values) == ["serve", "--port=80", "--a", "b c", "x"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--start", "serve"), "--start has no {port}"),
        (("--start", "serve {port} {a}"), "--start has {a}, which is no setting"),
        (("--start", "serve {port}", "--vary", "a=1,2"), "--vary has a, and --start no {a}"),
        (("--start", "serve {port} {a}", "--vary", "a=1,1"), "has a value twice"),
        (("--start", "serve {port} {a}", "--vary", "1a=1"), "is not NAME=A,B"),
        (("--start", "serve '{port}", "--vary", "a=1"), "cannot be split into words"),
        (("--vary", "a=1,2"), "--vary works only with --start"),
        (("--start", "serve {port}", "--base-url", "http://x"), "--base-url works only without --start"),
        (("--start", "serve {port}", "--find-max-rate", "--goodput", "ttft:9"), "leave out --find-max-rate"),
        (("--start", "no-such-program {port}"), "cannot start no-such-program"),
    ],
)
def test_what_makes_no_sense_is_one_line(headway: CommandLine, flags: tuple[str, ...], says: str) -> None:
    assert says in headway("bench", *flags).error()
