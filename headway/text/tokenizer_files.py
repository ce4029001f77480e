"""What a Hugging Face folder says of its tokenizer: tokenizer.json and its companions, read and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Pre-tokenizers that drop nothing of a text.
_KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts")


class TextError(ValueError):
    """A tokenizer or template is missing, broken, or cannot do what was asked; one line for the user."""


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


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """The fields of the Tokenizer that tokenizer.json and its companions in a folder describe.

    Raises:
        TextError: when a file is missing or broken; it names the file.
    """
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
    return {
        "backend": backend,
        "folder": folder,
        "vocab_size": backend.get_vocab_size() if vocab_size is None else vocab_size,
        "eos_token_ids": sorted(eos_token_ids),
        "special_tokens": special_tokens,
        "special_ids": frozenset(token_id for token_id, token in added.items() if token.special),
        "config": config,
        "generation_config": generation_config,
        "is_byte_level": (described.get("decoder") or {}).get("type") == "ByteLevel",
        "longest_token": _longest_token(described),
        "left_out": tuple(left_out),
    }


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
