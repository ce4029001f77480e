"""Datasets that are made up: lengths are drawn, prompts are random, and what is shared is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.load.errors import BenchError
from headway.load.workload.datasets import Dataset, SampleRequest, Turns
from headway.load.workload.lengths import Distribution, tokens


def check_whole(flag: str, value: int, fewest: int) -> None:
    """Raises BenchError where a number that a flag gave is below `fewest`."""
    if value < fewest:
        raise BenchError(f"{flag} is {value}; it must be {fewest} or more")


@dataclass
class RandomLengths(Dataset):
    """Single requests with random prompts."""

    # input_len, output_len: in tokens.
    input_len: Distribution
    output_len: Distribution
    prefix_len: int = 0  # tokens that all prompts begin with, in front of input_len

    def __post_init__(self) -> None:
        check_whole("--random-prefix-len", self.prefix_len, 0)

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        if count is None:
            raise BenchError("random requests have no end; give --num-prompts, or --duration with an arrival process")
        prompts = tokens(self.input_len, count, rng).tolist()
        answers = tokens(self.output_len, count, rng).tolist()
        prefix = self.prefix_len
        shared = ((0, prefix),) if prefix else ()
        return [
            (SampleRequest(answer, prefix + prompt, shared),) for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def describe(self) -> str:
        prefix = f", after {self.prefix_len} shared" if self.prefix_len else ""
        answers = f"; answers {self.output_len.describe()}" if self.output_len.mean else ""
        return f"random prompts ({self.input_len.describe()}{prefix}{answers})"


@dataclass
class PrefixRepetition(Dataset):
    """Prompts in groups of equal size: those of a group share a prefix, and all end differently.

    Groups differ by one in size where the number of prompts is no multiple of theirs; their order is random.
    """

    num_prefixes: int
    prefix_len: int
    suffix_len: int
    output_len: Distribution

    def __post_init__(self) -> None:
        check_whole("--prefix-repetition-num-prefixes", self.num_prefixes, 1)
        check_whole("--prefix-repetition-prefix-len", self.prefix_len, 1)
        check_whole("--prefix-repetition-suffix-len", self.suffix_len, 0)

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        if count is None:
            raise BenchError("repeated prefixes have no end; give --num-prompts, or --duration with an arrival process")
        if count < self.num_prefixes:
            self.notes.append(f"{count} prompts use {count} of {self.num_prefixes} prefixes, each once")
        groups = rng.permutation(np.arange(count) % self.num_prefixes).tolist()
        answers = tokens(self.output_len, count, rng).tolist()
        length = self.prefix_len + self.suffix_len
        return [
            (SampleRequest(answer, length, ((group, self.prefix_len),)),)
            for group, answer in zip(groups, answers, strict=True)
        ]

    def describe(self) -> str:
        return f"{self.num_prefixes} prefixes of {self.prefix_len} tokens, suffixes of {self.suffix_len}"


@dataclass
class MultiTurn(Dataset):
    """Conversations: each turn brings all that was said before it, comes after the answer, and some thinking."""

    turns: Distribution  # requests in a conversation
    # input_len, output_len: lengths of each turn, in tokens; input_len is what the user says, without what was said
    # before.
    input_len: Distribution
    output_len: Distribution
    think_s: Distribution  # seconds between an answer and the next turn
    prefix_len: int = 0  # tokens that all conversations begin with (a system prompt), in front of the first turn
    # Tokens of a prompt with all that was said before; a conversation ends before it becomes longer.
    longest: int | None = None

    def __post_init__(self) -> None:
        check_whole("--multi-turn-prefix-len", self.prefix_len, 0)

    @property
    def mean_turns(self) -> float:
        return max(self.turns.mean, 1.0)

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        if count is None:
            raise BenchError("conversations have no end; give --num-prompts, or --duration with an arrival process")
        turns = tokens(self.turns, count, rng).tolist()
        said = iter(tokens(self.input_len, sum(turns), rng).tolist())
        answers = iter(tokens(self.output_len, sum(turns), rng).tolist())
        thinking = iter(np.round(self.think_s.values(sum(turns), rng), 6).tolist())
        return [
            self._conversation([(next(said), next(answers), next(thinking)) for _ in range(length)]) for length in turns
        ]

    def _conversation(self, turns: list[tuple[int, int, float]]) -> Turns:
        requests: list[SampleRequest] = []
        context = self.prefix_len
        for said, answer, think_s in turns:
            if requests and self.longest is not None and context + said > self.longest:
                requests[-1] = replace(requests[-1], ends_early=True)
                break
            if requests:
                requests.append(SampleRequest(answer, said, think_s=think_s))
            else:
                requests.append(
                    SampleRequest(answer, self.prefix_len + said, ((0, self.prefix_len),) if self.prefix_len else ())
                )
            context += said + answer
        return tuple(requests)

    def describe(self) -> str:
        return (
            f"conversations of {self.turns.describe()} turns (each {self.input_len.describe()} tokens; answers "
            f"{self.output_len.describe()}; {self.think_s.describe()} s between)"
        )
