"""Rates of runs whose times were written by hand."""

from __future__ import annotations

import itertools
from array import array

import numpy as np
import pytest

from headway.load.measures.throughput import concurrency, token_arrivals, whole_run_rates, window_rates
from tests.bench.records import BEGAN_NS, at, failed, request


def test_the_whole_run_is_totals_over_its_duration() -> None:
    records = [request(0, [100, 200], prompt=30), request(1, [4000, 9000], due=3500, prompt=50, tokens=6), failed(2)]
    rates = whole_run_rates(records, BEGAN_NS, at(10_000))
    assert rates["request_throughput"] == 0.2
    assert rates["output_throughput"] == 0.8
    assert rates["total_token_throughput"] == 8.8


def test_a_window_counts_what_came_in_it_whoever_asked_for_it() -> None:
    early = request(0, [1500, 2500, 3500], due=1000, prompt=30)  # its last two tokens are inside
    late = request(1, [3900, 4100], due=3800, prompt=50)  # one token and the prompt inside, its end outside
    rates = window_rates([early, late], at(2000), at(4000))
    assert rates["request_throughput"] == 0.5
    assert rates["output_throughput"] == 1.5
    assert rates["total_token_throughput"] == (3 + 50) / 2


def test_windows_that_cover_a_run_add_up_to_it() -> None:
    generator = np.random.default_rng(1)
    records = [
        request(i, (due + np.cumsum(generator.integers(1, 400, 20))).tolist(), due=due, tokens=30)
        for i, due in enumerate(range(0, 9000, 137))
    ]
    end = max(record.end_ns for record in records) + 1
    edges = np.linspace(BEGAN_NS, end, 8).astype(np.int64)
    parts = [window_rates(records, int(a), int(b)) for a, b in itertools.pairwise(edges)]
    whole = whole_run_rates(records, BEGAN_NS, end)
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        assert np.mean([part[name] for part in parts]) == pytest.approx(whole[name], rel=1e-6)


def test_tokens_of_a_chunk_are_the_servers_word_or_spread_evenly() -> None:
    _, spread = token_arrivals([request(0, [10, 20, 30, 40], tokens=8)])
    assert spread.tolist() == [2, 2, 2, 2]
    told = request(0, [10, 20, 30], tokens=6)
    told.chunk_tokens, told.tokens_per_chunk_known = array("i", [1, 4, 1]), True
    times, tokens = token_arrivals([told])
    assert tokens.tolist() == [1, 4, 1]
    assert times.tolist() == [at(10), at(20), at(30)]


def test_the_fullest_second() -> None:
    records = [request(0, [100, 999, 1000, 1001, 1999, 2000], tokens=12), request(1, [1500])]
    assert whole_run_rates(records, BEGAN_NS, at(3000))["max_output_tokens_per_s"] == 7


def test_requests_in_flight() -> None:
    records = [
        request(0, [900], sent=0, end=1000),
        request(1, [950], sent=500, end=2000),
        request(2, [1500], sent=1000, end=3000),  # sent as the first one ends: never three at once
        failed(3, due=2500, end=4000),
    ]
    assert concurrency(records, BEGAN_NS, at(4000)) == (2, 1.5)
    assert concurrency(records, at(3000), at(4000)) == (1, 1.0)
    assert concurrency([], BEGAN_NS, at(4000)) == (0, 0.0)


def test_a_request_without_an_end_runs_until_the_end_of_the_run() -> None:
    record = request(0, [], sent=1000)
    record.end_ns = 0
    assert concurrency([record], BEGAN_NS, at(4000)) == (1, 0.75)


def test_a_run_of_no_length_has_no_rates() -> None:
    assert whole_run_rates([], BEGAN_NS, BEGAN_NS)["request_throughput"] == 0
