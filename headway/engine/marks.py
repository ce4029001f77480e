"""Steps as NVTX ranges, which Nsight Systems shows beside kernels; on AMD's GPUs torch makes ROCTX ranges of them."""

from __future__ import annotations

import torch

from headway.engine.hooks import StepHooks
from headway.engine.messages import SequenceOutput
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence


class StepMarks(StepHooks):
    """A range from the plan of a step to its outputs, named after what it computes.

    Where steps are submitted ahead, the kernels in it are those of the next step, too.
    """

    allows_ahead = True

    def planned(self, plan: StepPlan, now: int) -> None:
        torch.cuda.nvtx.range_push(_name(plan))

    def after(
        self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], outputs: list[SequenceOutput], now: int
    ) -> list[SequenceOutput]:
        torch.cuda.nvtx.range_pop()
        return outputs


def _name(plan: StepPlan) -> str:
    prompts = [len(item.token_ids) for item in plan.scheduled if not item.decoding]
    decoding = len(plan.scheduled) - len(prompts)
    parts = [f"{sum(prompts)} tokens of {len(prompts)} prompt{'s' * (len(prompts) > 1)}"] if prompts else []
    return "step: " + ", ".join([*parts, f"{decoding} decoding"]) if plan.scheduled else "nothing to run"
