"""Streamed text equals the text decoded at once, cut at the first stop string."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import CORPUS

WORDS = [
    "the",
    " time",
    "日本",
    "東京",
    "😀",
    "👩‍👩‍👧‍👦",
    "🇳🇱",
    "é",
    " ",
    "\n",
    "<|im_end|>",
    "[[plain]]",
    "a",
    "b",
    "ab",
    "aab",
]
texts = st.lists(st.sampled_from(WORDS) | st.sampled_from(CORPUS), max_size=8).map("".join)


def stream(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Push the ids in groups of the given sizes, over and over."""
    pieces, position, turn = [], 0, 0
    while position < len(ids) and detokenizer.stopped_by is None:
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[position : position + size]))
        position, turn = position + size, turn + 1
    return [*pieces, detokenizer.finish()]


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(ids=st.lists(st.integers(0, 520), max_size=40), sizes=sizes, skip=st.booleans())
def test_any_bytes_stream_to_the_one_shot_text(
    by_bytes: Tokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    """Broken UTF-8, special tokens and ids without a token included."""
    pieces = stream(Detokenizer(by_bytes, skip_special_tokens=skip), ids, sizes)
    assert "".join(pieces) == by_bytes.decode(ids, skip_special_tokens=skip)


@given(text=texts, sizes=sizes)
def test_sentencepieces_stream_to_the_one_shot_text(by_pieces: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = by_pieces.encode(text, add_special_tokens=False)
    assert "".join(stream(Detokenizer(by_pieces), ids, sizes)) == by_pieces.decode(ids)


@given(text=texts, sizes=sizes, at=st.integers(0, 60))
def test_output_continues_its_prompt(by_pieces: Tokenizer, text: str, sizes: list[int], at: int) -> None:
    """The space before the first word of the output is kept when the prompt came before it."""
    ids = by_pieces.encode("Once upon a time " + text, add_special_tokens=True)
    at = 5 + at % max(1, len(ids) - 5)
    prompt = by_pieces.decode(ids[:at])
    if prompt.endswith("\ufffd"):
        return  # the prompt ends within a character
    output = "".join(stream(Detokenizer(by_pieces, context=ids[:at]), ids[at:], sizes))
    assert prompt + output == by_pieces.decode(ids)


@given(text=texts, sizes=sizes, stop=st.text("ab the日本😀\n", min_size=1, max_size=4), include=st.booleans())
@example(text="aab", sizes=[1], stop="ab", include=False)
def test_text_ends_at_the_first_stop_string(
    by_bytes: Tokenizer, text: str, sizes: list[int], stop: str, include: bool
) -> None:
    ids = by_bytes.encode(text)
    full = by_bytes.decode(ids)
    detokenizer = Detokenizer(by_bytes, [stop], include_stop_str_in_output=include)
    output = "".join(stream(detokenizer, ids, sizes))
    if stop in full:
        assert output == full[: full.index(stop) + (len(stop) if include else 0)]
        assert detokenizer.stopped_by == stop
    else:
        assert output == full
        assert detokenizer.stopped_by is None


@given(text=texts, sizes=sizes, stops=st.lists(st.text("ab te日", min_size=1, max_size=3), min_size=1, max_size=4))
def test_of_several_stop_strings_the_first_complete_one_counts(
    by_bytes: Tokenizer, text: str, sizes: list[int], stops: list[str]
) -> None:
    ids = by_bytes.encode(text)
    full = by_bytes.decode(ids)
    ends = [(full.index(stop) + len(stop), -len(stop)) for stop in stops if stop in full]
    expected = full[: min(ends)[0] + min(ends)[1]] if ends else full
    assert "".join(stream(Detokenizer(by_bytes, stops), ids, sizes)) == expected


@given(text=texts, stop=st.text("ab the", min_size=1, max_size=4))
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(by_bytes: Tokenizer, text: str, stop: str) -> None:
    detokenizer = Detokenizer(by_bytes, [stop])
    shown = ""
    for count, token in enumerate(ids := by_bytes.encode(text), start=1):
        shown += detokenizer.push([token])
        if detokenizer.stopped_by is not None:
            return
        whole = by_bytes.decode(ids[:count]).rstrip("\ufffd")
        held = whole[len(shown) :]
        longest = next(n for n in range(len(stop) - 1, -1, -1) if whole.endswith(stop[:n]))
        assert whole.startswith(shown)
        assert held == stop[:longest]


def test_stop_string_before_min_tokens_does_not_count(by_bytes: Tokenizer) -> None:
    ids = [by_bytes.encode(letter)[0] for letter in "xyxyxy"]
    for least, expected in ((0, "x"), (2, "x"), (3, "xyx"), (4, "xyx"), (5, "xyxyx"), (7, "xyxyxy")):
        detokenizer = Detokenizer(by_bytes, ["y"], min_tokens=least)
        assert detokenizer.push(ids) + detokenizer.finish() == expected


def test_stop_string_over_the_min_tokens_border_counts(by_bytes: Tokenizer) -> None:
    ids = [by_bytes.encode(letter)[0] for letter in "xxyz"]
    detokenizer = Detokenizer(by_bytes, ["xy"], min_tokens=3)
    assert detokenizer.push(ids) == "x"
    assert detokenizer.num_tokens == 3


def test_tokens_after_the_stop_string_are_not_taken(by_bytes: Tokenizer) -> None:
    ids = [by_bytes.encode(letter)[0] for letter in "abcdef"]
    detokenizer = Detokenizer(by_bytes, ["c"])
    assert detokenizer.push(ids) == "ab"
    assert detokenizer.num_tokens == 3
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == ""


def test_unfinished_character_waits_and_ends_as_a_replacement(by_bytes: Tokenizer) -> None:
    euro = [
        next(i for i in range(by_bytes.vocab_size) if by_bytes.token_bytes(i) == bytes([b])) for b in b"\xe2\x82\xac"
    ]
    detokenizer = Detokenizer(by_bytes)
    assert [detokenizer.push([token]) for token in euro] == ["", "", "€"]
    assert detokenizer.push(euro[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("which", ["by_bytes", "by_pieces"])
def test_time_grows_with_the_new_tokens_only(which: str, request: pytest.FixtureRequest) -> None:
    """Doubling the output must not make a token dearer; bytes that never become text are the worst case."""
    tokenizer = request.getfixturevalue(which)
    part = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff")
    word = tokenizer.encode("the")[-1]

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(tokenizer, ["a" * 5000 + "b", "never"])
        began = time.process_time()
        for _ in range(count):
            detokenizer.push([part])
            detokenizer.push([word])
        return time.process_time() - began

    seconds(100)
    short = min(seconds(500) for _ in range(3))
    assert seconds(4000) < 8 * short * 4
