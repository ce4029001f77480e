"""Prompts: as long as wanted, and shared only where that is said."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headway.load.errors import BenchError
from headway.load.workload.prompts import PromptMaker, TokenSource
from headway.load.workload.token_sources import WORDS, TokenIdSource, TokenizerSource, WordSource
from headway.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_level, save, sentencepiece_style


def tokens_of(source: TokenSource, maker: PromptMaker, tokens: int, *shared: tuple[int, int]) -> list[int]:
    """The token ids that a server would compute."""
    prompt = maker.make(tokens, shared).prompt
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    assert isinstance(source, TokenizerSource) and prompt.text is not None
    return source.tokenizer.encode(prompt.text)


def common(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.fixture(params=["text", "ids", "tiny byte-level", "tiny sentencepiece", "one token per character"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> TokenSource:
    if request.param in ("text", "ids"):
        return request.getfixturevalue(request.param)  # type: ignore[no-any-return]
    makers = {
        "tiny byte-level": byte_level,
        "tiny sentencepiece": sentencepiece_style,
        "one token per character": characters,
    }
    return TokenizerSource(Tokenizer.load(save(tmp_path / "model", makers[request.param](), bos_token="<s>")))


def characters() -> Backend:
    """A tokenizer of a checkpoint made for tests: without merges, no text ever becomes the words of its vocabulary."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *[f"Ġw{n}" for n in range(500)]])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_prompts_have_the_wanted_length(source: TokenSource) -> None:
    maker = PromptMaker(source, 0)
    wanted = [*range(2, 40), 100, 999, 3000]
    lengths = [len(tokens_of(source, maker, length)) for length in wanted]
    exact = isinstance(source, TokenIdSource) or (isinstance(source, TokenizerSource) and source.alphabet.stable)
    off = [abs(got - length) for got, length in zip(lengths, wanted, strict=True)]
    assert sum(each > 0 for each in off) <= (0 if exact else 1), off
    assert max(off) <= 1


def test_the_reported_length_is_the_real_one(source: TokenSource) -> None:
    maker, again = PromptMaker(source, 3), PromptMaker(source, 3)
    for length in (1, 2, 17, 400):
        assert maker.make(length).tokens == len(tokens_of(source, again, length))


def test_only_the_unusual_tokenizer_needs_to_measure(source: TokenSource, request: pytest.FixtureRequest) -> None:
    if isinstance(source, TokenizerSource):
        assert source.alphabet.stable == ("sentencepiece" not in request.node.name)


def test_what_the_tokenizer_adds_in_front_is_part_of_the_length(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path / "model", sentencepiece_style(), bos_token="<s>"))
    source = TokenizerSource(tokenizer)
    assert source.added_tokens == 1
    made = PromptMaker(source, 0).make(50)
    assert made.tokens == 50 == len(tokenizer.encode(made.prompt.text or ""))
    later = PromptMaker(source, 0).make(50, continues=True)
    assert later.tokens == 50 == source.count(later.prompt.text or "")
    assert TokenizerSource(tokenizer, added_tokens=12).added_tokens == 12


def test_prompts_of_shared_blocks_share_exactly_those_tokens(text: TokenizerSource, ids: TokenIdSource) -> None:
    for source in (text, ids):
        maker = PromptMaker(source, 1)
        first = tokens_of(source, maker, 1700, (5, 512), (6, 512), (7, 512))
        second = tokens_of(source, maker, 1200, (5, 512), (6, 512), (9, 176))
        third = tokens_of(source, maker, 600, (5, 512))
        assert [len(first), len(second), len(third)] == [1700, 1200, 600]
        assert [common(first, second), common(first, third), common(second, third)] == [1024, 512, 512]


def test_text_and_ids_are_the_same_tokens(text: TokenizerSource, ids: TokenIdSource) -> None:
    shared = ((0, 100), (1, 30))
    assert tokens_of(text, PromptMaker(text, 4), 300, *shared) == tokens_of(ids, PromptMaker(ids, 4), 300, *shared)


def test_borders_of_blocks_hold_in_any_order(text: TokenizerSource) -> None:
    """In many prompts of blocks in random order, each block is the same tokens wherever it stands."""
    maker = PromptMaker(text, 2)
    blocks = {block: tokens_of(text, PromptMaker(text, 2), 48, (block, 48)) for block in range(40)}
    order = np.random.default_rng(0)
    for _ in range(50):
        chosen = order.permutation(40)[:12].tolist()
        expected = list(itertools.chain.from_iterable(blocks[block] for block in chosen))
        assert tokens_of(text, maker, 48 * 12, *[(block, 48) for block in chosen]) == expected


def test_part_of_a_block_begins_like_the_whole(source: TokenSource) -> None:
    maker = PromptMaker(source, 0)
    whole = maker.block(11, 512)
    np.testing.assert_array_equal(maker.block(11, 200), whole[:200])
    np.testing.assert_array_equal(PromptMaker(source, 0).block(11, 512), whole)
    assert not np.array_equal(PromptMaker(source, 1).block(11, 512), whole)
    assert not np.array_equal(maker.block(12, 512), whole)
    assert maker.block(2**63, 5).shape == (5,)  # ids of other traces are hashes


def test_no_two_prompts_begin_with_the_same_tokens(ids: TokenIdSource) -> None:
    """Not with the same first one, as long as there are tokens to begin with; never with the same two."""
    maker = PromptMaker(ids, 0)
    own = [maker.make(3).prompt.token_ids or () for _ in range(3000)]
    shared = [maker.make(3, ((block, 3),)).prompt.token_ids or () for block in range(3000)]
    enough = len(ids.openers) // 2
    assert enough > 300
    assert len({prompt[0] for prompt in own[:enough] + shared[:enough]}) == 2 * enough
    assert len({prompt[:2] for prompt in own + shared}) == 6000
    # If each place has an id, there are as many prompts as ids.
    many = PromptMaker(TokenIdSource(range(1000, 7000)), 0)
    assert len({(many.make(3).prompt.token_ids or ())[0] for _ in range(3000)}) == 3000


def test_a_maker_may_go_on_where_another_ended(text: TokenizerSource) -> None:
    continued = PromptMaker(text, 0, made=10)
    repeated = PromptMaker(text, 0)
    assert [repeated.make(40) for _ in range(11)][10] == continued.make(40)


def test_prompts_begin_with_words_that_survive_trimming(text: TokenizerSource) -> None:
    """Chat templates trim the space in front."""
    maker = PromptMaker(text, 0)
    for _ in range(200):
        written = maker.make(20).prompt.text or ""
        assert len(text.tokenizer.encode(written.strip())) == 20


def test_prompts_repeat_with_their_seed_and_only_then(source: TokenSource) -> None:
    first, second, other = PromptMaker(source, 5), PromptMaker(source, 5), PromptMaker(source, 6)
    mine = [first.make(60) for _ in range(5)]
    assert mine == [second.make(60) for _ in range(5)]
    assert mine != [other.make(60) for _ in range(5)]


def test_special_tokens_are_never_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path / "model", byte_level()))
    added = set(tokenizer.backend.get_added_tokens_decoder())
    assert added and not added & set(TokenIdSource.of_tokenizer(tokenizer).ids)


def test_a_thousand_prompts_of_a_thousand_tokens_take_no_time(text: TokenizerSource) -> None:
    """About 0.1 s; the limit is for a machine that has much else to do."""
    maker = PromptMaker(text, 0)
    began = time.process_time()
    for _ in range(1000):
        maker.make(1000)
    maker.make(30_000)
    assert time.process_time() - began < 3.0


def test_words_are_as_many_as_the_calibration_says(words: WordSource) -> None:
    made = PromptMaker(words, 0).make(254)
    assert len((made.prompt.text or "").split()) == 200 and made.tokens == 254
    shared = ((3, 125),)
    maker = PromptMaker(words, 0)
    first = (maker.make(300, shared).prompt.text or "").split()
    second = (maker.make(300, shared).prompt.text or "").split()
    assert first[:100] == second[:100] and first[100] != second[100]
    assert words.of_text("some text").tokens is None and words.count("one two three four") == 5


def test_calibration_finds_what_a_server_counts() -> None:
    source = WordSource.calibrated((50, 50 + 9), (350, 390 + 9 - 1))
    assert source.tokens_per_word == pytest.approx(1.13)
    assert source.added_tokens == 2
    exact = WordSource.calibrated((100, 7 + 130), (300, 7 + 390))
    assert (exact.tokens_per_word, exact.added_tokens) == (1.3, 7)
    assert exact.calibration_text(400).split()[:313] == list(WORDS)
    assert len(exact.calibration_text(400).split()) == 400


def test_words_are_single_tokens_mostly(tokenizer: Tokenizer) -> None:
    assert len(set(WORDS)) == len(WORDS) >= 300
    assert len(tokenizer.encode(WordSource.calibration_text(len(WORDS)))) < 1.5 * len(WORDS)


def test_sources_refuse_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give --tokenizer"):
        TokenIdSource(range(1000)).count("text")
    folder = tmp_path / "bare"
    folder.mkdir()
    backend = Backend(models.BPE(vocab={"Ã": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1}))
    with pytest.raises(BenchError, match="no ordinary tokens"):
        TokenizerSource(Tokenizer.load(folder))
