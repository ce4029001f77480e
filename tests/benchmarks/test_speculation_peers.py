"""Checkpoints whose texts are known, so that engines can be compared on texts that are easy to foresee or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import speculation_peers as peers
from headway import LLM, SamplingParams

NEW = 40


@pytest.mark.slow
def test_a_model_says_what_it_is_told_and_its_draft_is_right_as_often_as_it_is_set(tmp_path: Path) -> None:
    texts = peers._pair("qwen2-30m", ["quote", "edit", "random", 0.5], NEW, tmp_path)
    prompt = peers.PROMPT_TOKENS
    said = {}
    for name in ("model", "draft"):
        llm = LLM(str(tmp_path / name), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512, num_threads=1)
        wanted = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        asked = [{"prompt_token_ids": text[:prompt]} for of_load in texts.values() for text in of_load]
        said[name] = [output.outputs[0].token_ids for output in llm.generate(asked, wanted)]
    assert said["model"] == [text[prompt:] for of_load in texts.values() for text in of_load]
    assert said["draft"][:12] == said["model"][:12], "n-grams are measured without it"
    quote, edit = texts["quote"][0], texts["edit"][0]
    assert quote[prompt:] == quote[:NEW]
    assert [at for at in range(NEW) if edit[prompt + at] != edit[at]] == [23]
    after = peers.following([text[prompt - 1 :] for of_load in texts.values() for text in of_load], 32768)
    assert sorted(after) == list(range(32768))
    of_draft = peers.seldom_right(after, {0.5: [text[prompt - 1 :] for text in texts[0.5]]})
    pairs = [(a, b) for text in texts[0.5] for a, b in zip(text[prompt - 1 :], text[prompt:], strict=False)]
    assert 0.35 < sum(of_draft[a] == b for a, b in pairs) / len(pairs) < 0.65


def test_too_few_tokens_and_peers_that_are_not_driven_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="story has 8192 tokens, too few for so many --loads and --acceptance"):
        peers._pair("story", [0.1 * each for each in range(9)], 200, tmp_path)
    for wrong, why in (
        (["--acceptance", "1.5"], r"--acceptance is [1.5]; each must be between 0 and 1"),
        (["--new-tokens", "1"], "--new-tokens is 1; it must be between 2 and 400"),
        (["--batches", "1", "65"], "--batches is [1, 65]; it must be between 1 and 64"),
        (["--peer", f"openvino={Path(__file__)}"], "--peer openvino is not driven with drafts; llama.cpp and vllm are"),
    ):
        with pytest.raises(SystemExit):
            peers.main(wrong)
        assert why in capsys.readouterr().err
