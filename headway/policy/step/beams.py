"""Beam search: of all continuations of a few texts, the few likeliest go on, and texts that end are ranked.

The rules are those of transformers' `generate(num_beams=...)`. A step has the likeliest continuations of all beams
together. Those that end are kept if they are among the first `width`; of the others, `width` go on. A text that has
ended is ranked by the sum of its log-probabilities, divided by its number of tokens to the power of the length penalty.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 10.0
# What has no meaning where nothing is drawn, or counts tokens that other beams do not have; with the values that do
# nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "stop": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "prompt_logprobs": (None,),
}


class Asked(Protocol):
    """What is read of a request's parameters."""

    n: int
    best_of: int | None
    length_penalty: float
    early_stopping: bool | str

    @property
    def width(self) -> int: ...


def problem_of(params: Asked) -> tuple[str, str] | None:
    """Which parameter of a beam search cannot be had, and why; None for none."""
    width, penalty = params.width, params.length_penalty
    if not isinstance(width, int) or isinstance(width, bool) or not 1 <= width <= MAX_BEAMS:
        name = "n" if params.best_of is None else "best_of"
        return name, f"{name} is {width!r:.60}; with beam search, it must be between 1 and {MAX_BEAMS}"
    if params.n > width:
        return "n", f"n is {params.n}, more than best_of, which is {width}; ask for at most as many texts as beams"
    if (
        not isinstance(penalty, int | float)
        or isinstance(penalty, bool)
        or not abs(penalty) <= MAX_LENGTH_PENALTY  # also refuses NaN
    ):
        most = MAX_LENGTH_PENALTY
        return "length_penalty", f"length_penalty is {penalty!r:.60}; it must be between {-most:g} and {most:g}"
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        said = f'early_stopping is {params.early_stopping!r:.60}; it must be true, false or "never"'
        return "early_stopping", said
    for name, values in _WITHOUT_EFFECT.items():
        if getattr(params, name) not in values:
            return name, f"{name} has no meaning in a beam search, which draws nothing; leave it out"
    return None


class Row(Protocol):
    """The likeliest tokens behind a text, the likeliest first, with their log-probabilities."""

    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A text behind the prompt. It has one token more than the text before it: that at a place of a row."""

    score: float = 0.0  # the sum of the log-probabilities of its tokens
    length: int = 0
    before: Beam | None = None
    row: Row | None = None
    place: int = 0

    @property
    def token(self) -> int:
        assert self.row is not None
        return self.row.top_ids[self.place]

    def path(self) -> list[Beam]:
        """The texts that end with each of its tokens."""
        beam, found = self, []
        while beam.before is not None:
            found.append(beam)
            beam = beam.before
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        return [beam.token for beam in self.path()]


class BeamSearch:
    """A search for the likeliest texts.

    Args:
        width: how many beams go on.
        most: tokens of a text at most.
        stop_ids: tokens that end a text.
        early_stopping: True ends with the first `width` texts; False when no beam would be ranked before the last of
            them if it ended now; "never" when none can be any more.

    Attributes:
        beams: the texts that go on; at first the empty one.
        ended: the best texts that have ended, best first, with what they are ranked by.
        is_done: nothing goes on any more.
    """

    def __init__(
        self, width: int, most: int, stop_ids: Collection[int], length_penalty: float, early_stopping: bool | str
    ) -> None:
        self.beams = [Beam()]
        self.ended: list[tuple[float, Beam]] = []
        self.is_done = False
        self._width = width
        self._most = most
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    def advance(self, rows: Sequence[Row]) -> list[tuple[int, Beam]]:
        """Take the step behind all beams, of which there is a row each.

        Returns:
            the beams that go on from here, each with the number of the one before it.
        """
        width, length = self._width, self.beams[0].length + 1
        found = sorted(
            (-(beam.score + logprob), number, place)
            for number, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
            for place, logprob in enumerate(row.top_logprobs)
        )
        going: list[tuple[int, Beam]] = []
        for rank, (loss, number, place) in enumerate(found):
            if rank >= width and len(going) == width:
                break
            ends = length >= self._most or rows[number].top_ids[place] in self._stop_ids
            if ends and rank < width:
                self._end(Beam(-loss, length, self.beams[number], rows[number], place))
            elif not ends and len(going) < width:
                going.append((number, Beam(-loss, length, self.beams[number], rows[number], place)))
        self.beams = [beam for _, beam in going]
        self.is_done = not going or self._is_decided(length)
        return going

    def _end(self, beam: Beam) -> None:
        self.ended.append((beam.score / beam.length**self._length_penalty, beam))
        self.ended.sort(key=lambda each: -each[0])
        del self.ended[self._width :]

    def _is_decided(self, length: int) -> bool:
        """Whether the beams that go on change nothing any more, as far as that is told by the best of them."""
        if len(self.ended) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._most
        return not self.beams[0].score / length**self._length_penalty > self.ended[-1][0]

    def ends_at_stop(self, beam: Beam) -> bool:
        """Whether a text that has ended did so with a token that ends texts."""
        return beam.token in self._stop_ids

    def common(self) -> list[int]:
        """The tokens with which all beams begin."""
        texts = [beam.tokens for beam in self.beams]
        first, last = min(texts), max(texts)
        return first[: next((at for at, pair in enumerate(zip(first, last, strict=True)) if pair[0] != pair[1]), None)]


def most_tokens(width: int, prompt_len: int, max_len: int, block_size: int) -> int:
    """How many tokens a search needs in the KV cache at most, in whole blocks.

    Beams share the full blocks of the prompt; one block more is there while a beam's last block is copied.
    """
    shared = prompt_len // block_size
    return (shared + width * (math.ceil(max_len / block_size) - shared) + 1) * block_size
