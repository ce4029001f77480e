"""The prefix index where some layers have sliding windows, and a page has a block in each KV cache group.

Blocks of windowed groups come and go apart from others, so a page stays as long as it has a block or other pages hang
from it. A prefix can be gone on from if groups without a window have a block for each page, and those with a window for
each of the last pages that it sees and for the sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.policy.cache.kv_groups import PASSED, KVCacheGroup
from headway.policy.cache.prefix_index import MOST_PAGES, PrefixIndex, PrefixMatch


class WindowedIndex(PrefixIndex):
    """Finds the blocks of all groups by the tokens of a prompt.

    Args:
        groups: KV cache groups.
        references: how many sequences hold each block; the pool keeps it up to date.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: Sequence[KVCacheGroup], references: Sequence[int]
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.groups = tuple(groups)
        self._references = references
        self._numbers = [0] * num_blocks
        # Each group's block or PASSED, by place; and places without a page.
        self._held: list[list[int]] = [[] for _ in self._numbers]
        self._free = list(range(num_blocks))

    # --- lookups ------------------------------------------------------------------------------------

    def knows(self, node: int) -> bool:
        """Whether a page is there still."""
        return self._place_of(node) is not None

    def _place_of(self, node: int | str) -> int | None:
        """The place of a page; None where it is there no more, or this is a salt."""
        chain = self._chains.get(node // MOST_PAGES) if isinstance(node, int) else None
        if chain is None or not isinstance(node, int) or node - chain.first >= len(chain.places):
            return None
        return chain.places[node - chain.first]

    def match(self, tokens: Sequence[int], salt: str, known: PrefixMatch) -> None:
        """Do as PrefixIndex.match(), and find `whole` and `length`."""
        before = known.version
        super().match(tokens, salt, known)
        if known.version == before:
            return
        pages = [self._held[place] for place in known.places]
        length = len(pages)
        for number, group in enumerate(self.groups):
            if group.window is None and PASSED in (column := [blocks[number] for blocks in pages[:length]]):
                length = column.index(PASSED)
        known.whole = length
        for number, group in enumerate(self.groups):
            if PASSED in (column := [blocks[number] for blocks in pages[: min(group.sinks, length)]]):
                length = column.index(PASSED)
        # Where a window sees a page without a block, so it does from every shorter prefix that has the page.
        while (gap := self._gap(pages, length)) is not None:
            length = gap
        known.length = length
        tables = [self.table(number, known.places[:length]) for number in range(len(self.groups))]
        known.blocks = [block for _, blocks, sinks in tables for block in sinks + blocks]

    def _gap(self, pages: list[list[int]], length: int) -> int | None:
        """The last of `length` pages that a window needs to go on behind them, but has no block of."""
        size, groups = self._block_size, enumerate(self.groups)
        firsts = [(number, group.first(length * size, size)) for number, group in groups if group.window]
        for at in range(length - 1, min(first for _, first in firsts) - 1, -1):
            if any(at >= first and pages[at][number] == PASSED for number, first in firsts):
                return at
        return None

    def table(self, number: int, places: list[int]) -> tuple[int, list[int], list[int]]:
        """The parts of a BlockTable with which a group can go on behind these pages."""
        group, pages, size = self.groups[number], [self._held[place] for place in places], self._block_size
        first = group.first(len(places) * size, size)
        sinks = pages[: group.sinks] if first else []
        return first, [blocks[number] for blocks in pages[first:]], [blocks[number] for blocks in sinks]

    def blocks_at(self, places: Iterable[int]) -> list[int]:
        """All registered blocks of pages."""
        return [block for place in places for block in self._held[place] if block != PASSED]

    # --- changes ------------------------------------------------------------------------------------

    def register(
        self, blocks: list[int], parent: int | str, tokens: list[int], start: int, further: Sequence[list[int]] = ()
    ) -> int:
        """Do as PrefixIndex.register(); but a block that nobody uses makes way for another with the same prefix.

        `blocks` and `further` have PASSED where a group has no block.
        """
        node = 0
        for at, block in enumerate(blocks):
            node = self._register_page([block, *[each[at] for each in further]], parent, tokens, start + at)
            parent = node
        self._prune(node)
        self.version += 1
        return node

    def _register_page(self, blocks: list[int], parent: int | str, tokens: list[int], start: int) -> int:
        """Enter the blocks that groups have of a page, which may be there already."""
        size = self._block_size
        node = self.child(parent, tuple(tokens[start * size : (start + 1) * size]))
        if node is None:
            node = self._add([self._new_place()], parent, tokens, start)
        place = self._place_of(node)
        assert place is not None
        held = self._held[place]
        for number, (block, there) in enumerate(zip(blocks, held, strict=True)):
            if block == PASSED or self.nodes[block] or (there != PASSED and self._references[there]):
                continue
            if there != PASSED:
                self.nodes[there] = 0
                self.replaced.append(there)
            held[number] = block
            self.nodes[block] = node
        return node

    def _new_place(self) -> int:
        """A place for a new page without blocks."""
        if not self._free:  # there can be more pages than blocks
            self._free.append(len(self._numbers))
            self._numbers.append(0)
            self._held.append([])
        place = self._free.pop()
        self._held[place] = [PASSED] * len(self.groups)
        return place

    def _prune(self, node: int | str) -> None:
        """Take out a page without blocks and children, and those before it that are left so."""
        while isinstance(node, int) and (place := self._place_of(node)) is not None:
            if self._leads_on(node) or self.blocks_at([place]):
                break
            chain = self._chains[node // MOST_PAGES]
            self._take_out([place])
            self._free.append(place)
            node = chain.parent if node == chain.first else node - 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Take registered blocks out of the tree."""
        for block in blocks:
            node, self.nodes[block] = self.nodes[block], 0
            place = self._place_of(node)
            assert place is not None
            self._held[place][self._held[place].index(block)] = PASSED
            self._prune(node)
        self.version += 1

    def clear(self) -> None:
        """Take all pages out of the tree."""
        super().clear()
        self._numbers[:] = [0] * len(self._numbers)
        self._free = list(range(len(self._held)))
