"""Prompts of a workload for a simulation: a character for each token, as only equality of tokens matters."""

from __future__ import annotations

import zlib

import numpy as np

from headway.load.request import Prompt
from headway.load.workload.prompts import MadePrompt, Members, TokenSource
from headway.simulator.options import CHARACTERS
from headway.text.tokenizer import Tokenizer

_MEMBERS = 20_000
_FIRST = 0x4E00  # the first of so many characters of two bytes
_FIRST_ID = 0x10000  # where a tokenizer's ids begin


class SketchSource(TokenSource):
    """A source of prompts that have as many characters as the real ones have tokens.

    Args:
        tokenizer: a tokenizer for the texts of a dataset; without it a token stands for CHARACTERS characters of them.
    """

    size = _MEMBERS
    added_tokens = 0

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.openers = np.arange(_MEMBERS)
        self._tokenizer = tokenizer

    def render(self, members: Members, tokens: int, fixed: int, spare: np.random.Generator) -> MadePrompt:
        return MadePrompt(Prompt(text=(members + _FIRST).astype("<u2").tobytes().decode("utf-16-le")), len(members))

    def of_text(self, text: str) -> MadePrompt:
        if self._tokenizer is not None:
            ids = [_FIRST_ID + token for token in self._tokenizer.encode(text)]
        else:
            pieces = (text[start : start + CHARACTERS] for start in range(0, len(text), CHARACTERS))
            ids = [_FIRST + zlib.crc32(piece.encode(errors="replace")) % _MEMBERS for piece in pieces]
        return MadePrompt(Prompt(text="".join(map(chr, ids))), len(ids))

    def count(self, text: str) -> int:
        if self._tokenizer is not None:
            return len(self._tokenizer.encode(text, add_special_tokens=False))
        return -(-len(text) // CHARACTERS)


def ids_of(prompt: Prompt) -> list[int]:
    """Token ids of a prompt that a SketchSource has made."""
    ids: list[int] = np.frombuffer((prompt.text or "").encode("utf-32-le"), "<u4").tolist()
    return ids
