"""The whole server with the real engine process, on a small random model."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.server.live_server import eventually
from tests.server.test_lifecycle import _free_port
from tests.text.tiny_tokenizers import save_chat_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
OPTIONS = ["--load-format", "dummy", "--kv-cache-memory", "4M", "--threads", "1", "--log-level", "error"]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def is_engine(process: psutil.Process) -> bool:
    try:
        return "headway.engine" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


class Live:
    """`headway serve` on the random model."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.url = f"http://127.0.0.1:{(port := _free_port())}"
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "headway", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
            + ["--served-model-name", "random", *OPTIONS, *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def is_ready(self) -> bool:
        assert self.popen.poll() is None, "the server ended"
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    def metric(self, name: str) -> float:
        found = re.search(rf"^headway:{name}{{[^}}]*}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def is_idle(self) -> bool:
        busy = self.metric("num_requests_running") + self.metric("num_requests_waiting")
        return busy == 0 and self.metric("kv_cache_usage_perc") == 0

    def engine_process(self) -> psutil.Process:
        """The one that lives; where one was killed, the next as soon as it is there."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found.extend(filter(is_engine, psutil.Process(self.popen.pid).children()))
            return bool(found)

        eventually(look, 60)
        return found[0]

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            self.popen.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_chat_model(tmp_path_factory.mktemp("random"))
    config = json.loads((folder / "config.json").read_text()) | CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    server = Live(folder)
    eventually(server.is_ready, 90)
    yield server
    server.close()


def test_same_greedy_tokens_in_every_form(live: Live) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 24, "return_token_ids": True, **GREEDY}
    whole = live.complete(**asked)["choices"][0]
    assert len(whole["token_ids"]) == 24
    chunks = [c["choices"][0] for c in live.stream(**asked)]
    assert [i for c in chunks for i in c["token_ids"]] == whole["token_ids"]
    assert "".join(c["text"] for c in chunks) == whole["text"]
    several = live.complete(**{**asked, "n": 3})
    assert "completion_tokens_details" not in several["usage"], "it has no drafts"
    assert [c["token_ids"] for c in several["choices"]] == [whole["token_ids"]] * 3
    by_ids = live.complete(**{**asked, "prompt": [whole["prompt_token_ids"], [50, 51]]})["choices"]
    assert by_ids[0]["token_ids"] == whole["token_ids"]


def test_chat_with_the_openai_client(live: Live) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    asked: dict[str, Any] = {"model": "random", "messages": messages, "max_tokens": 12, "seed": 3}
    extra = {"extra_body": {"ignore_eos": True}}
    first = live.openai.chat.completions.create(**asked, **extra, logprobs=True, top_logprobs=4)
    again = live.openai.chat.completions.create(**asked, **extra)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.usage is not None
    assert first.usage.completion_tokens == 12
    logprobs = first.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for token in logprobs.content:
        tops = [top.logprob for top in token.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert len(tops) == 4
        assert token.logprob <= 0
    text = ""
    for chunk in live.openai.chat.completions.create(**asked, **extra, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == first.choices[0].message.content


def test_a_class_is_seen_in_the_answer_the_metrics_and_the_last_steps(live: Live) -> None:
    answer = live.complete(prompt="Once", max_tokens=5, service_tier="flex", include_timings=True, **GREEDY)
    assert (answer["service_tier"], answer["timings"]["service_class"]) == ("flex", "batch")
    assert answer["timings"]["ttft_objective_ns"] == 60_000_000_000
    last = live.http.get("/debug/schedule", params={"steps": 5}).json()["steps"]
    assert len(last) == 5
    assert [each["decision"].startswith("1 sequence decodes") for each in last[1:]] == [True] * 4
    assert last[0]["ago_ms"] > last[-1]["ago_ms"] > 0
    labels = ['objective="all"', 'result="met"', 'service_class="batch"']
    counted = f'class_objectives_total{{engine="0",model_name="random",{",".join(labels)}}} 1.0'
    eventually(lambda: counted in live.http.get("/metrics").text)


def test_stop_string_found_on_the_way(live: Live) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 40, **GREEDY}
    text = live.complete(**asked)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    stopped = live.complete(**asked, stop=stop, include_timings=True)
    assert stopped["choices"][0]["text"] == text[: text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert sum(stopped["timings"]["phases_ns"].values()) == stopped["timings"]["e2e_ns"]
    eventually(live.is_idle)


def test_echoed_prompt_has_log_probabilities(live: Live) -> None:
    choice = live.complete(prompt=[50, 60, 70], max_tokens=2, echo=True, logprobs=2, **GREEDY)["choices"][0]
    logprobs = choice["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert all(value < 0 for value in logprobs[1:])
    assert len(logprobs) == 5
    found = live.complete(prompt=[50, 60, 70], max_tokens=1, prompt_logprobs=0, **GREEDY)["choices"][0]
    again = [next(iter(one.values()))["logprob"] for one in found["prompt_logprobs"][1:]]
    assert again == pytest.approx(logprobs[1:3], abs=1e-4)


def test_second_request_finds_the_prefix_of_the_first(live: Live) -> None:
    prompt = list(range(100, 180))
    live.complete(prompt=prompt, max_tokens=1)
    assert live.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    other = live.complete(prompt=prompt, max_tokens=1, cache_salt="another tenant")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("body", [{"n": 2}, {"stream": True}, {"stream": True, "stop": ["\u0000never"]}])
def test_ledger_closes_over_both_processes(live: Live, body: dict[str, Any]) -> None:
    asked = {"prompt": "Once upon a time " * 10, "max_tokens": 10, "include_timings": True, **GREEDY, **body}
    began = time.monotonic_ns()
    timings = list(live.stream(**asked))[-1]["timings"] if body.get("stream") else live.complete(**asked)["timings"]
    elapsed = time.monotonic_ns() - began
    phases = timings["phases_ns"]
    assert sum(phases.values()) == timings["e2e_ns"] < elapsed
    assert {"receive", "tokenize", "transport", "prefill_compute", "decode_compute", "sampling"} <= phases.keys()
    assert (timings["tokens"], timings["steps"]) == (10, 10)


def test_crowd_of_which_a_third_leaves(live: Live) -> None:
    """64 streams; afterwards every block is free, every ledger closed, and the engine has not died of it."""
    draw = random.Random(2)
    leavers = set(draw.sample(range(64), 21))
    lasts: dict[int, dict[str, Any]] = {}

    def talk(number: int, stay_for: int) -> None:
        body = {"prompt": [40 + number] * (1 + number), "max_tokens": 40, "include_timings": True, **GREEDY}
        with httpx.stream("POST", f"{live.url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
            for count, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
                if number in leavers and count >= stay_for:
                    return
                lasts[number] = json.loads(line[6:])

    talkers = [threading.Thread(target=talk, args=(i, draw.randrange(20))) for i in range(64)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()
    for number in set(range(64)) - leavers:
        timings = lasts[number]["timings"]
        assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
        assert timings["tokens"] == 40
    eventually(live.is_idle)
    time.sleep(0.6)  # the engine checks its pool when it falls idle, and dies of what it finds
    assert live.is_ready()
    assert live.metric("engine_restarts") == 0


def test_killed_engine_goes_on_with_its_streams(live: Live) -> None:
    """32 streams, greedy and seeded, get what they get alone, and are told nothing of it but in their ledgers."""
    ways: list[dict[str, Any]] = [GREEDY, {"ignore_eos": True, "seed": 3, "top_p": 0.9}]

    def body(number: int) -> dict[str, Any]:
        prompt = [40 + number] * (1 + number)
        return {"prompt": prompt, "max_tokens": 200, "return_token_ids": True, "logprobs": 1, **ways[number % 2]}

    expected = [live.complete(**body(number))["choices"][0] for number in range(16)]
    restarts = live.metric("engine_restarts")
    begun, chunks = threading.Barrier(33), dict[int, list[dict[str, Any]]]()

    def talk(number: int) -> None:
        asked = {**body(number % 16), "include_timings": True, "stream_options": {"include_usage": True}}
        for count, chunk in enumerate(live.stream(**asked)):
            chunks.setdefault(number, []).append(chunk)
            if count == 0:
                begun.wait(60)

    talkers = [threading.Thread(target=talk, args=(number,)) for number in range(32)]
    for talker in talkers:
        talker.start()
    engine = live.engine_process()
    while begun.n_waiting < 32:  # a few steps at a time: none must end before all have begun, however busy the machine
        engine.resume()
        time.sleep(0.02)
        engine.suspend()
        time.sleep(0.05)
    begun.wait(60)
    engine.kill()
    eventually(lambda: live.http.get("/health").status_code == 503)
    refused = live.http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_loading")
    for talker in talkers:
        talker.join()
    went_on = 0
    for number in range(32):
        alone, (*mine, usage) = expected[number % 16], chunks[number]
        choices = [chunk["choices"][0] for chunk in mine]
        assert [i for choice in choices for i in choice["token_ids"]] == alone["token_ids"]
        assert "".join(choice["text"] for choice in choices) == alone["text"]
        found = [p for c in choices if c["logprobs"] for p in c["logprobs"]["token_logprobs"]]
        assert found == alone["logprobs"]["token_logprobs"]
        assert choices[-1]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 200
        timings = mine[-1]["timings"]
        assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
        went_on += {"engine_lost", "engine_restart"} <= timings["phases_ns"].keys()
    assert went_on >= 16, "most had ended before the engine was killed: the test shows little"
    assert live.metric("engine_restarts") == restarts + 1
    eventually(live.is_idle)


def test_client_that_leaves_while_the_engine_is_started_again_is_forgotten(live: Live) -> None:
    stream = live.stream(prompt="x", max_tokens=500, **GREEDY)
    next(stream)
    os.kill(live.engine_process().pid, signal.SIGKILL)
    eventually(lambda: live.http.get("/health").status_code == 503)
    stream.close()  # type: ignore[attr-defined]
    eventually(lambda: live.http.get("/load").json()["server_load"] == 0)
    assert live.metric("num_requests_waiting") == 0
    eventually(live.is_ready, 90)
    assert live.complete(prompt="x", max_tokens=3, **GREEDY)["usage"]["completion_tokens"] == 3
    eventually(live.is_idle)


@pytest.mark.slow
def test_embeddings_survive_the_engine(live: Live) -> None:
    """Alone, together, cut, and over an engine that is killed meanwhile, a text has the same vector."""
    texts = [f"Once upon a time, number {number}. " * (1 + number % 9) for number in range(60)]
    alone = [live.openai.embeddings.create(model="random", input=text).data[0].embedding for text in texts[:4]]
    assert all(sum(x * x for x in vector) == pytest.approx(1.0, abs=1e-5) for vector in alone)
    together = live.openai.embeddings.create(model="random", input=texts)
    vectors = [each.embedding for each in together.data]
    assert vectors[:4] == [pytest.approx(vector, abs=1e-5) for vector in alone]
    cut = live.openai.embeddings.create(model="random", input=texts[0], dimensions=8).data[0].embedding
    scale = sum(x * x for x in vectors[0][:8]) ** 0.5
    assert cut == pytest.approx([x / scale for x in vectors[0][:8]], abs=1e-5)
    ranked = live.http.post("/v1/rerank", json={"query": texts[3], "documents": [texts[1], texts[3]]}).json()
    assert [each["index"] for each in ranked["results"]] == [1, 0]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    engine, again = live.engine_process(), list[Any]()
    restarts = live.metric("engine_restarts")
    engine.suspend()
    body = {"input": texts, "include_timings": True}
    asking = threading.Thread(target=lambda: again.append(live.http.post("/v1/embeddings", json=body)))
    asking.start()
    eventually(lambda: live.http.get("/load").json()["server_load"] > 0)
    engine.kill()
    asking.join()
    answer = again[0].json()
    assert [each["embedding"] for each in answer["data"]] == [pytest.approx(vector, abs=1e-5) for vector in vectors]
    timings = answer["timings"]
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"] and "decode_compute" not in timings["phases_ns"]
    eventually(lambda: live.metric("engine_restarts") == restarts + 1 and live.is_idle())


@pytest.mark.slow
def test_engine_that_cannot_start_ends_the_server(folder: Path) -> None:
    """What engines refuse is in tests/engine; this one is refused late."""
    live = Live(folder, "--record-steps", "/no such folder/steps")
    _, errors = live.popen.communicate(timeout=90)
    assert live.popen.returncode == 2, errors
    assert errors.splitlines()[-1].startswith("headway: ")
    assert "/no such folder/steps: no such file or directory" in errors.splitlines()[-1].lower()
    assert "Traceback" not in errors


@pytest.mark.slow
def test_who_waits_too_long_is_ended_and_a_terminated_server_finishes_its_stream_and_its_engine(folder: Path) -> None:
    limits = ["--max-num-seqs", "1", "--max-queue-time", "0.3", "--max-num-queued-reqs", "13"]
    server = Live(folder, *limits, "--scheduling-policy", "fcfs")
    try:
        eventually(server.is_ready, 90)
        with ThreadPoolExecutor(1) as reader:
            long = server.stream(prompt="x", max_tokens=500, n=12, **GREEDY)  # one after the other
            next(long)
            rest = reader.submit(list, long)
            refused = server.http.post("/v1/completions", json={"prompt": "y"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
            assert "longer than 0.3 s" in refused.text
            ends = [each for each in rest.result() if each["choices"][0]["finish_reason"]]
            assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"] * 12, "who has begun goes on"
        eventually(server.is_idle)
        engine = server.engine_process()
        stream = server.stream(prompt="x", max_tokens=300, **GREEDY)
        next(stream)
        server.popen.terminate()
        assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.popen.wait(20) == 0
        assert not engine.is_running()
    finally:
        server.close()


@pytest.mark.slow
def test_a_stopped_engine_is_replaced_and_a_server_with_one_ends(folder: Path) -> None:
    """Its request goes on where it stood; at the end nobody waits for an engine that does not answer."""
    live = Live(folder, "--engine-timeout", "0.5", "--shutdown-timeout", "0.5")
    try:
        eventually(live.is_ready, 90)
        whole = live.complete(prompt="x", max_tokens=400, **GREEDY)
        stream = live.stream(prompt="x", max_tokens=400, **GREEDY)
        text = next(stream)["choices"][0]["text"]
        live.engine_process().suspend()
        eventually(lambda: live.http.get("/health").json().get("error", {}).get("code") == "engine_stalled")
        text += "".join(chunk["choices"][0]["text"] for chunk in stream)
        assert text == whole["choices"][0]["text"]
        assert live.metric("engine_restarts") == live.metric("engine_hangs") == 1
        eventually(live.is_ready, 90)
        live.engine_process().suspend()
        began = time.monotonic()
        live.popen.terminate()
        live.popen.communicate(timeout=60)
        assert time.monotonic() - began < 20
    finally:
        live.close()


def test_kernels_of_the_next_steps_can_be_timed(live: Live) -> None:
    asked = "/debug/profile?steps=20&kernels=true"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: live.http.get(asked).json())
        while not answer.done():  # one request may be over before the profile begins
            live.complete(prompt="x", max_tokens=40, **GREEDY)
    trace = answer.result()["traceEvents"]
    steps = [each for each in trace if each["name"] == "step"]
    passes = [each for each in trace if each["name"] == "forward pass"]
    assert len(steps) == len(passes) == 20
    timed = [each for each in steps if "products_ms" in each["args"]]
    assert len(timed) >= 18  # a step may have run while the first was asked for
    for step in timed:
        kinds = [step["args"][f"{kind}_ms"] for kind in ("attention", "products", "other")]
        assert all(length > 0 for length in kinds) and sum(kinds) * 1e3 <= step["dur"]
    after = live.http.get("/debug/profile?steps=5").json()["traceEvents"]
    assert not [each for each in after if each["name"] == "attend"]
