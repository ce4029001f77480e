"""A server of one's own: read, ready, and gone afterwards in every case."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import headway
from headway.bench.profile.local_server import LocalServer, Startup
from headway.engine.messages import Ready
from headway.load.errors import BenchError
from headway.server.startup_display import StartupDisplay

READY = "Ready after 1.50 s on cpu: context 1,024 tokens, KV cache 16,385 blocks of 16 tokens in int8\n"
SERVING = "Serving a model at http://127.0.0.1:8123/v1\n"


def script(tmp_path: Path, body: str) -> list[str]:
    """A stand-in for `headway serve`; it writes its process id to a file first."""
    lines = ["import os, signal, sys, time", f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))", body]
    (tmp_path / "server.py").write_text("\n".join(lines))
    return [sys.executable, str(tmp_path / "server.py")]


def says(text: str) -> str:
    return f"sys.stderr.write({text!r}); sys.stderr.flush()"


def is_gone(pid: int) -> bool:
    """A process that has ended counts as gone, also before its parent asked for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def server(tmp_path: Path, body: str, timeout_s: float = 60.0, on_line=lambda line: None) -> LocalServer:
    return LocalServer(["model"], timeout_s, on_line, script(tmp_path, body))


def test_what_the_server_prints_is_understood():
    """The real display of `headway serve`, so that a change of its words shows here."""
    file = io.StringIO()
    display = StartupDisplay("a model at noon", time.monotonic_ns(), Console(file=file, soft_wrap=True, width=80))
    display.start()
    display.on_server_stage("imports", 812_300_000)
    display.on_server_stage("tokenizer", 1_234_000_000)
    display.on_server_stage("rest", 400_000)
    ready = Ready(
        protocol=1, max_model_len=32768, num_blocks=16385, block_size=16, device="cuda:0", startup_ns={"warm_up": 10},
        kv_cache_dtype="bfloat16", max_num_seqs=256, pool_tokens=262160,
    )  # fmt: skip
    display.on_ready(ready, "http://127.0.0.1:4321")
    startup = Startup()
    for line in file.getvalue().splitlines():
        startup.read(line)
    assert startup.url == "http://127.0.0.1:4321"
    assert (startup.device, startup.max_model_len, startup.num_blocks, startup.block_size) == (
        "cuda:0",
        32768,
        16385,
        16,
    )
    assert startup.api_stages == pytest.approx({"imports": 0.812, "tokenizer": 1.234, "rest": 0.001})
    assert 0 <= startup.seconds < 60


async def test_ready_and_ended(tmp_path):
    heard: list[str] = []
    body = f"{says('loading' + chr(10) + READY + SERVING)}; time.sleep(600)"
    async with server(tmp_path, body, on_line=heard.append) as running:
        assert running.startup.url == "http://127.0.0.1:8123"
        assert (running.startup.seconds, running.startup.num_blocks) == (1.5, 16385)
        assert heard == ["loading", READY.strip(), SERVING.strip()]
        assert running.died() is None
        pid = running.pid
        assert pid is not None and not is_gone(pid)
    assert is_gone(pid)
    assert running.pid is None


@pytest.mark.parametrize("end", ["chr(10)", "''"])
async def test_what_it_writes_later_does_not_fill_the_pipe(tmp_path, end):
    """A megabyte after it was ready, in lines or in one; it would block for ever in a pipe that nobody reads."""
    done = tmp_path / "done"
    body = f"{says(READY + SERVING)}\nfor _ in range(10_000): sys.stderr.write('x' * 99 + {end})\n"
    body += f"open({str(done)!r}, 'w').close(); time.sleep(600)"
    async with server(tmp_path, body):
        deadline = time.monotonic() + 60
        while not done.exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_a_server_that_refuses_is_quoted(tmp_path):
    refusal = "Loading\nheadway: max_model_len is 9; it must be between 2 and 8\n"
    body = f"{says(refusal)}; sys.exit(2)"
    with pytest.raises(BenchError) as error:
        async with server(tmp_path, body):
            pytest.fail("it is not ready")
    assert str(error.value) == "the server did not start: max_model_len is 9; it must be between 2 and 8"


async def test_a_server_that_crashes_is_described(tmp_path):
    with pytest.raises(BenchError, match="did not start: it ended with code 7, last words: oh no"):
        async with server(tmp_path, f"{says('oh no' + chr(10))}; sys.exit(7)"):
            pytest.fail("it is not ready")


async def test_a_server_that_takes_too_long_is_ended(tmp_path):
    running = server(tmp_path, f"{says('  import: 12 ms' + chr(10))}; time.sleep(600)", timeout_s=1.0)
    with pytest.raises(BenchError, match=r"not ready after 1 s; raise --ready-timeout \((last words: import|it said)"):
        async with running:
            pytest.fail("it is not ready")
    pid_file = tmp_path / "pid"
    assert not pid_file.exists() or not pid_file.read_text() or is_gone(int(pid_file.read_text()))


async def test_a_server_that_ignores_the_signal_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.bench.profile.local_server._SHUTDOWN_S", 0.2)
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {says(READY + SERVING)}; time.sleep(600)"
    async with server(tmp_path, body) as running:
        pid = running.pid
    assert is_gone(pid)


async def test_a_cancelled_start_leaves_nothing(tmp_path):
    running = server(tmp_path, f"{says('loading' + chr(10))}; time.sleep(600)")
    starting = asyncio.create_task(running.__aenter__())
    while running.pid is None:
        await asyncio.sleep(0.01)
    pid = running.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert is_gone(pid)


async def test_a_server_that_dies_later_is_noticed(tmp_path):
    body = f"{says(READY + SERVING)}; time.sleep(0.1); {says('out of memory' + chr(10))}; os._exit(9)"
    async with server(tmp_path, body) as running:
        deadline = time.monotonic() + 60
        while running.died() is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert "ended with code 9" in running.died()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal to orphans is Linux's")
def test_a_killed_parent_takes_its_server_along(tmp_path):
    command = script(tmp_path, f"{says(READY + SERVING)}; time.sleep(600)")
    program = f"""
import asyncio, sys
from headway.bench.profile.local_server import LocalServer
async def main():
    async with LocalServer([], 60, command={command!r}) as running:
        print(running.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(headway.__file__).parent.parent)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not is_gone(pid):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.01)
