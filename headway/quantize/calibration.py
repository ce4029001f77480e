"""Text that shows what a model's layers see: windows of a file, or what the model itself writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headway.flags import Flag

if TYPE_CHECKING:
    from headway.text.tokenizer import Tokenizer

_CHARACTERS = 12  # most characters of a token, on average over a window
_KV_BYTES = 1 << 30  # size of the cache that the model writes with


@dataclass(slots=True)
class Calibration:
    """The text that awq and gptq look at."""

    calibration: Annotated[
        Path | None,
        Flag("Text (UTF-8) for awq and gptq. Default: what the model itself writes.", metavar="FILE", common=True),
    ] = None
    samples: Annotated[int, Flag("Pieces of it.", min=1, common=True)] = 128
    sample_tokens: Annotated[int, Flag("Tokens of a piece.", min=2, common=True)] = 512

    def windows(self, folder: Path, longest: int) -> list[list[int]]:
        """Token ids of each piece, all of one length.

        Args:
            longest: the most tokens that the model can take.

        Raises:
            ValueError: the text cannot be read, or is too short; or a sample is too long.
        """
        if self.sample_tokens > longest:
            raise ValueError(f"--sample-tokens {self.sample_tokens} is more than the model takes, {longest}")
        if self.calibration is None:
            return written(folder, self.samples, self.sample_tokens)
        try:
            text = self.calibration.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"--calibration {self.calibration} cannot be read: {said}") from None
        from headway.text.tokenizer import Tokenizer

        return windows(Tokenizer.load(folder), text, self.samples, self.sample_tokens)


def excerpts(text: str, count: int, characters: int) -> list[str]:
    """Cut `count` pieces out of a text, evenly spread over it, each beginning with a word.

    Raises:
        ValueError: the text is too short for them.
    """
    if len(text) < count * characters:
        raise ValueError(
            f"the text has {len(text):,} characters; {count} windows may take {count * characters:,}: "
            "give a longer one, or fewer or shorter windows"
        )
    found = []
    for number in range(count):
        piece = text[number * len(text) // count :][:characters]
        found.append(piece.partition(" ")[2] if number else piece)
    return found


def windows(tokenizer: Tokenizer, text: str, count: int, tokens: int) -> list[list[int]]:
    """Token ids of excerpts. Raises ValueError for a text that is too short, or has too few tokens by the character."""
    found = [tokenizer.encode(piece)[:tokens] for piece in excerpts(text, count, tokens * _CHARACTERS)]
    if short := [len(ids) for ids in found if len(ids) < tokens]:
        raise ValueError(f"{tokens * _CHARACTERS:,} characters of the text became {min(short)} tokens, not {tokens}")
    return found


def written(folder: Path, count: int, tokens: int, first_seed: int = 0) -> list[list[int]]:
    """Token ids that the model writes at temperature 1, each time from the start of a text (Williams et al., 2024).

    Args:
        first_seed: the seed of the first window; each further one has the next.
    """
    from headway.llm import LLM
    from headway.policy.step.sampling_params import SamplingParams

    llm = LLM(str(folder), device="cpu", max_model_len=tokens + 1, kv_cache_memory=_KV_BYTES)
    assert llm.tokenizer is not None
    first = llm.tokenizer.bos_token_id
    first = llm.tokenizer.eos_token_ids[0] if first is None and llm.tokenizer.eos_token_ids else first or 0
    params = [SamplingParams(max_tokens=tokens - 1, seed=first_seed + each, ignore_eos=True) for each in range(count)]
    found = llm.generate([{"prompt_token_ids": [first]}] * count, params)
    return [[first, *output.outputs[0].token_ids] for output in found]
