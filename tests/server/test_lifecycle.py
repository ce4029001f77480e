"""Start, drain and end of the whole process: ports, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import headway
from headway.server.errors import unavailable
from headway.server.generation import Generation
from tests.server.live_server import LiveServer, eventually

HERE = Path(__file__).parent


class Process:
    """A `headway serve` with a scripted engine."""

    def __init__(self, model: Path, *arguments: str, engine: dict[str, Any] | None = None, port: int = 0) -> None:
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = model.name
        paths = [str(Path(headway.__file__).parent.parent), str(HERE.parent.parent)]
        environment = {**os.environ, "FAKE_ENGINE": json.dumps(engine or {}), "PYTHONPATH": os.pathsep.join(paths)}
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "serve_scripted.py"), "serve", str(model), "--host", "127.0.0.1"]
            + ["--port", str(self.port), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answers(self, path: str = "/health") -> int:
        try:
            return httpx.get(self.url + path).status_code
        except httpx.TransportError:
            return 0

    def until_ready(self) -> Process:
        eventually(lambda: self.answers() == 200)
        return self

    def end(self) -> tuple[int, str]:
        """Wait for the process; its exit code and what it wrote to stderr."""
        _, errors = self.popen.communicate(timeout=20)
        return self.popen.returncode, errors


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


StartProcess = Callable[..., Process]


@pytest.fixture
def start(model_folder: Path) -> Iterator[StartProcess]:
    running: list[Process] = []

    def start(*arguments: str, **options: Any) -> Process:
        running.append(Process(model_folder, *arguments, **options))
        return running[-1]

    yield start
    for process in running:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


class Asker(threading.Thread):
    """Sends one completion and keeps the answer."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__()
        self.url, self.body = url, {"prompt": "x", "max_tokens": 200, **body}
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(f"{self.url}/v1/completions", json=self.body, timeout=30)

    def result(self) -> httpx.Response:
        self.join(30)
        assert self.answer is not None
        return self.answer


def until_busy(process: Process, requests: int) -> None:
    eventually(lambda: httpx.get(f"{process.url}/load").json()["server_load"] == requests)


def test_signal_lets_requests_finish(start: StartProcess) -> None:
    process = start(engine={"step_s": 0.06}).until_ready()
    whole, stream = Asker(process.url), Asker(process.url, stream=True)
    until_busy(process, 2)
    process.popen.terminate()
    eventually(lambda: process.answers() == 503)
    refused = httpx.post(f"{process.url}/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["retry-after"]
    assert whole.result().json()["choices"][0]["text"] == "Once upon a time there was a fox."
    assert stream.result().text.endswith("data: [DONE]\n\n")
    code, errors = process.end()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_classes_are_read_again_without_dropping_requests(start: StartProcess, tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text('[[class]]\nname = "day"\n')
    process = start("--service-classes", str(file), engine={"step_s": 0.05}).until_ready()
    stream = Asker(process.url, stream=True, service_class="day", ignore_eos=True, max_tokens=25)
    until_busy(process, 1)

    def reloads(result: str) -> bool:
        process.popen.send_signal(signal.SIGHUP)
        said = f'service_class_reloads_total{{engine="0",model_name="{process.model}",result="{result}"}} '
        return said in httpx.get(f"{process.url}/metrics").text

    file.write_text('[[class]]\nname = "night"\n')
    eventually(lambda: reloads("done"))
    ask = {"prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{process.url}/v1/completions", json={**ask, "service_class": "day"}).status_code == 400
    assert httpx.post(f"{process.url}/v1/completions", json={**ask, "service_class": "night"}).status_code == 200
    file.write_text('[[class]]\nname = "dusk"\nttft_ms = -1\n')
    eventually(lambda: reloads("failed"))
    assert httpx.post(f"{process.url}/v1/completions", json={**ask, "service_class": "night"}).status_code == 200
    assert stream.result().text.endswith("data: [DONE]\n\n")
    process.popen.terminate()
    code, errors = process.end()
    assert code == 0, errors
    assert f"classes and tenants are unchanged: {file}, line 3: ttft_ms is -1;" in errors
    assert "service classes are now night" in errors and "Traceback" not in errors


def test_requests_that_take_too_long_end_with_a_clean_error(start: StartProcess) -> None:
    process = start("--shutdown-timeout", "0.3", engine={"step_s": 0.05}).until_ready()
    whole, stream = Asker(process.url, ignore_eos=True), Asker(process.url, ignore_eos=True, stream=True)
    until_busy(process, 2)
    began = time.monotonic()
    process.popen.send_signal(signal.SIGINT)  # which is as good as SIGTERM
    assert whole.result().status_code == 503
    assert whole.result().json()["error"]["code"] == "shutting_down"
    last = json.loads(stream.result().text.split("data: ")[-1])
    assert "--shutdown-timeout 0.3" in last["error"]["message"]
    code, errors = process.end()
    assert code == 0, errors
    assert "Traceback" not in errors
    assert 0.3 < time.monotonic() - began < 5


def test_second_signal_does_not_wait(start: StartProcess) -> None:
    process = start("--shutdown-timeout", "60", engine={"step_s": 0.05}).until_ready()
    stream = Asker(process.url, ignore_eos=True, stream=True)
    until_busy(process, 1)
    process.popen.terminate()
    eventually(lambda: process.answers() == 503)
    process.popen.terminate()
    assert "shutting_down" in stream.result().text
    assert process.end()[0] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_on_its_way_to_the_engine_ends_with_the_others(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    enlist = server.service.enlist

    def enlist_at_the_last_moment(generation: Generation) -> None:
        enlist(generation)
        generation.abort(unavailable("the server shut down", "shutting_down", 5))

    monkeypatch.setattr(server.service, "enlist", enlist_at_the_last_moment)
    answer = server.post("/v1/completions", prompt="x", stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert server.engine.requests == []
    eventually(lambda: not server.service.in_flight and not server.service.generations)


def test_port_answers_while_the_engine_loads(start: StartProcess) -> None:
    process = start(engine={"loads": False})
    eventually(lambda: process.answers() == 503)
    assert httpx.get(f"{process.url}/health").json()["error"]["code"] == "engine_loading"
    assert process.answers("/version") == 200
    process.popen.terminate()
    assert process.end()[0] == 0


def test_engine_that_cannot_start_is_one_line_and_exit_code_2(start: StartProcess) -> None:
    code, errors = start("--log-level", "error", engine={"fails_with": "config.json: no key hidden_size"}).end()
    assert code == 2
    assert errors.splitlines()[-1] == "headway: config.json: no key hidden_size"
    assert "Traceback" not in errors


def test_startup_is_told_and_exported(start: StartProcess) -> None:
    process = start("--log-level", "error").until_ready()
    told = r'headway:startup_seconds{.*stage="storage_read"} 0.005'
    eventually(
        lambda: bool(re.search(told, httpx.get(f"{process.url}/metrics").text))
    )  # a moment after /health says so
    metrics = httpx.get(f"{process.url}/metrics").text
    assert re.search(r'headway:startup_seconds{.*stage="warm_up"} 0.007', metrics)
    process.popen.terminate()
    _, errors = process.end()
    for expected in ("storage read: 5 ms", "warm up", "server: imports", "Ready after", f"{process.url}/v1"):
        assert expected in errors


def test_settings_reach_the_server(start: StartProcess) -> None:
    process = start(
        *("--served-model-name", "a", "--served-model-name", "b", "--api-key", "sk-1", "--max-body-size", "1K"),
        *("--metrics-prefix", "vllm:", "--scheduling-policy", "priority", "--chat-template", "{{ bos_token }}"),
        *("--max-num-queued-reqs", "5"),
        engine={"num_waiting": 4},
    ).until_ready()
    key = {"authorization": "Bearer sk-1"}
    assert process.answers("/v1/models") == 401
    assert [m["id"] for m in httpx.get(f"{process.url}/v1/models", headers=key).json()["data"]] == ["a", "b"]
    assert "vllm:num_requests_waiting" in httpx.get(f"{process.url}/metrics").text
    long = {"prompt": "x" * 2000}
    assert httpx.post(f"{process.url}/v1/completions", headers=key, json=long).status_code == 413
    chat = {"messages": [{"role": "user", "content": "x"}], "priority": 3, "return_token_ids": True}
    answer = httpx.post(f"{process.url}/v1/chat/completions", headers=key, json=chat)
    assert answer.json()["prompt_token_ids"] == [0]


def test_a_server_without_requests_sleeps_and_still_knows_the_date(server: LiveServer) -> None:
    """Each time that it wakes up takes a core from the engine's threads."""
    ticks, tick = [], server.server.on_tick

    async def noted(counter: int) -> bool:
        ticks.append(counter)
        return await tick(counter)

    server.server.on_tick = noted  # type: ignore[method-assign]
    try:
        time.sleep(1.5)
        assert 1 <= len(ticks) <= 2
        said = parsedate_to_datetime(server.client.get("/health").headers["date"]).timestamp()
        assert abs(time.time() - said) < 4
    finally:
        server.server.on_tick = tick  # type: ignore[method-assign]


def test_server_starts_without_torch(model_folder: Path) -> None:
    """Importing it takes seconds that a start-up does not have."""
    program = (
        "import sys, headway.cli, headway.server.lifecycle, headway.engine.client\n"
        "heavy = {'torch', 'transformers', 'numba', 'triton', 'openai'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_port_in_use_is_one_line_and_half_a_request_is_refused_when_the_server_ends(start: StartProcess) -> None:
    process = start().until_ready()
    code, errors = start(port=process.port).end()
    assert code == 2
    assert errors.splitlines()[-1] == f"headway: port {process.port} on 127.0.0.1 is in use; choose another with --port"
    assert "Traceback" not in errors and "Loading" not in errors
    assert process.answers() == 200
    with socket.create_connection(("127.0.0.1", process.port), timeout=20) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head + b'{"prompt": ')
        time.sleep(0.3)
        process.popen.terminate()
        answer = b""
        while part := connection.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer
        told = time.monotonic()
        code, errors = process.end()  # though the client stays
        assert time.monotonic() - told < 3
    assert code == 0 and "Traceback" not in errors


def test_a_second_signal_ends_requests_that_do_not_end(start: StartProcess) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    process = start("--shutdown-timeout", "60", "--chat-template", loop).until_ready()
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    with socket.create_connection(("127.0.0.1", process.port), timeout=20) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        until_busy(process, 1)
        process.popen.terminate()
        eventually(lambda: process.answers() == 503)
        began = time.monotonic()
        process.popen.terminate()
        code, errors = process.end()
    assert code == 0 and "Traceback" not in errors
    assert time.monotonic() - began < 4, "the template may take 5 s"


def test_a_second_signal_ends_a_process_that_is_too_busy_for_the_first() -> None:
    """Python runs a handler between two of its instructions, and one that calls C may take for ever."""
    code = (
        "import hashlib, signal\n"
        "from headway.server.edge.last_signal import kill_at_the_next\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "kill_at_the_next(signal.SIGTERM)\n"
        "print('busy', flush=True)\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "busy\n"
            process.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.terminate()
            assert process.wait(20) == -signal.SIGTERM
        finally:
            process.kill()
