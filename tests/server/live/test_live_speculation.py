"""The whole server with drafts: the same texts in fewer steps, and what is told of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.bundled import DRAFT, STORY
from tests.server.live.test_live_engine import GREEDY, Live
from tests.server.live_server import eventually

MODEL = ["--load-format", "auto", "--kv-cache-memory", "16M"]
ASKED: dict[str, Any] = {"max_tokens": 300, "return_token_ids": True, **GREEDY}
PROMPTS = [[50 + number, 6, 7, 8, 9, 10] * 10 for number in range(3)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The tokens of each prompt without drafts."""
    llm = LLM(str(STORY), device="cpu", kv_cache_memory=16 << 20, num_threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    return [each.outputs[0].token_ids for each in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live(STORY, *MODEL, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8}')
    eventually(server.is_ready, 90)
    yield server
    server.close()


def test_the_same_tokens_in_fewer_steps(live: Live, plain: list[list[int]]) -> None:
    tried = accepted = 0
    for _ in range(6):  # steps may seem too slow for drafts while other tests run
        if accepted > 60:
            break
        for prompt, expected in zip(PROMPTS, plain, strict=True):
            answer = live.complete(prompt=prompt, include_timings=True, **ASKED)
            assert answer["choices"][0]["token_ids"] == expected
            timings = answer["timings"]
            assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
            assert timings["tokens"] == timings["steps"] + timings["accepted_drafts"] == 300
            details = answer["usage"].get("completion_tokens_details")
            if details is not None:
                assert details["accepted_prediction_tokens"] == timings["accepted_drafts"]
                assert details["rejected_prediction_tokens"] == timings["drafts"] - timings["accepted_drafts"]
            tried, accepted = tried + timings["drafts"], accepted + timings["accepted_drafts"]
    assert tried >= accepted > 60, "what these prompts begin soon repeats itself"
    assert live.metric("spec_decode_num_draft_tokens_total") == tried
    assert live.metric("spec_decode_num_accepted_tokens_total") == accepted
    assert 0 < live.metric("spec_decode_num_drafts_total") <= tried
    per_position = re.findall(
        r'^headway:spec_decode_num_accepted_tokens_per_pos_total{.*position="(\d)"} (\S+)$',
        live.http.get("/metrics").text,
        re.MULTILINE,
    )
    assert [int(position) for position, _ in per_position] == list(range(len(per_position)))
    assert sum(float(count) for _, count in per_position) == accepted


def test_a_stream_that_goes_on_in_another_engine_has_the_same_tokens(live: Live, plain: list[list[int]]) -> None:
    tokens: list[int] = []
    killed = False
    for chunk in live.stream(prompt=PROMPTS[1], **ASKED):
        tokens += chunk["choices"][0]["token_ids"]
        if len(tokens) > 40 and not killed:
            os.kill(live.engine_process().pid, signal.SIGKILL)
            killed = True
    assert killed and tokens == plain[1]


def test_a_predicted_answer_is_the_same_in_fewer_steps(live: Live) -> None:
    """With the openai client, whole and as a stream; also where only parts of the prediction come true."""
    asked: dict[str, Any] = {
        "model": "random",
        "messages": [{"role": "user", "content": "Tell me a story about a fox and a lost key."}],
        "max_tokens": 200,
        "temperature": 0,
        "extra_body": {"include_timings": True, "ignore_eos": True},
    }
    plain = live.openai.chat.completions.create(**asked)
    text = plain.choices[0].message.content or ""
    half = len(text) // 2
    for predicted in (text, text[:half] + " And so on. " + text[half:]):
        asked["prediction"] = {"type": "content", "content": predicted}
        accepted = 0
        for _ in range(30):  # drafts rest as long as a busy machine has made them lose time
            answer = live.openai.chat.completions.create(**asked)
            assert answer.choices[0].message.content == text
            assert answer.usage is not None and answer.usage.completion_tokens_details is not None
            won = answer.usage.completion_tokens_details.accepted_prediction_tokens or 0
            timings = (answer.model_extra or {})["timings"]
            assert timings["steps"] == timings["tokens"] - won
            if (accepted := accepted + won) >= 60:
                break
        assert accepted >= 60, predicted
    chunks = list(live.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens_details is not None


def test_a_draft_model_s_cache_and_drafts_are_told(plain: list[list[int]]) -> None:
    wanted = '{"method": "draft_model", "model": "headway/story-draft"}'
    with closing(Live(STORY, *MODEL, "--speculative-config", wanted)) as server:
        eventually(server.is_ready, 90)
        assert server.metric("draft_kv_cache_bytes") > 1 << 20
        assert server.metric("spec_decode_num_speculative_tokens") == 15
        answer = server.complete(prompt=PROMPTS[0], include_timings=True, **ASKED)
        metrics = server.http.get("/metrics").text
    assert answer["choices"][0]["token_ids"] == plain[0]
    timings = answer["timings"]
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
    assert timings["phases_ns"]["draft"] > 0
    by_kind = re.findall(
        r'^headway:spec_decode_num_draft_tokens_by_kind_total{[^}]*kind="(\w+)"[^}]*} (\S+)$', metrics, re.MULTILINE
    )
    assert {kind for kind, _ in by_kind} <= {"ngram", "draft_model"}
    assert sum(float(count) for _, count in by_kind) == timings["drafts"]


@pytest.mark.slow
def test_a_draft_with_another_tokenizer_ends_the_start_with_one_line(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["newcomer"] = tokenizer["model"]["vocab"].pop("the")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    wanted = json.dumps({"method": "draft_model", "model": str(tmp_path)})
    command = [sys.executable, "-m", "headway", "serve", str(STORY), "--port", "0", "--speculative-config", wanted]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("headway: ") and "it has another tokenizer: '" in said and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            '{"num_speculative_tokens": 0}',
            "num_speculative_tokens is 0; it must be a whole number from 1 to 64",
            marks=pytest.mark.slow,
        ),
        ('{"method": "medusa"}', "method is 'medusa'; it must be one of ngram, draft_model"),
        pytest.param("ngram", "'ngram' is not JSON", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_config_ends_the_start_with_one_line(given: str, said: str) -> None:
    command = [sys.executable, "-m", "headway", "serve", "--speculative-config", given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("headway: --speculative-config: ") and said in ended.stderr
    assert ended.stderr.count("\n") == 1
