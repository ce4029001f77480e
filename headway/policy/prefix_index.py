"""Which blocks hold a known prefix: a tree of blocks by their tokens.

A registered block is a node of the tree, and hangs from the node of the block before it. The first block hangs from the
request's salt, which keeps tenants apart. A lookup compares the token ids themselves, so equal hashes can never hand
one prompt's keys and values to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_Tokens = tuple[int, ...]


@dataclass(slots=True)
class PrefixMatch:
    """The known prefix of some tokens at a `version` of the index: its blocks, and the node of each.

    Args:
        whole, length: of an index of pages, see there.
    """

    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    version: int = -1
    whole: int = 0
    length: int = 0


class PrefixIndex:
    """Finds blocks by the tokens of a prompt.

    Few nodes have more than one child, so the tokens of a child are looked up by their hash only where there are
    several.

    Args:
        num_blocks: of the pool, `block_size` tokens each.

    Attributes:
        nodes: of each block; 0 where it is not registered. No number is given twice.
        version: changes with every block that is registered or forgotten.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.nodes = [0] * num_blocks
        self.version = 0
        self._block_size = block_size
        self._next_node = 1
        self._parents: list[int | str] = [0] * num_blocks  # a node or a salt; of registered blocks, as their tokens
        self._tokens: list[_Tokens] = [()] * num_blocks
        self._children: dict[int | str, int | dict[_Tokens, int]] = {}  # of a parent: its only one, or several

    def child(self, parent: int | str, tokens: _Tokens) -> int | None:
        """The block that holds these tokens after a parent."""
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
        self._drop_forgotten(known)
        parent: int | str = known.nodes[-1] if known.nodes else salt
        size = self._block_size
        for start in range(len(known.blocks) * size, (len(tokens) - 1) // size * size, size):
            block = self.child(parent, tuple(tokens[start : start + size]))
            if block is None:
                break
            parent = self.nodes[block]
            known.blocks.append(block)
            known.nodes.append(parent)
        known.version = self.version

    def _drop_forgotten(self, known: PrefixMatch) -> None:
        """Drop what no longer holds: a block whose node has changed, and all after it."""
        nodes = self.nodes
        for at, (block, node) in enumerate(zip(known.blocks, known.nodes, strict=True)):
            if nodes[block] != node:
                del known.blocks[at:], known.nodes[at:]
                return

    def register(self, blocks: list[int], parent: int | str, tokens: _Tokens) -> int:
        """Enter full blocks, one after the other, under a parent node.

        Where another block already holds the same prefix, that one stays in the index.

        Args:
            tokens: of all these blocks.

        Returns:
            The node that later blocks hang from.
        """
        size, nodes, parents, children = self._block_size, self.nodes, self._parents, self._children
        node = 0
        for at, block in enumerate(blocks):
            mine = tokens[at * size : (at + 1) * size]
            if parent in children or nodes[block]:
                node = self._register_beside(block, parent, mine)
            else:
                children[parent] = block
                parents[block], self._tokens[block] = parent, mine
                node = nodes[block] = self._next_node
                self._next_node += 1
            parent = node
        self.version += 1
        return node

    def _register_beside(self, block: int, parent: int | str, tokens: _Tokens) -> int:
        """Enter a block where the parent has other children, or the block is registered already."""
        found = self.child(parent, tokens)
        if found is not None:
            return self.nodes[found]
        node = self.nodes[block]
        if node:  # shared, but registered under a parent that was evicted: it moves, with all that hangs from it
            self.forget([block])
        else:
            node = self._next_node
            self._next_node += 1
        self.nodes[block] = node
        self._parents[block], self._tokens[block] = parent, tokens
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = block
        elif isinstance(siblings, dict):
            siblings[tokens] = block
        else:
            self._children[parent] = {self._tokens[siblings]: siblings, tokens: block}
        return node

    def forget(self, blocks: Iterable[int]) -> None:
        """Take registered blocks out. What hangs from them is not found any more."""
        parents, children, nodes = self._parents, self._children, self.nodes
        for block in blocks:
            siblings = children.pop(parents[block])
            if isinstance(siblings, dict):
                del siblings[self._tokens[block]]
                if siblings:
                    children[parents[block]] = siblings
            nodes[block] = 0
        self.version += 1

    def clear(self) -> None:
        """Take all out."""
        self.nodes = [0] * len(self.nodes)
        self._children.clear()
        self.version += 1

    def check_by_parts(self, at_once: int) -> Iterator[None]:
        """Verify that the tree has each registered block once, with a pause after every so many parents.

        Raises:
            RuntimeError: it has not.
        """
        missing = len(self.nodes) - self.nodes.count(0)
        for count, (parent, found) in enumerate(self._children.items(), 1):
            blocks = list(found.values()) if isinstance(found, dict) else [found]
            missing -= len(blocks)
            if not blocks or not all(self.nodes[block] and self._parents[block] == parent for block in blocks):
                missing = -1
                break
            if count % at_once == 0:
                yield
        if missing:
            raise RuntimeError("the prefix index and the registered blocks disagree")
