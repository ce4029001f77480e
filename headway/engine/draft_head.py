"""Drafts of a head that reads the model's results (models.heads), with a KV cache and block tables of its own.

The head is drafted with as a draft model is: its passes, blocks, prefix cache and failures are those of `draft_model`.
Two things differ. What it computes for a position follows from the token behind that, so its copy of a sequence lacks
the first token. And it reads the model's results, which are kept from the model's steps until it has read them. Where
more than a few are not there, as of a prompt that was too long, the sequence has no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.engine.draft_model import MEASURED_TOKENS, DraftModel
from headway.engine.runner import Runner
from headway.models.heads import HeadInputs
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.drafting import Drafting
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.policy.step.request import Sequence

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


class DraftHead(DraftModel):
    """Makes drafts with a head. Arguments as those of DraftModel.

    Args:
        kind: what its drafts are called in metrics.
        inputs: where the head reads results.

    Attributes:
        results: those of the model, which is to give them.
    """

    _skipped = 1

    def __init__(
        self,
        kind: str,
        inputs: HeadInputs,
        runner: Runner,
        blocks: KVBlocks,
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(runner, blocks, max_model_len, vocab_size, clock)
        self.kind = kind
        self._vocab_size = vocab_size
        self._inputs = inputs
        self.results = ModelResults(inputs)
        self._own: dict[int, Tensor] = {}  # the head's last results [hidden], by seq_id

    def forget(self, seq_id: int) -> None:
        """A sequence has ended; does nothing for an unknown one."""
        super().forget(seq_id)
        self._own.pop(seq_id, None)

    def _followed(self, sequence: Sequence) -> Sequence | None:
        copy = super()._followed(sequence)
        if copy is None:
            return None
        length = len(copy.tokens)
        return copy if self.results.reach(sequence.seq_id, length - self._lacks(copy), length) else None

    def _agreed(self, drafts: list[int], new: list[int]) -> int:
        """None: what was computed of drafts was of the head's own results."""
        return 0

    def _forward(self, plan: StepPlan) -> Tensor:
        self._inputs.give(torch.cat([self._read(item) for item in plan.scheduled]))
        hidden = super()._forward(plan)
        sampling = [item.seq_id for item in plan.scheduled if item.samples]
        self._own.update(zip(sampling, hidden.clone(), strict=True))
        return hidden

    def _read(self, item: ScheduledSequence) -> Tensor:
        """The results [n, hidden] that the head reads for an item's tokens: the model's, or behind drafts its own."""
        if item.start >= self._lengths[item.seq_id]:
            return self._own[item.seq_id][None]
        return self.results.read(item.seq_id, item.start, item.num_tokens)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[list[float], list[int]]:
        """See DraftModel."""
        best, chosen = super().run(plan)
        return best, chosen if (ids := self._inputs.ids) is None else [ids[token] for token in chosen]

    def measure(self, drafting: Drafting) -> None:
        """See DraftModel; of results that are zeros."""
        numbers = range(-len(self._runner.layout.tables.array), 0)
        for number in numbers:
            self.results.begin(number, MEASURED_TOKENS + 1)
        super().measure(drafting)
        for number in numbers:
            self.results.forget(number)
