"""Speculative decoding against the algorithm itself on drawn tokens, steps timed one by one, and a search of all k."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.speculative import MOST_TOKENS, best_tokens, break_even, cycle_s, expected_tokens, tpot_s
from tests.cost.machines import DENSE, deployment

acceptances = st.floats(0, 1)
ks = st.integers(0, MOST_TOKENS)
TARGET = deployment(replace(DENSE, layers=32, sliding_windows=()))
DRAFT = deployment(replace(DENSE, layers=1, sliding_windows=()))
CONTEXT = 200


def tokens_of_a_step(target: np.ndarray, draft: np.ndarray, k: int, random: np.random.Generator) -> int:
    """One step of speculative sampling (Leviathan et al., algorithm 1), where every position has the same odds."""
    for accepted, token in enumerate(random.choice(len(draft), k, p=draft)):
        if random.random() >= target[token] / draft[token]:
            return accepted + 1  # the refused one is drawn anew
    return k + 1


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("likeness", [0.1, 0.6, 0.97])
def test_expected_tokens_are_what_the_algorithm_gives(k, likeness):
    """A draft accepts as often as its odds and the target's overlap: the sum of the smaller of both."""
    random = np.random.default_rng(7)
    target, other = random.dirichlet(np.full(6, 0.3), size=2)
    draft = likeness * target + (1 - likeness) * other
    acceptance = float(np.minimum(target, draft).sum())
    drawn = [tokens_of_a_step(target, draft, k, random) for _ in range(5_000)]
    assert abs(fmean(drawn) - expected_tokens(k, acceptance)) < 4 * stdev(drawn) / len(drawn) ** 0.5


@given(k=ks, acceptance=st.floats(0, 1 - 1e-6))
def test_expected_tokens_are_the_published_formula(k, acceptance):
    """Equation 1 of Leviathan et al., which has no value at an acceptance of 1."""
    assert expected_tokens(k, acceptance) == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance))


@given(k=ks)
def test_the_limits_of_acceptance(k):
    assert expected_tokens(k, 0.0) == 1 and expected_tokens(k, 1.0) == k + 1


@given(k=st.integers(1, MOST_TOKENS), some=st.tuples(acceptances, acceptances))
def test_what_is_accepted_more_often_gives_more(k, some):
    low, high = sorted(some)
    assert expected_tokens(k, low) <= expected_tokens(k, high)
    assert expected_tokens(k - 1, high) <= expected_tokens(k, high) <= k + 1
    assert tpot_s(TARGET, DRAFT, 1, CONTEXT, k, high) <= tpot_s(TARGET, DRAFT, 1, CONTEXT, k, low)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_cycle_is_k_steps_of_the_draft_and_one_of_k_plus_1_tokens(batch):
    """The draft's steps are queued on the device: only the check waits for the host."""
    target = replace(TARGET, efficiency=replace(Efficiency.ideal(), step_s=0.5, sequence_s=0.01))
    draft = replace(DRAFT, efficiency=replace(Efficiency.ideal(), step_s=9.0, sequence_s=9.0))
    check = TARGET.step([Chunk(4, CONTEXT, logit_rows=4, sequences=batch)]).seconds + 0.5 + 0.01 * batch
    proposed = DRAFT.step([Chunk(1, CONTEXT, sequences=batch)]).seconds
    assert cycle_s(target, draft, batch, CONTEXT, 3) == pytest.approx(check + 3 * proposed)
    assert cycle_s(target, None, batch, CONTEXT, 3) == pytest.approx(check)


@pytest.mark.parametrize("draft", [DRAFT, None], ids=["draft", "lookup"])
def test_none_proposed_is_plain_decoding(draft):
    plain = TARGET.step([Chunk(1, CONTEXT, sequences=3)]).seconds
    assert tpot_s(TARGET, draft, 3, CONTEXT, 0, 0.7) == plain


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("draft", [DRAFT, None], ids=["draft", "lookup"])
def test_the_best_k_is_found_and_grows_with_the_acceptance(draft, batch):
    """One more gives 1 + 1 / (a^-1 + ... + a^-(k+1)) times the tokens, which grows with a; so the best k does."""
    found = []
    for acceptance in np.linspace(0, 1, 41).tolist():
        rates = []
        for k in range(17):
            check = TARGET.step([Chunk(k + 1, CONTEXT, logit_rows=k + 1, sequences=batch)]).seconds
            proposed = draft.step([Chunk(1, CONTEXT, sequences=batch)]).seconds if draft else 0.0
            tokens = k + 1 if acceptance == 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)
            rates.append(tokens / (check + k * proposed))
        found.append(best_tokens(TARGET, draft, batch, CONTEXT, acceptance))
        assert rates[found[-1]] == pytest.approx(max(rates), rel=1e-12)
    assert found == sorted(found) and found[0] == 0 and found[-1] > 0
    assert len(set(found)) > 3  # some in between are the best too


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("draft", [DRAFT, None], ids=["draft", "lookup"])
def test_at_the_break_even_both_take_as_long(draft, k):
    plain = tpot_s(TARGET, draft, 2, CONTEXT, 0, 0.0)
    even = break_even(TARGET, draft, 2, CONTEXT, k)
    assert even is not None and 0 < even < 1
    assert tpot_s(TARGET, draft, 2, CONTEXT, k, even) == pytest.approx(plain, rel=1e-12)
    assert tpot_s(TARGET, draft, 2, CONTEXT, k, even + 0.01) < plain < tpot_s(TARGET, draft, 2, CONTEXT, k, even - 0.01)


def test_a_draft_that_is_no_faster_never_pays():
    assert break_even(TARGET, TARGET, 1, CONTEXT, 4) is None
    assert best_tokens(TARGET, TARGET, 1, CONTEXT, 1.0) == 0
    assert tpot_s(TARGET, TARGET, 1, CONTEXT, 4, 1.0) > tpot_s(TARGET, TARGET, 1, CONTEXT, 0, 1.0)


def test_it_pays_less_the_larger_the_batch():
    """Checking is free while weights are read; once arithmetic counts, each checked token takes its time."""
    evens = [break_even(TARGET, DRAFT, batch, 1, 4) for batch in (1, 8, 16, 24)]
    assert all(small <= large for small, large in itertools.pairwise(evens)) and evens[0] < evens[-1] < 1
    assert break_even(TARGET, DRAFT, 2000, 1, 4) is None
