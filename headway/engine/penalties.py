"""Repetition, presence and frequency penalties, kept up to date on the device a token at a time.

A penalty touches only tokens that occurred, so each sequence has a row of distinct token ids with their
counts in the output, not a row of the vocabulary. Rows are kept by width, so that a long context makes only its own
row long. Definitions are those of the OpenAI API (presence,
frequency; over the output) and of CTRL, arXiv:1909.05858, section 4.1 (repetition; over prompt and
output): logit / r where positive and logit * r elsewhere, minus frequency * count, minus presence where
count > 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.policy.plan import SequenceState
from headway.policy.step_memory import ENTRIES_AT_A_TIME, LEAST_ROWS, LEAST_WIDTH

EMPTY = -1


class _Rows:
    """Rows of one width: token ids and their counts in the output, each [height, width]."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.owners: dict[int, _History] = {}
        self.ids = torch.full((LEAST_ROWS, width), EMPTY, dtype=torch.int64, device=device)
        self.counts = torch.zeros((LEAST_ROWS, width), dtype=torch.float32, device=device)
        self._free = list(range(LEAST_ROWS))

    def take(self, history: _History) -> None:
        """Give the history an empty row, making twice as many where none is free."""
        if not self._free:
            height = len(self.ids)
            self._free.extend(range(height, 2 * height))
            self.ids = torch.cat((self.ids, torch.full_like(self.ids, EMPTY)))
            self.counts = torch.cat((self.counts, torch.zeros_like(self.counts)))
        row = self._free.pop()
        self.ids[row] = EMPTY
        self.counts[row] = 0.0
        self.owners[row] = history
        history.rows, history.row = self, row

    def leave(self, row: int) -> None:
        del self.owners[row]
        self._free.append(row)

    @torch.inference_mode()
    def shrink(self) -> bool:
        """Halve the height where a quarter of it is used; True when rows have moved."""
        height = len(self.ids) // 2
        if height < LEAST_ROWS or len(self.owners) > height // 2:
            return False
        self._free = [row for row in range(height) if row not in self.owners]
        for row in [row for row in self.owners if row >= height]:
            history = self.owners.pop(row)
            history.row = self._free.pop()
            self.owners[history.row] = history
            self.ids[history.row], self.counts[history.row] = self.ids[row], self.counts[row]
        self.ids, self.counts = self.ids[:height].clone(), self.counts[:height].clone()
        return True


@dataclass(slots=True, eq=False)
class _History:
    """What the table knows of a sequence: its row, the column of each token, and how many tokens it has seen."""

    columns: dict[int, int]
    seen: int
    row: int = 0
    rows: _Rows = field(init=False)


@dataclass(slots=True)
class _Part:
    """Sequences of a batch whose rows have one width; tensors are [P, 1]."""

    rows: _Rows
    offsets: Tensor  # int64, where the sequence's logits begin in the flattened batch
    table_rows: Tensor  # int64 [P]
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(slots=True)
class PenaltyRows:
    """The penalised sequences of one batch, at `batch_rows` of logits with this row stride."""

    sequences: list[SequenceState]
    batch_rows: list[int]
    stride: int
    parts: list[_Part]
    version: int  # of the table, when the parts were made


class PenaltyTable:
    """Distinct tokens and output counts of every sequence that uses penalties, on the device.

    A prompt has at least one token, and every token is in the vocabulary.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._histories: dict[SequenceState, _History] = {}
        self._of_width: dict[int, _Rows] = {}
        self._version = 0  # counts the moves of rows

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def nbytes(self) -> int:
        return sum(rows.ids.nbytes + rows.counts.nbytes for rows in self._of_width.values())

    def forget(self, sequence: SequenceState) -> None:
        """Free the sequence's row, and memory when few are left; does nothing for one that has none."""
        history = self._histories.pop(sequence, None)
        if history is not None:
            self._leave(history.rows, history.row)
            self._version += history.rows.shrink()

    def rows(self, sequences: list[SequenceState], batch_rows: list[int], stride: int) -> PenaltyRows:
        """Gather what `apply` needs for these sequences, at rows batch_rows of logits with this row stride."""
        for sequence in sequences:
            if sequence not in self._histories:
                self._add(sequence)
        found = PenaltyRows(list(sequences), batch_rows, stride, [], self._version)
        found.parts = self._parts(found)
        return found

    def apply(self, logits: Tensor, rows: PenaltyRows) -> None:
        """Take in the tokens chosen since the last call and penalise logits, float32 and contiguous, in place."""
        self._update(rows.sequences)
        if rows.version != self._version:
            rows.parts, rows.version = self._parts(rows), self._version
        flat_logits = logits.view(-1)
        for part in rows.parts:
            ids, counts = part.rows.ids[part.table_rows], part.rows.counts[part.table_rows]
            used = ids != EMPTY
            flat = torch.where(used, ids, ids[:, :1]) + part.offsets
            old = flat_logits[flat]
            new = torch.where(old > 0, old / part.repetition, old * part.repetition)
            new -= part.frequency * counts
            new -= part.presence * (counts > 0)
            # Unused columns write what the first column writes, so the order of writes does not matter.
            flat_logits[flat] = torch.where(used, new, new[:, :1])

    def _parts(self, of: PenaltyRows) -> list[_Part]:
        members: dict[int, list[int]] = {}
        for place, sequence in enumerate(of.sequences):
            members.setdefault(self._histories[sequence].rows.width, []).append(place)
        parts = []
        for width, places in members.items():
            most = max(1, ENTRIES_AT_A_TIME // width)
            parts += [self._part(of, places[at : at + most]) for at in range(0, len(places), most)]
        return parts

    def _part(self, of: PenaltyRows, places: list[int]) -> _Part:
        params = [of.sequences[place].params for place in places]
        histories = [self._histories[of.sequences[place]] for place in places]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(1)

        return _Part(
            rows=histories[0].rows,
            offsets=torch.tensor([of.batch_rows[p] for p in places], device=self._device).unsqueeze(1) * of.stride,
            table_rows=torch.tensor([history.row for history in histories], device=self._device),
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
        )

    def _add(self, sequence: SequenceState) -> None:
        prompt = dict.fromkeys(sequence.tokens[: sequence.prompt_len])
        history = _History({token: column for column, token in enumerate(prompt)}, sequence.prompt_len)
        self._rows_for(len(prompt)).take(history)
        history.rows.ids[history.row, : len(prompt)] = torch.tensor(list(prompt), device=self._device)
        self._histories[sequence] = history

    def _rows_for(self, columns: int) -> _Rows:
        """Rows of the least width, a power of two, that holds so many."""
        width = max(LEAST_WIDTH, 1 << (columns - 1).bit_length())
        if width not in self._of_width:
            self._of_width[width] = _Rows(width, self._device)
        return self._of_width[width]

    def _leave(self, rows: _Rows, row: int) -> None:
        rows.leave(row)
        if not rows.owners:
            del self._of_width[rows.width]

    def _widen(self, history: _History) -> None:
        """Move a sequence that has outgrown its row to a wider one."""
        rows, row = history.rows, history.row
        self._rows_for(len(history.columns)).take(history)
        history.rows.ids[history.row, : rows.width] = rows.ids[row]
        history.rows.counts[history.row, : rows.width] = rows.counts[row]
        self._leave(rows, row)
        self._version += 1

    def _update(self, sequences: list[SequenceState]) -> None:
        changes: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for sequence in sequences:
            history = self._histories[sequence]
            known, tokens = history.columns, sequence.tokens[history.seen :]
            if not tokens:
                continue
            history.seen = len(sequence.tokens)
            columns = [known.setdefault(token, len(known)) for token in tokens]
            if len(known) > history.rows.width:
                self._widen(history)
            change = changes.setdefault(history.rows.width, ([], [], []))
            change[0].extend([history.row] * len(tokens))
            change[1].extend(columns)
            change[2].extend(tokens)
        one = torch.ones((), dtype=torch.float32, device=self._device)
        for width, change in changes.items():
            rows = self._of_width[width]
            at = torch.from_numpy(np.array(change, np.int64)).to(self._device, non_blocking=True)
            rows.ids[at[0], at[1]] = at[2]
            rows.counts.index_put_((at[0], at[1]), one, accumulate=True)
