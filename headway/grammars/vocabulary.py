"""A checkpoint's vocabulary as grammars see it: the bytes of each token, and which tokens end a text."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from llguidance import LLTokenizer

from headway.grammars.compile import GrammarError
from headway.text.tokenizer import bytes_of
from headway.text.tokenizer_files import TextError, read_json

_KINDS = ("BPE", "Unigram")
PAUSE_S = 0.02


class _Tokens:
    """What LLTokenizer reads of a tokenizer, and asks for the tokens of a text that has to come."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self.made: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """The longest token each time: for the short texts that a grammar forces, mostly what the tokenizer makes."""
        assert self.made is not None
        return self.made.greedy_tokenize(text)


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Read tokenizer.json. For 150,000 tokens this takes a second, and most of it holds the interpreter's lock.

    Args:
        vocab_size: tokens that the model knows; those beyond are left out.

    Raises:
        GrammarError: texts of this tokenizer cannot be held to a grammar, or nothing ends one.
    """
    if not eos_token_ids:
        raise GrammarError("the model has no end token, so a structured output could not end")
    try:
        described = read_json(folder / "tokenizer.json")
    except TextError as error:
        raise GrammarError(f"structured outputs need a tokenizer: {error}") from None
    model = described.get("model") or {}
    if model.get("type", "BPE") not in _KINDS:
        raise GrammarError(
            f"the tokenizer is of the kind {model.get('type')}; structured outputs need {' or '.join(_KINDS)}"
        )
    is_byte_level = (described.get("decoder") or {}).get("type") == "ByteLevel"
    vocab = model.get("vocab") or {}
    pairs = vocab.items() if isinstance(vocab, dict) else ((token, at) for at, (token, _) in enumerate(vocab))
    tokens, special = [b""] * vocab_size, []
    for token, number in pairs:
        if number < vocab_size:
            tokens[number] = bytes_of(token, is_byte_level)
    for added in described.get("added_tokens") or []:
        if added["id"] < vocab_size:
            tokens[added["id"]] = added["content"].encode()
            if added.get("special"):
                special.append(added["id"])
    ends = sorted(eos_token_ids)
    wrapper = _Tokens(tokens, special, ends[0])
    # In two parts, between which others get the interpreter's lock.
    wrapper.made = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=ends, slices=[])  # type: ignore[arg-type]
    wrapper.tokens = []  # they have been read
    time.sleep(PAUSE_S)
    return wrapper.made.with_slices(LLTokenizer.general_slices())
