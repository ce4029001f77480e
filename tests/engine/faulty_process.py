"""The engine process with faults: EngineClient starts it in the place of the real one.

A sequence whose prompt has the token KILLER kills the process with its third token; those with the token RAISER raise
in their steps.
"""

from __future__ import annotations

import os
import signal
import sys

from headway.engine import process
from headway.engine.core import EngineCore
from headway.engine.executor import StepOutcome
from headway.policy.step.plan import StepPlan

KILLER, RAISER = 499, 498


def spoil(core: EngineCore) -> None:
    run = core.executor.run

    def spoilt(plan: StepPlan) -> StepOutcome:
        result = run(plan)
        for item in plan.scheduled:
            sequence = core.scheduler.sequences[item.seq_id]
            prompt = sequence.tokens[: sequence.prompt_len]
            if KILLER in prompt and sequence.output_len == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if RAISER in prompt and sequence.output_len == 2:
                raise RuntimeError("injected")
        return result

    core.executor.run = spoilt  # type: ignore[method-assign]


def main() -> int:
    step_loop = process._step_loop

    def spoilt_loop(channel: process.Channel, core: EngineCore, parent: int) -> int:
        spoil(core)
        return step_loop(channel, core, parent)

    process._step_loop = spoilt_loop
    return process.main(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
