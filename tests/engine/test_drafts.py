"""Drafts, right ones and wrong ones, change how many steps it takes, and no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import LLM, RequestOutput, SamplingParams
from tests.engine.eager import Foreseeing, check_same, try_all_drafts
from tests.engine.models import write_config

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9, "n": 2},
    {"temperature": 0.0, "logprobs": 2},
    {
        "temperature": 1.3,
        "seed": 3,
        "min_p": 0.01,
        "top_k": 300,
        "min_tokens": 12,
        "stop_token_ids": list(range(0, 512, 5)),
    },
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 5, "logit_bias": {9: 5.0}, "stop_token_ids": list(range(0, 512, 29))},
]
PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(5 + 4 * i)] for i in range(12)]
WANTED = [SamplingParams(max_tokens=40, **{"ignore_eos": True, **KINDS[i % 6]}) for i in range(12)]


def answers(llm: LLM) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], WANTED)


@pytest.mark.parametrize(
    ("device", "caching"), [("cpu", True), ("cpu", False), pytest.param("cuda", True, marks=pytest.mark.gpu)]
)
def test_tokens_and_logprobs_are_those_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, caching: bool
) -> None:
    llm = LLM(
        write_config(tmp_path), skip_tokenizer_init=True, load_format="dummy", dtype="float32", num_threads=1,
        device=device, kv_cache_memory=4 << 20, max_num_seqs=16, max_num_batched_tokens=48,
        enable_prefix_caching=caching,
    )  # fmt: skip
    plain = answers(llm)
    texts = [PROMPTS[i] + choice.token_ids for i, output in enumerate(plain) for choice in output.outputs]
    counts = try_all_drafts(monkeypatch, llm, drafter := Foreseeing(texts))
    check_same(plain, answers(llm), exact=device == "cpu")
    assert counts["tried"] > counts["accepted"] > 100
    assert not drafter.known, "it is told of all ends"
    llm.engine.core.scheduler.check()
    assert llm.engine.core.scheduler.blocks.usage == 0.0
