"""Families with parts of their own through the whole engine: a checkpoint gives Hugging Face's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from tests.models import tiny

NEW = 12
PROMPTS = tiny.prompts([9, 30, 2, 17])


def hugging_face(folder: Path, case: str) -> list[list[int]]:
    model = tiny.save(case, folder)
    tokens = []
    for prompt in PROMPTS:
        known = list(prompt)
        for _ in range(NEW):
            known.append(int(tiny.logits(model, known)[-1].argmax()))
        tokens.append(known[len(prompt) :])
    return tokens


@pytest.mark.parametrize(
    "case",
    [
        "mixtral",
        "qwen2_moe_every_second",
        "qwen3_moe_some_dense",
        "deepseek_v3",
        "glm4_moe",
        "granite_moe",
        "gemma4_shared",
        "gemma4_experts",
        "ministral3",
        "minimax_m2",
    ],
)
def test_greedy_tokens_are_those_of_hugging_face(tmp_path: Path, case: str) -> None:
    """All prompts are in one batch."""
    expected = hugging_face(tmp_path, case)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu", num_threads=1, kv_cache_memory=4 << 20)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
