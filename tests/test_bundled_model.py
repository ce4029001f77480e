"""The models inside the package: their size, their cards, and that they are what Hugging Face reads too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway import LLM, SamplingParams
from headway.bundled import DRAFT, STORY

PROMPTS = ["Once upon a time", "“Who goes there?” said the captain,", "日本 🎉 naïve", "CHAPTER I.\n\n"]


def weights(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def test_sizes() -> None:
    assert weights(STORY) <= 25_000_000
    assert weights(DRAFT) <= weights(STORY) / 7


@pytest.mark.parametrize("folder", [STORY, DRAFT])
def test_the_card_gives_the_measured_loss(folder: Path) -> None:
    report = json.loads((folder / "training_report.json").read_text())
    card = (folder / "README.md").read_text()
    assert f"{report['held_out_loss_nats_per_token']:.2f}" in card
    assert f"{report['parameters']:,}" in card
    assert f"{report['training_tokens']:,}" in card


def test_the_draft_has_the_same_tokenizer() -> None:
    assert (STORY / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("folder", [STORY, DRAFT])
def test_greedy_text_is_hugging_faces(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    llm = LLM(str(folder), dtype="float32", kv_cache_memory=32 << 20, num_threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert output.prompt_token_ids == ids[0].tolist()
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()
        assert output.outputs[0].text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


def test_it_writes_words() -> None:
    llm = LLM(str(STORY), kv_cache_memory=32 << 20, num_threads=1)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=150, seed=1, ignore_eos=True)
    text = llm.generate("Once upon a time there was a king who", params)[0].outputs[0].text
    words = text.lower().split()
    common = {"the", "and", "to", "of", "he", "a", "was", "his", "that", "in", "it", "she", "had", "with", "said"}
    assert len(words) > 60
    assert 0.15 < sum(word.strip(",.;!?“”") in common for word in words) / len(words) < 0.7
    assert len(set(words)) > 40
