"""Datasets that hold the prompts themselves: ShareGPT-style JSON and JSON Lines of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from headway.load.errors import BenchError
from headway.load.workload.datasets import DEFAULT_OUTPUT_TOKENS, Dataset, SampleRequest, Turns
from headway.load.workload.files import Line, lines_of, read_text
from headway.load.workload.lengths import Distribution, tokens
from headway.load.workload.prompts import TokenSource

# What `vllm bench serve` takes of ShareGPT, in tokens.
FEWEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


@dataclass
class TextDataset(Dataset):
    """A file with prompts in it."""

    path: Path
    source: TokenSource
    output_len: Distribution | None = None  # tokens of answers; None takes those that the file says
    longest_prompt: int | None = None  # longer ones are left out; None takes the dataset's own bound, or none
    shuffle: bool = True  # take them in random order
    repeats_prompts: bool = field(default=True, init=False)

    def _order(self, rng: np.random.Generator) -> list[int]:
        order = rng.permutation(self.rows or 0) if self.shuffle else np.arange(self.rows or 0)
        found: list[int] = order.tolist()
        return found


@dataclass
class ShareGPT(TextDataset):
    """The first two turns of each conversation: a prompt, and an answer whose length is asked for.

    As `vllm bench serve` does, conversations are taken in random order, whoever speaks first, and left out when the
    prompt or the answer has fewer than 4 tokens (an answer only where its length is not overridden), the prompt more
    than 1024, or both together more than 2048.

    Args:
        path: JSON, [{"conversations": [{"from": "human", "value": "..."}, ...]}, ...].
        longest_prompt: instead of 1024; both together may then have 1024 more.

    Raises:
        BenchError: naming the file, and the line or entry that is wrong.
    """

    def __post_init__(self) -> None:
        path = self.path
        self._most = self.longest_prompt or LONGEST_PROMPT
        self._longest = max(LONGEST, self._most + LONGEST - LONGEST_PROMPT)
        entries = _sharegpt_entries(path)
        self._pairs = [(turns[0].value, turns[1].value) for turns in entries if len(turns) > 1]
        if len(self._pairs) < len(entries):
            short = len(entries) - len(self._pairs)
            self.notes.append(f"{path.name}: {short} of {len(entries)} conversations have no answer; left out")
        if not self._pairs:
            raise BenchError(f"{path} has no conversation with a prompt and an answer; it must have at least one")
        self.rows = len(self._pairs)

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        order = self._order(rng)
        wanted = tokens(self.output_len, len(order), rng).tolist() if self.output_len else [None] * len(order)
        kept: list[Turns] = []
        seen = 0
        for at, output_tokens in zip(order, wanted, strict=True):
            if len(kept) == count:
                break
            seen += 1
            prompt, answer = self._pairs[at]
            request = self._sensible(prompt, answer, output_tokens)
            if request is not None:
                kept.append((request,))
        if not kept:
            raise BenchError(f"{self.path}: none of {seen} conversations has {self._bounds()}")
        if len(kept) < seen:
            self.notes.append(
                f"{self.path.name}: {seen - len(kept)} of {seen} conversations left out: only those with "
                f"{self._bounds()} are used"
            )
        return kept

    def _bounds(self) -> str:
        return f"{FEWEST} to {self._most} prompt tokens and at most {self._longest} tokens in all"

    def _sensible(self, prompt: str, answer: str, output_tokens: int | None) -> SampleRequest | None:
        asked = self.source.count(prompt)
        answered = self.source.count(answer) if output_tokens is None else output_tokens
        too_short = asked < FEWEST or (output_tokens is None and answered < FEWEST)
        if too_short or asked > self._most or asked + answered > self._longest:
            return None
        return SampleRequest(answered, asked, text=prompt)

    def describe(self) -> str:
        return f"ShareGPT {self.path.name}"


class _Message(msgspec.Struct):
    value: str


class _Entry(msgspec.Struct):
    conversations: list[_Message] = []


def _sharegpt_entries(path: Path) -> list[list[_Message]]:
    text = read_text(path)
    try:
        return [entry.conversations for entry in msgspec.json.decode(text, type=list[_Entry])]
    except msgspec.ValidationError as error:
        raise BenchError(
            f'{path}: {error}; expected as [{{"conversations": [{{"from": "human", "value": "..."}}, ...]}}]'
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Line(path, _line_of_error(text)).wrong(str(error), "the file must be one JSON list") from None


def _line_of_error(text: str) -> int:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.lineno
    except (ValueError, RecursionError):  # a number of too many digits, or lists in lists
        return 1
    return 1


class _CustomRow(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None
    tenant: str = ""


@dataclass
class Custom(TextDataset):
    """Prompts of one's own.

    Args:
        path: JSON Lines, {"prompt": "...", "output_tokens": 10}; DEFAULT_OUTPUT_TOKENS where output_tokens is absent.
            A `tenant` says whose a prompt is.

    Raises:
        BenchError: naming the file and the line that is wrong.
    """

    def __post_init__(self) -> None:
        self._rows = list(_custom_rows(self.path))
        self.rows = len(self._rows)
        unsaid = sum(row.output_tokens is None for row in self._rows)
        if unsaid and self.output_len is None:
            default = f"{DEFAULT_OUTPUT_TOKENS} taken"
            self.notes.append(f"{self.path.name}: {unsaid} of {self.rows} prompts have no output_tokens; {default}")

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        order = self._order(rng)
        said = [self._rows[at].output_tokens or DEFAULT_OUTPUT_TOKENS for at in order]
        wanted = tokens(self.output_len, len(order), rng).tolist() if self.output_len else said
        kept: list[Turns] = []
        long = 0
        for at, output_tokens in zip(order, wanted, strict=True):
            if len(kept) == count:
                break
            row = self._rows[at]
            asked = self.source.count(row.prompt)
            if self.longest_prompt is not None and asked > self.longest_prompt:
                long += 1
            else:
                kept.append((SampleRequest(output_tokens, asked, text=row.prompt, tenant=row.tenant),))
        if not kept:
            raise BenchError(f"{self.path}: every prompt is longer than --max-input-len {self.longest_prompt}")
        if long:
            self.notes.append(f"{self.path.name}: {long} prompts longer than {self.longest_prompt} tokens left out")
        return kept

    def describe(self) -> str:
        return f"prompts of {self.path.name}"


def _custom_rows(path: Path) -> Iterator[_CustomRow]:
    decode = msgspec.json.Decoder(_CustomRow).decode
    for at, said in lines_of(path):
        row = at.decoded(decode, said, '{"prompt": "...", "output_tokens": 10}')
        if not row.prompt:
            raise at.wrong("the prompt is empty", "a text is expected")
        if row.output_tokens is not None and row.output_tokens < 1:
            raise at.wrong(f"output_tokens is {row.output_tokens}", "1 or more is expected")
        yield row
