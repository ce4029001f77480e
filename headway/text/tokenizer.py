"""A checkpoint's tokenizer: text to token ids and back, from the files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headway.text.tokenizer_files import read_tokenizer

LONG_TOKENS = 2000


def _byte_level_alphabet() -> dict[str, int]:
    """Printable character -> byte, as byte-level BPE writes bytes.

    Bytes that are printable in Latin-1 stand for themselves; the rest take the code points from 256 on, in order.
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(themselves)]
    return {chr(byte): byte for byte in themselves} | {chr(256 + i): byte for i, byte in enumerate(others)}


def bytes_of(token: str, is_byte_level: bool) -> bytes:
    """The bytes that a token of the vocabulary stands for, from how tokenizer.json writes it."""
    if is_byte_level:
        return bytes(map(BYTE_OF.__getitem__, token)) if BYTE_OF.keys() >= {*token} else token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


BYTE_OF = _byte_level_alphabet()


@dataclass(eq=False)
class Tokenizer:
    """Encodes and decodes with one checkpoint's vocabulary."""

    backend: tokenizers.Tokenizer
    folder: Path
    vocab_size: int  # ids below this are known to the model (its embedding may be larger than the tokenizer's list)
    # Every id that ends a text, from generation_config.json, config.json and the tokenizer's own.
    eos_token_ids: list[int]
    special_tokens: dict[str, str]  # name, as bos_token, to its text
    special_ids: frozenset[int]
    config: dict[str, Any]  # tokenizer_config.json; generation_config: generation_config.json, or {}
    generation_config: dict[str, Any]
    is_byte_level: bool  # tokens are byte strings, so text can be decoded byte by byte
    # Characters of a text that one token stands for at most; None where that is not known.
    longest_token: int | None = None
    # Texts of added tokens that the model has no row for. They are read as any other text.
    left_out: tuple[str, ...] = ()
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and its companions from `folder`.

        Raises:
            TextError: when a file is missing or broken; it names the file.
        """
        return cls(**read_tokenizer(Path(folder)))

    @property
    def bos_token_id(self) -> int | None:
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.backend.token_to_id(token)

    def special_ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of special tokens among some texts, by text."""
        found = {text: self.backend.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in found.items() if token_id in self.special_ids}

    def end_with(self, token: str) -> None:
        """Have this token end a text too, where the vocabulary has it."""
        token_id = self.backend.token_to_id(token)
        if token_id is not None:
            self.eos_token_ids = sorted({*self.eos_token_ids, token_id})

    @cached_property
    def num_added(self) -> tuple[int, int]:
        """Special tokens that encoding puts before a text and behind it."""
        plain, whole = (self.encode_here("a", each) for each in (False, True))
        starts = range(len(whole) - len(plain) + 1)
        before = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
        return before, max(0, len(whole) - len(plain) - before)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. The interpreter lock is free while a long text is encoded."""
        return next(self.encode_all([text], add_special_tokens))

    def encode_here(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode in the calling thread, so that it does not wait for what the library's threads have to do."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_stated_bos(text, ids) if add_special_tokens else ids

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Token ids of each of the texts, which are encoded together at the first step, by the library's threads."""
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        for text, one in zip(texts, encoded, strict=True):
            yield self._with_stated_bos(text, one.ids) if add_special_tokens else one.ids

    def shorter(self, text: str, num_tokens: int, keep_end: bool = False) -> str:
        """The text without its last tokens, or with `keep_end` its first; at least one character less."""
        spans = self.backend.encode(text, add_special_tokens=False).offsets
        if num_tokens >= len(spans):
            return ""
        if keep_end:
            return text[max(1, spans[num_tokens - 1][1]) :]
        return text[: min(spans[-num_tokens][0], len(text) - 1)]

    def _with_stated_bos(self, text: str, ids: list[int]) -> list[int]:
        """tokenizer_config.json's add_bos_token, where it is stated, wins over tokenizer.json's post-processor."""
        wants_bos = self.config.get("add_bos_token")
        if not isinstance(wants_bos, bool) or (bos := self.bos_token_id) is None:
            return ids
        has_bos = ids[:1] == [bos] and not text.startswith(self.special_tokens["bos_token"])
        if wants_bos == has_bos:
            return ids
        return [bos, *ids] if wants_bos else ids[1:]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing."""
        if len(token_ids) > LONG_TOKENS:  # only this lets go of the interpreter's lock
            texts: list[str] = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
            return texts[0]
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an id that the tokenizer has no token for."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else bytes_of(token, self.is_byte_level)
        return known

    def token_text(self, token_id: int) -> str:
        """A token as a string of its own; `bytes:\\xe2\\x82` when it is only part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
