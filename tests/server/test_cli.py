"""The command line: bad input is one line and exit code 2."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import headway
from headway.cli import main
from headway.cli.serve import short_name
from headway.config_files.tenants import Access, TenantFile
from headway.engine.client import EngineClient
from headway.engine.messages import Ready
from headway.flags import size, tokens
from headway.server.settings import ServerSettings
from headway.server.startup_display import StartupDisplay
from headway.text.chat_template import advice
from headway.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_level, save, save_chat_model


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"headway {headway.__version__}\n"


def test_module_is_the_same_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "headway", "--version"], capture_output=True, text=True)
    assert ran.stdout == f"headway {headway.__version__}\n"


def test_an_interrupt_while_modules_are_imported_ends_it_as_later(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    ran = subprocess.run([sys.executable, "-m", "headway", "serve"], capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stderr) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "--bogus"),
        (["serve", "--bogus"], "--bogus"),
        (["nothing"], "nothing"),
        (["serv"], "did you mean serve?"),
        (["serve", ""], "'': no such folder"),
        (["serve", "--port", "http"], "--port"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--dtype", "int3"], "bfloat16"),
        (["serve", "--kv-cache-dtype", "int2"], "--kv-cache-dtype is 'int2'; choose one of auto, int8, fp8"),
        (["serve", "--max-model-len", "0"], "--max-model-len"),
        (["serve", "--max-num-batched-tokens", "4q"], "'4q' is not a number of tokens"),
        (["serve", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens is 8, less than --max-num-seqs (256)"),
        (["serve", "--threads", "1000000"], "--threads is 1000000, and this process may use"),
        (["serve", "--quantization", "awq_marlin"], "the format of a quantised checkpoint is found without it"),
        (["serve", "--lora-dtype", "auto"], "adapters have the type of the model"),
        (["serve", "--lora-modules", "sql"], "'sql' is no adapter; write NAME=PATH"),
        (["serve", "--lora-modules", "sql=/none", "headway/story=/x"], "'headway/story' is the base model"),
        (["serve", "--api-key", ""], "--api-key: a value is empty"),
        (["serve", "--served-model-name", "a", "--served-model-name", " "], "--served-model-name: a value is empty"),
        (["serve", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["serve", "--memory-utilization", "1.5"], "--gpu-memory-utilization is '1.5'; it must be at most 1"),
        (["serve", "--n-gpu-layers", "99"], "the whole model is on one device; --device chooses it"),
        (["serve", "-t", "4"], "it is called --threads here"),
        (["serve", "--hf-repo", "owner/name"], "give the model as an argument, as owner/name or"),
        (["serve", "--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["serve", "--metrics-prefix", "a b"], "not a Prometheus name"),
        (["serve", "--scheduling-policy", "lifo"], "fcfs"),
        (["serve", "/no/such/folder"], "/no/such/folder"),
        (["serve", "one", "two"], "two"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("headway: ")
    assert says in errors
    assert errors.count("\n") == 1


def test_a_data_folder_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert run(monkeypatch, "serve", "--port", "0", "--data-dir", str(tmp_path / "file" / "data")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("headway: the data folder")


def test_bad_classes_are_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the flag, and by the key of a file of flags."""
    classes, flags = tmp_path / "classes.toml", tmp_path / "flags.toml"
    classes.write_text('[[class]]\nname = "a"\nttft_ms = 0\n')
    flags.write_text(f'service-classes = "{classes}"')
    for arguments in (["--service-classes", str(classes)], ["--config", str(flags)]):
        assert run(monkeypatch, "serve", *arguments) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"headway: --service-classes: {classes}, line 3: ttft_ms is 0; an objective is")
        assert line.count("\n") == 1


def test_folder_without_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "serve", str(tmp_path), "--port", "0") == 2
    assert "tokenizer.json is missing" in capsys.readouterr().err


def test_a_signal_during_the_start_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(EngineClient, "launch", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(EngineClient, "kill", lambda self: ended.append(1))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run(monkeypatch, "serve", "--port", "0") == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended


def test_broken_template_and_generation_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = save_chat_model(tmp_path, temperature=-5)
    assert run(monkeypatch, "serve", str(folder), "--port", "0") == 2
    assert "temperature is -5" in capsys.readouterr().err
    assert run(monkeypatch, "serve", str(folder), "--port", "0", "--chat-template", "{% if %}") == 2
    assert "not valid Jinja" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "in_bytes"),
    [("4096", 4096), ("8M", 8 * 2**20), ("1.5G", 3 * 2**29), ("2GiB", 2**31), ("1 KB", 1024), ("1t", 2**40)],
)
def test_sizes(text: str, in_bytes: int) -> None:
    assert size(text) == in_bytes


@pytest.mark.parametrize(("text", "number"), [("4096", 4096), ("4k", 4000), ("4K", 4096), (" 1m ", 10**6)])
def test_numbers_of_tokens(text: str, number: int) -> None:
    assert tokens(text) == number


READY = Ready(
    protocol=1, max_model_len=256, num_blocks=8, block_size=16, device="cpu", startup_ns={}, kv_cache_dtype="float32",
    max_num_seqs=4, pool_tokens=128,
)  # fmt: skip


def started(*progress: str, **more: bool) -> str:
    """What the display says of a start, in a log."""
    file = io.StringIO()
    display = StartupDisplay("tiny", time.monotonic_ns(), Console(file=file, soft_wrap=True, width=80))
    display.on_server_stage("imports", 1_000_000)
    display.start()
    for stage in progress:
        display.on_progress(stage, 2_000_000)
    stages = dict.fromkeys((*progress, "quiet"), 2_000_000)
    display.on_ready(msgspec.structs.replace(READY, startup_ns=stages), "http://127.0.0.1:4321", **more)
    return file.getvalue()


def test_each_stage_of_a_start_is_logged_once() -> None:
    said = started("load_weights", "warm_up")
    assert [said.count(stage) for stage in ("imports", "load weights", "warm up", "quiet")] == [1, 1, 1, 1]


def test_a_start_that_writes_to_the_cache_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert "headway cache" not in started("warm_up")
    monkeypatch.setattr(f"{__name__}.READY", msgspec.structs.replace(READY, kept_bytes=603_000_000))
    says = "Writing 603 MB of packed weights to /caches/headway/weights, for quicker starts; `headway cache` lists and"
    assert says in started("warm_up")


def test_a_log_says_once_that_kernels_are_compiled() -> None:
    file = io.StringIO()
    display = StartupDisplay("tiny", time.monotonic_ns(), Console(file=file, soft_wrap=True, width=80))
    display.on_progress("compiling: first, 0 of 2 done", 0)
    display.on_progress("compiling: second, 1 of 2 done", 0)
    display.on_progress("warm_up", 2_000_000)
    assert file.getvalue() == "  compiling: first, 0 of 2 done\n  warm up: 2 ms\n"


def test_all_times_of_a_start_are_written_alike() -> None:
    file = io.StringIO()
    display = StartupDisplay("tiny", time.monotonic_ns(), Console(file=file, soft_wrap=True, width=80))
    for stage, elapsed_ns in (("load_weights", 1_767_400_000), ("warm_up", 558_600_000), ("tokenizer", 90_000)):
        display.on_progress(stage, elapsed_ns)
        display.on_server_stage(f"{stage} again", elapsed_ns)
    display.on_ready(READY, "http://127.0.0.1:4321")
    said = file.getvalue()
    assert "  load weights: 1,767 ms\n  warm up: 559 ms\n  tokenizer: <1 ms\n" in said
    assert [re.search(f"{stage} again +(.*ms)", said)[1] for stage in ("weights", "warm up", "tokenizer")] == [  # type: ignore[index]
        *("1,767 ms", "559 ms", "<1 ms")
    ]


def test_a_start_says_that_a_model_has_no_chat_template(tmp_path: Path) -> None:
    """And what comes next is no chat then."""
    tokenizer = Tokenizer.load(save(tmp_path, byte_level()))
    file = io.StringIO()
    display = StartupDisplay("tiny", time.monotonic_ns(), Console(file=file, soft_wrap=True, width=80))
    display.on_template(False, advice(tokenizer))
    assert file.getvalue() == (
        "No chat template, so chats are refused. To chat, start with --chat-template chatml (the vocabulary has its "
        "tokens; a base model's has them, too).\n"
    )
    display.on_ready(READY, "http://127.0.0.1:4321", asks_for_key=True)
    said = file.getvalue()
    assert "headway chat" not in said
    assert """  curl http://127.0.0.1:4321/v1/completions -H 'Authorization: Bearer KEY' -H 'Content-Type: """ in said
    assert """-d '{"prompt": "Once upon a time"}'\n""" in said
    display.on_ready(msgspec.structs.replace(READY, generates=False), "http://127.0.0.1:4321")
    assert (
        """/v1/embeddings -H 'Content-Type: application/json' -d '{"input": "Once upon a time"}'""" in file.getvalue()
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [("models/Tiny-1B", "Tiny-1B"), ("models/Tiny-1B/", "Tiny-1B"), ("models/../models/a.Q4_0.gguf", "a.Q4_0")]
    + [("owner/name", "owner/name"), ("headway/story", "headway/story"), ("/", "/")],
)
def test_a_folder_is_called_by_its_last_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Tiny-1B").mkdir(parents=True)
    (tmp_path / "models" / "a.Q4_0.gguf").touch()
    assert short_name(model) == name


def test_a_start_names_its_process_and_warns_where_it_is_open() -> None:
    closed, open_ = started(), started(can_reload=True, is_open=True)
    assert f"(process {os.getpid()})" in closed and "kill -HUP" not in closed and "Warning" not in closed
    assert f"`kill -HUP {os.getpid()}` reads the files" in open_ and "without an API key" in open_
    assert started(asks_for_key=True).count("--api-key KEY") == 2 and "--api-key KEY" not in open_


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "::"}, True),
        ({"api_keys": ["sk-x"]}, False),
        ({"tenants": TenantFile()}, True),
        ({"tenants": TenantFile(keys={b"": Access()})}, False),
    ],
)
def test_a_server_is_open_without_a_key_on_an_address_of_others(settings: dict[str, Any], is_open: bool) -> None:
    assert ServerSettings(**settings).is_open is is_open
