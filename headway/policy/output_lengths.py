"""How many tokens a request will generate: no more than it allows, and about what its class has generated of late."""

from __future__ import annotations

from headway.policy.request import Sequence

_FOLLOWED = 0.05


class OutputLengths:
    def __init__(self) -> None:
        self._means: dict[str, float] = {}  # by class

    def ended(self, sequence: Sequence) -> None:
        """A sequence came to its own end."""
        name, length = sequence.service.name, sequence.output_len
        mean = self._means.setdefault(name, float(length))
        self._means[name] = mean + _FOLLOWED * (length - mean)

    def expected(self, sequence: Sequence) -> int:
        allowed = sequence.max_len - sequence.prompt_len
        return min(allowed, round(self._means.get(sequence.service.name, allowed)))
