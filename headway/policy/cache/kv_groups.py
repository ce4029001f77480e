"""KV cache groups: which layers share a block table, where some layers have sliding windows.

A layer with a window needs the keys and values of the last tokens alone. So the layers are put in groups of one window,
each with a block table of its own, and tables of windowed groups give up what the window has passed. All groups have
room for the same number of layers, so that their blocks are of one size and come from one pool.

Layers with attention sinks see the first tokens of a sequence, too, whose blocks stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

# Block tables of a sequence. More, for fewer layers each, would waste less memory and cost more work with each block.
MOST_GROUPS = 8
PASSED = -1  # in a block table: a window has passed the block, which is another's


class KVCacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler knows of a group; sizes are blocks of one sequence."""

    window: int | None  # positions that a query sees, itself included, sinks apart; None for all
    # The most blocks that a prompt under way has for tokens of its own: those that the largest step sees, sinks apart.
    # 0 without a window, where all its tokens have blocks.
    ahead: int = 0
    known: int = 0  # the most blocks of a known prefix that it begins with besides
    sinks: int = 0  # how many of the first blocks stay

    def first(self, computed: int, block_size: int) -> int:
        """The first entry of its table that is needed for tokens after so many computed ones, with those after it.

        It is 0 while no entry behind the sinks has been passed.
        """
        if self.window is None:
            return 0
        first = max(0, computed - self.window + 1) // block_size
        return first if first > self.sinks else 0

    def end(self, computed: int, block_size: int) -> int:
        """How many entries the table of a window has for a prompt's largest step after so many computed tokens."""
        first = self.first(computed, block_size)
        return (first or self.sinks) + self.ahead

    def most(self, num_blocks: int) -> int:
        """The most blocks that a sequence of `num_blocks` blocks of tokens ever has in this group."""
        return num_blocks if self.window is None else min(num_blocks, self.sinks + self.ahead + self.known)


WHOLE = KVCacheGroup(None)  # the only group where all layers see all tokens


def most_blocks(groups: Sequence[KVCacheGroup], num_blocks: int) -> int:
    """The most blocks that a sequence of `num_blocks` blocks of tokens holds in all tables; without groups, in one."""
    return sum(group.most(num_blocks) for group in groups) if groups else num_blocks


def _first_tokens(window: int, sinks: tuple[int, int] | None) -> int:
    """How many of a sequence's first tokens layers with this window see as sinks."""
    return sinks[0] if sinks is not None and window == sinks[1] else 0


def decode_blocks(window: int | None, tokens: int, block_size: int, sinks: tuple[int, int] | None = None) -> int:
    """How many blocks of one group a sequence of so many tokens holds while it decodes.

    Args:
        sinks: how many of the first tokens are sinks, and the window of the layers that have them.
    """
    whole = -(-tokens // block_size)
    if window is None:
        return whole
    first = _first_tokens(window, sinks)
    return min(whole, -(-first // block_size) + -(-(window - first - 1) // block_size) + 1)


@cache
def layers_per_group(windows: tuple[int | None, ...]) -> int:
    """How many layers a group has room for, given the window of each layer.

    There are at most MOST_GROUPS groups, or one for each window. Of the sizes that permit this, the one with the least
    room to spare in groups without a window, whose tables are long; then in the others; then the largest.
    """
    counts = [windows.count(window) for window in dict.fromkeys(windows)]
    whole, most = windows.count(None), max(MOST_GROUPS, len(counts))

    def spare(size: int) -> tuple[int, int, int]:
        return -whole % size, sum(-count % size for count in counts), -size

    sizes = range(1, max(counts) + 1)
    return min((size for size in sizes if sum(-(-count // size) for count in counts) <= most), key=spare)


def group_layers(windows: tuple[int | None, ...]) -> list[list[int]]:
    """The layers of each group, by number; those without a window come first.

    Args:
        windows: the window of each layer, as seen_windows() says.
    """
    size, groups = layers_per_group(windows), []
    for window in sorted(dict.fromkeys(windows), key=lambda each: (each is not None, each or 0)):
        layers = [layer for layer, each in enumerate(windows) if each == window]
        groups += [layers[at : at + size] for at in range(0, len(layers), size)]
    return groups


@cache
def group_windows(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The window of each group of group_layers()."""
    return tuple(windows[layers[0]] for layers in group_layers(windows))


def seen_windows(windows: Iterable[int | None], max_model_len: int) -> tuple[int | None, ...]:
    """The windows, with None for those that no sequence outgrows; empty where no window is left."""
    seen = tuple(window if window is not None and window < max_model_len else None for window in windows)
    return seen if any(seen) else ()


def kv_cache_groups(
    windows: Iterable[int | None],
    largest_chunk: int,
    max_model_len: int,
    block_size: int,
    sinks: tuple[int, int] | None = None,
) -> tuple[KVCacheGroup, ...]:
    """The groups of a model whose layers have these windows; empty where all layers see all of a sequence.

    Args:
        largest_chunk: most tokens of a sequence in a step.
        sinks: how many of the first tokens are sinks, and the window of the layers that have them.
    """
    seen, groups = seen_windows(windows, max_model_len), []
    for window in group_windows(seen) if seen else ():
        if window is None:
            groups.append(KVCacheGroup(None))
        else:
            first = _first_tokens(window, sinks)
            behind = window - first - 1
            ahead = -(-(behind + largest_chunk) // block_size) + 1
            groups.append(KVCacheGroup(behind + 1, ahead, -(-behind // block_size), first // block_size))
    return tuple(groups)
