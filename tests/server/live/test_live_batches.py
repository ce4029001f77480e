"""Batches with the real engine process: what is killed in the middle is answered once all the same."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.live.test_live_engine import Live, folder  # noqa: F401
from tests.server.live_server import eventually

REQUESTS = 120


def request(number: int) -> dict[str, Any]:
    body = {"model": "random", "prompt": f"Number {number}", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.mark.slow
def test_server_and_engine_killed_in_the_middle(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    options = ("--data-dir", str(tmp_path / "data"), "--max-num-seqs", "8")
    killed = Live(folder, *options)
    try:
        eventually(killed.is_ready, 90)
        content = b"".join(json.dumps(request(number)).encode() + b"\n" for number in range(REQUESTS))
        file = killed.openai.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        batch = killed.openai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        def done() -> int:
            counts = killed.openai.batches.retrieve(batch.id).request_counts
            assert counts is not None
            return counts.completed

        eventually(lambda: done() >= 10, 60)
        os.kill(killed.engine_process().pid, signal.SIGKILL)  # its requests go on with the next engine
        eventually(lambda: done() >= 30, 60)
        engine: psutil.Process = killed.engine_process()
        killed.popen.kill()
        os.kill(engine.pid, signal.SIGKILL)
        killed.popen.wait(20)
    finally:
        killed.close()
    server = Live(folder, *options)
    try:
        eventually(server.is_ready, 90)
        eventually(lambda: server.openai.batches.retrieve(batch.id).status == "completed", 60)
        found = server.openai.batches.retrieve(batch.id)
        assert found.output_file_id is not None and found.error_file_id is None
        assert found.request_counts is not None and found.request_counts.completed == REQUESTS
        answers = [json.loads(line) for line in server.openai.files.content(found.output_file_id).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(REQUESTS)]
        assert len({answer["response"]["request_id"] for answer in answers}) == REQUESTS
        for number in (0, 35, REQUESTS - 1):  # before, around and after the kill
            alone = server.complete(**request(number)["body"])["choices"][0]["text"]
            assert answers[number]["response"]["body"]["choices"][0]["text"] == alone
        assert found.usage is not None and found.usage.output_tokens == 16 * REQUESTS
        eventually(server.is_idle)
        engine = server.engine_process()
        server.popen.kill()
        eventually(lambda: not engine.is_running(), 15)  # it never outlives its server, though nothing is asked of it
    finally:
        server.close()
