"""Fits an `Efficiency`, which the cost model needs to know of this engine on this machine, to timed pieces.

Every fit is one of relative errors, as a piece of a microsecond matters as much as one of a second. Nothing overlaps
(sharpness 1): the time of an operation is that of its arithmetic and of its traffic together, and the measured factor
on linear layers makes up for what does overlap there, and for widening, which this engine does inside of its products.
No torch here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headway.calibration.samples import Kind, Piece, Sample
from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.timing import Deployment

Shapes = Callable[[int], ModelShape]
Curve = tuple[tuple[int, float], ...]
MAIN = ("bf16", "fp16", "fp32")  # the factor of the first that was measured counts for all other formats
STEP_DTYPE = "bfloat16"
ATTENTION = (Kind.DECODE, Kind.PROMPT)


def fit(hardware: Hardware, samples: Sequence[Sample], kernel_call_s: float, shape: Shapes) -> Efficiency:
    """The efficiency that describes the samples best.

    Args:
        kernel_call_s: the time of a kernel with nothing to do. It is taken off the pieces: steps have gaps of their
            own.
        shape: the shape of the model whose steps were timed, by its layers.
    """
    found: dict[Kind, list[Sample]] = {kind: [each for each in samples if each.piece.kind is kind] for kind in Kind}
    elements = _elements(hardware, found[Kind.ELEMENTS])
    base = replace(
        Efficiency.ideal(),
        sharpness=1.0,
        token_s=Efficiency().token_s,
        request_s=Efficiency().request_s,
        element_bytes=elements,
    )
    curves = _linear(hardware, base, found[Kind.LINEAR], kernel_call_s)
    main = next(name for name in (*MAIN, *curves) if name in curves)
    base = replace(base, linear=curves[main], linear_of={name: each for name, each in curves.items() if name != main})
    base = _attention(hardware, base, found[Kind.DECODE] + found[Kind.PROMPT], kernel_call_s)
    return _host(hardware, base, found[Kind.STEP], shape)


def predicted(hardware: Hardware, efficiency: Efficiency, piece: Piece, kernel_call_s: float, shape: Shapes) -> float:
    """Seconds of a piece by the cost model."""
    if piece.kind is Kind.STEP:
        return _step_s(hardware, efficiency, piece, shape)
    work, memory = piece.work, hardware.bytes_per_s
    if piece.kind is Kind.STREAM:
        return work.weight_bytes / memory
    gaps = piece.kernels * kernel_call_s
    compute = work.flops / hardware.rate(piece.format)
    moved = work.activation_bytes / (memory * efficiency.element_bytes)
    if piece.kind is Kind.LINEAR:
        factor = efficiency.linear_factor(piece.tokens, piece.format, hardware.arithmetic(piece.format))
        return efficiency.overlapped(compute, work.weight_bytes / memory + moved) * factor + gaps
    compute = compute / efficiency.attention_flops + piece.scores * efficiency.score_s
    gaps += efficiency.attention_s if piece.kind in ATTENTION else 0.0
    return efficiency.overlapped(compute, moved + work.kv_read_bytes / (memory * efficiency.kv_bytes)) + gaps


def errors(
    hardware: Hardware, efficiency: Efficiency, samples: Sequence[Sample], kernel_call_s: float, shape: Shapes
) -> dict[str, float]:
    """The median of |predicted / measured - 1| for each kind of sample."""
    found: dict[str, list[float]] = {}
    for each in samples:
        ratio = predicted(hardware, efficiency, each.piece, kernel_call_s, shape) / each.median
        found.setdefault(str(each.piece.kind), []).append(abs(ratio - 1.0))
    return {kind: statistics.median(each) for kind, each in found.items()}


def residuals(
    hardware: Hardware, efficiency: Efficiency, samples: Sequence[Sample], kernel_call_s: float, shape: Shapes
) -> dict[str, tuple[float, float]]:
    """Two factors on a prediction for each kind of sample. Four in five runs lie between them.

    A machine is as fast as in its best round at times, and at times as much slower than the median as the best is
    faster: the ends are quantiles of the ones and of the others. No end is on the wrong side of 1.
    """
    fast: dict[str, list[float]] = {}
    slow: dict[str, list[float]] = {}
    for each in samples:
        fitted = predicted(hardware, efficiency, each.piece, kernel_call_s, shape)
        fast.setdefault(str(each.piece.kind), []).append(each.best / fitted)
        slow.setdefault(str(each.piece.kind), []).append(each.median**2 / each.best / fitted)
    return {
        kind: (min(1.0, float(np.quantile(fast[kind], 0.1))), max(1.0, float(np.quantile(slow[kind], 0.9))))
        for kind in fast
    }


def _elements(hardware: Hardware, samples: Sequence[Sample]) -> float:
    """The share of the bandwidth that element-wise operations reach, beside a constant for each kernel."""
    columns = [[each.piece.work.activation_bytes / hardware.bytes_per_s, each.piece.kernels] for each in samples]
    traffic, _ = least_squares(columns, [each.median for each in samples], (1e-3, 0.0))
    return 1.0 / traffic


def _linear(hardware: Hardware, base: Efficiency, samples: Sequence[Sample], kernel_call_s: float) -> dict[str, Curve]:
    """A curve for each format: measured over predicted time by number of tokens, as geometric mean over shapes."""
    ratios: dict[str, dict[int, list[float]]] = {}
    for each in samples:
        gaps = each.piece.kernels * kernel_call_s
        plain = predicted(hardware, base, each.piece, 0.0, _no_steps)
        ratio = max(each.median - gaps, 0.1 * each.median) / plain
        ratios.setdefault(each.piece.format, {}).setdefault(each.piece.tokens, []).append(ratio)
    return {
        name: tuple((tokens, statistics.geometric_mean(of)) for tokens, of in sorted(by_tokens.items()))
        for name, by_tokens in ratios.items()
    }


def _attention(hardware: Hardware, base: Efficiency, samples: Sequence[Sample], kernel_call_s: float) -> Efficiency:
    """Fit attention as a constant, reads of the cache, products and scores in turn.

    The constant is that of decodes, as far as these say: short chunks of prompts take longer than all four explain, and
    would make it several times as large. Reads and products never beat the machine.
    """

    def least(some: Sequence[Sample], constant_s: float) -> tuple[float, ...]:
        columns, seconds = [], []
        for each in some:
            work = each.piece.work
            rest = each.piece.kernels * kernel_call_s + constant_s
            rest += work.activation_bytes / (hardware.bytes_per_s * base.element_bytes)
            read_s, products_s = (
                work.kv_read_bytes / hardware.bytes_per_s,
                work.flops / hardware.rate(each.piece.format),
            )
            columns.append([read_s, products_s, each.piece.scores, 1.0])
            seconds.append(max(each.median - rest, 0.1 * each.median))
        return least_squares(columns, seconds, (1.0, 1.0, 0.0, 0.0))

    attention_s = least([each for each in samples if each.piece.kind is Kind.DECODE], 0.0)[3]
    cache, products, score_s, _ = least(samples, attention_s)
    return replace(base, kv_bytes=1.0 / cache, attention_flops=1.0 / products, score_s=score_s, attention_s=attention_s)


def _host(hardware: Hardware, base: Efficiency, samples: Sequence[Sample], shape: Shapes) -> Efficiency:
    """Fit the time that each kernel, step and sequence of tiny models takes beyond its operations.

    A fourth coefficient is what operations on so few numbers cost, in each layer and sequence, beyond their prediction.
    It is not kept, because it is nothing in models of the usual size.
    """
    counting = replace(base, kernel_s=1.0)
    columns, seconds = [], []
    for each in samples:
        device_s = _step_s(hardware, base, each.piece, shape)
        kernels = _step_s(hardware, counting, each.piece, shape) - device_s
        columns.append([kernels, 1.0, each.piece.sequences, each.piece.sequences * each.piece.layers])
        seconds.append(max(each.median - device_s, 0.1 * each.median))
    kernel_s, step_s, sequence_s, _ = least_squares(columns, seconds, (0.0,) * 4)
    return replace(base, kernel_s=kernel_s, step_s=step_s, sequence_s=sequence_s)


def _step_s(hardware: Hardware, efficiency: Efficiency, piece: Piece, shape: Shapes) -> float:
    deployment = Deployment(shape(piece.layers), Precision.of(STEP_DTYPE), hardware, efficiency)
    return deployment.step([Chunk(1, piece.context, sequences=piece.sequences)]).seconds


def _no_steps(layers: int) -> ModelShape:
    raise ValueError(f"a step of {layers} layers is no piece of one")


def least_squares(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], least: Sequence[float]
) -> tuple[float, ...]:
    """The coefficients, none below its `least`, that make columns @ coefficients / seconds come closest to 1.

    With so few coefficients every choice of those that stay at their least is tried.
    """
    scaled = np.asarray(columns, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    low = np.asarray(least, dtype=float)
    wanted = 1.0 - scaled @ low
    best, best_error = low, math.inf
    for size in range(len(low) + 1):
        for free in itertools.combinations(range(len(low)), size):
            more = np.zeros(len(low))
            if free:
                more[list(free)] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            error = float(np.sum((scaled @ more - wanted) ** 2))
            if (more >= 0).all() and error < best_error:
                best, best_error = low + more, error
    return tuple(float(each) for each in best)
