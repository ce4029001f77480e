"""Repetition, presence and frequency penalties, kept up to date on the device a token at a time.

A penalty touches only tokens that occurred, so each sequence has a row of distinct token ids with their
counts in the output, not a row of the vocabulary. Definitions are those of the OpenAI API (presence,
frequency; over the output) and of CTRL, arXiv:1909.05858, section 4.1 (repetition; over prompt and
output): logit / r where positive and logit * r elsewhere, minus frequency * count, minus presence where
count > 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.policy.request import Sequence

EMPTY = -1


@dataclass(slots=True)
class _History:
    """What the table knows of a sequence: its row, the column of each token, and how many tokens it has seen."""

    row: int
    columns: dict[int, int]
    seen: int


@dataclass(slots=True)
class PenaltyRows:
    """The penalised sequences of one batch; tensors are [P, 1]."""

    sequences: list[Sequence]
    offsets: Tensor  # int64, where the sequence's logits begin in the flattened batch
    table_rows: Tensor  # int64 [P]
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def uses_penalties(sequence: Sequence) -> bool:
    params = sequence.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class PenaltyTable:
    """Distinct tokens and output counts of every sequence that uses penalties, [rows, columns] on the device.

    A prompt has at least one token, and every token is in the vocabulary.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._histories: dict[Sequence, _History] = {}
        self._free = [0, 1, 2, 3]
        self._ids = torch.full((4, 64), EMPTY, dtype=torch.int64, device=device)
        self._counts = torch.zeros((4, 64), dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self._histories)

    def forget(self, sequence: Sequence) -> None:
        """Free the sequence's row; does nothing for one that has none."""
        history = self._histories.pop(sequence, None)
        if history is not None:
            self._free.append(history.row)

    def rows(self, sequences: list[Sequence], batch_rows: list[int], stride: int) -> PenaltyRows:
        """Gather what `apply` needs for these sequences, at rows batch_rows of logits with this row stride."""
        for sequence in sequences:
            if sequence not in self._histories:
                self._add(sequence)
        params = [s.params for s in sequences]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(1)

        return PenaltyRows(
            sequences=list(sequences),
            offsets=torch.tensor(batch_rows, device=self._device).unsqueeze(1) * stride,
            table_rows=torch.tensor([self._histories[s].row for s in sequences], device=self._device),
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
        )

    def apply(self, logits: Tensor, rows: PenaltyRows) -> None:
        """Take in the tokens chosen since the last call and penalise logits, float32 and contiguous, in place."""
        self._update(rows.sequences)
        ids, counts = self._ids[rows.table_rows], self._counts[rows.table_rows]
        used = ids != EMPTY
        flat = torch.where(used, ids, ids[:, :1]) + rows.offsets
        old = logits.view(-1)[flat]
        new = torch.where(old > 0, old / rows.repetition, old * rows.repetition)
        new -= rows.frequency * counts
        new -= rows.presence * (counts > 0)
        # Unused columns write what the first column writes, so the order of writes does not matter.
        logits.view(-1)[flat] = torch.where(used, new, new[:, :1])

    def _add(self, sequence: Sequence) -> None:
        prompt = dict.fromkeys(sequence.tokens[: sequence.prompt_len])
        columns = {token: column for column, token in enumerate(prompt)}
        self._grow(len(columns))
        row = self._free.pop()
        self._ids[row] = EMPTY
        self._counts[row] = 0.0
        self._ids[row, : len(columns)] = torch.tensor(list(columns), device=self._device)
        self._histories[sequence] = _History(row, columns, sequence.prompt_len)

    def _grow(self, columns: int) -> None:
        """Make room for one more row and for rows of this many distinct tokens, doubling."""
        height, width = self._ids.shape
        new_height = height if self._free else height * 2
        new_width = width
        while new_width < columns:
            new_width *= 2
        if (new_height, new_width) == (height, width):
            return
        self._free.extend(range(height, new_height))
        ids, counts = self._ids, self._counts
        self._ids = torch.full((new_height, new_width), EMPTY, dtype=torch.int64, device=self._device)
        self._counts = torch.zeros((new_height, new_width), dtype=torch.float32, device=self._device)
        self._ids[:height, :width] = ids
        self._counts[:height, :width] = counts

    def _update(self, sequences: list[Sequence]) -> None:
        rows: list[int] = []
        columns: list[int] = []
        tokens: list[int] = []
        for sequence in sequences:
            history = self._histories[sequence]
            for token in sequence.tokens[history.seen :]:
                rows.append(history.row)
                columns.append(history.columns.setdefault(token, len(history.columns)))
                tokens.append(token)
            history.seen = len(sequence.tokens)
        if not tokens:
            return
        self._grow(max(columns) + 1)
        changes = torch.from_numpy(np.array((rows, columns, tokens), np.int64)).to(self._device, non_blocking=True)
        self._ids[changes[0], changes[1]] = changes[2]
        one = torch.ones((), dtype=torch.float32, device=self._device)
        self._counts.index_put_((changes[0], changes[1]), one, accumulate=True)
