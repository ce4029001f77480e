"""A stream among thousands of requests that arrive at once."""

from __future__ import annotations

import pytest

from benchmarks.burst import measure


@pytest.mark.slow
@pytest.mark.quiet
def test_four_thousand_requests_at_once_hold_up_a_stream_by_a_tenth_of_a_second_at_most() -> None:
    figures = measure(requests=4000, options=("--threads", "1"))
    assert figures.statuses.get(0, 0) == 0 and set(figures.statuses) <= {0, 200, 429}
    assert figures.tokens > 100, "the stream is among them"
    assert figures.relay_ms < 100, "between the engine and the socket"
    assert figures.socket_gap_cpu_ms < 100, "the server's own work between two tokens"
