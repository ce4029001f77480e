"""Drafts of a head that reads the model's results (models.heads), with a KV cache and block tables of its own.

The head is drafted with as a draft model is: its passes, blocks, prefix cache and failures are those of `draft_model`.
Two things differ. What it computes for a position follows from the token behind that, so its copy of a sequence lacks
the first token. And it reads the model's results, which are kept from the model's steps until it has read them. Where
more than a few are not there, as of a prompt that was too long, the sequence has no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from headway.engine.draft_model import MEASURED_TOKENS, DraftModel
from headway.engine.model_results import ModelResults
from headway.engine.runner import Runner
from headway.models.heads import HeadInputs
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.drafting import Drafting
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.policy.step.request import Sequence


class DraftHead(DraftModel):
    """Makes drafts with a head. Arguments as those of DraftModel.

    Args:
        kind: what its drafts are called in metrics.
        inputs: where the head reads results.

    Attributes:
        results: those of the model, which is to give them.
    """

    _makes_chains = False  # what it reads is given before each pass
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
