"""Keeps the token ids of texts that come again: system prompts, and what has been said in a conversation.

A prompt is cut before each token that its template marks turns with, and each part is encoded and kept by itself. The
ids of the whole are exactly those of its parts, one after the other. For a tokenizer looks for its added tokens before
it does anything else, and what lies between two of them is normalised, split and encoded by itself. So it is enough
that a cut goes before a token that the tokenizer finds there in the whole text, and again in the part. It does where

* the token is looked for in the text as it is, not as it is normalised (`normalized` false);
* no such token is longer and begins with it, and its first character is in such tokens only at their beginning: then
  none that begins before it reaches into it;
* it takes no blanks before it along (`lstrip`), and does not begin with one that a token before it takes (`rstrip`);
* no added token looks at the characters around it (`single_word`).

A part that begins with such a token has its other text behind it, as in the whole; so what is done at the beginning of
a text alone (the first blank of Metaspace) is done there in neither. A model that draws by chance (dropout) has no ids
to keep.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from itertools import pairwise

import tokenizers

# An entry takes so much memory beside its text and ids, in the unit of `most`.
ENTRY_CHARS = 100
# A longer text is one part: to look for cuts in it would take milliseconds.
MOST_CHARS = 2**20


def safe_cuts(backend: tokenizers.Tokenizer, template: str) -> re.Pattern[str] | None:
    """Matches the tokens of a chat template before which any text may be cut; None where there are none."""
    draws = json.loads(backend.to_str())["model"].get("dropout")
    if draws or backend.encode_special_tokens:
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.single_word for token in added):
        return None
    raw = sorted({token.content for token in added if not token.normalized and token.content})
    inner = {character for content in raw for character in content[1:]}
    beginnings = {one for one, following in pairwise(raw) if following.startswith(one)}
    safe = [
        token.content
        for token in added
        if not (token.normalized or token.lstrip)
        and token.content
        and token.content in template
        and token.content not in beginnings
        and token.content[0] not in inner
        and not token.content[0].isspace()
    ]
    return re.compile("|".join(map(re.escape, safe))) if safe else None


class KnownTexts:
    """Token ids of parts of texts, the ones least recently used forgotten first.

    Args:
        cuts: as safe_cuts(); None keeps nothing, and each text is one part.
        most: characters that are kept.

    Attributes:
        queries, hits: characters that were looked up, and found.
    """

    def __init__(self, cuts: re.Pattern[str] | None, most: int) -> None:
        self._cuts = cuts
        self._most = most
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self.size = self.queries = self.hits = 0

    def parts(self, text: str) -> list[str]:
        """The text in parts whose ids, one after the other, are its own."""
        if self._cuts is None or not self._most or len(text) > MOST_CHARS:
            return [text]
        starts = [0, *(match.start() for match in self._cuts.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(starts) if start < end] or [text]

    def find(self, part: str, salt: str) -> array[int] | None:
        """The ids of a part, where one of the same salt is known."""
        if self._cuts is None:
            return None
        found = self._ids.get((salt, part))
        self.queries += len(part)
        if found is not None:
            self.hits += len(part)
            self._ids.move_to_end((salt, part))
        return found

    def keep(self, part: str, salt: str, ids: list[int]) -> None:
        """Remember the ids of a part, which was encoded without special tokens around it."""
        cost = len(part) + len(salt) + ENTRY_CHARS
        if self._cuts is None or (salt, part) in self._ids or cost > self._most:
            return
        self._ids[salt, part] = array("i", ids)
        self.size += cost
        while self.size > self._most:
            forgotten, _ = self._ids.popitem(last=False)
            self.size -= sum(map(len, forgotten)) + ENTRY_CHARS
