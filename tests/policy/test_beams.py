"""Beam search by itself: what is kept, when it ends, and which parameters cannot be had."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest

from headway.policy.step.beams import Beam, BeamSearch, most_tokens
from headway.policy.step.sampling_params import InvalidParameter, SamplingParams


@dataclass
class Likely:
    """A row of a model."""

    top_ids: list[int]
    top_logprobs: list[float]


def row(text: list[int], vocab: int, stop: int, often: float = 0.3) -> Likely:
    """The tokens behind a text, as a function of it."""
    rng = random.Random(str(text))
    weights = [rng.random() + 1e-3 for _ in range(vocab)]
    weights[stop] *= often
    logprobs = [math.log(weight / sum(weights)) for weight in weights]
    ids = sorted(range(vocab), key=lambda token: -logprobs[token])
    return Likely(ids, [logprobs[token] for token in ids])


def searched(width: int, most: int, vocab: int, **changes: Any) -> BeamSearch:
    given: dict[str, Any] = {"length_penalty": 0.0, "early_stopping": "never", **changes}
    found = BeamSearch(width, most, frozenset([0]), **given)
    while not found.is_done:
        found.advance([row(beam.tokens, vocab, 0) for beam in found.beams])
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_as_wide_as_all_texts_finds_the_likeliest(penalty: float) -> None:
    vocab, most = 4, 4
    found = searched(4**4, most, vocab, length_penalty=penalty)
    ranked: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        for text in map(list, itertools.product(range(vocab), repeat=length)):
            if 0 in text[:-1] or (length < most and text[-1] != 0):
                continue
            rows = [row(text[:at], vocab, 0) for at in range(length)]
            score = sum(each.top_logprobs[each.top_ids.index(token)] for each, token in zip(rows, text, strict=True))
            ranked.append((score / length**penalty, text))
    ranked.sort(key=lambda each: -each[0])
    assert [beam.tokens for _, beam in found.ended][:20] == [text for _, text in ranked][:20]
    assert [score for score, _ in found.ended] == pytest.approx([score for score, _ in ranked][: len(found.ended)])


def test_early_stopping_ends_a_search_sooner_or_later() -> None:
    lengths: dict[Any, list[int]] = {True: [], False: [], "never": []}
    for stopping, found in lengths.items():
        search = BeamSearch(3, 40, frozenset([0]), 1.0, stopping)
        while not search.is_done:
            search.advance([row(beam.tokens, 6, 0, 1.5) for beam in search.beams])
            found.append(len(search.ended))
    assert len(lengths[True]) <= len(lengths[False]) <= len(lengths["never"]) <= 40
    assert len(lengths[True]) < len(lengths["never"])
    assert lengths[True][-1] == 3


def test_beams_that_begin_alike_know_it() -> None:
    search = BeamSearch(3, 9, frozenset(), 1.0, False)
    assert search.common() == []
    search.beams = [_text([4, 5, 6, 1]), _text([4, 5, 7, 1]), _text([4, 5, 6, 2])]
    assert search.common() == [4, 5]
    search.beams = search.beams[:1]
    assert search.common() == [4, 5, 6, 1]


def _text(tokens: list[int]) -> Beam:
    beam = Beam()
    for token in tokens:
        beam = Beam(0.0, beam.length + 1, beam, Likely([token], [0.0]), 0)
    return beam


def test_memory_is_that_of_one_prompt_and_of_what_follows_it() -> None:
    assert most_tokens(4, 32, 40, 16) == (2 + 4 * 1 + 1) * 16
    assert most_tokens(4, 33, 40, 16) == (2 + 4 * 1 + 1) * 16
    assert most_tokens(1, 5, 16, 16) == 2 * 16


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"best_of": 0}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"best_of": 2.5}, "best_of"),
        ({"n": 65}, "n"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {1: 1}}, "logit_bias"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": 1}, "use_beam_search"),
    ],
)
def test_what_a_search_cannot_have_is_named(given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(**{"use_beam_search": True, **given})
    assert error.value.parameter == name and name in str(error.value)


@pytest.mark.parametrize("given", [{"best_of": 2}, {"length_penalty": 0.5}, {"early_stopping": True}])
def test_what_only_a_search_has_is_refused_without_one(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="use_beam_search") as error:
        SamplingParams(**given)
    assert error.value.parameter == next(iter(given))
    assert SamplingParams(n=2, best_of=2).width == 2
