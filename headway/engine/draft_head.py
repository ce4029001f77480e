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
class _Results:
    """The model's results of a sequence for positions `first` to `end` - 1, in parts [n, hidden]."""

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


class DraftHead(DraftModel):
    """Makes drafts with a head. Arguments as those of DraftModel; `heed` is told of the model's steps.

    Args:
        kind: what its drafts are called in metrics.
        inputs: where the head reads results.
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
        self._results: dict[int, _Results] = {}
        self._own: dict[int, Tensor] = {}  # the head's last results [hidden], by seq_id

    def heed(self, scheduled: list[ScheduledSequence], hidden: Tensor) -> None:
        """Keep the model's results [T, hidden] of a step."""
        kept, first = self._inputs.kept(hidden), 0
        for item in scheduled:
            rows = kept[first : first + item.num_tokens]
            first += item.num_tokens
            known = self._results.setdefault(item.seq_id, _Results(item.start, item.start))
            known.append(item.start, rows)
        while len(self._results) > 1 and sum(map(len, self._results.values())) > MOST_KEPT:
            del self._results[max(self._results, key=lambda seq_id: len(self._results[seq_id]))]

    def forget(self, seq_id: int) -> None:
        """A sequence has ended; does nothing for an unknown one."""
        super().forget(seq_id)
        self._results.pop(seq_id, None)
        self._own.pop(seq_id, None)

    def _followed(self, sequence: Sequence) -> Sequence | None:
        copy, known = super()._followed(sequence), self._results.get(sequence.seq_id)
        if copy is None or known is None:
            return None
        length = len(copy.tokens)
        start = length - self._lacks(copy)
        return copy if known.first - start <= _MOST_MISSING and length <= known.end else None

    def _agreed(self, drafts: list[int], new: list[int]) -> int:
        """None: what was computed of drafts was of the head's own results."""
        return 0

    def _forward(self, plan: StepPlan) -> Tensor:
        self._inputs.give(torch.cat([self._read(item) for item in plan.scheduled]))
        hidden = super()._forward(plan)
        own = hidden.clone()
        at = 0
        for item in plan.scheduled:
            if item.start < self._lengths[item.seq_id]:
                self._results[item.seq_id].drop(item.start + item.num_tokens - 1)
            if item.samples:
                self._own[item.seq_id] = own[at]
                at += 1
        return hidden

    def _read(self, item: ScheduledSequence) -> Tensor:
        """The results [n, hidden] that the head reads for an item's tokens: the model's, or behind drafts its own."""
        if item.start >= self._lengths[item.seq_id]:
            return self._own[item.seq_id][None]
        return self._inputs.read(self._results[item.seq_id].rows(item.start, item.num_tokens))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[list[float], list[int]]:
        """See DraftModel."""
        best, chosen = super().run(plan)
        return best, chosen if (ids := self._inputs.ids) is None else [ids[token] for token in chosen]

    def measure(self, drafting: Drafting) -> None:
        """See DraftModel; of results that are zeros."""
        for number in range(-len(self._runner.layout.tables.array), 0):
            zeros = self._inputs.rows.new_zeros(MEASURED_TOKENS + 1, self._inputs.width)
            self._results[number] = _Results(0, len(zeros), [zeros])
        super().measure(drafting)
        self._results.clear()
