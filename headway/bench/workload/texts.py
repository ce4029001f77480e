"""Datasets that hold the prompts themselves: ShareGPT-style JSON and JSON Lines of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.bench.errors import BenchError
from headway.bench.workload.drafts import Draft, Turns
from headway.bench.workload.files import numbered_lines, read_text, wrong
from headway.bench.workload.lengths import Distribution, tokens
from headway.bench.workload.prompts import TokenSource
from headway.bench.workload.traces import decoded

# What `vllm bench serve` takes of ShareGPT, in tokens.
FEWEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
DEFAULT_OUTPUT_TOKENS = 256


class ShareGPT:
    """The first two turns of each conversation: a prompt, and an answer whose length is asked for.

    As `vllm bench serve` does, conversations are taken in random order, whoever speaks first, and left out when the
    prompt or the answer has fewer than 4 tokens (an answer only where its length is not overridden), the prompt more
    than 1024, or both together more than 2048.

    Args:
        path: JSON, [{"conversations": [{"from": "human", "value": "..."}, ...]}, ...].
        output_len: tokens of answers; None takes the answer's own length.
        longest_prompt: instead of 1024; both together may then have 1024 more.

    Raises:
        BenchError: naming the file, and the line or entry that is wrong.
    """

    has_times = False
    repeats_prompts = True
    mean_turns = 1.0

    def __init__(
        self,
        path: Path,
        source: TokenSource,
        output_len: Distribution | None = None,
        longest_prompt: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self.path, self._source, self._output_len, self._shuffle = path, source, output_len, shuffle
        self._longest_prompt = longest_prompt or LONGEST_PROMPT
        self._longest = max(LONGEST, self._longest_prompt + LONGEST - LONGEST_PROMPT)
        self.notes: list[str] = []
        entries = _sharegpt_entries(path)
        self._pairs = [(turns[0].value, turns[1].value) for turns in entries if len(turns) > 1]
        if len(self._pairs) < len(entries):
            short = len(entries) - len(self._pairs)
            self.notes.append(f"{path.name}: {short} of {len(entries)} conversations have no answer; left out")
        if not self._pairs:
            raise BenchError(f"{path} has no conversation with a prompt and an answer; it must have at least one")
        self.rows: int | None = len(self._pairs)

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        order = rng.permutation(len(self._pairs)) if self._shuffle else np.arange(len(self._pairs))
        wanted = tokens(self._output_len, len(order), rng).tolist() if self._output_len else [None] * len(order)
        kept: list[Turns] = []
        seen = 0
        for at, output_tokens in zip(order.tolist(), wanted, strict=True):
            if len(kept) == count:
                break
            seen += 1
            prompt, answer = self._pairs[at]
            draft = self._sensible(prompt, answer, output_tokens)
            if draft is not None:
                kept.append((draft,))
        if not kept:
            raise BenchError(f"{self.path}: none of {seen} conversations has a length of {self._bounds()}")
        if len(kept) < seen:
            self.notes.append(
                f"{self.path.name}: {seen - len(kept)} of {seen} conversations left out, not of {self._bounds()}"
            )
        return kept

    def _bounds(self) -> str:
        return f"{FEWEST} to {self._longest_prompt} prompt tokens and {self._longest} in all"

    def _sensible(self, prompt: str, answer: str, output_tokens: int | None) -> Draft | None:
        asked = self._source.count(prompt)
        answered = self._source.count(answer) if output_tokens is None else output_tokens
        too_short = asked < FEWEST or (output_tokens is None and answered < FEWEST)
        if too_short or asked > self._longest_prompt or asked + answered > self._longest:
            return None
        return Draft(answered, asked, text=prompt)

    def describe(self) -> str:
        return f"ShareGPT {self.path.name}"


class _Said(msgspec.Struct):
    value: str


class _Entry(msgspec.Struct):
    conversations: list[_Said] = []


def _sharegpt_entries(path: Path) -> list[list[_Said]]:
    text = read_text(path)
    try:
        return [entry.conversations for entry in msgspec.json.decode(text, type=list[_Entry])]
    except msgspec.ValidationError as error:
        raise BenchError(
            f'{path}: {error}; expected as [{{"conversations": [{{"from": "human", "value": "..."}}, ...]}}]'
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong(path, _line_of_error(text), str(error), "the file must be one JSON list") from None


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


class Custom:
    """Prompts of one's own.

    Args:
        path: JSON Lines, {"prompt": "...", "output_tokens": 10}; output_tokens may be absent.
        output_len: tokens of answers; None takes each line's own, or DEFAULT_OUTPUT_TOKENS.

    Raises:
        BenchError: naming the file and the line that is wrong.
    """

    has_times = False
    repeats_prompts = True
    mean_turns = 1.0

    def __init__(
        self,
        path: Path,
        source: TokenSource,
        output_len: Distribution | None = None,
        longest_prompt: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self.path, self._source, self._output_len, self._shuffle = path, source, output_len, shuffle
        self._longest_prompt = longest_prompt
        self.notes: list[str] = []
        self._rows = list(_custom_rows(path))
        self.rows: int | None = len(self._rows)
        unsaid = sum(row.output_tokens is None for row in self._rows)
        if unsaid and output_len is None:
            default = f"{DEFAULT_OUTPUT_TOKENS} taken"
            self.notes.append(f"{path.name}: {unsaid} of {self.rows} prompts have no output_tokens; {default}")

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        order = rng.permutation(len(self._rows)) if self._shuffle else np.arange(len(self._rows))
        said = [self._rows[at].output_tokens or DEFAULT_OUTPUT_TOKENS for at in order.tolist()]
        wanted = tokens(self._output_len, len(order), rng).tolist() if self._output_len else said
        kept: list[Turns] = []
        long = 0
        for at, output_tokens in zip(order.tolist(), wanted, strict=True):
            if len(kept) == count:
                break
            prompt = self._rows[at].prompt
            asked = self._source.count(prompt)
            if self._longest_prompt is not None and asked > self._longest_prompt:
                long += 1
            else:
                kept.append((Draft(output_tokens, asked, text=prompt),))
        if not kept:
            raise BenchError(f"{self.path}: every prompt is longer than --max-input-len {self._longest_prompt}")
        if long:
            self.notes.append(f"{self.path.name}: {long} prompts longer than {self._longest_prompt} tokens left out")
        return kept

    def describe(self) -> str:
        return f"prompts of {self.path.name}"


def _custom_rows(path: Path) -> Iterator[_CustomRow]:
    decode = msgspec.json.Decoder(_CustomRow).decode
    for line, said in numbered_lines(path):
        row = decoded(decode, path, line, said, '{"prompt": "...", "output_tokens": 10}')
        if not row.prompt:
            raise wrong(path, line, "the prompt is empty", "a text is expected")
        if row.output_tokens is not None and row.output_tokens < 1:
            raise wrong(path, line, f"output_tokens is {row.output_tokens}", "1 or more is expected")
        yield row
