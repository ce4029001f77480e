"""What a model's steps gave for its sequences, kept until a head that makes drafts has read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.models.heads import HeadInputs
from headway.policy.step.plan import ScheduledSequence

MOST_KEPT = 8192  # results of the model, of all sequences together
# So many may be missing, for which zeros are read: prefix caches of model and head end at other tokens.
_MOST_MISSING = 64


@dataclass(slots=True)
class _Rows:
    """Results of a sequence for positions `first` to `end` - 1, in parts [n, hidden]."""

    first: int
    end: int
    parts: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return self.end - self.first

    def append(self, start: int, rows: Tensor) -> None:
        """Results from a position on, which take the place of those that were known from there on."""
        if not self.first <= start <= self.end:
            self.first = self.end = start
            self.parts.clear()
        while self.end > start:
            last = self.parts.pop()
            left = len(last) - (self.end - start)
            self.end = max(start, self.end - len(last))
            if left > 0:
                self.parts.append(last[:left])
        self.parts.append(rows)
        self.end += len(rows)

    def drop(self, start: int) -> None:
        """Forget those before a position, in whole parts."""
        while self.parts and self.first + len(self.parts[0]) <= start:
            self.first += len(self.parts.pop(0))

    def rows(self, start: int, count: int) -> Tensor:
        """[count, hidden] of positions up to the last that is known; zeros for those before the first."""
        rows = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        if (missing := self.first - start) > 0:
            rows = torch.cat([rows.new_zeros(missing, rows.shape[1]), rows])
        return rows[max(0, -missing) :][:count]


class ModelResults:
    """What the model's steps gave for sequences, by seq_id, as far as a head has not read it.

    Args:
        inputs: says what is kept of a step.
    """

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        self._of: dict[int, _Rows] = {}

    def heed(self, scheduled: list[ScheduledSequence], hidden: Tensor) -> None:
        """Keep the results [T, hidden] of a step."""
        kept, first = self._inputs.kept(hidden), 0
        for item in scheduled:
            known = self._of.setdefault(item.seq_id, _Rows(item.start, item.start))
            known.append(item.start, kept[first : first + item.num_tokens].clone())
            first += item.num_tokens
        while len(self._of) > 1 and sum(map(len, self._of.values())) > MOST_KEPT:
            del self._of[max(self._of, key=lambda seq_id: len(self._of[seq_id]))]

    def forget(self, seq_id: int) -> None:
        """A sequence has ended, or is computed again; does nothing for an unknown one."""
        self._of.pop(seq_id, None)

    def reach(self, seq_id: int, start: int, end: int) -> bool:
        """Whether all but a few results of these positions are there."""
        known = self._of.get(seq_id)
        return known is not None and known.first - start <= _MOST_MISSING and end <= known.end

    def read(self, seq_id: int, start: int, count: int) -> Tensor:
        """What the head reads [count, hidden] of positions that are reached. Those before the last are forgotten."""
        known = self._of[seq_id]
        rows = known.rows(start, count)
        known.drop(start + count - 1)
        return self._inputs.read(rows)

    def begin(self, seq_id: int, count: int) -> None:
        """Zeros for the first positions of a sequence."""
        self._of[seq_id] = _Rows(0, count, [self._inputs.rows.new_zeros(count, self._inputs.width)])
