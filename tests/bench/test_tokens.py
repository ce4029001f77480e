"""Which tokens prompts are made of: the tokenizer that is found or named, or words that the server has measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headway.bench.client.probe import count_tokens, probe
from headway.bench.options import Target
from headway.bench.tokens import LONG_WORDS, SHORT_WORDS, load_tokenizer, token_source
from headway.bundled import PROSE, STORY
from headway.load.errors import BenchError
from headway.load.request import Prompt
from headway.load.workload.prompts import PromptMaker, TokenSource
from headway.load.workload.token_sources import (
    ProseSource,
    ProseWordSource,
    TokenIdSource,
    TokenizerSource,
    WordSource,
)
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer
from tests.text.tiny_tokenizers import byte_level, save

STORY_NAME = f"headway/{STORY.name}"


async def source_for(target: Target) -> tuple[TokenSource, str]:
    return await token_source(target, await probe(target.endpoint()))


@pytest.fixture
def word_tokens(tmp_path: Path) -> Path:
    """A tokenizer to which every word is a token, as to the scripted server."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted(set(WordSource.calibration_text(LONG_WORDS).split()))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "<unk>"])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return save(tmp_path / "words", tokenizer)


async def test_words_that_the_server_has_measured(scripted: ScriptedServer) -> None:
    source, said = await source_for(Target(scripted.url))
    assert isinstance(source, WordSource)
    assert source.tokens_per_word == 1 and source.added_tokens == 0
    assert said == "everyday words, 1 tokens each by the server's count"
    made = PromptMaker(source, 0).make(25)
    assert made.prompt.text is not None and len(made.prompt.text.split()) == made.tokens == 25


async def test_by_usage_where_there_is_no_tokenize() -> None:
    with ScriptedServer() as server:
        source, _ = await source_for(Target(server.url))
    assert isinstance(source, WordSource) and source.tokens_per_word == 1


async def test_a_server_that_tells_nothing(word_tokens: Path) -> None:
    with ScriptedServer(script=script(usage=False, continuous_usage=False)) as server:
        with pytest.raises(BenchError, match=r"reports no token counts.*--tokenizer"):
            await source_for(Target(server.url))
        # A tokenizer cannot be checked then, and is taken.
        source, said = await source_for(Target(server.url, tokenizer=str(word_tokens)))
    assert isinstance(source, TokenizerSource) and said == f"tokenizer {word_tokens}"


async def test_the_tokenizer_that_is_named(scripted: ScriptedServer, word_tokens: Path) -> None:
    for name in (word_tokens, word_tokens / "tokenizer.json"):
        source, said = await source_for(Target(scripted.url, tokenizer=str(name)))
        assert isinstance(source, TokenizerSource) and said == f"tokenizer {word_tokens}"


async def test_another_tokenizer_than_the_servers(scripted: ScriptedServer, tmp_path: Path) -> None:
    """It cuts words into letters or so; the server counts words."""
    folder = save(tmp_path, byte_level(300))
    tokenizer = load_tokenizer(str(folder))
    words = LONG_WORDS - SHORT_WORDS
    ours = [len(tokenizer.encode(WordSource.calibration_text(n), add_special_tokens=False)) for n in (SHORT_WORDS, 240)]
    with pytest.raises(BenchError) as refused:
        await source_for(Target(scripted.url, tokenizer=str(folder)))
    told = f"{words} words are {ours[1] - ours[0]} tokens by it and {words} by the server"
    assert str(refused.value) == f"--tokenizer {folder} is not the server's: {told}"


async def test_the_tokenizer_of_a_folder_that_is_served(word_tokens: Path) -> None:
    """A server that calls its model by the folder, which is on this machine."""
    with ScriptedServer(kind="vllm", model=[str(word_tokens)]) as server:
        source, said = await source_for(Target(server.url))
    assert isinstance(source, TokenizerSource) and said == f"tokenizer {word_tokens}"


async def test_a_tokenizer_that_was_found_and_does_not_fit(tmp_path: Path) -> None:
    """Nobody named it: words do."""
    folder = save(tmp_path, byte_level(300))
    with ScriptedServer(kind="vllm", model=[str(folder)]) as server:
        source, _ = await source_for(Target(server.url))
    assert isinstance(source, WordSource)


async def test_the_bundled_model() -> None:
    """Its name is enough to find its tokenizer. The scripted server counts words, so ids are made of it."""
    with ScriptedServer(kind="headway", model=[STORY_NAME]) as server:
        source, said = await source_for(Target(server.url, prompts="token-ids"))
        made = PromptMaker(source, 0).make(30)
        assert isinstance(source, TokenIdSource) and said == f"token ids by {STORY}"
        assert made.tokens == 30
        assert await count_tokens(await probe(Target(server.url).endpoint()), [made.prompt]) == [30]


async def test_token_ids_that_cannot_be(scripted: ScriptedServer) -> None:
    with pytest.raises(BenchError, match="made with a tokenizer, and none was found; give --tokenizer"):
        await source_for(Target(scripted.url, prompts="token-ids"))
    with pytest.raises(BenchError, match="a chat takes text only"):
        await source_for(Target(scripted.url, prompts="token-ids", backend="openai-chat"))
    # A server that counts other than three tokens has taken the list for a text.
    with (
        ScriptedServer(script=script(prompt_tokens=9)) as server,
        pytest.raises(BenchError, match="does not accept token ids; use --prompts text"),
    ):
        await source_for(Target(server.url, prompts="token-ids"))


async def test_what_a_chat_template_adds(word_tokens: Path) -> None:
    """A server whose every prompt has seven tokens more than its words: usage cannot say that here, so a count does."""
    import headway.bench.tokens as tokens

    with ScriptedServer() as server:
        target = Target(server.url, backend="openai-chat", tokenizer=str(word_tokens))
        probed = await probe(target.endpoint())

        async def counted(server: object, prompts: list[Prompt]) -> list[int]:
            return [len((prompt.text or "").split()) + 7 for prompt in prompts]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokens, "count_tokens", counted)
            source, _ = await token_source(target, probed)
            words, _ = await token_source(Target(server.url, backend="openai-chat"), probed)
    assert source.added_tokens == words.added_tokens == 7
    made = PromptMaker(source, 0).make(20)
    assert made.tokens == 20 and made.prompt.text is not None and len(made.prompt.text.split()) == 13


def test_no_tokenizer_there(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=f"--tokenizer {tmp_path}: .*tokenizer.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(BenchError, match="is not a folder, and it cannot be loaded from the Hugging") as refused:
        load_tokenizer("no-such-owner/no-such-model")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("counts", [[3, 3], [0, 0], [9, 4]])
async def test_a_server_whose_counts_cannot_be(
    scripted: ScriptedServer, word_tokens: Path, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def count_tokens(*_: object) -> list[int]:
        return counts

    monkeypatch.setattr("headway.bench.tokens.count_tokens", count_tokens)
    with pytest.raises(BenchError, match="give --tokenizer"):
        await source_for(Target(scripted.url))
    source, _ = await source_for(Target(scripted.url, tokenizer=str(word_tokens)))
    assert isinstance(source, TokenizerSource)


def test_a_home_folder_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BenchError, match="~nobody-at-all/x is not a folder"):
        load_tokenizer("~nobody-at-all/x")


async def test_a_server_that_speculates_gets_prose() -> None:
    with ScriptedServer(kind="vllm") as server:
        found = await probe(Target(server.url).endpoint())
        speculating = dataclasses.replace(found, speculates=True)
        words, said = await token_source(Target(server.url), speculating)
        random, _ = await token_source(Target(server.url, prompts="words"), speculating)
        asked, _ = await token_source(Target(server.url, prompts="prose"), found)
    assert isinstance(words, ProseWordSource) and said == "prose, 1 tokens a word by the server's count"
    assert isinstance(random, WordSource) and not random.is_text and asked.is_text and not found.speculates
    text = " ".join(PROSE.read_text().split())
    for source in (words, ProseSource(load_tokenizer(STORY_NAME), PROSE.read_text())):
        maker = PromptMaker(source, 3)
        made = [maker.make(60) for _ in range(40)]
        for each in made:
            shown = " ".join((each.prompt.text or "").split())
            assert each.tokens == 60 and shown[:1].isupper() and shown in text
        assert len({(each.prompt.text or "")[:40] for each in made}) == 40
        first, second = ((maker.make(60, [(0, 30)]).prompt.text or "") for _ in range(2))
        assert first[:50] == second[:50] and first != second
        assert maker.make(30_000).tokens == 30_000  # longer than the text
