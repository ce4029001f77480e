"""Every command and program of README.md and docs/*.md does what stands beside it.

Loads are cut to a handful of requests and two seconds, and `headway serve` only takes its flags and files, so that the
whole takes half a minute; `test_readme_as_it_stands` and `test_servers_start_as_documented`, which are slow, cut
nothing. A block that needs what a test does not have says so in a comment before it, as in
`<!-- not run: network -->`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from headway.bundled import STORY
from headway.calibration.store import save
from headway.cli import main
from tests.bench.command_line import skip_layout
from tests.calibration.machines import a_machine
from tests.live.conftest import SOURCE, Served
from tests.live.documents import DOCUMENTS, LANGUAGES, REASONS, REPOSITORY, Block, blocks, missing_lines, shown_by

ALL = [block for document in DOCUMENTS for block in blocks(document)]
ADDRESS = "http://localhost:8000"
# Flags that make a load long, and what a test gives in their place.
SHORT = {
    "--num-prompts": "6",
    "--duration": "2",
    "--repeats": "2",
    "--request-rate": "20",
    "--sweep": "rate:20,40",
    "--on-seconds": "0.5",
    "--off-seconds": "0.5",
}
APART = {"--compare", "--start"}  # loads that are put on no server of the test
ENOUGH = {"--num-prompts", "--mix", "--compare"}
# Loads of which a document shows what was found, that end by themselves, or whose reading takes a longer one.
FOUND = {
    "--find-max-rate": ["--max-search-seconds", "1", "--random-input-len", "16", "--random-output-len", "4"],
    "bench": ["--num-warmups", "1"],
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.1234567,{100 + second},{5 + second}\n" for second in range(12)
)
MOONCAKE = "".join(
    f'{{"timestamp": {at * 100}, "input_length": 600, "output_length": 5, "hash_ids": [1, {at + 2}]}}\n'
    for at in range(12)
)


def sh_blocks(slow: bool) -> list[Block]:
    return [b for b in ALL if b.language == "sh" and not b.mark.startswith("not run") and (b.mark == "slow") == slow]


def test_each_block_says_its_language_and_why_it_is_not_run() -> None:
    for block in ALL:
        assert block.language in LANGUAGES, f"{block.name}: a fence needs one of {sorted(LANGUAGES)}"
        assert block.mark in ("", "slow", "an example") or block.mark.removeprefix("not run: ") in REASONS, block.name
        if block.language in ("", "text"):
            assert not block.text.lstrip("$ ").startswith(("headway ", "curl ")), (
                f"{block.name}: label commands with sh"
            )
        if block.language == "sh":
            assert not any(command.startswith((".venv/bin", "python -m headway")) for command in block.commands)
    assert len([b for b in ALL if b.language == "sh" and b.mark.startswith("not run")]) <= 10


@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*.toml")), ids=lambda file: file.name)
def test_examples_are_those_that_the_documents_show_and_run(example: Path) -> None:
    assert example.read_text() in [f"{b.text}\n" for b in ALL if b.language == "toml"]
    assert any(f"examples/{example.name}" in b.text for b in ALL if b.language == "sh")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file that a document's commands name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("headway.bench.client.watch.reasons", lambda *_: [])
    skip_layout(monkeypatch)
    save(a_machine("my-machine"))
    (tmp_path / "my-model").mkdir()
    shutil.copy(STORY / "config.json", tmp_path / "my-model")
    for name in ("conv.csv", "AzureLLMInferenceTrace_conv.csv"):
        (tmp_path / name).write_text(AZURE)
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    for name, example in (("classes", "classes"), ("tenants", "tenants"), ("other", "tenants")):
        shutil.copy(REPOSITORY / "examples" / f"{example}.toml", tmp_path / f"{name}.toml")
    (tmp_path / "tenants.jsonl").write_text(MOONCAKE.replace("{", '{"tenant": "acme", '))
    return tmp_path


def run(command: str, server: Served | None, shorten: bool = True, starts: bool = False) -> str:
    """What the command prints. It must end with exit code 0.

    Args:
        starts: whether `headway serve` starts a server; or only takes its flags and files, in a hundredth of the time.
    """
    if server is not None:
        command = command.replace(ADDRESS, server.url)
    words = shlex.split(command)
    if words[0] == "curl":
        ran = subprocess.run(["curl", "--silent", "--fail-with-body", *words[1:]], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout
    assert words[0] == "headway", f"{command}: a document has no other commands"
    if words[1] == "serve" and starts:
        return _serve(words[2:])
    if words[1] == "serve":
        with mock.patch.object(importlib.import_module("headway.cli.serve"), "_run"):
            return _main(words)
    if words[1] == "chat" and server is not None:
        words.append(server.url)
    is_load = words[1] in ("bench", "simulate") and words[2:3] not in (["profile"], ["quality"])
    if is_load and words[1] == "bench" and server is not None and server.url not in words and not APART & set(words):
        words += ["--base-url", server.url]
    return _main(_shortened(words, is_load) if shorten else words)


def _shortened(words: list[str], is_load: bool) -> list[str]:
    short = [SHORT.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if is_load and not ENOUGH & set(words):
        short += ["--num-prompts", "6"]
    for flag, more in FOUND.items():
        short += more if flag in words and is_load and "--compare" not in words else []
    return short


def _main(words: list[str]) -> str:
    said, errors = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, words
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    undecided = "--find-max-rate" in words and "The search" in said.getvalue()
    undecided |= words[1:3] == ["simulate", "verify"] and "medians within" in said.getvalue()  # on a busy machine
    assert ended.value.code == 0 or undecided, f"{shlex.join(words)}\n{said.getvalue()}{errors.getvalue()}"
    return said.getvalue()


def _serve(arguments: list[str]) -> str:
    """A server lasts: it must begin to serve, and end with SIGTERM."""
    here = ["--port", "0", "--host", "127.0.0.1", "--threads", "1"]
    command = [sys.executable, "-m", "headway", "serve", *arguments, *here]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": SOURCE}
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("Serving"):
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "".join(said)
    return "".join(said)


def results_of_runs(server: Served, folder: Path) -> None:
    """The files that `--compare` is given."""
    for name in ("before", "after", "a1", "a2", "a3", "b1", "b2", "b3"):
        if name in ("before", "a1", "a2", "a3"):
            more = f"--base-url {server.url} --result-dir . --result-filename {name}.json --seed {len(name)}"
            run(
                f"headway bench --request-rate 40 --num-prompts 40 --random-input-len 8 --random-output-len 4 {more}",
                None,
            )
        else:
            source = "before" if name == "after" else f"a{name[1]}"
            shutil.copy(folder / f"{source}.json", folder / f"{name}.json")


def check(block: Block, server: Served, folder: Path, shorten: bool = True) -> None:
    if "--compare" in block.text:
        results_of_runs(server, folder)
    printed, all_shown = "", [*shown_by(block)]
    for command in block.commands:
        printed = run(command, server, shorten, starts=bool(all_shown))
    for shown in all_shown:
        keep = bool(re.match(r"headway plan\b", block.commands[-1]))
        assert missing_lines(shown, printed, keep) == [], f"{block.name}: not printed as shown\n{printed}"


@pytest.mark.parametrize("block", sh_blocks(slow=False), ids=lambda b: b.name)
def test_commands_run_as_documented(block: Block, served: Served, workplace: Path) -> None:
    check(block, served, workplace)


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in sh_blocks(slow=False) if "headway serve" in b.text], ids=lambda b: b.name)
def test_servers_start_as_documented(block: Block, workplace: Path) -> None:
    for command in block.commands:
        run(command, None, starts=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", sh_blocks(slow=True), ids=lambda b: b.name)
def test_commands_that_take_minutes_run(block: Block, served: Served, workplace: Path) -> None:
    check(block, served, workplace)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [b for b in sh_blocks(slow=False) if b.document.name == "README.md"], ids=lambda b: b.name
)
def test_readme_as_it_stands(block: Block, served: Served, workplace: Path) -> None:
    check(block, served, workplace, shorten=False)


def programs_of(document: Path) -> list[str]:
    return [b.text for b in blocks(document) if b.language == "python" and not b.mark.startswith("not run")]


PROGRAMS = [document for document in DOCUMENTS if programs_of(document)]


@pytest.mark.parametrize("document", PROGRAMS, ids=lambda document: document.name)
def test_programs_run_as_documented(document: Path, served: Served, workplace: Path) -> None:
    """The Python of a document, its blocks one after the other, as they build on each other."""
    programs = programs_of(document)
    if "steps.jsonl" in programs[0]:
        _serve(["--record-steps", "steps.jsonl"])
    program = "\n".join(programs).replace(ADDRESS, served.url)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program, document.name, "exec"), {"__name__": "__main__"})


def test_the_readme_is_short_and_shows_what_one_gets() -> None:
    text = DOCUMENTS[0].read_text()
    assert len(text.splitlines()) < 150
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 2 and all((DOCUMENTS[0].parent / each).is_file() for each in pictures)


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", document.read_text()):
            target = document.parent / link if link else document
            assert target.exists(), f"{document.name} links to {link}"
            if anchor and target.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
                assert anchor in slugs, f"{document.name} links to {link}#{anchor}"


def test_chat_serves_a_model_for_one_conversation(workplace: Path) -> None:
    answer = _main(["headway", "chat", "headway/story", "--message", "Tell me about the sea.", "--max-tokens", "12"])
    assert len(answer.split()) >= 3
