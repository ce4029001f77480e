"""Which blocks hold a known prefix: a tree of pages by their tokens.

A page is a run of tokens as long as a block, behind the pages before it. The first page hangs from the request's salt,
which keeps tenants apart. A lookup compares the token ids themselves, so equal hashes can never hand one prompt's keys
and values to another.

What the tree keeps of a page is in lists, at the page's place. That is the number of its block, with which it comes and
goes; `windowed_index` has pages with several blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.policy.cache.kv_groups import WHOLE, KVCacheGroup

Tokens = tuple[int, ...]


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
        self._next_node = 1
        self._numbers = self.nodes  # the node at each place
        self._parents: list[int | str] = [0] * num_blocks  # a node or a salt, at each place
        self._tokens: list[Tokens] = [()] * num_blocks
        self._children: dict[int | str, int | dict[Tokens, int]] = {}  # of a parent: its only one's place, or several

    # --- lookups ------------------------------------------------------------------------------------

    def child(self, parent: int | str, tokens: Tokens) -> int | None:
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
        known.blocks, known.whole, known.length = known.places, len(known.places), len(known.places)
        known.version = self.version

    def table(self, number: int, places: list[int]) -> tuple[int, list[int], list[int]]:
        """The parts of a BlockTable with which a group can go on behind these pages."""
        return 0, list(places), []

    def blocks_at(self, places: Iterable[int]) -> list[int]:
        """All registered blocks of pages."""
        return list(places)

    # --- changes ------------------------------------------------------------------------------------

    def register(
        self, blocks: Sequence[int], parent: int | str, tokens: Sequence[int], further: Sequence[Sequence[int]] = ()
    ) -> int:
        """Enter full blocks, one after the other, under a parent node or a salt.

        Where another block holds the same prefix already, that one stays.

        Args:
            blocks: the blocks of the first group; `further` has those of other groups, if there are any.
            tokens: the tokens of all these pages.

        Returns:
            The node that later pages hang from.
        """
        nodes, parents, children, kept, new = self.nodes, self._parents, self._children, self._tokens, self._next_node
        node = 0
        for block, page in zip(blocks, zip(*[iter(tokens)] * self._block_size, strict=True), strict=True):
            if parent in children or nodes[block]:
                self._next_node = new
                parent = node = self._register_beside(block, parent, page)
                new = self._next_node
            else:
                children[parent] = block
                parents[block] = parent
                kept[block] = page
                nodes[block] = parent = node = new
                new += 1
        self._next_node = new
        self.version += len(blocks)
        return node

    def are_leaves(self, nodes: list[int]) -> bool:
        """Whether these are nodes from which nothing hangs; 0 is none."""
        return 0 not in nodes and self._children.keys().isdisjoint(nodes)

    def register_each(self, pages: Iterable[tuple[int, int, Tokens]]) -> list[int]:
        """Enter full blocks, each with a parent node and tokens of its own, one after the other.

        Returns:
            The nodes that later pages hang from.
        """
        nodes, parents, children, kept, found = self.nodes, self._parents, self._children, self._tokens, list[int]()
        for block, parent, tokens in pages:
            if parent in children or nodes[block]:
                found.append(self._register_beside(block, parent, tokens))
                continue
            children[parent] = block
            parents[block], kept[block] = parent, tokens
            nodes[block] = self._next_node
            found.append(self._next_node)
            self._next_node += 1
        self.version += len(found)
        return found

    def _register_beside(self, block: int, parent: int | str, tokens: Tokens) -> int:
        """Enter a block where the parent has other children, or the block is registered already."""
        found = self.child(parent, tokens)
        if found is not None:
            return self.nodes[found]
        node = self.nodes[block]
        if node:  # shared, but registered under a parent that was evicted: it moves, with all that hangs from it
            self._take_out([block])
        self._hang(block, parent, tokens, node)
        return self.nodes[block]

    def _hang(self, place: int, parent: int | str, tokens: Tokens, node: int = 0) -> None:
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
            if siblings != place:
                assert isinstance(siblings, dict)
                del siblings[self._tokens[place]]
                if siblings:
                    children[parents[place]] = siblings
            numbers[place] = 0

    def forget(self, blocks: list[int]) -> None:
        """Take registered blocks out of the tree."""
        self._take_out(blocks)
        self.version += len(blocks)

    def clear(self) -> None:
        """Take all pages out of the tree."""
        self.nodes[:] = [0] * len(self.nodes)
        self._children.clear()
        self.version += 1

    def check_by_parts(self, at_once: int) -> Iterator[None]:
        """Verify that the tree has each registered block once, with a pause after every so many parents.

        Raises:
            RuntimeError: it has not.
        """
        missing, pages = len(self.nodes) - self.nodes.count(0), 0
        for count, (parent, found) in enumerate(self._children.items(), 1):
            places = list(found.values()) if isinstance(found, dict) else [found]
            missing, pages = missing - len(self.blocks_at(places)), pages + len(places)
            if not places or not all(self._is_sound(place, parent) for place in places):
                missing = -1
                break
            if count % at_once == 0:
                yield
        if missing or pages != self._num_pages():
            raise RuntimeError("the prefix index and the registered blocks disagree")

    def _num_pages(self) -> int:
        return len(self.nodes) - self.nodes.count(0)

    def _is_sound(self, place: int, parent: int | str) -> bool:
        """A page hangs from this parent, and has blocks or, with windows, children."""
        node, blocks = self._numbers[place], self.blocks_at([place])
        is_used = blocks or node in self._children
        return bool(node and is_used) and self._parents[place] == parent and all(self.nodes[b] == node for b in blocks)
