"""A request before its prompt is made: what datasets give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.load.request import Message

DEFAULT_OUTPUT_TOKENS = 256  # of an answer to a text, where the file does not say


@dataclass(frozen=True, slots=True)
class Links:
    """What a request waits for, as places in its conversation."""

    follows: int | None = None  # the request that it goes on from; None where its prompt is all that it says
    after: tuple[int, ...] = ()  # further ones that must have been answered


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request."""

    output_tokens: int  # wanted of the answer, 1 or more
    input_tokens: int = 0  # tokens of the prompt, 1 or more; of a later turn, what it adds. 0 where `text` says it.
    shared: tuple[tuple[int, int], ...] = ()  # (block id, tokens) of what the prompt begins with; part of input_tokens
    # text, messages: the prompt itself, where the dataset has one.
    text: str | None = None
    messages: tuple[Message, ...] = ()
    extra_body: dict[str, Any] = field(default_factory=dict)  # further fields of its body
    # Seconds after the dataset's first request, by its own clock; None where it has none.
    arrival_s: float | None = None
    links: Links | None = None  # what it waits for; None is the turn before
    think_s: float = 0.0  # seconds before this turn, after the last answer that it waits for
    not_before_s: float = 0.0  # it is not due earlier than so many seconds after the first turn
    ends_early: bool = False  # the conversation was to go on, and would have become too long
    cancel_after_s: float | None = None  # its client gives it up so long after it was sent; None for one that waits
    tenant: str = ""  # whose it is, where the dataset says so


# The turns of one conversation, each behind those that it waits for; a single request is a conversation of one turn.
Turns = tuple[SampleRequest, ...]


@dataclass(kw_only=True)
class Dataset(ABC):
    """Where requests come from."""

    has_times: bool = field(default=False, init=False)  # each first turn has an arrival_s, ascending
    rows: int | None = field(default=None, init=False)  # how many conversations there are; None when there is no end
    repeats_prompts: bool = field(default=False, init=False)  # taken once more, a row is the same prompt again
    # What was left out or changed while reading, a sentence each.
    notes: list[str] = field(default_factory=list, init=False)

    @property
    def mean_turns(self) -> float:
        """The mean number of turns of a conversation."""
        return 1.0

    @abstractmethod
    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        """Up to `count` conversations, or all that there are; fewer only where the dataset ends.

        `notes` may grow by what this draw left out.
        """

    @abstractmethod
    def describe(self) -> str:
        """Describe the dataset in a few words, for titles."""
