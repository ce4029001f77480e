"""KV of preempted sequences in host memory: whether it is copied there, and which host blocks hold it.

A preempted sequence loses its blocks. Either it computes their tokens again when it returns, or the blocks are swapped
out to host memory and back in, where that is predicted to take less time. Blocks at its beginning that other sequences
use as well stay in the pool: they are not swapped out, and are found again by the prefix index. Where they were evicted
meanwhile, the tokens are computed again after all.

The same memory has what passes between two engines: a prompt that one has computed for another, and one that has come.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from headway.policy.step.step_time import StepTimeModel


class BlockSwap(msgspec.Struct, array_like=True, gc=False):
    """Blocks to copy from the KV pool to the host (`is_out`) or back, the first to the first and so on.

    With names, the host keeps the copies under these, and is done with its blocks then.
    """

    is_out: bool
    blocks: list[int]
    host_blocks: list[int]
    names: list[bytes] = []


@dataclass(frozen=True, slots=True)
class SwapSpace:
    """Host memory for blocks, and how long it takes to copy some there and back, in nanoseconds."""

    num_blocks: int = 0  # 0 where nothing is swapped
    fixed_ns: float = 0.0  # what copying takes for any number of blocks
    block_ns: float = 0.0  # what each block takes on top of that

    def copy_ns(self, num_blocks: int) -> float:
        """How long it takes to copy so many blocks to the host and back, in nanoseconds."""
        return self.fixed_ns + num_blocks * self.block_ns

    def one_way_ns(self, swaps: list[BlockSwap]) -> int:
        """How long the copies of a plan take, each in its one direction, in nanoseconds."""
        return round(sum([self.copy_ns(len(swap.blocks)) for swap in swaps]) / 2)


NO_SWAP = SwapSpace()


@dataclass(slots=True)
class Swapped:
    """What the host holds of a waiting sequence."""

    # Entry of its block table that the first of the host blocks is a copy of. With several KV cache groups, the host
    # has one table after the other; with a window, from the entry that is needed next.
    first: int
    computed: int  # tokens that were computed when it was preempted
    host_blocks: list[int]


@dataclass(slots=True)
class Handed(Swapped):
    """What the host holds of a prompt for another engine, in the order in which blocks are computed."""

    copied: int = 0  # of its blocks, those that are copied there


class HostPool:
    """The blocks of a SwapSpace, which each plan's `swaps` fill and read in order.

    Args:
        step_time: predicts how long tokens take to be computed again.

    Attributes:
        swaps: copies that are decided and in no plan yet.
        lent: what another engine is to fetch, and what is being fetched from one, by the key of its handle.
        stored: host blocks whose copies are kept elsewhere by now; others append to it, from any thread.
        counts: since the start. Tokens swapped `out` and `in`; decisions to `swap`, to `recompute`, and to recompute as
            the host was `full`; and the nanoseconds that were predicted for all of these, `recompute_ns` and `copy_ns`.
    """

    def __init__(self, space: SwapSpace, step_time: StepTimeModel) -> None:
        self.space = space
        self.stored: deque[int] = deque()
        self._staged: set[int] = set()  # host blocks that hold what is on its way to be kept elsewhere
        self.swaps: list[BlockSwap] = []
        self.lent: dict[str, Swapped] = {}
        self.counts: Counter[str] = Counter()
        self._step_time = step_time
        self._free = list(range(space.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        self._take_back()
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.space.num_blocks - self.num_free

    def _take_back(self) -> None:
        while self.stored:
            host_block = self.stored.popleft()
            self._staged.remove(host_block)
            self._free.append(host_block)

    def swap_out(self, blocks: list[int], first: int, start: int, computed: int) -> Swapped | None:
        """Decide what becomes of blocks that are about to be released; None where their tokens are computed again.

        Args:
            first: Swapped.first.
            start, computed: the blocks hold the tokens from `start` to `computed`.
        """
        recompute_ns = self._step_time.prefill_ns(computed - start, start)
        copy_ns = self.space.copy_ns(len(blocks))
        self.counts["recompute_ns"] += round(recompute_ns)
        self.counts["copy_ns"] += round(copy_ns)
        if copy_ns > recompute_ns:
            self.counts["recompute"] += 1
            return None
        if len(blocks) > self.num_free:
            self.counts["full"] += 1
            return None
        host_blocks = [self._free.pop() for _ in blocks]
        self.swaps.append(BlockSwap(True, blocks, host_blocks))
        self.counts["swap"] += 1
        self.counts["out"] += computed - start
        return Swapped(first, computed, host_blocks)

    def take(self, count: int, computed: int) -> Handed | None:
        """Host blocks for all blocks of a prompt's first `computed` tokens; None where too few are free."""
        if not 0 < count <= len(self._free):
            return None
        return Handed(0, computed, [self._free.pop() for _ in range(count)])

    def swap_in(self, host_blocks: list[int], blocks: list[int], tokens: int) -> None:
        """Copy `tokens` back from host blocks to these."""
        self.swaps.append(BlockSwap(False, blocks, host_blocks))
        self.counts["in"] += tokens

    def stage(self, blocks: list[int], names: list[bytes]) -> int:
        """Have the last of these blocks copied out, to be kept under their names; how many the host had room for."""
        count = min(len(blocks), self.num_free)
        if count:
            host_blocks = [self._free.pop() for _ in range(count)]
            self._staged.update(host_blocks)
            self.swaps.append(BlockSwap(True, blocks[-count:], host_blocks, names[-count:]))
        return count

    def reserve(self, first: int, most: int, block_size: int) -> Swapped | None:
        """Host blocks for up to `most` pages of a waiting sequence, from entry `first` of its table on."""
        count = min(most, self.num_free)
        if not count:
            return None
        return Swapped(first, (first + count) * block_size, [self._free.pop() for _ in range(count)])

    def free(self, swapped: Swapped) -> None:
        """Give host blocks back. What is still to be copied from them is copied before they are written again."""
        self._free += swapped.host_blocks

    def take_swaps(self) -> list[BlockSwap]:
        """The copies that go into the next plan that is run; none are left after that."""
        taken, self.swaps = self.swaps, []
        return taken

    def check(self, held: Iterable[Swapped | None]) -> None:
        """Verify that each host block is free or held by one of these.

        Raises:
            RuntimeError: some are lost or held twice.
        """
        everyone = [*held, *self.lent.values()]
        blocks = [block for each in everyone if each is not None for block in each.host_blocks]
        blocks += [*self._free, *self._staged]
        if sorted(blocks) != list(range(self.space.num_blocks)):
            raise RuntimeError(f"of {self.space.num_blocks} host blocks {len(set(blocks))} are free or held once")
