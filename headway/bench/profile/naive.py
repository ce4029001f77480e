"""The same answer without a cache of keys and values: every token takes a pass over the whole text before it.

No engine here can be told to forget, so each token is a request of its own: a prompt as long as the text would be by
then, which shares its beginning with no other, and one token of output (document 001, chapter 5).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.load.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Naive:
    """Milliseconds of each token of an answer, its first included, without a cache and with one."""

    prompt_tokens: int  # of the prompt before the first
    naive_ms: tuple[float, ...]
    cached_ms: tuple[float, ...]  # medians over the requests of this length

    @property
    def times(self) -> float:
        """How many times as long the whole answer takes without a cache."""
        return sum(self.naive_ms) / sum(self.cached_ms)

    def until(self, ms: Sequence[float]) -> list[float]:
        """Milliseconds from the send until each token."""
        return list(itertools.accumulate(ms))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"times": self.times}


def naive_of(prompt_tokens: int, single: Sequence[RequestRecord], cached: Sequence[RequestRecord]) -> Naive | None:
    """Both runs side by side; None where one of the requests failed.

    Args:
        single: requests of one token each, in the order of the answer.
        cached: requests of the whole answer.
    """
    whole = [record for record in cached if record.ok and len(record.chunk_ns) == len(single)]
    if not whole or not all(record.ok for record in single):
        return None
    gaps = [[b - a for a, b in itertools.pairwise([record.sent_ns, *record.chunk_ns])] for record in whole]
    return Naive(
        prompt_tokens,
        tuple((record.first_token_ns - record.sent_ns) / 1e6 for record in single),
        tuple(statistics.median(each) / 1e6 for each in zip(*gaps, strict=True)),
    )
