"""`headway bench` against routes that answer with vectors and scores: a live server, and one that answers badly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.bench.results import load_json
from headway.text.tokenizer import Tokenizer
from tests.bench.command_line import CommandLine, Ran
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer
from tests.text.tiny_tokenizers import save_chat_model

FEW = ("--num-prompts", "6", "--num-warmups", "1", "--random-input-len", "20")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    tokenizer = Tokenizer.load(folder)
    server = LiveServer(FakeEngine(tokenizer), tokenizer).start()
    yield server
    server.stop()


@pytest.fixture
def server(live: LiveServer) -> LiveServer:
    live.engine.reset()
    return live


def bench(headway: CommandLine, server: LiveServer, folder: Path, backend: str, *more: object, **named: Any) -> Ran:
    where = ("--base-url", server.url, "--tokenizer", folder)
    return headway("bench", *where, "--backend", backend, *FEW, *more, **named)


def run_of(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, (ran.out, ran.err)
    return ran.result()


@pytest.mark.parametrize("load", [("--max-concurrency", "2"), ("--request-rate", "200")])
def test_embeddings_have_one_latency_and_input_tokens(
    headway: CommandLine, server: LiveServer, folder: Path, load: tuple[str, str]
) -> None:
    ran = bench(headway, server, folder, "openai-embeddings", *load, "--goodput", "e2el:10000")
    result = run_of(ran)
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (6, 120, 0)
    assert result["total_token_throughput"] == pytest.approx(120 / result["duration"])
    assert result["p99_e2el_ms"] > 0 and not any(key.endswith(("_ttft_ms", "_tpot_ms", "_itl_ms")) for key in result)
    whole = result["headway"]["summaries"][0]
    assert set(whole["from_schedule"]) == {"e2el_ms"} and whole["attainment"]["met"] == 6
    assert "input tokens/s" in ran.out and "E2EL" in ran.out
    assert not any(word in ran.out for word in ("output tokens", "TTFT", "TPOT", "ITL"))
    prompts = [request.prompt_token_ids for request in server.engine.requests]
    assert all(len(ids) == 20 for ids in prompts[-7:])
    (path,) = ran.files(".json")
    assert all(record.ok and record.is_vector and record.timings for record in load_json(path).records)


def test_a_request_may_have_several_texts_or_token_ids(headway: CommandLine, server: LiveServer, folder: Path) -> None:
    several = ("--random-batch-size", "3", "--prompts", "token-ids", "--random-prefix-len", "5")
    result = run_of(bench(headway, server, folder, "openai-embeddings", *several))
    assert result["total_input_tokens"] == 6 * 3 * 25
    ids = [tuple(request.prompt_token_ids) for request in server.engine.requests][-18:]
    assert len(set(ids)) == 18 and len({each[:5] for each in ids}) == 1 and {len(each) for each in ids} == {25}


@pytest.mark.parametrize("backend", ["vllm-rerank", "vllm-score"])
def test_documents_are_ranked_and_scored_by_a_query(
    headway: CommandLine, server: LiveServer, folder: Path, backend: str
) -> None:
    """The score here is the cosine of the embeddings of the query and of a document."""
    ran = bench(headway, server, folder, backend, "--random-batch-size", "4", "--report", folder / f"{backend}.html")
    result = run_of(ran)
    assert result["completed"] == 6 and result["total_input_tokens"] == 6 * (32 + 4 * 20)
    page = (folder / f"{backend}.html").read_text()
    assert "latency-over-time" in page and "ttft-over-time" not in page and "input tokens/s" in page


def test_texts_of_a_file_and_a_sweep(headway: CommandLine, server: LiveServer, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"text number {number}"}) + "\n" for number in range(6)))
    where = ("--base-url", server.url, "--tokenizer", folder, "--backend", "openai-embeddings", "--num-prompts", "6")
    ran = headway("bench", *where, "--dataset-name", "custom", "--dataset-path", path, "--sweep", "concurrency:1,2")
    assert ran.code == 0, ran.err
    assert "E2EL P50" in ran.out and "TTFT" not in ran.out
    compared = headway("bench", "--compare", *ran.files(".json"), results=False)
    assert compared.code == 0 and "E2EL median" in compared.out and "output tokens" not in compared.out
    refused = headway("bench", *where, "--dataset-name", "custom", "--dataset-path", path, "--random-batch-size", "2")
    assert "--random-batch-size needs made-up prompts" in refused.error()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--goodput", "ttft:100"), "objective for ttft, and --backend openai-embeddings has no tokens"),
        (("--random-output-len", "8"), "--random-output-len was given, and --backend openai-embeddings generates"),
        (("--ignore-eos",), "--ignore-eos and --backend openai-embeddings exclude each other"),
        (("--random-prefix-len", "300"), "the longest text has 320 tokens, more than the model's context of 256"),
        (("--dataset-name", "multi_turn"), "no answers that a conversation could go on from"),
        (("--temperature", "1"), "the server refuses a text at /v1/embeddings"),
        (("--extra-body", '{"dimensions": 0}'), "the server refuses a text at /v1/embeddings"),
        (("--backend", "openai", "--random-batch-size", "2"), "takes one prompt; use openai-embeddings"),
        (("--backend", "vllm-rerank", "--prompts", "token-ids"), "a ranking takes text only"),
    ],
)
def test_what_makes_no_sense_is_said(
    headway: CommandLine, server: LiveServer, folder: Path, options: tuple[str, ...], message: str
) -> None:
    few = FEW[:4] if "multi_turn" in options else FEW
    where = ("--base-url", server.url, "--tokenizer", folder, "--backend", "openai-embeddings")
    assert message in headway("bench", *where, *few, *options).error()


ANSWERS: dict[str, tuple[int, str]] = {
    "no JSON": (200, "<html>"),
    "no data": (200, '{"object": "list"}'),
    "too few": (200, '{"data": []}'),
    "too many": (200, '{"data": [{"embedding": [1.0]}, {"embedding": [1.0]}]}'),
    "an empty vector": (200, '{"data": [{"embedding": []}]}'),
    "a hole": (200, '{"data": [{"embedding": [1.0, null]}]}'),
    "not a number": (200, '{"data": [{"embedding": [NaN]}]}'),
    "no vector": (200, '{"data": [{"index": 0}]}'),
    "an error": (200, '{"error": {"message": "out of memory"}}'),
    "a status": (500, '{"error": {"message": "out of memory"}}'),
    "cut": (200, '{"data": [{"embed'),
}
GOOD = '{"data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": %d, "total_tokens": 1}}'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    modes: list[str] = []  # of answers behind the first good ones

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self._answer(200 if found else 404, '{"data": [{"id": "m"}]}' if found else "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/embeddings":
            return self._answer(404, "{}")
        measured = "measured" in str(body["input"])
        mode = self.modes[0] if measured else ""
        status, text = ANSWERS.get(mode, (200, GOOD % len(str(body["input"]).split())))
        self._answer(status, text, more=100 * (mode == "cut"))

    def _answer(self, status: int, text: str, more: int = 0) -> None:
        """`more`: bytes that are promised and do not come."""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text) + more))
        self.end_headers()
        self.wfile.write(text.encode())
        if more:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture(scope="module")
def strange() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("mode", [*ANSWERS, ""])
def test_a_bad_answer_is_a_failure(
    headway: CommandLine, strange: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setattr(_Handler, "modes", [mode])
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"prompt": "measured"}) + "\n")
    options = ("--dataset-name", "custom", "--dataset-path", path, "--num-prompts", "2", "--num-warmups", "0")
    ran = headway("bench", "--base-url", strange, "--backend", "openai-embeddings", *options)
    if not mode:
        assert ran.code == 0 and ran.result()["total_input_tokens"] == 2
        return
    kinds = {"a status": "server_error", "an error": "stream_error", "cut": "cut"}
    assert ran.code == 1 and set(ran.result()["headway"]["failures"]) == {kinds.get(mode, "malformed")}, ran.out


def test_a_server_without_the_route_is_named(headway: CommandLine, strange: str) -> None:
    ran = headway("bench", "--base-url", strange, "--backend", "vllm-rerank", *FEW)
    assert "does not answer on /v1/rerank" in ran.error() and "does it serve a model for this?" in ran.error()
