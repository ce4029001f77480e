"""What runs the scheduler's plans: this process's device (`runner`), and nothing else as yet."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headway.engine.messages import PromptLogprobs, TokenLogprobs
from headway.policy.accounting import StepTimes
from headway.policy.plan import StepPlan


class EngineFault(RuntimeError):
    """A step failed and no request is to blame. The engine's state is unknown: it is of no further use."""


class StepOutcome(msgspec.Struct):
    """What a step produced, by the seq_id of its sequences.

    Args:
        tokens: the new ones of each that samples: its drafts as far as they are what is drawn, and one more; None where
            its logits were not numbers.
        drafts: tokens that are proposed to follow those, to be tried in the next step.
        logprobs: of its new tokens, where it wants them.
        prompt_logprobs: of the prompt tokens of this step, where it wants them.
        failed_since_ns: where the step failed and was run again in parts, since when; else 0.
        faults: what was raised on a sequence alone.
    """

    times: StepTimes
    tokens: dict[int, list[int] | None] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[PromptLogprobs]] = {}
    drafts: dict[int, list[int]] = {}
    failed_since_ns: int = 0
    faults: dict[int, str] = {}

    def take(self, part: StepOutcome) -> None:
        """Add what some of the step's sequences got."""
        self.tokens |= part.tokens
        self.logprobs |= part.logprobs
        self.prompt_logprobs |= part.prompt_logprobs
        self.drafts |= part.drafts


class Executor(Protocol):
    """Runs plans one after the other. What it knows of sequences it knows from them."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step.

        Should it raise, the plan, or parts of it without the copies, can be run again after recover().

        Raises:
            EngineFault: nothing can be run any more.
        """

    def forget(self, seq_id: int) -> None:
        """A sequence has finished or was preempted; does nothing for an unknown one."""

    def recover(self) -> None:
        """A step raised: make again what it may have half written."""
