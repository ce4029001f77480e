"""The interface of what runs the scheduler's plans. `runner` implements it for this process's device."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.engine.messages import PromptLogprobs, TokenLogprobs
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan


class EngineFault(RuntimeError):
    """A step failed and no request is to blame. The engine's state is unknown: it is of no further use."""


class StepOutcome(msgspec.Struct):
    """What a step produced, by the seq_id of its sequences.

    Args:
        tokens: new tokens of each sequence that samples: the drafts that were accepted, and the token drawn after them.
            None where the logits were not numbers, or the hidden states of a sequence that wants a vector.
        logprobs: log-probabilities of the new tokens, for sequences that want them.
        prompt_logprobs: those of this step's prompt tokens, for sequences that want them.
        pooled: what this step adds to the vectors that sequences want: float64.
        failed_since_ns: when the step began that failed and was run again in parts; 0 where it did not fail.
        faults: names of the exceptions that sequences raised when they ran alone.
        routing: what mixtures of experts did: times that one was asked, pairs of a token and an expert, experts that
            had any token, and tokens of those that had most.
    """

    times: StepTimes
    tokens: dict[int, list[int] | None] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[PromptLogprobs]] = {}
    pooled: dict[int, NDArray[np.float64]] = {}
    failed_since_ns: int = 0
    faults: dict[int, str] = {}
    routing: tuple[int, int, int, int] = (0, 0, 0, 0)

    def take(self, part: StepOutcome) -> None:
        """Add the outcome of a part of the step."""
        self.tokens |= part.tokens
        self.logprobs |= part.logprobs
        self.prompt_logprobs |= part.prompt_logprobs
        self.pooled |= part.pooled
        self.routing = tuple(map(sum, zip(self.routing, part.routing, strict=True)))  # type: ignore[assignment]


class Executor(Protocol):
    """Runs plans one after the other, and knows of sequences only what plans have said."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, below which all token ids are."""

    @property
    def generates(self) -> bool:
        """Whether the model has an output layer."""

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step.

        When it has raised, the plan can be run again after recover(), whole or in parts without the swaps and copies.

        Raises:
            EngineFault: nothing can be run any more.
        """

    def forget(self, seq_id: int) -> None:
        """A sequence has finished or was preempted; does nothing for an unknown one."""

    def recover(self) -> None:
        """Discard what a step that raised may have half written."""
