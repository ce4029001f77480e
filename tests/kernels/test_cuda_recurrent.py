"""Recurrent layers on CUDA against the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.kernels.interface import LayerState, StepGeometry
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import DeltaRule
from tests.kernels.operations import DTYPES
from tests.kernels.steps import assert_close, on, random, step_of

pytest.importorskip("triton")
import tests.kernels.interpreted  # noqa: F401
from headway.kernels.cuda.kernels import CudaKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceKernels()
# Tokens, source, target: a decode in place, a prompt's beginning, one that is copied from elsewhere, a short part.
SPANS = [[0, 1, 2, 2, 0, 0, 0], [1, 21, -1, 0, 5, 6, 3], [22, 18, 4, 1, 18, 7, 0], [40, 2, 3, 3, 0, 0, 0],
         [0, 0, 0, 0, 7, 5, 1], [0, 0, 0, 0, 21, 8, 0]]  # fmt: skip
TOKENS, SLOTS = 42, 9


def step(spans: list[list[int]], sequences: int, device: str = DEVICE) -> StepGeometry:
    geometry, _ = step_of([1] * sequences, [1] * sequences, 16)
    geometry = on(device, geometry)
    geometry.spans = torch.tensor([[sequences, *[0] * 6], *spans], device=device)
    return geometry


def state_of(inputs: tuple[int, ...], matrices: tuple[int, ...] | None = None) -> LayerState:
    return LayerState(
        random(7, torch.float32, SLOTS, *inputs),
        None if matrices is None else random(8, torch.float32, SLOTS, *matrices),
    )


def there(state: LayerState) -> LayerState:
    matrices = None if state.matrices is None else state.matrices.clone().to(DEVICE)
    return LayerState(state.inputs.clone().to(DEVICE), matrices)


def assert_states(ours: LayerState, theirs: LayerState) -> None:
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])])
@pytest.mark.parametrize(("width", "channels", "gated"), [(4, 150, False), (3, 40, True), (1, 40, False)])
def test_convolutions(dtype: torch.dtype, width: int, channels: int, gated: bool) -> None:
    """Inputs are slices of a wider product, states are kept within a span; token by token the bits are the same."""
    wide = random(0, dtype, TOKENS, 3 * channels)
    taps, bias = random(1, torch.float32, width, channels), random(2, torch.float32, channels) if gated else None
    theirs = state_of((width - 1, channels))
    ours, alone = there(theirs), there(theirs)
    kernels = CudaKernels()

    def run(each: CudaKernels | ReferenceKernels, state: LayerState, spans: StepGeometry, part: Tensor) -> Tensor:
        device = state.inputs.device
        before, behind, x = part.to(device).chunk(3, 1)
        moved = (taps.to(device), None if bias is None else bias.to(device))
        return each.convolve(x, (before, behind) if gated else None, *moved, state, spans)

    expected = run(REFERENCE, theirs, step(SPANS, 4, "cpu"), wide)
    got = run(kernels, ours, step(SPANS, 4), wide)
    assert_close(got, expected, dtype)
    assert_states(ours, theirs)
    for number in range(18):  # the third span, which leaves its state in slot 1
        source = 1 if number else 4
        one = run(kernels, alone, step([[0, 1, source, 1, 0, 0, 0]], 1), wide[22 + number : 23 + number])
        assert torch.equal(one[0], got[22 + number])
    assert torch.equal(alone.inputs[1], ours.inputs[1]) and torch.equal(ours.inputs[1], ours.inputs[7])


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])])
@pytest.mark.parametrize(
    ("heads", "key_heads", "key", "value", "by_turns"),
    [(4, 2, 24, 40, False), (4, 2, 24, 40, True), pytest.param(2, 2, 16, 16, False, marks=pytest.mark.slow)],
)
def test_the_delta_rule(dtype: torch.dtype, heads: int, key_heads: int, key: int, value: int, by_turns: bool) -> None:
    """The same of it."""
    mixed = random(0, dtype, TOKENS, 2 * key_heads * key + heads * value)
    wide, numbers = random(1, dtype, TOKENS, heads * value + 3), random(2, dtype, TOKENS, 2 * heads) * 3
    rule = [random(3, torch.float32, heads).exp(), random(4, torch.float32, heads), random(5, torch.float32, value)]
    theirs = state_of((1, 8), (heads, key, value))
    ours, alone = there(theirs), there(theirs)
    kernels = CudaKernels()

    def run(
        each: CudaKernels | ReferenceKernels, state: LayerState, spans: StepGeometry, tokens: slice = slice(None)
    ) -> Tensor:
        device = state.inputs.device
        parts = (mixed[tokens].to(device), wide.to(device)[tokens, 3:], numbers[tokens].to(device))
        described = DeltaRule(key_heads, *(part.to(device) for part in rule), 1e-6, by_turns)
        return each.delta_rule(*parts, described, state, spans)

    expected = run(REFERENCE, theirs, step(SPANS, 4, "cpu"))
    got = run(kernels, ours, step(SPANS, 4))
    assert_close(got, expected, dtype)
    assert_states(ours, theirs)
    for number in range(18):
        source, at = 1 if number else 4, 22 + number
        one = run(kernels, alone, step([[0, 1, source, 1, 0, 0, 0]], 1), slice(at, at + 1))
        assert torch.equal(one[0], got[at])
    assert alone.matrices is not None and ours.matrices is not None
    assert torch.equal(alone.matrices[1], ours.matrices[1]) and torch.equal(ours.matrices[1], ours.matrices[7])


def test_a_step_without_spans_is_refused() -> None:
    geometry, _ = step_of([1], [1], 16)
    with pytest.raises(ValueError, match="a step of a model with recurrent layers has no spans"):
        CudaKernels().convolve(torch.ones(1, 8), None, torch.ones(4, 8), None, state_of((3, 8)), geometry)
