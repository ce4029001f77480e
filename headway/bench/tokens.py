"""Finds the tokens of which prompts are made, for the server at hand."""

from __future__ import annotations

from pathlib import Path

from headway.bench.client.probe import Server, count_tokens
from headway.bench.options import Target
from headway.bundled import PROSE, bundled_folder
from headway.load.errors import BenchError
from headway.load.request import Prompt
from headway.load.workload.prompts import TokenSource
from headway.load.workload.token_sources import ProseSource, ProseWordSource, TokenIdSource, TokenizerSource, WordSource
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]
SHORT_WORDS, LONG_WORDS = 16, 240
# A text may become a token or two more or less at its ends; a tokenizer that is not the server's is further off.
MOST_OFF_SHARE = 0.05


async def token_source(target: Target, server: Server) -> tuple[TokenSource, str]:
    """Where the tokens of prompts come from, and a description of it.

    The tokenizer that was named, or else the one that belongs to the served model, where its files are on this
    machine; without one, everyday words whose length the server has told.

    Raises:
        BenchError: the tokenizer that was named cannot be had, or token ids are wanted where they cannot be made or
            taken.
    """
    if target.token_ids:
        _check_token_ids(target, server)
    name = target.tokenizer_name
    tokenizer = load_tokenizer(name) if name is not None else _find_tokenizer(server.root)
    if target.token_ids:
        if tokenizer is None:
            raise BenchError("token ids are made with a tokenizer, and none was found; give --tokenizer")
        return TokenIdSource.of_tokenizer(tokenizer), f"token ids by {tokenizer.folder}"
    counts = await _server_counts(server)
    is_prose = target.prompts == "prose" or (target.prompts == "text" and server.speculates)
    if tokenizer is not None:
        off = _mismatch(tokenizer, counts)
        if off is None:
            added = None if not target.chat or counts is None else _added(tokenizer, counts)
            if is_prose:
                return ProseSource(tokenizer, PROSE.read_text(), added), f"prose, by tokenizer {tokenizer.folder}"
            return TokenizerSource(tokenizer, added), f"tokenizer {tokenizer.folder}"
        if name is not None:
            raise BenchError(f"--tokenizer {name} is not the server's: {off}")
    if counts is None:
        raise BenchError("the server reports no token counts, so prompts cannot be measured; give --tokenizer")
    source = WordSource.calibrated((SHORT_WORDS, counts[0]), (LONG_WORDS, counts[1]))
    if is_prose:
        words = PROSE.read_text().split()
        few = await count_tokens(server, [Prompt(text=" ".join(words[:LONG_WORDS]))])
        per_word = (few[0] - source.added_tokens) / LONG_WORDS
        prose = ProseWordSource(words, per_word, source.added_tokens)
        return prose, f"prose, {per_word:.3g} tokens a word by the server's count"
    return source, f"everyday words, {source.tokens_per_word:.3g} tokens each by the server's count"


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of a folder, or of a model of the Hugging Face hub.

    Raises:
        BenchError: there is none, or it is broken.
    """
    folder = bundled_folder(name) or _local(name)
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        folder = _download(name)
    try:
        return Tokenizer.load(folder)
    except TextError as error:
        raise BenchError(f"--tokenizer {name}: {error}") from None


def _local(name: str) -> Path:
    """The name as a path; ~ is the home folder, where there is one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~nobody
        return Path(name)


def _check_token_ids(target: Target, server: Server) -> None:
    if target.api not in ("completions", "embeddings"):
        taker = "a chat" if target.chat else "a ranking"
        raise BenchError(f"--prompts token-ids needs /v1/completions or /v1/embeddings; {taker} takes text only")
    if not server.token_id_prompts:
        raise BenchError(f"this server ({server.name}) does not accept token ids; use --prompts text")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES))
    except Exception as error:  # the hub client raises whatever its HTTP library does
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BenchError(
            f"--tokenizer {name} is not a folder, and it cannot be loaded from the Hugging Face hub: {said}"
        ) from None


def _find_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model that is a folder of this machine, or a Hugging Face id in the cache."""
    folder = bundled_folder(model) or _local(model)
    try:
        if not (folder / "tokenizer.json").is_file():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(model, "tokenizer.json")
            if not isinstance(cached, str):
                return None
            folder = Path(cached).parent
        return Tokenizer.load(folder)
    except (OSError, ValueError):  # not a hub id; not a tokenizer
        return None


async def _server_counts(server: Server) -> tuple[int, int] | None:
    """Tokens of the short and of the long calibration text, by the server; None where it gives no usable counts."""
    texts = [Prompt(text=WordSource.calibration_text(words)) for words in (SHORT_WORDS, LONG_WORDS)]
    try:
        short, long = await count_tokens(server, texts)
    except BenchError:
        return None
    return (short, long) if long > short > 0 else None


def _counted(tokenizer: Tokenizer, words: int) -> int:
    return len(tokenizer.encode(WordSource.calibration_text(words), add_special_tokens=False))


def _added(tokenizer: Tokenizer, counts: tuple[int, int]) -> int:
    return max(counts[0] - _counted(tokenizer, SHORT_WORDS), 0)


def _mismatch(tokenizer: Tokenizer, counts: tuple[int, int] | None) -> str | None:
    """Why the server must have another tokenizer, or None. What it adds to prompts cancels out in the difference."""
    if counts is None:
        return None
    ours, theirs = _counted(tokenizer, LONG_WORDS) - _counted(tokenizer, SHORT_WORDS), counts[1] - counts[0]
    if abs(ours - theirs) <= MOST_OFF_SHARE * theirs:
        return None
    return f"{LONG_WORDS - SHORT_WORDS} words are {ours} tokens by it and {theirs} by the server"
