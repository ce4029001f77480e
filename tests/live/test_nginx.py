"""The server behind nginx, by the file of deploy/."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.live.conftest import Served

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "nginx.conf"


@pytest.fixture
def through(served: Served, tmp_path: Path) -> Iterator[str]:
    """The address of an nginx before the server."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("there is no nginx")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = CONFIG.read_text()
    assert text.count("127.0.0.1:8000") == text.count("listen 8080") == 1
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}").replace("listen 8080", f"listen 127.0.0.1:{port}")
    file = tmp_path / "nginx.conf"
    file.write_text(text)
    more = "user root;" if os.geteuid() == 0 else ""
    nginx = subprocess.Popen([program, "-p", tmp_path, "-c", file, "-g", f"daemon off; {more}"])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 20
    while nginx.poll() is None and time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health")
            break
        except httpx.TransportError:
            time.sleep(0.02)
    yield url
    nginx.terminate()
    assert nginx.wait(timeout=20) == 0


def test_answers_and_streams_come_through(served: Served, through: str) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    direct = httpx.post(f"{served.url}/v1/completions", json=asked).json()["choices"][0]["text"]
    answer = httpx.post(f"{through}/v1/completions", json=asked, headers={"x-request-id": "mine"})
    assert answer.json()["choices"][0]["text"] == direct and answer.headers["x-request-id"] == "mine"
    with openai.OpenAI(base_url=f"{through}/v1", api_key="none", max_retries=0) as client:
        began, times, text = time.monotonic(), list[float](), ""
        for chunk in client.completions.create(model="headway/story", stream=True, **asked):  # type: ignore[call-overload]
            times.append(time.monotonic() - began)
            text += chunk.choices[0].text if chunk.choices else ""
        assert text == direct and len({round(each, 4) for each in times}) > 10, "as they come, not all at once"
        with client.responses.stream(model="headway/story", input="Hello", max_output_tokens=20) as stream:
            assert stream.get_final_response().usage is not None
    refused = httpx.post(
        f"{through}/v1/completions", content=b"x" * (9 << 20), headers={"content-type": "application/json"}
    )
    assert refused.status_code == 413 and "--max-body-size" in refused.json()["error"]["message"]
