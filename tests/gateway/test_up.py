"""`headway up`: servers and their gateway in one command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headway.gateway.servers import read_up_file
from tests.engine.clients import has_ended
from tests.server.conftest import model_folder  # noqa: F401
from tests.server.live_server import eventually

REPOSITORY = Path(__file__).parents[2]
HEALTH = "[health]\nevery_s = 0.2\ntimeout_s = 1\nfailures = 2\nslow_start_s = 0.1\n"


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "up.toml"
    path.write_text(
        'routing = "least-loaded"\n[[server]]\nname = "a"\nmodel = "m"\nweight = 2\n'
        'flags = { max-num-seqs = 8, enable_prefix_caching = false, alias = ["x", "y"] }\n'
        '[[server]]\nname = "b"\nmodel = "n"\n[[backend]]\nname = "far"\nurl = "http://far"\n'
    )
    found = read_up_file(str(path))
    first, second = found.servers
    assert first.flags == ("--max-num-seqs=8", "--no-enable-prefix-caching", "--alias=x", "--alias=y")
    assert first.port != second.port and first.key != second.key and first.key not in repr(found)
    backends = {each.name: each for each in found.gateway.backends}
    assert list(backends) == ["far", "a", "b"] and backends["a"].weight == 2 and backends["b"].kind == "headway"
    assert backends["a"].url == f"http://127.0.0.1:{first.port}" and backends["a"].key == first.key


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no servers"),
        ('[[server]]\nname = "a"', "line 1: a server has no model"),
        ('[[server]]\nname = "a"\nmodel = "m"\nport = 5', "line 4: 'port' is unknown"),
        ('[[server]]\nname = "a b"\nmodel = "m"', "line 2: name is 'a b'"),
        ('[[server]]\nname = "a"\nmodel = "m"\nflags = { port = 1 }', "which the gateway sets itself"),
        ('[[server]]\nname = "a"\nmodel = "m"\nflags = { x = [[1]] }', "write a number, true, false or a string"),
        ('[[server]]\nname = "a"\nmodel = "m"\n' * 2, "two backends are named 'a'"),
        ("server = 1", "write [[server]]"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "up.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_up_file(str(path))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@contextlib.contextmanager
def running(folder: Path, text: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    path = folder / "up.toml"
    path.write_text(text)
    command = [sys.executable, "-m", "tests.gateway.up_scripted", "up", str(path), "--port=0", "--host=127.0.0.1"]
    process = subprocess.Popen(
        [*command, f"--log-dir={folder / 'logs'}"], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        yield process, process.stderr.readline().split()[3].rstrip(";")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ask(url: str, model: str, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 2} | fields, timeout=20
    )


def test_servers_are_started_kept_and_ended(tmp_path: Path, model_folder: Path) -> None:  # noqa: F811
    entry = '[[server]]\nname = "{}"\nmodel = {}\n'
    text = HEALTH + "".join(entry.format(name, json.dumps(str(model_folder))) for name in ("one", "two"))
    with running(tmp_path, text) as (process, url):
        for name in ("one", "two"):
            eventually(lambda name=name: ask(url, name).status_code == 200, 60)
        assert {each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]} == {"one", "two"}
        children = {each.pid: each for each in psutil.Process(process.pid).children()}
        assert len(children) == 2
        victim = next(each for each in children.values() if "--served-model-name=one" in each.cmdline())
        victim.kill()
        assert ask(url, "two").status_code == 200
        eventually(lambda: ask(url, "one").status_code == 200, 60)
        now = psutil.Process(process.pid).children()
        assert len(now) == 2 and victim.pid not in {each.pid for each in now}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None and "all servers have ended" in process.stderr.read()
        assert all(map(has_ended, now))
        assert (tmp_path / "logs" / "one.log").stat().st_size


def test_servers_end_with_a_gateway_that_is_killed(tmp_path: Path, model_folder: Path) -> None:  # noqa: F811
    text = HEALTH + f'[[server]]\nname = "one"\nmodel = {json.dumps(str(model_folder))}\n'
    with running(tmp_path, text) as (process, url):
        eventually(lambda: ask(url, "one").status_code == 200, 60)
        (child,) = psutil.Process(process.pid).children()
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        eventually(lambda: has_ended(child), 20)
        assert time.monotonic() - began < 20


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with running(tmp_path, HEALTH + '[[server]]\nname = "one"\nmodel = "/nowhere"\n') as (process, url):
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        assert any("died (exit code 2)" in line for line in lines), lines
        assert ask(url, "one").status_code == 503
