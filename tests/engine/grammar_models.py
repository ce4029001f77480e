"""A tiny random checkpoint with a tokenizer whose tokens are bytes and some pieces of JSON."""

from __future__ import annotations

import json
from pathlib import Path

from headway.text.tokenizer import BYTE_OF
from tests.engine.models import write_config

PIECES = ['{"', '":', '",', '"}', "true", "null", "name", ' "', "},", "ab", "12", "\n  "]
EOS, VOCAB = 0, 300


def save_grammar_model(folder: Path, **changes: object) -> Path:
    """A model with random weights (load_format="dummy"): token 0 is the end, 1 is special, and 256 tokens are bytes."""
    write_config(folder, vocab_size=VOCAB, eos_token_id=EOS, **changes)
    letter_of = {byte: letter for letter, byte in BYTE_OF.items()}
    texts = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
    vocab = {"".join(letter_of[byte] for byte in text): 2 + at for at, text in enumerate(texts)}
    added = [
        {"id": at, "content": text, "special": True, "normalized": False, "single_word": False, "lstrip": False,
         "rstrip": False}
        for at, text in enumerate(("<end>", "<other>"))
    ]  # fmt: skip
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {"<end>": 0, "<other>": 1, **vocab}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder
