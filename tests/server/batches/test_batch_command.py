"""`headway batch`: with an engine of its own, which is scripted here, and against a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually
from tests.server.test_lifecycle import HERE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
StartServer = Callable[..., LiveServer]


def row(number: int, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": TEXT,
        "body": {"prompt": "Once", "max_tokens": 4, **body},
    }


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Command:
    """`headway batch` in a process, with a scripted engine."""

    def __init__(self, *arguments: str | Path, **engine: Any) -> None:
        paths = [str(HERE.parent.parent)]
        environment = {**os.environ, "FAKE_ENGINE": json.dumps(engine), "PYTHONPATH": os.pathsep.join(paths)}
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "serve_scripted.py"), "batch", *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        out, errors = self.popen.communicate(timeout=30)
        return self.popen.returncode, out, errors


def test_a_file_becomes_a_file_in_order(model_folder: Path, tmp_path: Path) -> None:
    """Endpoints may be mixed, and errors stand in their places."""
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": CHAT,
        "body": {"messages": [{"role": "user", "content": "Hi"}]},
    }
    source = write(tmp_path / "in.jsonl", row(0), "{broken", chat, row(1, temperature=-1), row(2))
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())  # a mark of the byte order, of Windows
    output = tmp_path / "out.jsonl"
    code, out, errors = Command(source, "-o", output, "--model", model_folder).end()
    assert code == 0, errors
    assert "3 answered, 2 failed" in out
    assert "failed: request 2: the line is not a valid request" in errors and "failed: r1: temperature" in errors
    rows = read(output)
    assert [each["custom_id"] for each in rows] == ["r0", None, "chat", "r1", "r2"]
    assert rows[1]["error"]["code"] == "invalid_json_line"
    assert [each["response"]["status_code"] for each in rows if each["response"]] == [200, 200, 400, 200]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    code, _, errors = Command(source, "-o", output, "--model", model_folder).end()
    assert code == 2 and "--overwrite" in errors and read(output) == rows
    code, _, errors = Command(output, "-o", output, "--model", model_folder, "--overwrite").end()
    assert code == 2 and "has the requests" in errors and read(output) == rows


def test_an_interrupted_run_goes_on(model_folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(row(number) for number in range(300)))
    output, folder = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.batch"
    arguments = (source, "-o", output, "--model", model_folder)
    running = Command(*arguments, step_s=0.03)
    eventually(lambda: (folder / "headway.sqlite-wal").exists())
    eventually(lambda: (folder / "headway.sqlite-wal").stat().st_size > 100_000)
    running.popen.send_signal(signal.SIGINT)
    code, _, errors = running.end()
    assert (code, errors.splitlines()[-1]) == (130, "headway: interrupted; give the same command again to continue")
    assert not output.exists() and folder.exists()
    other = write(tmp_path / "other.jsonl", row(1))
    code, _, errors = Command(other, "-o", output, "--model", model_folder).end()
    assert code == 2 and "another input" in errors
    code, out, errors = Command(*arguments).end()
    assert code == 0, errors
    assert "300 answered, 0 failed" in out
    assert [each["custom_id"] for each in read(output)] == [f"r{number}" for number in range(300)]
    assert not folder.exists()


def test_a_server_can_be_asked(start_server: StartServer, engine: FakeEngine, tmp_path: Path) -> None:
    server = start_server(api_keys=["secret"], max_num_queued_reqs=3)
    source = write(tmp_path / "in.jsonl", *(row(number) for number in range(10)))
    at = ("-o", tmp_path / "out.jsonl", "--url", f"{server.url}/v1")
    code, _, errors = Command(source, *at).end()
    assert code == 2 and "--api-key" in errors
    code, out, errors = Command(
        source, *at, "--api-key", "secret", "--service-class", "offline", "--max-concurrency", "2"
    ).end()
    assert code == 0, errors
    assert "10 answered" in out
    assert {request.service_class for request in engine.requests} == {"offline"}
    assert [each["custom_id"] for each in read(tmp_path / "out.jsonl")] == [f"r{number}" for number in range(10)]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([row(1), row(1)], [], "line 2: custom_id 'r1' is also that of line 1"),
        ([row(1, model="other")], [], "line 1: model 'other' is not served here"),
        ([], [], "the file has no requests"),
        (None, [], "cannot read"),
        ([row(1)], ["--url", "ftp://nowhere"], "--url is 'ftp://nowhere'"),
        ([row(1)], ["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        ([row(1)], ["--url", "http://127.0.0.1:1", "--model", "m"], "leave out --model"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: list[Any] | None,
    options: list[str],
    says: str,
) -> None:
    from headway.cli import main

    source = tmp_path / "in.jsonl"
    if rows is not None:
        write(source, *rows)
    monkeypatch.setattr(sys, "argv", ["headway", "batch", str(source), "-o", str(tmp_path / "out.jsonl"), *options])
    with pytest.raises(SystemExit) as end:
        main()
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.startswith("headway: ") and errors.count("\n") == 1, errors
    assert says in errors
    assert not (tmp_path / "out.jsonl").exists()
