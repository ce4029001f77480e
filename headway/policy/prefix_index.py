"""Which blocks hold a known prefix: a tree of pages by their tokens.

A page is a run of tokens as long as a block, behind the pages before it. The first page hangs from the request's salt,
which keeps tenants apart. A lookup compares the token ids themselves, so equal hashes can never hand one prompt's keys
and values to another.

A page has up to one block for each KV cache group. Without windows there is one group, and a page comes and goes with
its block. Blocks of windowed groups come and go apart from others, so there a page stays as long as it has a block or
other pages hang from it. A prefix can then be gone on from if groups without a window have a block for each page, and
those with a window for each of the last pages that it sees and for the sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.policy.kv_groups import PASSED, WHOLE, KVCacheGroup

_Tokens = tuple[int, ...]


@dataclass(slots=True)
class PrefixMatch:
    """The known prefix of some tokens at a `version` of the index.

    Args:
        blocks: those that going on from the prefix takes, group by group.
        nodes: its pages.
        whole: how many of the pages groups without a window have.
        length: how many of the pages can be gone on from.
    """

    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    version: int = -1
    whole: int = 0
    length: int = 0


class PrefixIndex:
    """Finds blocks by the tokens of a prompt.

    Few pages have more than one child, so the tokens of a child are looked up by their hash only where there are
    several.

    Args:
        num_blocks: of the pool, `block_size` tokens each.
        groups: KV cache groups; empty where all layers see all tokens.
        references: how many sequences hold each block; the pool keeps it up to date.

    Attributes:
        groups: one without a window where none were given.
        nodes: the page of each block; 0 where it is not registered. No number is given twice.
        version: changes with every block that is registered or forgotten.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: Sequence[KVCacheGroup], references: Sequence[int]
    ) -> None:
        self.groups = tuple(groups) or (WHOLE,)
        self.nodes = [0] * num_blocks
        self.version = 0
        self._block_size = block_size
        self._references = references
        self._has_windows = any(group.window for group in self.groups)
        self._next_node = 1
        self._pages: dict[int, tuple[int | str, _Tokens]] = {}  # the parent, or salt, and the tokens
        self._children: dict[int | str, int | dict[_Tokens, int]] = {}  # of a parent: its only one, or several
        self._blocks: list[dict[int, int]] = [{} for _ in self.groups]  # of each group, by page

    # --- lookups ------------------------------------------------------------------------------------

    def knows(self, node: int) -> bool:
        return node in self._pages

    def child(self, parent: int | str, tokens: _Tokens) -> int | None:
        """The page that has these tokens after a parent."""
        found = self._children.get(parent)
        if isinstance(found, dict):
            return found.get(tokens)
        return found if found is not None and self._pages[found][1] == tokens else None

    def match(self, tokens: Sequence[int], salt: str, known: PrefixMatch) -> None:
        """Bring up to date what is known of the longest known prefix of `tokens`, the last one excluded.

        What still holds is not looked up again.
        """
        if known.version == self.version:
            return
        nodes, pages, size = known.nodes, self._pages, self._block_size
        if not all(map(pages.__contains__, nodes)):
            del nodes[_unbroken(pages, nodes) :]
            del known.blocks[len(nodes) :]
        parent: int | str = nodes[-1] if nodes else salt
        for start in range(len(nodes) * size, (len(tokens) - 1) // size * size, size):
            node = self.child(parent, tuple(tokens[start : start + size]))
            if node is None:
                break
            nodes.append(node)
            parent = node
        if self._has_windows:
            self._measure(known)
        else:
            known.whole = known.length = len(nodes)
            known.blocks += map(self._blocks[0].__getitem__, nodes[len(known.blocks) :])
        known.version = self.version

    def _measure(self, known: PrefixMatch) -> None:
        """Find how many of its pages groups without a window have, and how many can be gone on from."""
        nodes, pairs = known.nodes, list(zip(self.groups, self._blocks, strict=True))
        whole = min((_unbroken(blocks, nodes) for group, blocks in pairs if not group.window), default=len(nodes))
        length = known.whole = whole
        for group, blocks in pairs:
            if (sinks := _unbroken(blocks, nodes[: group.sinks])) < group.sinks:
                length = min(length, sinks)
        # Where a window sees a page without a block, so it does from every shorter prefix that has the page.
        while (gap := self._gap(nodes, length)) is not None:
            length = gap
        known.length, tables = length, [self.table(number, nodes[:length]) for number in range(len(self.groups))]
        known.blocks = [block for _, blocks, sinks in tables for block in sinks + blocks]

    def _gap(self, nodes: list[int], length: int) -> int | None:
        """The last page that a window sees behind so many of them, and has no block of."""
        size, pairs = self._block_size, zip(self.groups, self._blocks, strict=True)
        seen = [(group.first(length * size, size), blocks) for group, blocks in pairs if group.window]
        for at in range(length - 1, min(first for first, _ in seen) - 1, -1):
            if any(at >= first and nodes[at] not in blocks for first, blocks in seen):
                return at
        return None

    def table(self, number: int, nodes: list[int]) -> tuple[int, list[int], list[int]]:
        """What a group needs of these pages to go on behind them, as the parts of a BlockTable; it must have that."""
        group, blocks, size = self.groups[number], self._blocks[number], self._block_size
        first = group.first(len(nodes) * size, size) if group.window else 0
        sinks = nodes[: group.sinks] if first else []
        return first, [blocks[node] for node in nodes[first:]], [blocks[node] for node in sinks]

    def blocks_of(self, nodes: Iterable[int]) -> list[int]:
        """All registered blocks of pages."""
        return [blocks[node] for node in nodes for blocks in self._blocks if node in blocks]

    # --- changes ------------------------------------------------------------------------------------

    def register(
        self, blocks: Sequence[int], parent: int | str, tokens: _Tokens, *further: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Enter full blocks, one after the other, under a parent page or a salt.

        Where another block holds the same prefix already, that one stays; but beside windows, one that nobody uses
        makes way.

        Args:
            blocks: of the first group; PASSED where it has none, as in those of `further` groups.
            tokens: of all these pages.

        Returns:
            The page that later ones hang from, and the blocks that have made way.
        """
        size, nodes, pages, children, first = (
            self._block_size, self.nodes, self._pages, self._children, self._blocks[0]
        )  # fmt: skip
        node, replaced = 0, list[int]()
        for at, block in enumerate(blocks):
            mine = tokens[at * size : (at + 1) * size]
            if self._has_windows or parent in children or nodes[block]:
                node = self._register_beside(parent, mine, [block, *[each[at] for each in further]], replaced)
            else:
                node = self._next_node
                self._next_node += 1
                children[parent] = nodes[block] = node
                pages[node] = parent, mine
                first[node] = block
            parent = node
        if self._has_windows:
            self._prune(parent)
        self.version += 1
        return node, replaced

    def _register_beside(self, parent: int | str, tokens: _Tokens, blocks: list[int], replaced: list[int]) -> int:
        """Enter blocks of a page that may be there, or where other pages hang from the parent."""
        node, nodes = self.child(parent, tokens), self.nodes
        if node is None:
            node = 0 if self._has_windows else nodes[blocks[0]]
            if node:  # shared, but registered under a parent that was evicted: it moves, with all that hangs from it
                self._take_out(node)
            else:
                node, self._next_node = self._next_node, self._next_node + 1
            self._hang(node, parent, tokens)
        for block, known in zip(blocks, self._blocks, strict=True):
            there = known.get(node)
            if block == PASSED or nodes[block]:
                continue
            if there is not None:
                if not self._has_windows or self._references[there]:
                    continue
                nodes[there] = 0
                replaced.append(there)
            known[node], nodes[block] = block, node
        return node

    def _hang(self, node: int, parent: int | str, tokens: _Tokens) -> None:
        self._pages[node] = parent, tokens
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = node
        elif isinstance(siblings, dict):
            siblings[tokens] = node
        else:
            self._children[parent] = {self._pages[siblings][1]: siblings, tokens: node}

    def _take_out(self, node: int) -> int | str:
        """Take a page out of the tree; returns its parent. What hangs from the page is not found any more."""
        parent, tokens = self._pages.pop(node)
        siblings = self._children.pop(parent)
        if isinstance(siblings, dict):
            del siblings[tokens]
            if siblings:
                self._children[parent] = siblings
        return parent

    def _prune(self, node: int | str) -> None:
        """Take out a page without blocks and children, and those before it that are left so."""
        while isinstance(node, int) and not (node in self._children or self.blocks_of([node])):
            node = self._take_out(node)

    def forget(self, blocks: Iterable[int]) -> None:
        """Take registered blocks out."""
        nodes, first = self.nodes, self._blocks[0]
        for block in blocks:
            node, nodes[block] = nodes[block], 0
            if self._has_windows:
                del next(known for known in self._blocks if known.get(node) == block)[node]
                self._prune(node)
            else:
                del first[node]
                self._take_out(node)
        self.version += 1

    def clear(self) -> None:
        """Take all out."""
        self.nodes = [0] * len(self.nodes)
        self._pages.clear()
        self._children.clear()
        for known in self._blocks:
            known.clear()
        self.version += 1

    def check_by_parts(self, at_once: int) -> Iterator[None]:
        """Verify that the tree has each registered block once, with a pause after every so many parents.

        Raises:
            RuntimeError: it has not.
        """
        missing, pages = len(self.nodes) - self.nodes.count(0), len(self._pages)
        for count, (parent, found) in enumerate(self._children.items(), 1):
            for node in found.values() if isinstance(found, dict) else [found]:
                blocks, page = self.blocks_of([node]), self._pages.get(node)
                missing, pages = missing - len(blocks), pages - 1
                is_used = blocks or (self._has_windows and node in self._children)
                if not is_used or page is None or page[0] != parent or any(self.nodes[b] != node for b in blocks):
                    raise RuntimeError(_DISAGREE)
            if count % at_once == 0:
                yield
        if missing or pages:
            raise RuntimeError(_DISAGREE)


_DISAGREE = "the prefix index and the registered blocks disagree"


def _unbroken(known: dict[int, int] | dict[int, tuple[int | str, _Tokens]], nodes: list[int]) -> int:
    """How many of the first nodes are known."""
    return next((at for at, node in enumerate(nodes) if node not in known), len(nodes))
