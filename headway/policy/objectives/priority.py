"""The policy `priority`: the better priority goes first, and takes the place of a worse one a few times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headway.policy.objectives.orders import PRIORITY
from headway.policy.objectives.victims import Displacement
from headway.policy.step.request import Sequence
from headway.policy.step.scheduling_policy import SchedulingPolicy
from headway.policy.step.sequences import Sequences, Step


class PriorityPolicy(SchedulingPolicy):
    """Serves lower priority values first; each is worth some seconds of waiting (`orders.priority`)."""

    orders = PRIORITY
    uses_priority = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._displacement = Displacement(self)

    def prepare(self, step: Step) -> None:
        self._displacement.displace(step)

    def is_outranked(self, sequences: Sequences) -> bool:
        return self._displacement.is_outranked(sequences)

    def is_steady(self, running: Iterable[Sequence]) -> bool:
        return True
