"""The interface of what runs the scheduler's plans. `runner` implements it for this process's device."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.engine.messages import PromptLogprobs, TokenLogprobs
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan

if TYPE_CHECKING:
    from headway.kernels.interface import KernelTime


class EngineFault(RuntimeError):
    """A step failed and no request is to blame. The engine's state is unknown: it is of no further use."""


class StepOutcome(msgspec.Struct):
    """What a step produced, by the seq_id of its sequences."""

    times: StepTimes
    # New tokens of each sequence that samples: the drafts that were accepted, and the token drawn after them. None
    # where the logits were not numbers, or the hidden states of a sequence that wants a vector. Empty where it is not
    # known yet which tokens a grammar allows.
    tokens: dict[int, list[int] | None] = {}
    reasons: dict[int, str] = {}  # why tokens are None, where it is something else
    logprobs: dict[int, list[TokenLogprobs]] = {}  # log-probabilities of the new tokens, for sequences that want them
    prompt_logprobs: dict[int, list[PromptLogprobs]] = {}  # those of this step's prompt tokens, for who wants them
    pooled: dict[int, NDArray[np.float64]] = {}  # what this step adds to the vectors that sequences want
    drafts: dict[int, list[int]] = {}  # tokens that a grammar forces behind the new ones; the next step tries them
    failed_since_ns: int = 0  # when the step began that failed and was run again in parts; 0 where it did not fail
    faults: dict[int, str] = {}  # names of the exceptions that sequences raised when they ran alone
    # What mixtures of experts did: times that one was asked, pairs of a token and an expert, experts that had any
    # token, and tokens of those that had most.
    routing: tuple[int, int, int, int] = (0, 0, 0, 0)

    def take(self, part: StepOutcome) -> None:
        """Add the outcome of a part of the step."""
        self.tokens |= part.tokens
        self.reasons |= part.reasons
        self.logprobs |= part.logprobs
        self.prompt_logprobs |= part.prompt_logprobs
        self.pooled |= part.pooled
        self.drafts |= part.drafts
        self.routing = tuple(map(sum, zip(self.routing, part.routing, strict=True)))  # type: ignore[assignment]


class Executor(Protocol):
    """Runs plans one after the other, and knows of sequences only what plans have said."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, below which all token ids are."""

    @property
    def generates(self) -> bool:
        """Whether the model has an output layer."""

    def prepare(self, grammar: str, eos_token_ids: Collection[int]) -> Future[None] | None:
        """Begin what takes time before the first step with a grammar; None where nothing does.

        The future's ValueError is one line for the user.
        """

    def look(self) -> None:
        """Look, now and then while nothing runs, whether plans can still be run. Raises EngineFault where not."""

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step.

        When it has raised, the plan can be run again after recover(), whole or in parts without the swaps and copies.

        Raises:
            EngineFault: nothing can be run any more.
        """

    def timed(self, wanted: bool | None) -> list[KernelTime]:
        """The last kernels, as Kernels.timed() gives them."""

    def forget(self, seq_id: int) -> None:
        """A sequence has finished or was preempted; does nothing for an unknown one."""

    def recover(self) -> None:
        """Discard what a step that raised may have half written."""
