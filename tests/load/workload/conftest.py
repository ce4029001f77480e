"""Sources of tokens that the tests of workloads share."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.load.workload.token_sources import TokenIdSource, TokenizerSource, WordSource
from headway.text.tokenizer import Tokenizer

STORY = Path(__file__).parents[3] / "headway" / "bundled" / "story"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(STORY)


@pytest.fixture(scope="session")
def text(tokenizer: Tokenizer) -> TokenizerSource:
    return TokenizerSource(tokenizer)


@pytest.fixture(scope="session")
def ids(tokenizer: Tokenizer) -> TokenIdSource:
    return TokenIdSource.of_tokenizer(tokenizer)


@pytest.fixture(scope="session")
def words() -> WordSource:
    return WordSource(1.25, added_tokens=4)
