"""How many tokens of prompts a step may compute, and how long others may wait for them.

Everybody in a step waits for all of it. Those who decode wait for the prompts beside them; where nobody decodes, the
first prompt waits for the others. Where a token was promised by a certain time, the step may last until then. Otherwise
prompts may make the step longer by `max_stall_ns`, or twice as long where it takes longer than that without them, as
`step_time` predicts. On a fast device the first bound holds; on a slow one the second keeps prompts from starving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.policy.step.step_time import StepTimeModel, StepWork, pairs


@dataclass(frozen=True, slots=True)
class Sharing:
    """How prompts and those who decode share steps."""

    # While prompts can be computed nobody decodes, so that the prompts' steps have no others in them. Otherwise each
    # step has a token of everybody who decodes, and prompts get the rest of it.
    prefill_first: bool = False


MIXED, PREFILL_FIRST = Sharing(), Sharing(prefill_first=True)
# Tokens of prompts in a step beside others, until enough steps were measured to know what they cost.
TOKENS_UNTIL_LEARNT = 32


@dataclass(slots=True)
class StepBudget:
    """What is left of a step for prompts: tokens, and nanoseconds for which others may be held up."""

    tokens: int  # how many tokens prompts may have
    step_time: StepTimeModel  # predicts what tokens cost
    max_stall_ns: float = math.inf  # for how many nanoseconds prompts may hold up others; may be infinite
    least: int = 1  # tokens that the first prompt gets beside decoding sequences whatever they cost
    _stall_ns: float = math.inf  # nanoseconds that may still be added
    _shared: bool = False

    def share_with(self, others: StepWork, slack_ns: float = math.inf) -> None:
        """`others` are in the step and wait for what is added from now on. The step may take `slack_ns` in all."""
        if self._shared or math.isinf(min(self.max_stall_ns, slack_ns)):
            return
        self._shared = True
        if slack_ns < math.inf:
            self._stall_ns = max(0.0, slack_ns - self.step_time.predict_ns(others))
        elif self.step_time.is_trained:
            self._stall_ns = max(self.max_stall_ns, self.step_time.predict_ns(others))
        else:
            self.tokens = min(self.tokens, TOKENS_UNTIL_LEARNT)

    @property
    def is_spent(self) -> bool:
        """Whether no prompt gets another token."""
        return self.fit(0, 1) == 0

    def fit(self, start: int, wanted: int, with_logits: bool = False, decodes: bool = False) -> int:
        """How many of `wanted` tokens of a prompt, of which `start` are computed, the step has room for.

        with_logits: each of the tokens costs a row of logits too.
        decodes: it is the newest token of a sequence that goes on, with all before it in the cache.
        """
        if math.isinf(self._stall_ns) and not (with_logits and self._shared):
            return min(wanted, self.tokens)
        affordable = self.tokens
        if decodes:
            affordable = int(self._added_ns(_decode(start)) <= self._stall_ns)
        elif not math.isinf(self._stall_ns):
            affordable = self.step_time.prefill_tokens_within(self._stall_ns, start, with_logits)
        if with_logits and not self.step_time.knows_logits:
            affordable = min(affordable, TOKENS_UNTIL_LEARNT)
        return min(wanted, self.tokens, max(affordable, self.least))

    def spend(self, start: int, count: int, logit_rows: int = 0, decodes: bool = False) -> None:
        """Put `count` tokens of a prompt in the step, as fit() has allowed. The first sequence waits for the others."""
        self.tokens -= count
        self.least = 0
        if math.isinf(self._stall_ns) and (self._shared or math.isinf(self.max_stall_ns)):
            return
        if decodes:
            work = _decode(start)
            added_ns = self._added_ns(work)
        else:
            work = StepWork(count, prefill_pairs=pairs(start, count), logit_rows=logit_rows)
            added_ns = self.step_time.prefill_ns(count, start, logit_rows > 0)
        self._stall_ns = max(0.0, self._stall_ns - added_ns)
        self.share_with(work)

    def _added_ns(self, work: StepWork) -> float:
        return max(0.0, self.step_time.predict_ns(work) - self.step_time.predict_ns(StepWork()))


def _decode(start: int) -> StepWork:
    return StepWork(decode_tokens=1, decode_context=start + 1)
