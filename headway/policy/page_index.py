"""Which blocks hold a known prefix, of models whose layers are in several KV cache groups.

A page is a run of tokens as long as a block, behind the pages before it: a node of a tree, as in `prefix_index`. It has
up to one block for each group. Blocks of windowed groups come and go apart from others, so a page stays as long as it
has a block or other pages hang from it.

A prefix of some pages can be gone on from if groups without a window have a block for each page, and those with a
window for each of the last pages that it sees and for the sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headway.policy.kv_groups import GroupTable, KVCacheGroup
from headway.policy.prefix_index import PrefixMatch

_Tokens = tuple[int, ...]
NO_BLOCK = -1


@dataclass(slots=True)
class _Page:
    """Args:
    blocks: of each group, or NO_BLOCK.
    children: how many pages hang from it.
    """

    parent: int | str
    tokens: _Tokens
    blocks: list[int]
    children: int = 0


class PageIndex:
    """Finds blocks by the tokens of a prompt, as PrefixIndex.

    Attributes:
        nodes: the page of each block; 0 where it is not registered. No number is given twice.
        version: changes with every block that is registered or forgotten.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[KVCacheGroup]) -> None:
        self.nodes = [0] * num_blocks
        self.version = 0
        self._block_size = block_size
        self._groups = groups
        self._next_page = 1
        self._pages: dict[int, _Page] = {}
        self._numbers: dict[tuple[int | str, _Tokens], int] = {}  # by a page's parent, or salt, and tokens

    def knows(self, page: int) -> bool:
        return page in self._pages

    def match(self, tokens: Sequence[int], salt: str, known: PrefixMatch) -> None:
        """Bring up to date what is known of `tokens`, the last one excluded.

        `nodes` become the pages, `whole` says how many of them groups without a window have, and `length` how many can
        be gone on from; `blocks` are those that this takes.
        """
        if known.version == self.version:
            return
        found, size = known.nodes, self._block_size
        del found[next((at for at, page in enumerate(found) if page not in self._pages), len(found)) :]
        parent: int | str = found[-1] if found else salt
        for start in range(len(found) * size, (len(tokens) - 1) // size * size, size):
            page = self._numbers.get((parent, tuple(tokens[start : start + size])))
            if page is None:
                break
            found.append(page)
            parent = page
        self._measure(known)
        known.blocks = [block for table in self.tables(known, known.length) for block in table.held]
        known.version = self.version

    def _measure(self, known: PrefixMatch) -> None:
        """Find how many of its pages groups without a window have, and how many can be gone on from."""
        pages = [self._pages[number].blocks for number in known.nodes]
        whole = len(pages)
        for group, seen in enumerate(self._groups):
            if seen.window is None and NO_BLOCK in (column := [blocks[group] for blocks in pages[:whole]]):
                whole = column.index(NO_BLOCK)
        length = known.whole = whole
        for group, seen in enumerate(self._groups):
            if seen.sinks and NO_BLOCK in (column := [blocks[group] for blocks in pages[: min(seen.sinks, length)]]):
                length = column.index(NO_BLOCK)
        # Where a window sees a page without a block, so it does from every shorter prefix that has the page.
        while (gap := self._gap(pages, length)) is not None:
            length = gap
        known.length = length

    def _gap(self, pages: list[list[int]], length: int) -> int | None:
        """The last page that a window sees behind so many of them, and has no block of."""
        size, windowed = self._block_size, [(at, group) for at, group in enumerate(self._groups) if group.window]
        firsts = {at: group.first(length * size, size) for at, group in windowed}
        for at in range(length - 1, min(firsts.values(), default=length) - 1, -1):
            if any(pages[at][group] == NO_BLOCK for group, first in firsts.items() if at >= first):
                return at
        return None

    def tables(self, known: PrefixMatch, length: int) -> list[GroupTable]:
        """What groups have of the first pages of a prefix, as far as it is needed."""
        size, tables = self._block_size, []
        pages = [self._pages[number].blocks for number in known.nodes[:length]]
        for group, seen in enumerate(self._groups):
            first = seen.first(length * size, size)
            sinks = pages[: seen.sinks] if first else []
            tables.append(
                GroupTable(first, [blocks[group] for blocks in pages[first:]], [blocks[group] for blocks in sinks])
            )
        return tables

    def path(self, tokens: Sequence[int], salt: str) -> list[list[int]]:
        """The registered blocks of each known page of `tokens`."""
        parent: int | str = salt
        blocks: list[list[int]] = []
        for start in range(0, len(tokens), self._block_size):
            page = self._numbers.get((parent, tuple(tokens[start : start + self._block_size])))
            if page is None:
                break
            blocks.append([block for block in self._pages[page].blocks if block != NO_BLOCK])
            parent = page
        return blocks

    def register(
        self, parent: int | str, tokens: _Tokens, rows: Sequence[Sequence[int]], references: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Enter full blocks under a page or a salt, for each page those of all groups, or NO_BLOCK.

        Where a group has a block there already that is in use, that one stays; one that nobody uses makes way.

        Args:
            tokens: of all these pages.
            references: of each block.

        Returns:
            The last page, from which later ones hang, and the blocks that have made way.
        """
        size, node, replaced = self._block_size, parent, list[int]()
        for at, blocks in enumerate(rows):
            node = self._page(node, tokens[at * size : (at + 1) * size])
            page = self._pages[node]
            for group, block in enumerate(blocks):
                there = page.blocks[group]
                if block == NO_BLOCK or self.nodes[block] or (there != NO_BLOCK and references[there]):
                    continue
                if there != NO_BLOCK:
                    self.nodes[there] = 0
                    replaced.append(there)
                page.blocks[group] = block
                self.nodes[block] = node
        assert isinstance(node, int)
        self._prune(node)
        self.version += 1
        return node, replaced

    def _page(self, parent: int | str, tokens: _Tokens) -> int:
        number = self._numbers.get((parent, tokens))
        if number is None:
            number, self._next_page = self._next_page, self._next_page + 1
            self._numbers[parent, tokens] = number
            self._pages[number] = _Page(parent, tokens, [NO_BLOCK] * len(self._groups))
            if isinstance(parent, int):
                self._pages[parent].children += 1
        return number

    def forget(self, blocks: Iterable[int]) -> None:
        """Take registered blocks out."""
        for block in blocks:
            number, self.nodes[block] = self.nodes[block], 0
            page = self._pages[number]
            page.blocks[page.blocks.index(block)] = NO_BLOCK
            self._prune(number)
        self.version += 1

    def _prune(self, number: int | str) -> None:
        """Take out a page without blocks and children, and those before it that are left so."""
        while isinstance(number, int):
            page = self._pages[number]
            if page.children or any(block != NO_BLOCK for block in page.blocks):
                return
            del self._pages[number], self._numbers[page.parent, page.tokens]
            number = page.parent
            if isinstance(number, int):
                self._pages[number].children -= 1

    def clear(self) -> None:
        """Take all out."""
        self.nodes = [0] * len(self.nodes)
        self._pages.clear()
        self._numbers.clear()
        self.version += 1

    def check_by_parts(self, at_once: int) -> Iterator[None]:
        """Verify that the pages have each registered block once, with a pause after every so many pages.

        Raises:
            RuntimeError: they have not.
        """
        missing = len(self.nodes) - self.nodes.count(0)
        for count, (number, page) in enumerate(self._pages.items(), 1):
            blocks = [block for block in page.blocks if block != NO_BLOCK]
            missing -= len(blocks)
            known = self._numbers.get((page.parent, page.tokens)) == number
            if not known or not (blocks or page.children) or any(self.nodes[block] != number for block in blocks):
                missing = -1
                break
            if count % at_once == 0:
                yield
        if missing or len(self._numbers) != len(self._pages):
            raise RuntimeError("the index of pages and the registered blocks disagree")
