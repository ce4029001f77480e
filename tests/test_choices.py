"""A choice grows alike however its tokens come, and says how it ended as vLLM does."""

from __future__ import annotations

from typing import Any

import pytest

from headway.engine.messages import SequenceOutput, TokenLogprobs
from headway.outputs.choices import Choice, TokenizedPrompt
from headway.policy.step.sampling_params import SamplingParams
from headway.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import save_chat_model

EOS = [0, 2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_chat_model(tmp_path_factory.mktemp("model")))


def choice_of(tokenizer: Tokenizer | None, **params: Any) -> Choice:
    prompt, wanted = TokenizedPrompt([5, 6]), SamplingParams(**params)
    return Choice(index=0, prompt=prompt, params=wanted, tokenizer=tokenizer, eos_token_ids=EOS)


def output(token_ids: list[int], finish_reason: str | None = None, stop_token_id: int | None = None) -> SequenceOutput:
    logprobs = [TokenLogprobs(-float(token), 1, [], []) for token in token_ids]
    return SequenceOutput("r", 0, token_ids, finish_reason, stop_token_id, logprobs=logprobs)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_stop_string_ends_it_however_many_tokens_come_at_once(tokenizer: Tokenizer, at_once: int) -> None:
    token_ids = tokenizer.encode("Once upon a time there was a small house by the sea.")
    choice, text, taken = choice_of(tokenizer, stop=["was a"]), "", []
    for start in range(0, len(token_ids), at_once):
        piece = choice.accept(output(token_ids[start : start + at_once]))
        text += piece.text
        taken += piece.token_ids
        assert piece.logprobs is not None
        assert [-int(entry.logprob) for entry in piece.logprobs] == piece.token_ids
        assert len(piece.offsets) == len(piece.token_ids)
        if choice.finish_reason is not None:
            break
    assert (choice.finish_reason, choice.stop_reason, text) == ("stop", "was a", "Once upon a time there ")
    assert tokenizer.decode(taken).endswith("was a"), "tokens after the stop string are not taken"
    assert choice.num_tokens == len(taken)


def test_a_stop_string_that_only_the_end_completes_counts(tokenizer: Tokenizer) -> None:
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe2")
    choice = choice_of(tokenizer, stop=["\ufffd"])
    assert choice.accept(output([half])).text == ""
    assert choice.finish_reason is None
    piece = choice.accept(output([], "length"))
    assert (piece.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "\ufffd")


@pytest.mark.parametrize("with_text", [True, False])
@pytest.mark.parametrize(
    ("params", "token", "said"),
    [
        ({}, 2, None),
        ({"stop_token_ids": [9]}, 9, 9),
        ({"stop_token_ids": [2]}, 2, None),
        ({"stop_token_ids": [2], "ignore_eos": True}, 2, 2),
    ],
)
def test_a_stop_token_is_counted_without_its_text(
    tokenizer: Tokenizer, params: dict[str, Any], token: int, said: int | None, with_text: bool
) -> None:
    choice = choice_of(tokenizer if with_text else None, skip_special_tokens=False, **params)
    piece = choice.accept(output([70, token], "stop", token))
    assert piece.text == (tokenizer.decode([70]) if with_text else "")
    assert (piece.token_ids, choice.num_tokens) == ([70, token], 2)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", said)
    shown = choice_of(tokenizer, skip_special_tokens=False, include_stop_str_in_output=True, **params)
    assert shown.accept(output([70, token], "stop", token)).text == tokenizer.decode([70, token], False)
