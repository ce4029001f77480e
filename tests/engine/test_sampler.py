"""The sampler against its definition in plain Python, and what it promises about batches and bad rows.

All of it as tensors, and with the kernel that draws.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headway.engine import sampler as sampler_module
from headway.engine.sampler import BAD_TOKEN, Sampler
from headway.kernels.cpu.kernels import CpuKernels
from headway.policy.step.plan import SequenceState
from tests.engine.sampling_oracle import acceptable, distribution, kept, logits_of, make_sequence, ranked

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True, params=["tensors", "kernel"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "kernel":
            patch.setitem(globals(), "Sampler", partial(Sampler, draw=CpuKernels().draw))
        yield


@pytest.fixture
def two_threads() -> None:
    """Results must not depend on how torch divides the work."""
    torch.set_num_threads(2)


def sample(logits: torch.Tensor, sequences: list[SequenceState]) -> list[int]:
    sampled = Sampler(logits.shape[1], CPU).sample(logits, sequences)
    assert BAD_TOKEN not in sampled.token_ids
    return sampled.token_ids


def assert_matches_definition(logits: torch.Tensor, sequences: list[SequenceState]) -> None:
    for row, (token, sequence) in enumerate(zip(sample(logits, sequences), sequences, strict=True)):
        wanted = acceptable(logits[row].float().numpy(), sequence)
        assert token in wanted, f"row {row}: {token} is not in {wanted} for {sequence.params}"


# --- each parameter, and mixes, against the definition --------------------------------------------------

EACH_PARAMETER = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50},
    {"top_k": 290},
    {"top_k": 5000},
    {"top_p": 0.02},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 0.9999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    {"logit_bias": {3: 5.0, 8: -100.0}},
    {"min_tokens": 9},
    {"allowed_token_ids": [7]},
    {"allowed_token_ids": [0, 3, 6, 9], "top_k": 3},
    {"allowed_token_ids": [5, 31, 8, 31], "repetition_penalty": 1.5, "logit_bias": {8: 3.0, 9: 100.0}},
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("params", EACH_PARAMETER, ids=str)
@pytest.mark.parametrize(("rows", "vocab_size"), [(40, 12), (25, 300), (5, 3000)])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_each_parameter(params: dict[str, object], rows: int, vocab_size: int, step: float) -> None:
    sequences = [
        make_sequence([1, 2, 2, 5], [3, 8, 3, 1][: seed % 5], seed=seed, stop_ids=(3, 4, 5000), **params)
        for seed in range(rows)
    ]
    assert_matches_definition(logits_of(rows, vocab_size, seed=1, step=step), sequences)


def test_a_top_p_next_to_one_keeps_all() -> None:
    """The tokens are so alike that the sum of their weights depends on its order."""
    sequences = [make_sequence(seed=row, top_p=1.0 - 2**-53, temperature=0.2) for row in range(30)]
    assert_matches_definition(logits_of(30, 129, seed=3, scale=0.01), sequences)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, object]:
    def sometimes(value: object, strategy: st.SearchStrategy[object]) -> object:
        return draw(strategy) if draw(st.booleans()) else value

    return {
        "temperature": draw(st.sampled_from([0.0, 1e-3, 0.2, 0.7, 1.0, 2.0, 50.0])),
        "top_k": sometimes(0, st.integers(1, 400)),
        "top_p": sometimes(1.0, st.floats(0.001, 1.0)),
        "min_p": sometimes(0.0, st.floats(0.0, 1.0)),
        "repetition_penalty": sometimes(1.0, st.floats(0.5, 2.0)),
        "presence_penalty": sometimes(0.0, st.floats(-2.0, 2.0)),
        "frequency_penalty": sometimes(0.0, st.floats(-2.0, 2.0)),
        "logit_bias": sometimes({}, st.dictionaries(st.integers(0, 4), st.floats(-100.0, 100.0), max_size=3)),
        "min_tokens": sometimes(0, st.integers(0, 6)),
    }


@given(
    batch=st.lists(parameters(), min_size=1, max_size=7),
    vocab_size=st.sampled_from([5, 127, 128, 129, 500, 2600]),
    scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    step=st.sampled_from([0.0, 0.25, 1.0]),
    seed=st.integers(0, 2**63),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_random_mixes(
    batch: list[dict[str, object]], vocab_size: int, scale: float, step: float, seed: int, dtype: torch.dtype
) -> None:
    chance = random.Random(seed)
    sequences = [
        make_sequence(
            [chance.randrange(5) for _ in range(3)],
            [chance.randrange(5) for _ in range(chance.randrange(5))],
            seed=seed + row,
            stop_ids=(1, 2),
            **params,
        )
        for row, params in enumerate(batch)
    ]
    assert_matches_definition(logits_of(len(batch), vocab_size, seed % 2**32, scale, step).to(dtype), sequences)


@pytest.mark.covering(2)
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0])
def test_a_nucleus_wider_than_the_candidates_looked_at(top_p: float, scale: float) -> None:
    """Flat rows need every token, sharp ones a few; they share a batch and each asks for log-probabilities."""
    flat = logits_of(6, 6000, seed=2, scale=scale)
    sharp = logits_of(6, 6000, seed=3, scale=6.0)
    logits = torch.stack([flat, sharp], 1).flatten(0, 1)
    sequences = [make_sequence(seed=row, top_p=top_p, logprobs=row % 3) for row in range(12)]
    sampled = Sampler(6000, CPU).sample(logits, sequences)
    exact = logits.double().log_softmax(-1)
    for row, sequence in enumerate(sequences):
        token, entry = sampled.token_ids[row], sampled.logprobs[row]
        assert token in acceptable(logits[row].numpy(), sequence, slack=1e-6)
        assert entry is not None
        assert entry.logprob == pytest.approx(exact[row, token].item(), abs=1e-4)
        assert entry.rank == 1 + int((logits[row] > logits[row, token]).sum())


# --- distribution of the draws -------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 9},
        {"top_p": 0.85},
        {"min_p": 0.05},
        {"top_k": 25, "top_p": 0.9, "min_p": 0.02},
        {"logit_bias": {3: 2.0, 7: -4.0}, "temperature": 0.8},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.1, "presence_penalty": 0.5, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, object]) -> None:
    """Chi-square over 20,000 draws, the number of bins with five expected; the seeds are fixed."""
    vocab_size, rows, steps = 40, 500, 40
    row = logits_of(1, vocab_size, seed=5, scale=1.5)
    sequences = [make_sequence(seed=seed, **params) for seed in range(rows)]
    sampler = Sampler(vocab_size, CPU)
    counts, expected = np.zeros(vocab_size), np.zeros(vocab_size)
    for step in range(steps):
        expected += distribution(row[0].numpy(), sequences[0]) * rows
        for sequence, token in zip(sequences, sampler.sample(row.expand(rows, -1), sequences).token_ids, strict=True):
            sequence.tokens.append(step % 7)  # the same history for all
            counts[token] += 1
    assert counts[expected == 0].sum() == 0
    binned = expected >= 5
    freedom = binned.sum() - 1
    statistic = ((counts - expected)[binned] ** 2 / expected[binned]).sum()
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_of_a_large_vocabulary_are_not_distorted() -> None:
    """Half of the mass lies in 100,000 tokens too unlikely to move a float32 sum on their own."""
    vocab_size, rows = 100_001, 400
    logits = torch.zeros(vocab_size)
    logits[0] = math.log(100_000)
    sequences = [make_sequence(seed=seed) for seed in range(rows)]
    rare = [token for token in sample(logits.expand(rows, -1), sequences) if token != 0]
    assert abs(len(rare) - rows / 2) < 4 * math.sqrt(rows) / 2
    assert abs(np.mean(rare) - vocab_size / 2) < 4 * vocab_size / math.sqrt(12 * len(rare))


# --- the same tokens whatever else is in the batch ----------------------------------------------------


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab_size", [777, 32_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_the_batch(vocab_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(len(EACH_PARAMETER), vocab_size, seed=7).to(dtype)
    sequences = [
        make_sequence([1, 2], [3, 1], seed=row, stop_ids=(3,), logprobs=2 if row % 2 else None, **params)
        for row, params in enumerate(EACH_PARAMETER)
    ]
    together = Sampler(vocab_size, CPU).sample(logits, sequences)
    chance = random.Random(0)
    for size in (1, 2, 3, 7, len(sequences)):
        sampler = Sampler(vocab_size, CPU)
        order = list(range(len(sequences)))
        chance.shuffle(order)
        for at in range(0, len(order), size):
            rows = order[at : at + size]
            part = sampler.sample(logits[rows], [sequences[row] for row in rows])
            assert part.token_ids == [together.token_ids[row] for row in rows]
            assert part.logprobs == [together.logprobs[row] for row in rows]


def test_seeds_and_positions_give_different_draws() -> None:
    logits = torch.zeros(200, 5000)
    by_seed = sample(logits, [make_sequence(seed=seed) for seed in range(200)])
    by_position = sample(logits, [make_sequence(output=[0] * n) for n in range(200)])
    assert len(set(by_seed)) > 180
    assert len(set(by_position)) > 180
    assert sample(logits, [make_sequence(seed=seed) for seed in range(200)]) == by_seed


def test_tokens_after_a_preemption_are_the_same() -> None:
    """Every other sampler forgets every sequence after every step, as preemption does."""
    params: dict[str, object] = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 5, "top_k": 20}

    def run(forgets: bool) -> list[list[int]]:
        sampler = Sampler(60, CPU)
        sequences = [make_sequence([1, 2, 3], seed=seed, stop_ids=(7,), **params) for seed in range(4)]
        for step in range(25):
            logits = logits_of(4, 60, seed=step, scale=1.0)
            tokens = sampler.sample(logits, sequences).token_ids
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.tokens.append(token)
                if forgets:
                    sampler.forget(sequence)
        return [sequence.tokens for sequence in sequences]

    assert run(forgets=True) == run(forgets=False)


# --- greedy, cuts and ties -----------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab_size", [5, 128, 151_936])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_greedy_takes_the_lowest_id_among_equals(vocab_size: int, rows: int) -> None:
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16)
    wanted = []
    for row in range(rows):
        first, second = sorted(random.Random(row).sample(range(vocab_size), 2))
        logits[row, [first, second]] = 7.0
        wanted.append(first)
    assert sample(logits, [make_sequence(temperature=0.0)] * rows) == wanted
    assert sample(logits, [make_sequence(top_k=1, seed=row) for row in range(rows)]) == wanted
    assert sample(logits, [make_sequence(top_p=1e-6, seed=row) for row in range(rows)]) == wanted
    assert (
        sample(torch.zeros(rows, vocab_size), [make_sequence(top_k=1, seed=row) for row in range(rows)]) == [0] * rows
    )


def test_ties_at_the_cut_keep_the_lowest_ids() -> None:
    """900 equal logits, far more than the candidates looked at; top_k keeps exactly k."""
    logits = torch.zeros(300, 1000)
    logits[:, 100:] = 4.0
    for params, count in (({"top_k": 30}, 30), ({"top_k": 300}, 300), ({"top_p": 0.5}, 451)):
        tokens = sample(logits, [make_sequence(seed=seed, **params) for seed in range(300)])
        assert set(tokens) <= set(range(100, 100 + count))
        assert max(tokens) > 100 + count * 0.8


def test_a_tiny_temperature_is_almost_greedy() -> None:
    logits = logits_of(20, 500, seed=9)
    greedy = sample(logits, [make_sequence(temperature=0.0)] * 20)
    for temperature in (1e-3, 1e-4, 1e-6, 5e-324):
        assert sample(logits, [make_sequence(temperature=temperature, seed=row) for row in range(20)]) == greedy


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    logits = logits_of(30, 200, seed=10)
    unlimited = sample(logits, [make_sequence(seed=row) for row in range(30)])
    for top_k in (200, 201, 10**9):
        assert sample(logits, [make_sequence(seed=row, top_k=top_k) for row in range(30)]) == unlimited


# --- biases and bans ------------------------------------------------------------------------------------


def test_logit_bias_forces_and_bans() -> None:
    logits = logits_of(2, 50, seed=11)
    best = int(logits[1].argmax())
    forced = make_sequence(seed=1, logit_bias={17: 100.0})
    banned = make_sequence(temperature=0.0, logit_bias={best: -100.0})
    second = int(logits[1].topk(2).indices[1])
    assert sample(logits, [forced, banned]) == [17, second]


def test_no_stop_token_before_min_tokens() -> None:
    """The stop tokens are by far the likeliest; they come the moment they may."""
    sampler = Sampler(30, CPU)
    logits = torch.zeros(2, 30)
    logits[:, [4, 9]] = 20.0
    sequences = [
        make_sequence([1], seed=1, stop_ids=(4, 9), min_tokens=3),
        make_sequence([1, 1], stop_ids=(9,), min_tokens=5, temperature=0.0, logit_bias={4: -50}),
    ]
    for _ in range(7):
        for sequence, token in zip(sequences, sampler.sample(logits, sequences).token_ids, strict=True):
            sequence.tokens.append(token)
    for sequence, stops, free in ((sequences[0], {4, 9}, 3), (sequences[1], {9}, 5)):
        output = sequence.tokens[sequence.prompt_len :]
        assert not stops & set(output[:free])
        assert set(output[free:]) <= stops


def test_end_tokens_alone_come_though_they_do_not_end_it_yet() -> None:
    sequences = [
        make_sequence(stop_ids=(4, 9), min_tokens=3, allowed_token_ids=[4, 9]),
        make_sequence(stop_ids=(4, 9), min_tokens=3, allowed_token_ids=[4, 9, 5]),
        make_sequence(),
    ]
    logits = torch.zeros(3, 30)
    logits[:, 4] = 20.0
    drawn = sample(logits, sequences)
    assert drawn[0] in (4, 9) and drawn[1] == 5


# --- log-probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_unchanged_distribution(dtype: torch.dtype) -> None:
    logits = logits_of(5, 1000, seed=12).to(dtype)
    sequences = [
        make_sequence([1, 2], seed=1, logprobs=5),
        make_sequence([1, 2], seed=2),
        make_sequence([1, 2], seed=3, logprobs=0, temperature=2.0, repetition_penalty=3.0, logit_bias={9: 100.0}),
        make_sequence([1, 2], logprobs=20, temperature=0.0),
        make_sequence([1, 2], seed=5, logprobs=1, top_k=3, min_tokens=2, stop_ids=(4,)),
    ]
    sampled = Sampler(1000, CPU).sample(logits, sequences)
    exact = logits.double().log_softmax(-1).numpy()
    assert sampled.token_ids[2] == 9
    assert sampled.logprobs[1] is None
    for row in (0, 2, 3, 4):
        entry, token, wanted = sampled.logprobs[row], sampled.token_ids[row], sequences[row].params.logprobs
        assert entry is not None
        assert entry.logprob == pytest.approx(exact[row, token], abs=1e-5)
        assert entry.rank == 1 + (exact[row] > exact[row, token]).sum()
        best = sorted(range(1000), key=lambda token: (-exact[row, token], token))[:wanted]
        assert entry.top_ids == best
        assert entry.top_logprobs == pytest.approx(exact[row, best], abs=1e-5)
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)


def test_logprobs_of_a_vocabulary_smaller_than_asked_for() -> None:
    sampled = Sampler(3, CPU).sample(torch.tensor([[1.0, 2.0, 0.0]]), [make_sequence(temperature=0.0, logprobs=20)])
    entry = sampled.logprobs[0]
    assert entry is not None
    assert (entry.rank, entry.top_ids, len(entry.top_logprobs)) == (1, [1, 0, 2], 3)


# --- extreme and bad logits ----------------------------------------------------------------------------

DRAWS = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 280}]


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_extreme_logits(params: dict[str, object]) -> None:
    rows = torch.full((5, 300), -math.inf)
    rows[0, 7] = 0.0  # all but one impossible
    rows[1] = -3e38
    rows[1, 8] = 3e38  # a difference beyond float32
    rows[2] = 1e30
    rows[2, 9] = 2e30
    rows[3, 10] = -3.4e38  # the only possible one, and the least finite number
    rows[4] = 88.0
    tokens = sample(rows, [make_sequence(seed=seed, **params) for seed in range(5)])
    assert tokens[:4] == [7, 8, 9, 10]
    assert 0 <= tokens[4] < 300


@pytest.mark.parametrize("params", DRAWS, ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_reported_and_the_others_go_on(params: dict[str, object], wrong: float) -> None:
    logits = logits_of(3, 300, seed=13)
    sequences = [make_sequence(seed=seed, logprobs=1, **params) for seed in range(3)]
    fine = Sampler(300, CPU).sample(logits, sequences)
    logits[1, slice(None) if wrong == -math.inf else 200] = wrong
    sampled = Sampler(300, CPU).sample(logits, sequences)
    assert sampled.token_ids == [fine.token_ids[0], BAD_TOKEN, fine.token_ids[2]]
    assert sampled.logprobs == [fine.logprobs[0], None, fine.logprobs[2]]


def test_a_row_that_bans_everything_is_bad() -> None:
    sequence = make_sequence(stop_ids=(0, 1, 2), min_tokens=1)
    assert Sampler(3, CPU).sample(torch.zeros(1, 3), [sequence]).token_ids == [BAD_TOKEN]


def test_a_bad_row_with_penalties_and_logprobs_recovers() -> None:
    sampler = Sampler(300, CPU)
    sequences = [make_sequence(seed=seed, presence_penalty=1.0, top_p=0.9, logprobs=0) for seed in range(2)]
    logits = torch.zeros(2, 300)
    logits[0, 5] = math.nan
    assert [token == BAD_TOKEN for token in sampler.sample(logits, sequences).token_ids] == [True, False]
    assert BAD_TOKEN not in sampler.sample(torch.zeros(2, 300), sequences).token_ids


# --- the step's manners --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_callers_logits_are_left_alone(vocab_size: int, dtype: torch.dtype, logprobs: int | None) -> None:
    logits = logits_of(3, vocab_size, seed=14).to(dtype)
    before = logits.clone()
    sequences = [
        make_sequence(logit_bias={1: 5.0}, min_tokens=1, stop_ids=(2,)),
        make_sequence(top_p=0.5, frequency_penalty=1.0),
        make_sequence(temperature=0.0, logprobs=logprobs),
    ]
    Sampler(vocab_size, CPU).sample(logits, sequences)
    assert torch.equal(logits, before)


def test_a_steady_batch_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    describe = sampler_module.describe
    monkeypatch.setattr(sampler_module, "describe", lambda *args: calls.append(1) or describe(*args))
    sampler = Sampler(40, CPU)
    sequences = [make_sequence(seed=seed, presence_penalty=0.5) for seed in range(3)]
    for _ in range(5):
        for sequence, token in zip(sequences, sampler.sample(torch.zeros(3, 40), sequences).token_ids, strict=True):
            sequence.tokens.append(token)
    assert len(calls) == 1
    sequences[0], sequences[1] = sequences[1], sequences[0]  # the caller's own list, changed in place
    sampler.sample(torch.zeros(3, 40), sequences)
    assert len(calls) == 2


def test_no_rows_and_wrong_shapes() -> None:
    sampler = Sampler(40, CPU)
    empty = sampler.sample(torch.zeros(0, 40), [])
    assert (empty.token_ids, empty.logprobs) == ([], [])
    for shape in ((1, 39), (2, 40), (40,)):
        with pytest.raises(ValueError, match=r"expected \(1, 40\)"):
            sampler.sample(torch.zeros(shape), [make_sequence()])


@given(size=st.integers(1, 60), top_k=st.integers(1, 60), seed=st.integers(0, 10**6))
@example(size=1, top_k=1, seed=0)
def test_only_kept_tokens_are_drawn(size: int, top_k: int, seed: int) -> None:
    logits = logits_of(8, size, seed, step=1.0)
    sequences = [make_sequence(seed=seed + row, top_k=top_k) for row in range(8)]
    for row, token in enumerate(sample(logits, sequences)):
        assert token in kept(*ranked(logits[row].numpy(), sequences[row]), sequences[row])[0]
