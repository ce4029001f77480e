"""Which blocks hold a known prefix: a tree of chains of pages by their tokens.

A page is a run of tokens as long as a block, behind the pages before it. The first page hangs from the request's salt,
which keeps tenants apart. A lookup compares the token ids themselves, so equal hashes can never hand one prompt's keys
and values to another.

Pages that a sequence computes one behind the other are a chain: a list of places, and nodes whose numbers follow each
other. So most is done for many pages together. Their tokens are not copied: the chain keeps the sequence's list, whose
tokens never change once they are registered. The place of a page is the number of its block, with which it comes and
goes; `windowed_index` has pages with several blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.policy.cache.kv_groups import PASSED, WHOLE, KVCacheGroup

Tokens = tuple[int, ...]
MOST_PAGES = 1 << 32  # of a chain, more than fit in memory
_FEW_PAGES = 8  # when a chain has so few left, the tokens of others are not kept


@dataclass(slots=True)
class PrefixMatch:
    """The known prefix of some tokens at a `version` of the index."""

    # The blocks that a sequence needs to go on from the prefix, group by group.
    blocks: list[int] = field(default_factory=list)
    # nodes, places: the pages of the prefix.
    nodes: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    version: int = -1
    whole: int = 0  # how many of the pages have a block in all groups without a window
    length: int = 0  # how many of the pages a sequence can go on from


@dataclass(slots=True)
class Chain:
    """Pages one behind the other. Whoever holds the block of one holds those of the pages before it, too."""

    first: int  # the node of the first page
    parent: int | str  # the node or salt that the first page hangs from
    # The tokens of the sequence that has computed them, of which it may be `start` pages until the first.
    tokens: list[int]
    start: int
    places: list[int]  # the places of the pages; PASSED for one that was taken out before one behind it
    is_whole: bool = True  # no page was taken out. Otherwise none is added, as no number is given twice.

    def page(self, number: int, size: int) -> Tokens:
        """The tokens of a page, by its number in the chain."""
        at = (self.start + number) * size
        return tuple(self.tokens[at : at + size])

    def keep_tokens(self, pages: int, size: int) -> None:
        """Keep the tokens of so many pages alone."""
        self.tokens, self.start = self.tokens[self.start * size : (self.start + pages) * size], 0


class PrefixIndex:
    """Finds blocks by the tokens of a prompt.

    Args:
        num_blocks: blocks of the pool, `block_size` tokens each.

    Attributes:
        groups: KV cache groups of the block tables: here one, without a window.
        nodes: the page of each block; 0 where it is not registered. No number is given twice.
        version: changes with every block that is registered or forgotten.
        replaced: blocks that have made way for others, until the pool takes them; here always empty.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.groups: tuple[KVCacheGroup, ...] = (WHOLE,)
        self.nodes = [0] * num_blocks
        self.version = 0
        self.replaced: list[int] = []
        self._block_size = block_size
        self._numbers = self.nodes  # the node at each place
        self._num_chains = 0
        self._chains: dict[int, Chain] = {}  # by the numbers of their nodes // MOST_PAGES
        self._heads: dict[int | str, dict[Tokens, Chain]] = {}  # of a parent: chains by the tokens of their first page

    # --- lookups ------------------------------------------------------------------------------------

    def child(self, parent: int | str, tokens: Tokens) -> int | None:
        """The node of the page that has these tokens after a parent."""
        if isinstance(parent, int) and (chain := self._chains.get(parent // MOST_PAGES)) is not None:
            at = parent + 1 - chain.first
            is_there = at < len(chain.places) and chain.places[at] != PASSED
            if is_there and chain.page(at, self._block_size) == tokens:
                return parent + 1
        chains = self._heads.get(parent)
        return chains[tokens].first if chains is not None and tokens in chains else None

    def match(self, tokens: Sequence[int], salt: str, known: PrefixMatch) -> None:
        """Bring up to date what is known of the longest known prefix of `tokens`, the last one excluded.

        What still holds is not looked up again.
        """
        if known.version == self.version:
            return
        there = [self._numbers[place] for place in known.places]
        if there != known.nodes:  # one was forgotten, and so is all after it
            at = next(at for at, node in enumerate(known.nodes) if there[at] != node)
            del known.places[at:], known.nodes[at:]
        size, end = self._block_size, (len(tokens) - 1) // self._block_size
        parent: int | str = known.nodes[-1] if known.nodes else salt
        while (at := len(known.nodes)) < end:
            node = self.child(parent, tuple(tokens[at * size : (at + 1) * size]))
            if node is None:
                break
            places = self._alike(node, tokens[at * size : end * size])
            known.places += places
            known.nodes += range(node, node + len(places))
            parent = known.nodes[-1]
        known.blocks, known.whole, known.length = known.places, len(known.places), len(known.places)
        known.version = self.version

    def _alike(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The places of a page and of those behind it in its chain, as far as they have these tokens."""
        chain, size = self._chains[node // MOST_PAGES], self._block_size
        first = node - chain.first
        places = chain.places[first : first + len(tokens) // size]
        if PASSED in places:
            del places[places.index(PASSED) :]
        length, at = len(places) * size, (chain.start + first) * size
        own, others = chain.tokens[at : at + length], list(tokens[:length])
        if own != others:
            differs = next(at for at in range(0, length, size) if own[at : at + size] != others[at : at + size])
            del places[differs // size :]
        return places

    def table(self, number: int, places: list[int]) -> tuple[int, list[int], list[int]]:
        """The parts of a BlockTable with which a group can go on behind these pages."""
        return 0, list(places), []

    def blocks_at(self, places: Iterable[int]) -> list[int]:
        """All registered blocks of pages."""
        return list(places)

    def are_leaves(self, nodes: list[int]) -> bool:
        """Whether these are different nodes from which nothing hangs; 0 is none."""
        if 0 in nodes or len(set(nodes)) < len(nodes) or not self._heads.keys().isdisjoint(nodes):
            return False
        chains = self._chains
        for node in nodes:
            chain = chains.get(node // MOST_PAGES)
            if chain is not None and node + 1 - chain.first < len(chain.places):
                return False
        return True

    # --- changes ------------------------------------------------------------------------------------

    def register(
        self, blocks: list[int], parent: int | str, tokens: list[int], start: int, further: Sequence[list[int]] = ()
    ) -> int:
        """Enter full blocks, one after the other, under a parent node or a salt.

        Where another block holds the same prefix already, that one stays.

        Args:
            blocks: the blocks of the first group; `further` has those of other groups, if there are any.
            tokens: all tokens of the sequence. They are kept, and may only become more.
            start: how many pages of the sequence are before these.

        Returns:
            The node that later pages hang from.
        """
        size, at, node = self._block_size, 0, 0
        self.version += len(blocks)
        known = [self.nodes[block] for block in blocks]
        while at < len(blocks):
            page = tuple(tokens[(start + at) * size : (start + at + 1) * size])
            found, end = self.child(parent, page), at + 1
            if found is not None:
                node = found
            elif known[at]:  # shared, but registered under a parent that was evicted
                node = self._move(known[at], parent)
            else:
                end = at + 1 if any(known[at:]) else len(blocks)
                node = self._add(blocks[at:end], parent, tokens, start + at)
            parent, at = node, end
        return node

    def extend(self, block: int, leaf: int, tokens: list[int]) -> int:
        """Do as register() with the next block of a sequence behind a leaf, if it joins the chain of that.

        Its tokens need not be there yet, but before the next lookup.

        Returns:
            The new leaf; 0 where it does not join, and nothing was done.
        """
        chain = self._chains.get(leaf // MOST_PAGES)
        if chain is None or chain.tokens is not tokens or not chain.is_whole or self._numbers[block]:
            return 0
        chain.places.append(block)
        self._numbers[block] = leaf + 1
        self.version += 1
        return leaf + 1

    def _add(self, places: list[int], parent: int | str, tokens: list[int], start: int) -> int:
        """Hang new pages of a sequence from a parent, one behind the other, and return the node of the last.

        They join the parent's chain if that is of the same sequence and ends with it.
        """
        numbers, chain, first = self._numbers, None, 0
        if isinstance(parent, int) and (chain := self._chains.get(parent // MOST_PAGES)) is not None:
            first = chain.first + len(chain.places)
        if chain is None or chain.tokens is not tokens or first - 1 != parent or not chain.is_whole:
            self._num_chains += 1
            first = self._num_chains * MOST_PAGES
            chain = self._chains[self._num_chains] = Chain(first, parent, tokens, start, places)
            self._hang(chain)
        else:
            chain.places += places
        for node, place in enumerate(places, first):
            numbers[place] = node
        return first + len(places) - 1

    def _hang(self, chain: Chain) -> None:
        """Have the parent of a chain lead to its first page."""
        self._heads.setdefault(chain.parent, {})[chain.page(0, self._block_size)] = chain

    def _cut_off(self, chain: Chain) -> None:
        """Have nothing lead to the first page of a chain any more."""
        siblings = self._heads[chain.parent]
        del siblings[chain.page(0, self._block_size)]
        if not siblings:
            del self._heads[chain.parent]

    def _move(self, node: int, parent: int | str) -> int:
        """Hang a page that is in use from another parent, with all that hangs from it. Returns its node.

        Its block is held, and so are those before it in its chain. So it is the first where its parent was taken out.
        """
        chain = self._chains[node // MOST_PAGES]
        if chain.first == node:
            self._cut_off(chain)
            chain.parent = parent
            self._hang(chain)
        return node

    def _take_out(self, places: list[int]) -> None:
        """Take pages out of the tree. What hangs from them is not found any more."""
        numbers, at = self._numbers, 0
        while at < len(places):
            node = numbers[places[at]]
            chain = self._chains[node // MOST_PAGES]
            own, end = chain.places, node + 1 - chain.first
            gone = places[at : at + end]  # these may be it and the pages before it, as ends are given up first
            before = own[end - len(gone) : end][::-1]
            if gone != before:
                gone = gone[: next(at for at, place in enumerate(gone) if place != before[at])]
            start = end - len(gone)
            if not start:
                self._cut_off(chain)
            own[start:end] = [PASSED] * len(gone) if end < len(own) else []
            while own and own[-1] == PASSED:
                own.pop()
            chain.is_whole = False
            if not own:
                del self._chains[node // MOST_PAGES]
            elif len(own) <= _FEW_PAGES and len(chain.tokens) > _FEW_PAGES * self._block_size:
                chain.keep_tokens(_FEW_PAGES, self._block_size)
            for place in gone:
                numbers[place] = 0
            at += len(gone)

    def leave(self, node: int, tokens: list[int]) -> None:
        """The sequence with these tokens, of which this is the last page, is not computed any more."""
        chain = self._chains.get(node // MOST_PAGES)
        if chain is not None and chain.tokens is tokens and chain.start:
            chain.keep_tokens(len(chain.places), self._block_size)

    def forget(self, blocks: list[int]) -> None:
        """Take registered blocks out of the tree."""
        self._take_out(blocks)
        self.version += len(blocks)

    def clear(self) -> None:
        """Take all pages out of the tree."""
        self.nodes[:] = [0] * len(self.nodes)
        self._chains.clear()
        self._heads.clear()
        self.version += 1

    def check_by_parts(self, at_once: int) -> Iterator[None]:
        """Verify that the tree has each registered block once, with a pause after a chain and every so many pages.

        Raises:
            RuntimeError: it has not.
        """
        pages = blocks = heads = looked_at = 0
        for chain in self._chains.values():
            is_head = self._heads.get(chain.parent, {}).get(chain.page(0, self._block_size)) is chain
            nodes = [(place, node) for node, place in enumerate(chain.places, chain.first) if place != PASSED]
            if is_head == (chain.places[0] == PASSED) or not all(self._is_sound(*each) for each in nodes):
                break
            pages, blocks = pages + len(nodes), blocks + len(self.blocks_at(place for place, _ in nodes))
            heads += is_head
            looked_at += len(nodes)
            if looked_at >= at_once:
                looked_at = 0
                yield
        there = [len(numbers) - numbers.count(0) for numbers in (self._numbers, self.nodes)]
        if [pages, blocks] != there or heads != sum(map(len, self._heads.values())):
            raise RuntimeError("the prefix index and the registered blocks disagree")

    def _leads_on(self, node: int) -> bool:
        """Whether a page hangs from this one."""
        chain = self._chains[node // MOST_PAGES]
        return node in self._heads or node + 1 - chain.first < len(chain.places)

    def _is_sound(self, place: int, node: int) -> bool:
        """A page is at its place, and has blocks or, with windows, pages that hang from it."""
        blocks = self.blocks_at([place])
        is_used = bool(blocks) or self._leads_on(node)
        return is_used and self._numbers[place] == node and all(self.nodes[block] == node for block in blocks)
