"""Prompts of a wanted length: which of them share a beginning, and that no others do.

A source of tokens (`token_sources.py`) is an alphabet whose members are about a token each. The maker draws members: a
stream of its own for each prompt, and one for each block that prompts share, so that the same block id is the same
tokens in every prompt, and after the same blocks a server's prefix cache can hold what it computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.load.request import Prompt

Members = NDArray[np.int64]
BLOCKS_KEPT = 4096
QUERY_TOKENS = 32  # tokens in the query of a ranking

# Kinds of streams. Prompts' own and blocks start with different members.
_OWN, _BLOCK, _ORDER, _SPARE = range(4)


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """A prompt and its length in tokens as the server will count them, None where that cannot be told."""

    prompt: Prompt
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Texts:
    """What a request has if nothing is generated: `count` texts, and a query before them for rankings and scores."""

    count: int = 1
    query: bool = False

    def made(self, maker: PromptMaker, first: MadePrompt, more: Callable[[], MadePrompt]) -> MadePrompt:
        """A prompt of all of them; `more` makes the texts behind the first."""
        query = [maker.make(QUERY_TOKENS)] if self.query else []
        found = [*query, first, *(more() for _ in range(self.count - 1))]
        if len(found) == 1:
            return first
        said = tuple(each.prompt.text or each.prompt.token_ids or () for each in found)
        tokens = [each.tokens for each in found if each.tokens is not None]
        return MadePrompt(Prompt(several=said), sum(tokens) if len(tokens) == len(found) else None)

    def longest(self, tokens: int) -> int:
        """Tokens of a text, of so many tokens of a request."""
        return max(tokens - QUERY_TOKENS * self.query, 1) // self.count


class TokenSource(Protocol):
    """An alphabet, and how its members become a prompt. It has no state: the same members are the same prompt.

    Attributes:
        size: the size of the alphabet; members are 0 .. size - 1.
        openers: members that a prompt may start with, of shape [n].
        added_tokens: how many tokens the server puts around a prompt (a beginning-of-text token, a chat template).
        token_ids: prompts are token ids, which chats and conversations cannot use.
        estimates: there is no tokenizer, so lengths are approximate.
        is_text: members are the tokens of a text in their order, so a stretch is one that begins with an opener.
    """

    size: int
    openers: Members
    added_tokens: int
    token_ids: bool = False
    estimates: bool = False
    is_text: bool = False

    def members_for(self, tokens: int) -> int:
        """How many members make a stretch of `tokens` tokens."""
        return tokens

    def render(self, members: Members, tokens: int, fixed: int, spare: np.random.Generator) -> MadePrompt:
        """The prompt of these members, which should be `tokens` long without what the server adds.

        Where it is not, members behind the first `fixed` may be left out, and new ones drawn from `spare`.
        """
        ...

    def of_text(self, text: str) -> MadePrompt:
        """A given text as a prompt.

        Raises:
            BenchError: when this source cannot.
        """
        ...

    def count(self, text: str) -> int:
        """Tokens of a text, without what the server adds; an estimate where there is no tokenizer."""
        ...


class PromptMaker:
    """Makes the prompts of one workload; the same seed makes the same prompts in the same order.

    No two prompts without a shared block begin with the same two members, for the first openers / 2 * size prompts;
    as far as openers last not even the first is the same. The same holds among blocks of ids 0, 1, 2, ... and between
    blocks and prompts.
    """

    def __init__(self, source: TokenSource, seed: int, made: int = 0) -> None:
        """`made` prompts have been made before: the next is unlike those too."""
        self.source = source
        self._seed = seed
        order = np.random.default_rng([seed, _ORDER])
        openers = source.openers if len(source.openers) > 1 else np.arange(source.size)
        # An even number, so that going round keeps the two kinds apart.
        self._openers = order.permutation(openers)[: max(len(openers) // 2 * 2, 1)]
        self._seconds = order.permutation(source.size)
        self._made = made
        self._cached_block = lru_cache(BLOCKS_KEPT)(self._block)

    def block(self, block_id: int, tokens: int) -> Members:
        """Members of a shared block, of shape [n]: a longer stretch of the same block begins with a shorter one."""
        return self._cached_block(block_id, self.source.members_for(tokens))

    def _block(self, block_id: int, count: int) -> Members:
        return self._stream(_BLOCK, block_id, count)

    def _stream(self, kind: int, number: int, count: int) -> Members:
        rounds, first = divmod(2 * number + kind, len(self._openers))
        if self.source.is_text:  # of later rounds behind the opener, so that they begin otherwise
            return (self._openers[first] + rounds + np.arange(count)) % self.source.size
        members = np.random.default_rng([self._seed, kind, number]).integers(0, self.source.size, count)
        members[:1] = self._openers[first]
        members[1:2] = self._seconds[(rounds + first) % self.source.size]
        return members

    def make(self, tokens: int, shared: Sequence[tuple[int, int]] = (), continues: bool = False) -> MadePrompt:
        """A prompt of `tokens` tokens, counted as the server will.

        Args:
            shared: (block id, tokens) of the blocks that it begins with; what does not fit is cut off. The rest is
                the prompt's own.
            continues: it goes behind an earlier turn, so that nothing is added in front.
        """
        room = wanted = max(tokens - (0 if continues else self.source.added_tokens), 1)
        parts = []
        for block_id, length in shared:
            length = min(length, room)
            if length:
                parts.append(self.block(block_id, length))
            room -= length
        if room:
            own = self.source.members_for(wanted) - sum(map(len, parts))
            parts.append(self._stream(_OWN, self._made, max(own, 1)))
        fixed = sum(map(len, parts[:-1]))
        spare = np.random.default_rng([self._seed, _SPARE, self._made])
        self._made += 1
        made = self.source.render(np.concatenate(parts), wanted, fixed, spare)
        if continues or made.tokens is None:
            return made
        return MadePrompt(made.prompt, made.tokens + self.source.added_tokens)
