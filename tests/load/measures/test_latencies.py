"""Latencies of requests whose times were written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headway.load.measures.latencies import Latencies
from tests.bench.records import failed, request


def test_every_latency_of_one_request() -> None:
    latencies = Latencies.of([request(0, [150, 170, 230, 250], due=50, sent=60, end=251)])
    assert latencies.start_lag_ms.tolist() == [10]
    assert latencies.ttft("send").tolist() == [90]
    assert latencies.ttft("schedule").tolist() == [100]
    assert latencies.e2el("send").tolist() == [190]
    assert latencies.e2el("schedule").tolist() == [200]
    assert latencies.tpot_ms.tolist() == pytest.approx([100 / 3])
    assert latencies.itl_ms.tolist() == [20, 60, 20]
    assert latencies.normalized("send").tolist() == [190 / 4]
    assert latencies.normalized("schedule").tolist() == [50]


def test_tokens_are_the_servers_and_not_the_chunks() -> None:
    latencies = Latencies.of([request(0, [100, 200], tokens=5)])
    assert latencies.tpot_ms.tolist() == [25]
    assert latencies.normalized("send").tolist() == [40]
    assert latencies.itl_ms.tolist() == [100]
    without_usage = request(1, [100, 200])
    without_usage.output_tokens = None
    assert Latencies.of([without_usage]).tpot_ms.tolist() == [100]


@pytest.mark.parametrize(("chunks", "tokens"), [([100], 1), ([100], 8), ([100, 110], 1), ([100, 100, 100], 3)], ids=str)
def test_no_tpot_of_one_token_or_of_chunks_that_were_read_together(chunks: list[float], tokens: int) -> None:
    record = request(0, chunks, tokens=tokens)
    assert np.isnan(Latencies.of([record]).tpot_ms).all()


def test_a_server_that_counted_no_tokens_has_no_normalized_latency() -> None:
    assert np.isnan(Latencies.of([request(0, [100, 110], tokens=0)]).normalized("send")).all()


def test_gaps_are_never_across_requests_and_know_theirs() -> None:
    records = [request(1, [500, 510, 530], due=400), failed(7), request(2, [900], due=600), request(0, [5, 6, 8])]
    latencies = Latencies.of(records)
    assert [record.index for record in latencies.records] == [0, 1, 2]
    assert latencies.itl_ms.tolist() == [1, 2, 10, 20]
    assert latencies.itl_request.tolist() == [0, 0, 1, 1]


def test_nothing_completed() -> None:
    latencies = Latencies.of([failed(0)])
    assert latencies.records == []
    assert all(len(values) == 0 for values in latencies.metrics("schedule").values())


def test_many_gaps_equal_a_plain_loop() -> None:
    generator = np.random.default_rng(0)
    records = [
        request(i, np.cumsum(generator.integers(1, 50, generator.integers(1, 9))).tolist(), due=0, sent=0)
        for i in range(200)
    ]
    expected = [(b - a) / 1e6 for r in records for a, b in zip(r.chunk_ns, r.chunk_ns[1:], strict=False)]
    latencies = Latencies.of(records)
    assert latencies.itl_ms.tolist() == expected
    assert np.bincount(latencies.itl_request, minlength=200).tolist() == [len(r.chunk_ns) - 1 for r in records]
