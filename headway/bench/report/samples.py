"""Records as arrays, for pictures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from headway.load.measures.latencies import NS_PER_MS, Floats
from headway.load.record import RequestRecord

NS_PER_S = 1e9


def gaps(records: Sequence[RequestRecord], began_ns: int) -> tuple[Floats, Floats]:
    """When each gap between two chunks ended, in s after `began_ns`, and its length in ms, in the order of time."""
    ends, lengths = [np.empty(0)], [np.empty(0)]
    for record in records:
        if record.ok and len(record.chunk_ns) > 1:
            times = np.frombuffer(record.chunk_ns, dtype=np.int64)
            ends.append((times[1:] - began_ns) / NS_PER_S)
            lengths.append(np.diff(times) / NS_PER_MS)
    all_ends, all_lengths = np.concatenate(ends), np.concatenate(lengths)
    order = np.argsort(all_ends, kind="stable")
    return all_ends[order], all_lengths[order]


def class_names(records: Sequence[RequestRecord]) -> list[str]:
    """Classes of the mix, the one with most requests first."""
    return [name for name, _ in Counter(record.class_name for record in records).most_common()]


def sent(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Records of the requests that were sent and have ended, in order of arrival."""
    return sorted((each for each in records if each.sent_ns and each.end_ns), key=lambda each: each.scheduled_ns)


def open_over_time(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """How many intervals are open: times, and the number from each time on."""
    times = np.concatenate([starts, ends])
    change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.lexsort((change, times))  # where one ends as another begins, the end comes first
    return times[order], np.cumsum(change[order])


def per_second(times: Floats, weights: Floats | None, edges: Floats) -> Floats:
    """What came in each bin of time, per second."""
    counts, _ = np.histogram(times, bins=edges, weights=weights)
    return counts / np.diff(edges)


def rolling(times: Floats, values: Floats, edges: Floats, shares: Sequence[float], least: int) -> list[Floats]:
    """Quantiles of the values in each bin of time, one array for each share; NaN in bins with fewer than `least`."""
    ends = np.searchsorted(times, edges)
    rows = np.full((len(shares), len(edges) - 1), np.nan)
    for place, (low, high) in enumerate(itertools.pairwise(ends)):
        if high - low >= least:
            rows[:, place] = np.quantile(values[low:high], shares)
    return list(rows)
