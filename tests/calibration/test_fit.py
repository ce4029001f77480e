"""The fit finds an efficiency again from what the cost model makes of it, and stays physical with noise."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from headway.calibration.fit import errors, fit, least_squares, predicted, residuals
from headway.calibration.host import tiny_shape
from headway.calibration.samples import Kind, Piece, Sample, Timings
from headway.cost.efficiency import Efficiency
from tests.calibration.machines import HARDWARE, KERNEL_S, KNOWN, timed_pieces

FITTED = ("attention_flops", "score_s", "kv_bytes", "element_bytes", "kernel_s", "step_s", "sequence_s")


def fitted(samples: tuple[Sample, ...], kernel_call_s: float = KERNEL_S) -> Efficiency:
    return fit(HARDWARE, samples, kernel_call_s, tiny_shape)


def test_a_known_efficiency_is_found_again() -> None:
    found = fitted(timed_pieces())
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3), name
    for mine, true in ((found.linear, KNOWN.linear), (found.linear_of["fp32"], KNOWN.linear_of["fp32"])):
        assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in true]
        assert [factor for _, factor in mine] == pytest.approx([factor for _, factor in true], rel=1e-3)
    rest = {each.name for each in fields(Efficiency)} - {*FITTED, "linear", "linear_of"}
    assert {name: getattr(found, name) for name in rest} == {name: getattr(KNOWN, name) for name in rest}


def test_a_known_efficiency_predicts_its_own_pieces() -> None:
    samples = timed_pieces()
    for each in samples:
        said = predicted(HARDWARE, KNOWN, each.piece, KERNEL_S, tiny_shape)
        assert said == pytest.approx(each.median, rel=1e-9), each.piece.kind
    off = errors(HARDWARE, KNOWN, samples, KERNEL_S, tiny_shape)
    assert set(off) == set(Kind) and max(off.values()) < 1e-9


def test_errors_are_medians_by_kind() -> None:
    samples = [each for each in timed_pieces() if each.piece.kind is Kind.DECODE][:3]
    slower = [replace(each, median=each.median * by) for each, by in zip(samples, (1.0, 1.25, 2.0), strict=True)]
    assert errors(HARDWARE, KNOWN, slower, KERNEL_S, tiny_shape) == {"attention of decodes": pytest.approx(0.2)}


@pytest.mark.parametrize(
    "true",
    [
        replace(KNOWN, score_s=0.0, attention_flops=1.0),
        replace(KNOWN, kernel_s=KERNEL_S, step_s=0.0, sequence_s=0.0),
        replace(KNOWN, kv_bytes=1.0, element_bytes=0.3),
        replace(KNOWN, linear=((1, 3.0),), linear_of={"fp32": ((1, 0.2),)}),
    ],
)
def test_efficiencies_at_their_bounds_are_found_too(true: Efficiency) -> None:
    found = fitted(timed_pieces(true))
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3, abs=1e-12), name
    for tokens in (1, 16, 256):
        for format_ in ("bf16", "fp32"):
            assert found.linear_factor(tokens, format_) == pytest.approx(true.linear_factor(tokens, format_), rel=1e-3)


def test_what_tiny_operations_cost_more_is_not_the_host_s() -> None:
    """This cost is one of each layer and sequence; a model of the usual size has none of it."""
    clean = timed_pieces()
    more = tuple(
        replace(each, median=each.median + 2e-7 * each.piece.layers * each.piece.sequences)
        if each.piece.kind is Kind.STEP
        else each
        for each in clean
    )
    found = fitted(more)
    for name in ("kernel_s", "step_s", "sequence_s"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3), name


@pytest.mark.parametrize(
    "beyond",
    [replace(KNOWN, kv_bytes=3.0), replace(KNOWN, attention_flops=5.0)],
    ids=["a cache read faster than memory", "products faster than the machine's"],
)
def test_no_attention_beats_the_machine(beyond: Efficiency) -> None:
    found = fitted(timed_pieces(beyond))
    assert found.kv_bytes <= 1.0 and found.attention_flops <= 1.0


def test_what_short_prompts_take_longer_is_not_the_decodes() -> None:
    """Chunks of 64 tokens take as long as three times what explains longer ones; decodes are as quick as they were."""
    true = replace(KNOWN, attention_s=9e-6)
    slower = tuple(
        replace(each, median=3.0 * each.median) if each.piece.kind is Kind.PROMPT and each.piece.tokens == 64 else each
        for each in timed_pieces(true)
    )
    assert fitted(slower).attention_s == pytest.approx(9e-6, rel=1e-3)


@settings(max_examples=40)
@given(st.lists(st.floats(0.6, 1.8), min_size=40, max_size=40), st.floats(0.0, 1e-3))
def test_noise_leaves_it_physical(noise: list[float], kernel_call_s: float) -> None:
    """Whatever was measured: shares above 0, none of attention's above 1, times not below 0, all of them finite."""
    clean = timed_pieces()
    noisy = tuple(replace(each, median=each.median * noise[i % len(noise)]) for i, each in enumerate(clean))
    found = fitted(noisy, kernel_call_s)
    assert 0 < found.kv_bytes <= 1 and 0 < found.attention_flops <= 1
    assert all(0 <= getattr(found, name) < math.inf for name in FITTED)
    assert all(0 < factor < math.inf for curve in (found.linear, *found.linear_of.values()) for _, factor in curve)
    for each in noisy:
        said = predicted(HARDWARE, found, each.piece, kernel_call_s, tiny_shape)
        assert 0 < said < math.inf


@settings(max_examples=40)
@given(st.lists(st.floats(0.97, 1.03), min_size=40, max_size=40))
def test_a_little_noise_changes_little(noise: list[float]) -> None:
    clean = timed_pieces()
    noisy = tuple(replace(each, median=each.median * noise[i % len(noise)]) for i, each in enumerate(clean))
    off = errors(HARDWARE, fitted(noisy), noisy, KERNEL_S, tiny_shape)
    assert max(off.values()) < 0.07


def test_the_first_format_counts_for_all_that_were_not_measured() -> None:
    without = tuple(each for each in timed_pieces() if (each.piece.kind, each.piece.format) != (Kind.LINEAR, "bf16"))
    found = fitted(without)
    assert found.linear_of == {}
    assert found.linear_factor(16, "bf16") == found.linear_factor(16, "fp32") == pytest.approx(0.6, rel=1e-3)


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_least_squares_is_that_of_scipy(seed: int, width: int) -> None:
    random = np.random.default_rng(seed)
    columns = random.uniform(0.1, 2.0, (12, width))
    seconds = random.uniform(0.5, 2.0, 12)
    least = random.uniform(0.0, 0.5, width)
    found = least_squares(columns.tolist(), seconds.tolist(), least.tolist())
    best = lsq_linear(columns / seconds[:, None], np.ones(12), (least, np.inf), tol=1e-12)
    error = float(np.sum((columns @ found / seconds - 1) ** 2))
    assert (np.asarray(found) >= least).all()
    assert error <= 2 * best.cost * (1 + 1e-6) + 1e-9


def test_best_and_median_of_a_piece() -> None:
    timings = Timings(Piece(Kind.STREAM, "bf16", "", 1), [4.0, 2.0, 8.0])
    sample = timings.sample()
    assert (sample.best, sample.median, sample.repeats, sample.scatter) == (2.0, 4.0, 3, 0.5)


def test_residuals_are_what_four_in_five_runs_lie_between() -> None:
    """Medians are as fitted, and the best runs 5 % faster: others are as much slower, in every kind."""
    found = residuals(HARDWARE, KNOWN, timed_pieces(), KERNEL_S, tiny_shape)
    assert found == {str(kind): pytest.approx((0.95, 1 / 0.95)) for kind in Kind}


def test_residuals_lie_on_both_sides_of_what_is_fitted() -> None:
    """All pieces took 1.5 times as long as is fitted: still nobody may say that they are never as fast."""
    slower = [replace(each, best=1.5 * each.median, median=1.5 * each.median) for each in timed_pieces()]
    for low, high in residuals(HARDWARE, KNOWN, slower, KERNEL_S, tiny_shape).values():
        assert low == 1.0 and high == pytest.approx(1.5)
