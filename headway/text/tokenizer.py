"""A checkpoint's tokenizer: text to token ids and back, from the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

LONG_TOKENS = 2000
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextError(ValueError):
    """A tokenizer or template is missing, broken, or cannot do what was asked; one line for the user."""


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
        values = [BYTE_OF.get(character) for character in token]
        return token.encode() if None in values else bytes(value for value in values if value is not None)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


# Pre-tokenizers that drop nothing of a text.
_KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts")
BYTE_OF = _byte_level_alphabet()


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file, or {} for an optional file that is absent.

    Raises:
        TextError: naming the file, when it is missing, unreadable, or not a JSON object.
    """
    if not required and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TextError(f"{path} is missing; a checkpoint folder needs it") from None
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise TextError(f"{path} holds a {type(content).__name__}; a JSON object is needed")
    return content


@dataclass(eq=False)
class Tokenizer:
    """Encodes and decodes with one checkpoint's vocabulary.

    Attributes:
        vocab_size: ids below this are known to the model (its embedding may be larger than the tokenizer's list).
        eos_token_ids: every id that ends a text, from generation_config.json, config.json and the tokenizer's own.
        special_tokens: name, as bos_token, to its text.
        config: tokenizer_config.json; generation_config: generation_config.json, or {}.
        is_byte_level: tokens are byte strings, so text can be decoded byte by byte.
        longest_token: characters of a text that one token stands for at most; None where that is not known.
        left_out: texts of added tokens that the model has no row for. They are read as any other text.
    """

    backend: tokenizers.Tokenizer
    folder: Path
    vocab_size: int
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    special_ids: frozenset[int]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    is_byte_level: bool
    longest_token: int | None = None
    left_out: tuple[str, ...] = ()
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and its companions from `folder`.

        Raises:
            TextError: when a file is missing or broken; it names the file.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file() and (other := folder / "tiktoken.model").is_file():  # as Kimi K2 is published
            raise TextError(f"{other} cannot be read; convert the tokenizer to tokenizer.json, in the same folder")
        described = read_json(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TextError(f"{path} is not a tokenizer that can be loaded: {error}") from None
        # Lengths are checked against the model's context; the file's own limits would cut in silence.
        backend.no_truncation()
        backend.no_padding()
        config = read_json(folder / "tokenizer_config.json", required=False)
        generation_config = read_json(folder / "generation_config.json", required=False)
        special_tokens = _special_tokens(folder, config)
        vocab_size, left_out = _model_vocab_size(folder), dict[str, int]()
        if vocab_size is not None:
            backend, left_out = _fitted(backend, described, vocab_size, path)
            for name, token in special_tokens.items():
                if token in left_out and name in ("bos_token", "eos_token"):
                    raise TextError(_id_error(f"{path}: {name} {token!r}", left_out[token], vocab_size))
        added = backend.get_added_tokens_decoder()
        own_eos = backend.token_to_id(special_tokens.get("eos_token", ""))
        eos_token_ids = stated_eos_ids(folder) | (set() if own_eos is None else {own_eos})
        return cls(
            backend=backend,
            folder=folder,
            vocab_size=backend.get_vocab_size() if vocab_size is None else vocab_size,
            eos_token_ids=sorted(eos_token_ids),
            special_tokens=special_tokens,
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            config=config,
            generation_config=generation_config,
            is_byte_level=(described.get("decoder") or {}).get("type") == "ByteLevel",
            longest_token=_longest_token(described),
            left_out=tuple(left_out),
        )

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
        bos, wants_bos = self.bos_token_id, self.config.get("add_bos_token")
        if bos is None or not isinstance(wants_bos, bool):
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
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else bytes_of(token, self.is_byte_level)

    def token_text(self, token_id: int) -> str:
        """A token as a string of its own; `bytes:\\xe2\\x82` when it is only part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _parts(described: Any, within: str) -> list[dict[str, Any]]:
    """A step of a tokenizer, or the steps in it."""
    if not isinstance(described, dict):
        return []
    inner = described.get(within)
    return [each for part in inner for each in _parts(part, within)] if isinstance(inner, list) else [described]


def _longest_token(described: dict[str, Any]) -> int | None:
    """Characters for which one token can stand. None where any number can: unknown words, blanks that are dropped."""
    model, cuts = described.get("model") or {}, _parts(described.get("pre_tokenizer"), "pretokenizers")
    vocab, added = model.get("vocab"), described.get("added_tokens") or []
    if model.get("type") != "BPE" or not isinstance(vocab, dict) or not vocab:
        return None
    if not (model.get("byte_fallback") or any(each.get("type") == "ByteLevel" for each in cuts)):
        return None
    if any(each.get("type") not in _KEEPING or each.get("behavior") == "Removed" for each in cuts):
        return None
    if any(each.get("lstrip") or each.get("rstrip") for each in added):
        return None
    factor = 1
    for each in _parts(described.get("normalizer"), "normalizers"):
        replaced = (each.get("pattern") or {}).get("String")
        if each.get("type") == "NFC":
            factor = 4  # one character can be composed of so many
        elif each.get("type") != "Prepend" and not (
            each.get("type") == "Replace" and replaced and len(each.get("content", "")) >= len(replaced)
        ):
            return None
    return factor * max(max(map(len, vocab)), max((len(each["content"]) for each in added), default=1))


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    found = read_json(folder / "special_tokens_map.json", required=False) | config
    texts: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = found.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            texts[name] = token
    return texts


def _model_vocab_size(folder: Path) -> int | None:
    """The size of the vocabulary by config.json; that of the part that reads text, if the model has others."""
    stated = read_json(folder / "config.json", required=False)
    text = stated.get("text_config")
    for part in (text if isinstance(text, dict) else {}, stated):
        if isinstance(size := part.get("vocab_size"), int) and not isinstance(size, bool):
            return size
    return None


def _fitted(
    backend: tokenizers.Tokenizer, described: dict[str, Any], vocab_size: int, path: Path
) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """The tokenizer without added tokens that the model has no row for, as the one of images in Gemma 3 1B.

    A text that has one would make the engine look behind the embedding.

    Returns:
        That tokenizer, and the ids of those tokens by their texts.

    Raises:
        TextError: tokens that are needed are beyond the model's.
    """
    vocab = described["model"].get("vocab")
    largest = max(vocab.values(), default=0) if isinstance(vocab, dict) else len(vocab or ()) - 1
    if largest >= vocab_size:
        raise TextError(
            f"{path} has {largest + 1:,} tokens, but the model has {vocab_size:,}; take the tokenizer of this model"
        )
    added = backend.get_added_tokens_decoder()
    beyond = {token.content: number for number, token in added.items() if number >= vocab_size}
    if beyond:
        kept = [token for token in described["added_tokens"] if token["content"] not in beyond]
        backend = tokenizers.Tokenizer.from_str(json.dumps({**described, "added_tokens": kept}))
        backend.no_truncation()
        backend.no_padding()
        for token, number in zip((around := backend.encode("a")).tokens, around.ids, strict=True):
            if number >= vocab_size:
                raise TextError(_id_error(f"{path}: {token!r}, which goes around each text,", number, vocab_size))
    return backend, beyond


def _id_error(what: str, number: int, vocab_size: int) -> str:
    return f"{what} has the id {number}, but the model has {vocab_size:,} tokens; take the tokenizer of this model"


def stated_eos_ids(folder: Path) -> set[int]:
    """The ids that end a text, as generation_config.json says, or else config.json.

    Of several, those that the model does not have are left out.

    Raises:
        TextError: naming the file in which they are not ids, or the model has none of them.
    """
    vocab_size = _model_vocab_size(folder)
    for name in ("generation_config.json", "config.json"):
        stated = read_json(folder / name, required=False).get("eos_token_id")
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
            raise TextError(f"{folder / name}: eos_token_id is {stated!r}; it must be a token id or a list of them")
        if known := {each for each in ids if each >= 0 and (vocab_size is None or each < vocab_size)}:
            return known
        if ids:
            has = "ids are never negative" if vocab_size is None else f"the model has the ids 0 to {vocab_size - 1}"
            raise TextError(f"{folder / name}: eos_token_id is {str(stated)[:60]}, but {has}; answers would not end")
    return set()
