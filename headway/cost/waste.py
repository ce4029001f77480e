"""What engines without a cache, or with batches that begin and end together, compute for nothing (document 001)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.cost.attention import Chunk
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.timing import Deployment
from headway.cost.work import Work, step_work, total


def recompute_work(shape: ModelShape, tokens: int, precision: Precision | None = None, flash: bool = True) -> Work:
    """Of making the next token after `tokens` others without a cache: all of them go through the model again."""
    return total(step_work(shape, [Chunk(tokens)], precision, flash).values())


def recompute_s(deployment: Deployment, prompt: int, output: int) -> float:
    """Seconds of `output` tokens after a prompt without a cache: a pass over everything so far for each.

    Passes are timed at up to 65 lengths and the rest interpolated between them: time grows smoothly with length.
    """
    if output < 1:
        raise ValueError(f"output tokens are {output}; they must be at least 1")
    marks = sorted({prompt + (output - 1) * i // 64 for i in range(65)})
    times = [deployment.step([Chunk(length)]).seconds for length in marks]
    whole = times[0]
    for low, high, before, after in zip(marks, marks[1:], times, times[1:], strict=False):
        count = high - low  # the lengths after `low` up to `high`, on the line between both
        whole += count * before + (after - before) * (count + 1) / 2
    return whole


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A batch whose requests begin together, padded to the longest prompt, and end with the longest answer.

    Args:
        useful_tokens, computed_tokens: positions that a request asked for, and that went through the model.
        useful_flops, computed_flops: likewise.
        seconds: from the first step to the last.
        continuous_s: had each request left when it was done and prompts not been padded.
    """

    useful_tokens: int
    computed_tokens: int
    useful_flops: int
    computed_flops: int
    seconds: float
    continuous_s: float

    @property
    def wasted_tokens(self) -> float:
        """Share of the computed positions that nobody asked for."""
        return 1.0 - self.useful_tokens / self.computed_tokens

    @property
    def wasted_flops(self) -> float:
        return 1.0 - self.useful_flops / self.computed_flops


def static_batch(deployment: Deployment, requests: Sequence[tuple[int, int]]) -> StaticBatch:
    """Of requests given as (prompt tokens, output tokens).

    Raises:
        ValueError: there are none, or one asks for nothing.
    """
    if not requests or any(prompt < 1 or output < 1 for prompt, output in requests):
        raise ValueError(f"requests are {list(requests)}; each needs at least 1 prompt token and 1 output token")
    prompt = max(each for each, _ in requests)
    output = max(each for _, each in requests)
    padded = [(prompt, output)] * len(requests)
    return StaticBatch(
        useful_tokens=_positions(requests),
        computed_tokens=_positions(padded),
        useful_flops=_flops(deployment, requests),
        computed_flops=_flops(deployment, padded),
        seconds=_lockstep_s(deployment, padded),
        continuous_s=_lockstep_s(deployment, requests),
    )


def _positions(requests: Sequence[tuple[int, int]]) -> int:
    """The last output token is not fed back."""
    return sum(prompt + output - 1 for prompt, output in requests)


def _steps(requests: Sequence[tuple[int, int]]) -> list[list[Chunk]]:
    """All prompts in one step, then a token of each that is not done."""
    steps = [[Chunk(prompt) for prompt, _ in requests]]
    for step in range(1, max(output for _, output in requests)):
        steps.append([Chunk(1, prompt + step - 1) for prompt, output in requests if output > step])
    return steps


def _flops(deployment: Deployment, requests: Sequence[tuple[int, int]]) -> int:
    return sum(
        total(step_work(deployment.shape, step, deployment.precision).values()).flops for step in _steps(requests)
    )


def _lockstep_s(deployment: Deployment, requests: Sequence[tuple[int, int]]) -> float:
    return sum(deployment.step(step).seconds for step in _steps(requests))
