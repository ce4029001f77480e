"""Which blocks hold a known prefix: a tree of pages by their tokens.

A page is a run of tokens as long as a block, behind the pages before it. The first page hangs from the request's salt,
which keeps tenants apart. A lookup compares the token ids themselves, so equal hashes can never hand one prompt's keys
and values to another.

A page has up to one block for each KV cache group. Without windows there is one group, and a page comes and goes with
its block. Blocks of windowed groups come and go apart from others, so there a page stays as long as it has a block or
other pages hang from it. A prefix can then be gone on from if groups without a window have a block for each page, and
those with a window for each of the last pages that it sees and for the sinks.

What the tree keeps of a page is in lists, at the page's place. Without windows that is the number of its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.policy.cache.kv_groups import PASSED, WHOLE, KVCacheGroup

_Tokens = tuple[int, ...]


@dataclass(slots=True)
class PrefixMatch:
    """The known prefix of some tokens at a `version` of the index.

    Args:
        blocks: the blocks that a sequence needs to go on from the prefix, group by group.
        nodes, places: the pages of the prefix.
        whole: how many of the pages have a block in all groups without a window.
        length: how many of the pages a sequence can go on from.
    """

    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    version: int = -1
    whole: int = 0
    length: int = 0


class PrefixIndex:
    """Finds blocks by the tokens of a prompt.

    Few pages have more than one child, so the tokens of a child are looked up by their hash only where there are
    several.

    Args:
        num_blocks: blocks of the pool, `block_size` tokens each.
        groups: KV cache groups; empty where all layers see all tokens.
        references: how many sequences hold each block; the pool keeps it up to date.

    Attributes:
        groups: one without a window where none were given.
        nodes: the page of each block; 0 where it is not registered. No number is given twice.
        version: changes with every block that is registered or forgotten.
        replaced: blocks that have made way for others, until the pool takes them.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: Sequence[KVCacheGroup], references: Sequence[int]
    ) -> None:
        self.groups = tuple(groups) or (WHOLE,)
        self.nodes = [0] * num_blocks
        self.version = 0
        self.replaced: list[int] = []
        self._block_size = block_size
        self._references = references
        self._has_windows = any(group.window for group in self.groups)
        self._next_node = 1
        self._numbers = [0] * num_blocks if self._has_windows else self.nodes  # the node at each place
        self._parents: list[int | str] = [0] * num_blocks  # a node or a salt, at each place
        self._tokens: list[_Tokens] = [()] * num_blocks
        self._children: dict[int | str, int | dict[_Tokens, int]] = {}  # of a parent: its only one's place, or several
        # With windows: each group's block or PASSED, by place; the place of each node; and places without a page.
        self._held: list[list[int]] = [[] for _ in self._numbers] if self._has_windows else []
        self._places: dict[int | str, int] = {}
        self._free = list(range(num_blocks)) if self._has_windows else []

    # --- lookups ------------------------------------------------------------------------------------

    def knows(self, node: int) -> bool:
        """Whether a page is there still; only asked where there are windows."""
        return node in self._places

    def child(self, parent: int | str, tokens: _Tokens) -> int | None:
        """The place of the page that has these tokens after a parent."""
        found = self._children.get(parent)
        if isinstance(found, dict):
            return found.get(tokens)
        return found if found is not None and self._tokens[found] == tokens else None

    def match(self, tokens: Sequence[int], salt: str, known: PrefixMatch) -> None:
        """Bring up to date what is known of the longest known prefix of `tokens`, the last one excluded.

        What still holds is not looked up again.
        """
        if known.version == self.version:
            return
        numbers, size = self._numbers, self._block_size
        for at, (place, node) in enumerate(zip(known.places, known.nodes, strict=True)):
            if numbers[place] != node:  # it was forgotten, and so is all after it
                del known.places[at:], known.nodes[at:]
                break
        parent: int | str = known.nodes[-1] if known.nodes else salt
        for start in range(len(known.nodes) * size, (len(tokens) - 1) // size * size, size):
            child = self.child(parent, tuple(tokens[start : start + size]))
            if child is None:
                break
            parent = numbers[child]
            known.places.append(child)
            known.nodes.append(parent)
        if self._has_windows:
            self._measure(known)
        else:
            known.blocks, known.whole, known.length = known.places, len(known.places), len(known.places)
        known.version = self.version

    def _measure(self, known: PrefixMatch) -> None:
        """Find `whole` and `length` of a match."""
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
        if not self._has_windows:
            return 0, list(places), []
        group, pages, size = self.groups[number], [self._held[place] for place in places], self._block_size
        first = group.first(len(places) * size, size)
        sinks = pages[: group.sinks] if first else []
        return first, [blocks[number] for blocks in pages[first:]], [blocks[number] for blocks in sinks]

    def blocks_at(self, places: Iterable[int]) -> list[int]:
        """All registered blocks of pages."""
        if not self._has_windows:
            return list(places)
        return [block for place in places for block in self._held[place] if block != PASSED]

    # --- changes ------------------------------------------------------------------------------------

    def register(
        self, blocks: Sequence[int], parent: int | str, tokens: _Tokens, further: Sequence[Sequence[int]] = ()
    ) -> int:
        """Enter full blocks, one after the other, under a parent node or a salt.

        Where another block holds the same prefix already, that one stays; but beside windows, one that nobody uses
        makes way.

        Args:
            blocks: the blocks of the first group; PASSED where it has none, which holds for `further` groups too.
            tokens: the tokens of all these pages.

        Returns:
            The node that later pages hang from.
        """
        size, nodes, parents, children = self._block_size, self.nodes, self._parents, self._children
        node, has_windows = 0, self._has_windows
        for at, block in enumerate(blocks):
            page = tokens[at * size : (at + 1) * size]
            if has_windows:
                node = self._register_page([block, *[each[at] for each in further]], parent, page)
            elif parent in children or nodes[block]:
                node = self._register_beside(block, parent, page)
            else:
                children[parent] = block
                parents[block], self._tokens[block] = parent, page
                node = nodes[block] = self._next_node
                self._next_node += 1
            parent = node
        if has_windows:
            self._prune(self._places[node])
        self.version += 1
        return node

    def _register_beside(self, block: int, parent: int | str, tokens: _Tokens) -> int:
        """Enter a block where the parent has other children, or the block is registered already."""
        found = self.child(parent, tokens)
        if found is not None:
            return self.nodes[found]
        node = self.nodes[block]
        if node:  # shared, but registered under a parent that was evicted: it moves, with all that hangs from it
            self._take_out([block])
        self._hang(block, parent, tokens, node)
        return self.nodes[block]

    def _register_page(self, blocks: list[int], parent: int | str, tokens: _Tokens) -> int:
        """Enter the blocks that groups have of a page, which may be there already."""
        place = self.child(parent, tokens)
        if place is None:
            place = self._new_place()
            self._hang(place, parent, tokens)
            self._places[self._numbers[place]] = place
        node, held = self._numbers[place], self._held[place]
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
            self._parents.append(0)
            self._tokens.append(())
            self._held.append([])
        place = self._free.pop()
        self._held[place] = [PASSED] * len(self.groups)
        return place

    def _hang(self, place: int, parent: int | str, tokens: _Tokens, node: int = 0) -> None:
        """Hang a page from a parent, by its number, or a new one in place of 0."""
        if not node:
            node, self._next_node = self._next_node, self._next_node + 1
        self._numbers[place], self._parents[place], self._tokens[place] = node, parent, tokens
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = place
        elif isinstance(siblings, dict):
            siblings[tokens] = place
        else:
            self._children[parent] = {self._tokens[siblings]: siblings, tokens: place}

    def _take_out(self, places: Iterable[int]) -> None:
        """Take pages out of the tree. What hangs from them is not found any more."""
        parents, children, numbers = self._parents, self._children, self._numbers
        for place in places:
            siblings = children.pop(parents[place])
            if isinstance(siblings, dict):
                del siblings[self._tokens[place]]
                if siblings:
                    children[parents[place]] = siblings
            numbers[place] = 0

    def _prune(self, place: int) -> None:
        """Take out a page without blocks and children, and those before it that are left so."""
        up: int | None = place
        while up is not None and not (self._numbers[up] in self._children or self.blocks_at([up])):
            del self._places[self._numbers[up]]
            self._take_out([up])
            self._free.append(up)
            up = self._places.get(self._parents[up])

    def forget(self, blocks: Iterable[int]) -> None:
        """Take registered blocks out of the tree."""
        if self._has_windows:
            for block in blocks:
                place, self.nodes[block] = self._places[self.nodes[block]], 0
                self._held[place][self._held[place].index(block)] = PASSED
                self._prune(place)
        else:
            self._take_out(blocks)
        self.version += 1

    def clear(self) -> None:
        """Take all pages out of the tree."""
        self.nodes[:] = [0] * len(self.nodes)
        self._numbers[:] = [0] * len(self._numbers)
        self._children.clear()
        self._places.clear()
        self._free = list(range(len(self._held)))
        self.version += 1

    def check_by_parts(self, at_once: int) -> Iterator[None]:
        """Verify that the tree has each registered block once, with a pause after every so many parents.

        Raises:
            RuntimeError: it has not.
        """
        missing, pages = len(self.nodes) - self.nodes.count(0), len(self._places)
        for count, (parent, found) in enumerate(self._children.items(), 1):
            places = list(found.values()) if isinstance(found, dict) else [found]
            missing, pages = missing - len(self.blocks_at(places)), pages - len(places)
            if not places or not all(self._is_sound(place, parent) for place in places):
                missing = -1
                break
            if count % at_once == 0:
                yield
        if missing or (pages and self._has_windows):
            raise RuntimeError("the prefix index and the registered blocks disagree")

    def _is_sound(self, place: int, parent: int | str) -> bool:
        """A page hangs from this parent, and has blocks or, with windows, children."""
        node, blocks = self._numbers[place], self.blocks_at([place])
        is_used = blocks or node in self._children
        return bool(node and is_used) and self._parents[place] == parent and all(self.nodes[b] == node for b in blocks)
