"""Repetition, presence and frequency penalties over the tokens that occurred, kept up to date a token at a time.

A penalty touches only tokens that occurred. So each sequence has a list of its distinct tokens with their counts in
the output, and no row of the vocabulary. The lists are on the host, where the tokens are, and go to the device end to
end in every step. Presence and frequency penalties are defined as in the OpenAI API, over the output; the repetition
penalty r as in CTRL (arXiv:1909.05858, section 4.1), over prompt and output: a logit becomes logit / r where it is
positive and logit * r elsewhere, then minus frequency * count, then minus presence where the count is above 0.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.kernels.host import to_device
from headway.policy.cache.sizing import ENTRIES_AT_A_TIME
from headway.policy.step.plan import SequenceState


@dataclass(slots=True, eq=False)
class _History:
    """The distinct tokens among the first `seen` of a sequence, in the order of their first occurrence, with counts."""

    places: dict[int, int]  # the place of each token in the arrays
    token_ids: array[int]
    counts: array[float]  # how often each token is in the output, as float32
    seen: int


class PenaltyTable:
    """Distinct tokens and output counts of every sequence that uses penalties.

    A prompt has at least one token, and every token is in the vocabulary.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._histories: dict[SequenceState, _History] = {}

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def nbytes(self) -> int:
        return sum(len(history.places) * (8 + 4) for history in self._histories.values())

    def clear(self) -> None:
        """Forget every sequence."""
        self._histories.clear()

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence. Does nothing for one that was not penalised."""
        self._histories.pop(sequence, None)

    def seen(self, sequence: SequenceState) -> tuple[int, int, int]:
        """(address of its distinct tokens, address of their counts, how many they are), good until the next call."""
        history = self._history(sequence)
        return history.token_ids.buffer_info()[0], *history.counts.buffer_info()

    def apply(self, logits: Tensor, rows: list[int], sequences: list[SequenceState]) -> None:
        """Penalise rows of logits in place for all tokens of their sequences; logits float32 [R, V], contiguous."""
        histories = [self._history(sequence) for sequence in sequences]
        num_together = max(1, ENTRIES_AT_A_TIME // max(len(history.places) for history in histories))
        starts = np.array(rows, np.int64) * logits.shape[1]
        penalties = np.array(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (s.params for s in sequences)],
            np.float32,
        )
        for at in range(0, len(rows), num_together):
            part = slice(at, at + num_together)
            self._penalise(logits.view(-1), histories[part], starts[part], penalties[part])

    def _penalise(
        self, logits: Tensor, histories: list[_History], starts: NDArray[np.int64], penalties: NDArray[np.float32]
    ) -> None:
        """Penalise histories whose rows begin at `starts` of the flattened logits; penalties [len(histories), 3]."""
        lengths = [len(history.places) for history in histories]
        where = np.concatenate([history.token_ids for history in histories]) + np.repeat(starts, lengths)
        at = to_device(where, self._device)
        counts = to_device(np.concatenate([history.counts for history in histories]), self._device)
        repetition, frequency, presence = to_device(np.repeat(penalties.T, lengths, axis=1), self._device)
        old = logits[at]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new -= frequency * counts
        new -= presence * (counts > 0)
        logits[at] = new

    def _history(self, sequence: SequenceState) -> _History:
        """The history of a sequence, brought up to its newest token."""
        history = self._histories.get(sequence)
        if history is None:
            prompt = list(dict.fromkeys(sequence.tokens[: sequence.prompt_len]))
            places = {token: place for place, token in enumerate(prompt)}
            history = _History(places, array("q", prompt), array("f", [0.0]) * len(prompt), sequence.prompt_len)
            self._histories[sequence] = history
        for token in sequence.tokens[history.seen :]:
            place = history.places.setdefault(token, len(history.token_ids))
            if place == len(history.token_ids):
                history.token_ids.append(token)
                history.counts.append(0.0)
            history.counts[place] += 1.0
        history.seen = len(sequence.tokens)
        return history
