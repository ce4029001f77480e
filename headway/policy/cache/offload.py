"""Evicted prefix blocks that are kept beyond the pool: what they are called there, and whether loading them pays.

A page is a run of tokens as long as a block. Its name is the SHA-256 of the name of the page before it and of its own
tokens, so it stands for all tokens up to its end, and for the request's salt, with which the first page begins.

A block that is evicted goes through host memory (`swap`) to the store. What a request is to load comes the same way as
what was swapped out of a preempted one, and so is admitted like it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.swap import HostPool
from headway.policy.step.request import Sequence
from headway.policy.step.step_time import StepTimeModel

_FOLLOWING = 0.2  # weight of the newest load in how long loads take
LATE = 2.0  # a load is given up after so many times what computing takes
LEAST_WAIT_NS = 20e6


def root_name(salt: str) -> bytes:
    """What stands for the name of the page before the first one."""
    return hashlib.sha256(salt.encode()).digest()


def page_names(before: bytes, tokens: Tokens[int], first: int, size: int) -> Iterator[bytes]:
    """The names of the whole pages of `size` tokens from token `first` on; `before` is that of the page before."""
    name = before
    for start in range(first, len(tokens) // size * size, size):
        name = hashlib.sha256(name + array("q", tokens[start : start + size]).tobytes()).digest()
        yield name


class LoadTime:
    """How long pages take to be loaded: as measured at the start, and then as the last loads took.

    Args:
        fixed_ns, page_ns: nanoseconds of a load, and of each page of it.
    """

    def __init__(self, fixed_ns: float, page_ns: float) -> None:
        self._fixed_ns, self._page_ns, self._pace = fixed_ns, page_ns, 1.0

    def ns(self, pages: int) -> float:
        """The nanoseconds that so many pages are expected to take."""
        return self._pace * (self._fixed_ns + pages * self._page_ns)

    def took(self, pages: int, ns: float) -> None:
        """Learn from a load."""
        expected = self._fixed_ns + pages * self._page_ns
        self._pace += _FOLLOWING * (ns / expected - self._pace)


class Offloading:
    """Decides which evicted blocks are kept, and what is loaded of a request's prompt.

    It is to be told of blocks that are registered or evicted, of sequences with one block table.

    Its counts are among those of the HostPool: `offload_out` and `offload_in`, tokens of pages; decisions to `load`, or
    to `recompute_loadable`; and `late` loads, which were not waited for.

    Args:
        is_kept: whether the store has a page of this name already.
        may_have: whether it may have one to load.
        load_time: how long the store takes.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        host: HostPool,
        step_time: StepTimeModel,
        is_kept: Callable[[bytes], bool],
        may_have: Callable[[bytes], bool],
        load_time: LoadTime,
    ) -> None:
        self.load_time = load_time
        self._blocks, self._host, self._step_time = blocks, host, step_time
        self._is_kept, self._may_have = is_kept, may_have
        self._names = [b""] * blocks.num_blocks

    def registered(self, sequence: Sequence, full: int) -> None:
        """The first `full` pages of a sequence are computed."""
        size, (known, name) = self._blocks.block_size, sequence.named
        table = sequence.tables[0].blocks
        before, tokens = name or root_name(sequence.cache_salt), sequence.tokens[: full * size]
        for page in page_names(before, tokens, known * size, size):
            self._names[table[known]] = name = page
            known += 1
        sequence.named = known, name

    def evicted(self, blocks: list[int]) -> None:
        """Keep what is in these blocks, before others write to them, as far as the host has room for it on its way."""
        new = [block for block in blocks if not self._is_kept(self._names[block])]
        count = self._host.stage(new, [self._names[block] for block in new])
        self._host.counts["offload_out"] += count * self._blocks.block_size

    def wanted(self, tokens: list[int], salt: str) -> tuple[int, list[bytes], float]:
        """What of a prompt is to be loaded: the first page, the names of the pages, and how long to wait in ns.

        There are no pages where none are kept behind what the pool has, or where computing them takes less time.
        """
        blocks, size = self._blocks, self._blocks.block_size
        known = blocks.match(tokens, salt)
        name = self._names[known[-1]] if known else root_name(salt)
        names: list[bytes] = []
        most = self._host.num_free
        for page in page_names(name, tokens[:-1], len(known) * size, size):
            if len(names) == most or not self._may_have(page):
                break
            names.append(page)
        if not names:
            return 0, [], 0.0
        recompute_ns = self._step_time.prefill_ns(len(names) * size, len(known) * size)
        load_ns = self.load_time.ns(len(names)) + self._host.space.copy_ns(len(names)) / 2
        pays = load_ns < recompute_ns
        self._host.counts["load" if pays else "recompute_loadable"] += 1
        return (len(known), names, max(LEAST_WAIT_NS, LATE * recompute_ns)) if pays else (0, [], 0.0)

    def loaded(self, sequence: Sequence, first: int, pages: int) -> list[int]:
        """The host blocks that pages of a waiting sequence are to be written to, from page `first` on; [] for none."""
        size = self._blocks.block_size
        sequence.swapped = self._host.reserve(first, pages, size)
        if sequence.swapped is None:
            return []
        self._host.counts["offload_in"] += len(sequence.swapped.host_blocks) * size
        return sequence.swapped.host_blocks
