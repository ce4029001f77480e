"""Speculation that tries each draft there is, whether that pays or not, and a drafter that knows what follows.

A draft model drafts for all sequences before each step then, always as far.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from headway import LLM, RequestOutput
from headway.engine.drafter import Speculator
from headway.policy.step.drafting import BESIDE, Drafting
from headway.policy.step.plan import StepPlan, accepted_drafts
from headway.policy.step.request import Sequence
from headway.policy.step.speculation import Proposal, Speculation


class Foreseeing:
    """Proposes what follows, four fifths of it right.

    Args:
        texts: prompts with what follows each of them.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.chance = random.Random(1)
        self.known: set[int] = set()

    def propose(self, sequences: list[Sequence], most: int, most_ns: float = math.inf) -> dict[int, Proposal]:
        found = {}
        for sequence in sequences:
            self.known.add(sequence.seq_id)
            tokens, known = sequence.tokens, len(sequence.tokens)
            text = next(text for text in self.texts if text[:known] == tokens)
            if follows := text[known : known + self.chance.randrange(most + 1)]:
                drafts = [token if self.chance.random() < 0.8 else 11 for token in follows]
                found[sequence.seq_id] = Proposal(drafts, 4)
        return found

    def forget(self, seq_id: int) -> None:
        self.known.discard(seq_id)


def check_same(plain: list[RequestOutput], drafted: list[RequestOutput], exact: bool) -> None:
    """Tokens are the same, and so are log-probabilities: bit by bit where that is promised, else to a rounding."""
    for before, after in zip(plain, drafted, strict=True):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert (other.token_ids, other.finish_reason) == (one.token_ids, one.finish_reason)
            if exact:
                assert other.logprobs == one.logprobs
            else:
                expected = [entry.logprob for entry in one.logprobs or []]
                assert [entry.logprob for entry in other.logprobs or []] == pytest.approx(expected, abs=1e-4)


def check_same_texts(plain: list[RequestOutput], drafted: list[RequestOutput]) -> None:
    """Texts are the same, and what has ended them."""
    for before, after in zip(plain, drafted, strict=True):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert (one.text, one.finish_reason, one.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )


def try_all_drafts(patch: pytest.MonkeyPatch, llm: LLM, drafter: Foreseeing | None = None) -> Counter[str]:
    """Let an engine try each draft, and those of a drafter if one is given.

    Returns:
        How many are tried from now on, and how many accepted.
    """

    def choose(
        self: Speculation, proposals: Mapping[int, Proposal], decoding: int, with_prompts: bool = False
    ) -> dict[int, list[int]]:
        return {seq_id: proposal.token_ids for seq_id, proposal in proposals.items()}

    patch.setattr(Speculation, "choose", choose)
    patch.setattr(Speculation, "rests", lambda self: False)
    patch.setattr(Speculation, "asks", lambda self: True)
    core, counts = llm.engine.core, Counter[str]()
    if drafter is not None:
        patch.setattr(core, "hooks", [Speculator(drafter, 5, core.scheduler)])
    complete = core.scheduler.complete

    def counting(plan: StepPlan, *results: Any) -> list[tuple[Sequence, list[int]]]:
        changed = complete(plan, *results)
        new_of = {sequence.seq_id: new for sequence, new in changed}
        for item in plan.scheduled:
            counts["tried"] += max(0, item.samples - 1)
            counts["accepted"] += accepted_drafts(item, new_of.get(item.seq_id, []))
        return changed

    patch.setattr(core.scheduler, "complete", counting)
    return counts


def draft_always(patch: pytest.MonkeyPatch, count: int = 4) -> None:
    """Let draft models make `count` drafts for each sequence before each step."""

    def opens(self: Speculation, decoding: int, with_prompts: bool, slack_ns: float = 0.0) -> Drafting | None:
        assert self.drafting is not None
        self.drafting.open(decoding, float, 1 << 20)
        return self.drafting

    def begin(
        self: Drafting, lacks: Mapping[int, int], output_lens: Mapping[int, int]
    ) -> tuple[dict[int, int], list[int]]:
        self._step.reach = dict.fromkeys(lacks, 1.0)
        return {seq_id: each - 1 for seq_id, each in lacks.items() if each > BESIDE}, list(lacks)

    def goes_on(self: Drafting, confidences: Mapping[int, float]) -> list[int]:
        self._step.passes += 1
        return list(confidences) if self._step.passes < count else []

    patch.setattr(Speculation, "opens", opens)
    patch.setattr(Drafting, "begin", begin)
    patch.setattr(Drafting, "goes_on", goes_on)
    patch.setattr(
        Drafting, "chain", lambda self, seq_ids: (count - self._step.passes, -1.0, -1.0, [1.0] * len(seq_ids))
    )
