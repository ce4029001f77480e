"""Tokenizers that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import save, save_chat_model, sentencepiece_style


@pytest.fixture(scope="session")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def pieces_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    return save(folder, sentencepiece_style(), bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True)


@pytest.fixture(scope="session")
def by_bytes(bytes_folder: Path) -> Tokenizer:
    return Tokenizer.load(bytes_folder)


@pytest.fixture(scope="session")
def by_pieces(pieces_folder: Path) -> Tokenizer:
    return Tokenizer.load(pieces_folder)
