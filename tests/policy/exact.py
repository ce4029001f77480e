"""A machine whose steps take exactly as long as is predicted, and sequences in any state."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from headway.policy.step.request import NEVER, Sequence, Status
from headway.policy.step.step_time import StepWork
from tests.policy.simulation import make_sequence

MS = 1_000_000
_numbers = itertools.count()


@dataclass
class Exact:
    """A StepTimeModel of known coefficients, in milliseconds; attention costs nothing."""

    fixed: float = 10.0
    token: float = 1.0
    decode: float = 1.0
    is_trained: bool = True
    knows_logits: bool = True
    overrun: float = 1.0
    error: float = 0.0

    def observe(self, work: StepWork, duration_ns: int) -> None:
        """Learn nothing, as everything is known."""

    def predict_ns(self, work: StepWork) -> float:
        return MS * (self.fixed + self.token * work.prefill_tokens + self.decode * work.decode_tokens)

    def prefill_ns(self, count: int, start: int, with_logits: bool = False) -> float:
        return MS * self.token * count

    def prefill_tokens_within(self, duration_ns: float, start: int, with_logits: bool = False) -> int:
        return int(duration_ns / (MS * self.token) + 1e-9)

    def share_without(self, work: StepWork, without: StepWork) -> float:
        return self.predict_ns(without) / self.predict_ns(work)


def waiting(prompt_len: int, due_ms: float | None, rank: int = 0, **fields: Any) -> Sequence:
    """A sequence that has waited since 0 and whose first token is due at `due_ms`."""
    sequence = make_sequence(str(next(_numbers)), list(range(prompt_len)), 20)
    sequence.seq_id, sequence.rank = next(_numbers), rank
    sequence.due_ns, sequence.tpot_ns = NEVER if due_ms is None else int(due_ms * MS), NEVER
    for name, value in fields.items():
        setattr(sequence, name, value)
    return sequence


def decoding(tpot_ms: float | None, last_token_ms: float = 0.0, context: int = 10, **fields: Any) -> Sequence:
    """A decoding sequence that had its newest token at `last_token_ms`."""
    sequence = waiting(context, 0 if tpot_ms else None, **fields)
    sequence.tokens.append(1)
    sequence.num_computed, sequence.status = context, Status.RUNNING
    sequence.tpot_ns = NEVER if tpot_ms is None else int(tpot_ms * MS)
    sequence.last_token_ns = int(last_token_ms * MS)
    return sequence
