"""The last steps and the reasons for them, for whoever looks into a server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence


@dataclass(slots=True)
class Decision:
    """One step. Sequences go by the ids of their requests, times are nanoseconds."""

    planned_ns: int  # when it was decided
    decoding: int = 0  # sequences that decode in it
    prompt_tokens: int = 0
    waiting: int = 0  # how many there were afterwards, as in `running`
    running: int = 0
    queue: str = ""  # why the others still wait, as the ledger's phase
    slack_ns: float = math.inf  # the time until the next promised token is due
    tightest: str = ""  # whose it is; empty where none is promised
    urgent: str = ""  # the prompt for which others were held back
    left_out: int = 0  # decoding sequences that got no token
    window_ns: int = 0
    admitted: list[str] = field(default_factory=list)
    told: dict[int, str] = field(default_factory=dict)  # who the executor hears of, by the numbers of their sequences
    preempted: list[str] = field(default_factory=list)
    yielded: list[tuple[str, str]] = field(default_factory=list)  # who was put behind others or refused, and why
    gave_back: list[tuple[str, str]] = field(default_factory=list)  # who was preempted, and for which class
    evicted: Mapping[tuple[str, str], int] = field(default_factory=dict)  # cached blocks given up, by class and reason
    swapped_out: list[tuple[str, int]] = field(default_factory=list)  # who goes to host memory, with how many blocks
    swapped_in: int = 0  # blocks that are copied back
    predicted_ns: float = 0.0  # predicted time of the forward pass; 0 while it is not known
    took_ns: int = 0  # measured time of it; likewise
    least_ns: float = 0.0  # what the machine would need at least for it; 0 where that is not known
    plan: StepPlan | None = None  # what was run; None where nothing was
    times: StepTimes | None = None  # when it was; None while it is not known

    def note_preempted(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """Note who was preempted, and what is swapped."""
        preempted = [sequences[seq_id] for seq_id in plan.preempted if seq_id in sequences]  # others were ended
        self.preempted = [sequence.request_id for sequence in preempted]
        self.swapped_out = [(s.request_id, len(s.swapped.host_blocks)) for s in preempted if s.swapped is not None]
        self.swapped_in = sum([len(swap.blocks) for swap in plan.swaps if not swap.is_out])

    def in_words(self) -> str:
        """The decision as one line of text."""
        if self.window_ns:
            return f"Nothing runs: waits {self.window_ns / 1e6:.1f} ms for more requests."
        work = []
        if self.decoding:
            work.append(f"{_sequences(self.decoding)} {'decodes' if self.decoding == 1 else 'decode'}")
        if self.prompt_tokens:
            work.append(f"{self.prompt_tokens} token{'s' * (self.prompt_tokens != 1)} of prompts")
        parts = [", ".join(work) or "Nothing runs"]
        if self.tightest:
            parts.append(f"the next promised token, of {self.tightest}, is due in {self.slack_ns / 1e6:.1f} ms")
        if self.urgent:
            parts.append(f"the prompt of {self.urgent} is urgent")
        if self.left_out:
            is_or_are = "is" if self.left_out == 1 else "are"
            parts.append(f"{_sequences(self.left_out)} without an objective {is_or_are} left out")
        if self.admitted:
            parts.append("admitted: " + ", ".join(self.admitted))
        if self.preempted:
            parts.append("preempted: " + ", ".join(self.preempted))
        parts += [f"{name} yields ({reason})" for name, reason in self.yielded]
        parts += [f"{name} gives blocks back to {service_class}" for name, service_class in self.gave_back]
        parts += [f"{_blocks(count)} of {name} swapped out" for name, count in self.swapped_out]
        if self.swapped_in:
            parts.append(f"{_blocks(self.swapped_in)} swapped in")
        if self.evicted:
            blocks = (f"{count} of {name or 'several classes'} ({why})" for (name, why), count in self.evicted.items())
            parts.append("cached blocks evicted: " + ", ".join(blocks))
        if self.waiting:
            parts.append(f"{self.waiting} wait ({self.queue})")
        if self.predicted_ns:
            parts.append(f"predicted {self.predicted_ns / 1e6:.1f} ms")
        if self.took_ns:
            parts.append(f"took {self.took_ns / 1e6:.1f} ms")
        if self.least_ns:
            parts.append(f"the roofline is {self.least_ns / 1e6:.2f} ms")
        return "; ".join(parts) + "."


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def _sequences(count: int) -> str:
    return f"{count} sequence{'s' * (count != 1)}"
