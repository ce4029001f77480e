"""Drafts from what stands in the prompt and the output, and an engine that tries them where they pay."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import LLM, SamplingParams
from headway.bundled import STORY
from headway.engine.drafter import INDEXED_AT_ONCE, NgramDrafter, Repeats, Speculator
from headway.engine.messages import AddRequest, SequenceOutput
from headway.policy.step.request import Resumed, Sequence
from headway.policy.step.speculative_config import SpeculativeConfig
from tests.engine.eager import check_same_texts, try_all_drafts
from tests.engine.models import write_config
from tests.policy.simulation import make_sequence

REPEATING = "The fox met the owl. The owl said: the key is in the old well. The fox met the owl. The owl said: "


def longest_match(tokens: list[int], most: int) -> int:
    """How many of the last tokens stand somewhere before, ending before the last one; by looking everywhere."""
    ends = range(1, len(tokens))
    return max((len(_common(tokens[:end], tokens, most)) for end in ends), default=0)


def _common(one: list[int], other: list[int], most: int) -> list[int]:
    found: list[int] = []
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b or len(found) == most:
            break
        found.append(a)
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=12),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 6),
)
def test_what_is_proposed_followed_the_longest_match(
    prompt: list[int], parts: list[list[int]], least: int, more: int, count: int
) -> None:
    text, most, tokens = Repeats(list(prompt), least, least + more), least + more, list(prompt)
    text.index(1000)
    for new in [[], *parts]:
        text.add(new)
        tokens += new
        longest = longest_match(tokens, most)
        # Of many places only the latest are compared, so that a match may be shorter, but never be none.
        assert (text.match > 0) == (longest >= least)
        assert text.match <= longest
        drafts = text.following(count)
        assert len(drafts) == (count if text.match else 0)
        if text.match:
            follows = [*tokens, *drafts]
            ends = [
                end for end in range(text.match, len(tokens)) if tokens[end - text.match : end] == tokens[-text.match :]
            ]
            assert any(follows[end : end + count] == drafts for end in ends)


def test_a_prediction_is_what_followed_the_prompt() -> None:
    """Its drafts begin with the first token, and go on behind a change once two tokens agree again."""
    drafter, predicted = NgramDrafter(SpeculativeConfig()), [5, 6, 7, 8, 9, 10, 11, 12]
    sequence = make_sequence("a", [1, 2, 3], 20)
    sequence.prediction = predicted
    other = make_sequence("b", [1, 2, 3], 20)
    other.seq_id = 1
    for each in (sequence, other):
        each.tokens.append(5)
    found = drafter.propose([sequence, other], 3)
    assert found[0].token_ids == [6, 7, 8] and found[0].match == 4 and 1 not in found
    sequence.tokens += [6, 7, 99]
    assert drafter.propose([sequence], 3) == {}
    sequence.tokens += [9, 10]
    assert drafter.propose([sequence], 2)[0].token_ids == [11, 12]


def test_the_longest_of_some_places_is_taken() -> None:
    text = Repeats([1, 2, 3, 7, 9, 2, 3, 8, 5, 1, 2, 3], 2, 8)
    text.index(1000)
    text.add([])
    assert (text.match, text.following(2)) == (3, [7, 9])
    text.add([7])
    assert (text.match, text.following(2)) == (4, [9, 2])
    text.add([8])
    assert text.match == 0 and text.following(2) == []


def test_a_loop_is_drafted_beyond_its_end() -> None:
    text = Repeats([4, 5, 6, 4, 5], 2, 8)
    text.index(1000)
    text.add([])
    assert text.following(8) == [6, 4, 5, 6, 4, 5, 6, 4]


def test_a_long_prompt_is_read_in_parts() -> None:
    """A step is held up by a bounded number of tokens, however long the prompts are that came together."""
    drafter = NgramDrafter(SpeculativeConfig())
    sequences = [a_sequence(number, [1, 2, 3, *range(10, 10 + INDEXED_AT_ONCE // 2), 1, 2]) for number in range(3)]
    found = [set(drafter.propose(sequences, 4)) for _ in range(2)]
    assert found[0] == {0} and found[1] == {0, 1, 2}
    drafter.forget(0)
    drafter.forget(7)
    assert set(drafter._known) == {1, 2}


def test_where_little_may_be_lost_few_sequences_are_looked_at() -> None:
    """All are again when there is more time, and have the longest match of all their tokens."""
    drafter = NgramDrafter(SpeculativeConfig())
    sequences = [a_sequence(number, [1, 2, 3, 4, 1, 2]) for number in range(4)]
    assert set(drafter.propose(sequences, 4)) == {0, 1, 2, 3}
    for sequence in sequences:
        sequence.tokens += [*range(5, 25), 3, 4, 1]
    looked_at = set(drafter.propose(sequences, 4, most_ns=0.0))
    assert 0 in looked_at and 3 not in looked_at
    for sequence in sequences:
        sequence.tokens += [2, 3]
    found = drafter.propose(sequences, 4)
    assert {number: (each.match, each.token_ids) for number, each in found.items()} == dict.fromkeys(
        range(4), (3, [4, 1, 2, 5])
    )


def a_sequence(number: int, tokens: list[int]) -> Sequence:
    sequence = make_sequence(str(number), tokens, 8)
    sequence.seq_id = number
    return sequence


def test_an_engine_drafts_where_it_pays(tmp_path: Path) -> None:
    """The greedy output of a random model soon repeats itself."""
    plain, speculative = (
        LLM(
            write_config(tmp_path), skip_tokenizer_init=True, load_format="dummy", dtype="float32", num_threads=1,
            device="cpu", kv_cache_memory=4 << 20, speculative_config=wanted,
        )
        for wanted in (None, {"method": "ngram", "num_speculative_tokens": 8})
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    prompts = [{"prompt_token_ids": [7, 8, 9] * 5}]
    expected = plain.generate(prompts, params)[0].outputs[0].token_ids
    for _ in range(3):
        (output,) = speculative.generate(prompts, params)
        assert output.outputs[0].token_ids == expected
    assert not plain.engine.core.hooks
    assert sum(output.timings_ns.values()) > 0
    (speculator,) = speculative.engine.core.hooks
    assert isinstance(speculator, Speculator) and not speculator._policy._rates._own


@pytest.fixture(scope="module")
def stories() -> tuple[LLM, LLM]:
    """The bundled model without and with drafts."""
    options = {"device": "cpu", "kv_cache_memory": 16 << 20, "num_threads": 1, "max_num_seqs": 8}
    wanted = SpeculativeConfig(num_speculative_tokens=8, prompt_lookup_min=1)
    return LLM(str(STORY), **options), LLM(str(STORY), speculative_config=wanted, **options)


@pytest.mark.parametrize("stop", [["the"], [". The"], ["owl said", "in the old"], [" well. The fox met"]])
def test_a_stop_string_within_several_tokens_at_once(
    stories: tuple[LLM, LLM], stop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, speculative = stories
    params = SamplingParams(temperature=0.0, max_tokens=60, stop=stop, n=2)
    before = plain.generate([REPEATING, REPEATING[8:]], params)
    counts = try_all_drafts(monkeypatch, speculative)
    check_same_texts(before, speculative.generate([REPEATING, REPEATING[8:]], params))
    assert counts["tried"] > 0


def test_a_request_that_goes_on_after_a_crash_has_the_same_tokens(
    stories: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, speculative = stories
    tokenizer = plain.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(REPEATING)
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=5, ignore_eos=True)
    expected = plain.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
    try_all_drafts(monkeypatch, speculative)
    core = speculative.engine.core
    for known in (0, 1, 13, 39):
        core.add(AddRequest("one", prompt, params, [], resumed=[Resumed(0, expected[:known])]))
        outputs: list[SequenceOutput] = []
        while core.has_work:
            outputs += core.step().outputs
        assert expected[:known] + [token for each in outputs for token in each.token_ids] == expected
        assert outputs[-1].drafts >= outputs[-1].accepted_drafts
    core.scheduler.check()
