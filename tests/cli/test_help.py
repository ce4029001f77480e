"""Help that reads at any width: no name and no number is broken or cut, and the first page is short."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from headway.cli import COMMANDS, main, spellings
from headway.cli.help import wrapped

Headway = Callable[..., tuple[int, str, str]]
ALL = (
    *(name for name in COMMANDS if name != "keys"),
    "bench profile",
    "plan compare",
    "plan levers",
    "simulate verify",
)


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Headway:
    def run(*arguments: str, columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["headway", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ALL)
def test_help_breaks_no_name_and_fits(headway: Headway, name: str, columns: int) -> None:
    wide = headway(*name.split(), "--help-all", columns=1000)[1]
    code, out, _ = headway(*name.split(), "--help-all", columns=columns)
    assert code == 0 and "…" not in out
    options = set(re.findall(r"--[a-z][a-z-]*[a-z]", wide))
    assert options <= set(re.findall(r"--[a-z][a-z-]*[a-z]", out))
    # A line is only longer than the terminal where a single word is.
    assert all(len(line) <= columns or len(line.split()) <= 3 for line in out.splitlines())
    assert re.findall(r"\d[\d,.]*", wide) == re.findall(r"\d[\d,.]*", out)


@pytest.mark.parametrize("name", ["serve", "bench", "plan", "simulate"])
def test_the_first_page_has_the_options_that_matter(headway: Headway, name: str) -> None:
    few, every = headway(name, "--help")[1], headway(name, "--help-all")[1]
    shown = [len(re.findall(r"^  --", page, re.MULTILINE)) for page in (few, every)]
    assert 10 <= shown[0] <= 22 < shown[1]
    assert f"more options: headway {name} --help-all" in few and "more options" not in every
    assert len(re.findall(r"^[A-Z][\w ]+:$", every, re.MULTILINE)) >= 4  # groups


def test_a_long_word_is_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert wrapped("see --prefix-repetition-num-prefixes-of-all for it", 4).splitlines() == [
        "    see",
        "    --prefix-repetition-num-prefixes-of-all",
        "    for it",
    ]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("run headway/story", "there is no command 'run'; use headway serve MODEL"),
        ("bench http://localhost:8000", "--base-url http://localhost:8000"),
        ("serve --cpu-offload-gb 2", "no option --cpu-offload-gb; the whole model is on one device"),
        ("batch in.jsonl", "headway: give --output"),
        ("serve --ctx-size 512", "headway serve has no option --ctx-size; it is called --max-model-len here"),
        ("serve --kv-cache-memory-bytes 4G", "it is called --kv-cache-memory here"),
        ("serve --batch-size 8", "it is called --max-num-seqs here"),
        ("serve --max_num_seqs 8", "did you mean --max-num-seqs?"),
        ("serve --model x", "give the model as an argument"),
        ("bench --rps 4", "it is called --request-rate here"),
        ("bench --concurrency 4", "it is called --max-concurrency here"),
        ("bench --prompt-tokens 4", "it is called --random-input-len here"),
        ("plan llama-3.1-8b --random-output-len 4", "it is called --output-tokens here"),
        ("bench prof", "headway bench has no command 'prof'; did you mean profile?"),
        ("bench --goodput ttft:500 tpot", "--goodput: 'tpot' is not KEY:MS"),
        ("plan llama-3.1-8b --hardware L4 --slo ttft 500", "--slo: 'ttft' is not KEY:MS"),
        ("plan llama-3.1-8b --gpu H200", "headway plan has no option --gpu; it is called --hardware here"),
        ("serve --zzz", "headway serve --help-all lists its options"),
        ("--help-all", "headway --help lists its options"),
        ("serve --port x", "--port is 'x'; it must be a whole number"),
        ("serve --port 99999", "--port is '99999'; it must be at most 65535"),
        ("serve --device tpu", "--device is 'tpu'; choose one of auto, cpu, cuda"),
        ("bench --request-rate -1", "the request rate is -1; it must be a finite number above 0"),
        ("plan llama-3.1-8b", "give --hardware, such as H100-SXM; `headway plan --list` lists all"),
    ],
)
def test_other_tools_words_get_ours(headway: Headway, typed: str, says: str) -> None:
    code, out, error = headway(*typed.split())
    assert code == 2 and not out and error.count("\n") == 1
    assert says in error


@pytest.mark.parametrize("typed", ["", "keys"])
def test_a_command_without_arguments_prints_its_help(headway: Headway, typed: str) -> None:
    code, out, error = headway(*typed.split())
    assert code == 2 and not error and "\nCommands:\n  " in out


def test_keys_of_a_file_get_our_words(headway: Headway, tmp_path: object) -> None:
    (file := tmp_path / "serve.toml").write_text("ctx_size = 512")  # type: ignore[operator]
    assert "unknown key 'ctx_size'; it is called max-model-len here" in headway("serve", "--config", str(file))[2]


def test_the_words_that_we_suggest_exist(headway: Headway) -> None:
    known = {option for name in ALL for option in re.findall(r"--[a-z-]+", headway(*name.split(), "--help-all")[1])}
    suggested = {ours for each in spellings.OPTIONS.values() for ours in each}
    assert suggested <= known
    assert all(said.split()[1] in COMMANDS for said in spellings.COMMANDS.values())


def test_help_has_no_inverted_or_passive_stock_phrases(headway: Headway) -> None:
    """Wordings that had to be read twice."""
    texts = " ".join(headway(*name.split(), "--help-all", columns=1000)[1] for name in ALL)
    for phrase in ("by nobody", "go before", "it takes so many", "so many as", "done without", "has a meaning only"):
        assert phrase not in texts, phrase
