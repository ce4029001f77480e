"""Mixtures of experts on CPU: which experts a token goes to, and the sum of what they make of it.

Each job's arguments begin with the rows that are taken at a time and the number of rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from headway.kernels.adapters import AdaptedMixture, AdapterRows, AdapterSpec
from headway.kernels.cpu.compile import compiled, give_back, take_memory
from headway.kernels.cpu.expert_plan import MOST_ROWS, ExpertPlan
from headway.kernels.cpu.jobs import arg, job, once_per_kind, real_arg, take_rows
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.rows import REORDER, exp_of_negative
from headway.kernels.cpu.simd import FLOAT32, KINDS, load, read_int64, store, write_integer
from headway.kernels.cpu.team import Team

if TYPE_CHECKING:
    from headway.kernels.cpu.adapters import AdaptedLinear

_ZERO, _ONE, _NAN, _LOWEST = np.float32(0), np.float32(1), np.float32(np.nan), -np.float32(np.inf)


@compiled()
def _total(kind, logits, count):
    """(the greatest, the sum of exp(each - greatest)); NaN as the sum if one is, or if the greatest is not finite."""
    greatest = _LOWEST
    for e in range(count):
        value = load(logits, e, kind)
        if value != value:
            return greatest, _NAN
        greatest = max(greatest, value)
    if np.isinf(greatest):
        return greatest, _NAN
    total = _ZERO
    for e in range(count):
        total += exp_of_negative(load(logits, e, kind) - greatest)
    return greatest, total


@compiled()
def _next(choices, count, last, value):
    """The greatest of the choices that come after number `last`, of this value: less, or as much and further on."""
    place, best = -1, _LOWEST
    for e in range(count):
        found = load(choices, e, FLOAT32)
        if (found < value or (found == value and e > last)) and (place < 0 or found > best):
            place, best = e, found
    return place, best


@compiled()
def sigmoid_of(value):
    """The sigmoid of a float32, within some units in the last place. That of NaN is NaN."""
    if value != value:
        return value
    small = exp_of_negative(-abs(value))
    return (_ONE if value >= _ZERO else small) / (_ONE + small)


@compiled()
def _limit(choices, count, groups, best_groups, sums_two, of_groups):
    """Choices of all but the best groups become the lowest; of_groups has room for a float32 of each."""
    size = count // groups
    for group in range(groups):
        best = second = _LOWEST
        for e in range(group * size, (group + 1) * size):
            value = load(choices, e, FLOAT32)
            if value > best:
                best, second = value, best
            else:
                second = max(second, value)
        store(of_groups, group, best + second if sums_two else best, FLOAT32)
    for group in range(groups):
        value, better = load(of_groups, group, FLOAT32), 0
        for other in range(groups):
            against = load(of_groups, other, FLOAT32)
            better += against > value or (against == value and other < group)
        if better >= best_groups:
            for e in range(group * size, (group + 1) * size):
                store(choices, e, _LOWEST, FLOAT32)


@compiled()
def _route_row(kind, logits, count, per_token, normalized, scoring, choices, chosen, weights):
    """See Scores: whether sigmoid, bias or 0, groups, best groups, factor. choices has room for count + groups."""
    sigmoid, bias, groups, best_groups, factor = scoring
    greatest, total = _total(kind, logits, count)
    known = total == total
    for e in range(count):  # without a bias, a softmax chooses as its logits do
        choice = load(logits, e, kind)
        if sigmoid:
            choice = sigmoid_of(choice)
        elif bias != 0:
            choice = exp_of_negative(choice - greatest) / total
        store(choices, e, choice + load(bias, e, FLOAT32) if bias != 0 else choice, FLOAT32)
    if groups > 1:
        _limit(choices, count, groups, best_groups, sigmoid, choices + count * 4)
    last, value, of_chosen = -1, np.float32(np.inf), np.float32(1e-20)
    for k in range(per_token):
        if known:
            last, value = _next(choices, count, last, value)
            logit = load(logits, last, kind)
            weight = sigmoid_of(logit) if sigmoid else exp_of_negative(logit - greatest)
        else:
            last, weight = k, _NAN
        of_chosen += weight
        write_integer(chosen, k, np.int64(last), 64)
        store(weights, k, weight, FLOAT32)
    whole = of_chosen if normalized else _ONE if sigmoid else total
    for k in range(per_token):
        store(weights, k, load(weights, k, FLOAT32) / whole * factor, FLOAT32)


# The fields of Scores come last.
ROUTE = struct.Struct("15qd")


@once_per_kind
def route_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, rows, count, per_token = arg(a, 0), arg(a, 1), arg(a, 4), arg(a, 5)
        normalized, shared, gated = arg(a, 6), arg(a, 7), arg(a, 10)
        scoring = (arg(a, 11), arg(a, 12), arg(a, 13), arg(a, 14), np.float32(real_arg(a, 15)))
        stride, width = (count + shared * gated) * arg(a, 3), per_token + shared
        choices = take_memory((count + arg(a, 13)) * 4)
        first = take_rows(a, step)
        while first < rows:
            for row in range(first, min(first + step, rows)):
                logits = arg(a, 2) + row * stride
                chosen, weights = arg(a, 8) + row * width * 8, arg(a, 9) + row * width * 4
                _route_row(kind, logits, count, per_token, normalized, scoring, choices, chosen, weights)
                if shared:
                    write_integer(chosen, per_token, np.int64(count), 64)
                    weight = sigmoid_of(load(logits, count, kind)) if gated else _ONE
                    store(weights, per_token, weight, FLOAT32)
            first = take_rows(a, step)
        give_back(choices)

    return job(rows)


@compiled(fastmath=REORDER)
def _add_row(kind, sums, weight, source, width):
    for d in range(width):
        store(sums, d, load(sums, d, FLOAT32) + weight * load(source, d, kind), FLOAT32)


@compiled()
def mix_rows(kind, size, first, last, places, weights, per_token, width, results, shared, sums, out):
    """Row i of out is the sum of weights[i, k] times row places[i, k] of results, in the order of k.

    A row -1 counts nothing. Then, unless `shared` is 0, one weight more times row i there is added. Numbers have `size`
    bytes; sums has room for a row of float32.
    """
    columns = per_token + (shared != 0)
    for i in range(first, last):
        for d in range(width):
            store(sums, d, _ZERO, FLOAT32)
        for k in range(per_token):
            place = read_int64(places, i * per_token + k)
            if place >= 0:
                weight = load(weights, i * columns + k, FLOAT32)
                _add_row(kind, sums, weight, results + place * width * size, width)
        if shared != 0:
            weight = load(weights, i * columns + per_token, FLOAT32)
            _add_row(kind, sums, weight, shared + i * width * size, width)
        for d in range(width):
            store(out, i * width + d, load(sums, d, FLOAT32), kind)


MIX = struct.Struct("9q")


@once_per_kind
def mix_job(kind: Any) -> int:
    size = 4 if kind is FLOAT32 else 2

    def rows(a: int) -> None:
        step, count, width = arg(a, 0), arg(a, 1), arg(a, 5)
        sums = take_memory(width * 4)
        first = take_rows(a, step)
        while first < count:
            mix_rows(
                kind, size, first, min(first + step, count), arg(a, 2), arg(a, 3), arg(a, 4), width, arg(a, 6),
                arg(a, 7), sums, arg(a, 8),
            )  # fmt: skip
            first = take_rows(a, step)
        give_back(sums)

    return job(rows)


class PackedExperts:
    """A Mixture of packed weights: in a step five jobs, whatever its tokens and their experts are.

    Args:
        gate_up, down: the weights of `count` experts.
        counts: see ExpertPlan.

    Attributes:
        of_all: experts that tokens choose from.
        here: the first of them whose weights these are, and how many there are.
    """

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, count: int, team: Team, counts: np.ndarray) -> None:
        self.gate_up, self.down, self._team, self._counts = gate_up, down, team, counts
        self.of_all, self.here = count, (0, count)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """See Mixture; in the order in which the experts of a token are given."""
        tokens, width = x.shape
        per_token = chosen.shape[1] - (shared is not None)
        plan = ExpertPlan(self._team, chosen, per_token, self.of_all, self.here, self._counts)
        results = self.down.of_experts(self.gate_up.of_experts(x, plan, True), plan, False)
        out = self._team.empty((tokens, width), x.dtype)
        arguments = (
            plan.places.data_ptr(), weights.data_ptr(), per_token, width, results.data_ptr(),
            0 if shared is None else shared.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._team.share(mix_job(KINDS[x.dtype]), MIX, tokens, width * chosen.numel(), arguments)
        return out

    def adapted(self, specs: Sequence[AdapterSpec], rows: AdapterRows) -> AdaptedMixture:
        from headway.kernels.cpu.adapters import AdaptedLinear

        pairs = zip((self.gate_up, self.down), specs, strict=True)
        return AdaptedExperts(self, [AdaptedLinear(self._team, *pair, rows, self.here[1]) for pair in pairs])


class AdaptedExperts(PackedExperts):
    """A mixture of which both products have adapters beside them. All else is the plain one's."""

    def __init__(self, plain: PackedExperts, products: list[AdaptedLinear]) -> None:
        vars(self).update(vars(plain))
        self.gate_up, self.down = self._adapted = products

    def write(self, slot: int, matrices: Sequence[tuple[Tensor, Tensor]]) -> None:
        for product, (down, up) in zip(self._adapted, matrices, strict=True):
            product.write(slot, down, up)


class HeadPlan:
    """A plan like ExpertPlan that sends every token to the matrix of each head, head by head. Its memory never moves.

    A row of x is given by the element at which it begins, so that tokens and heads may be strided.
    """

    def __init__(self, tokens: int, heads: int, token_stride: int, head_stride: int) -> None:
        head, token = np.divmod(np.arange(heads * tokens), tokens)
        self._rows = np.stack([token * token_stride + head * head_stride, head], 1).astype(np.int64)
        pieces = -(-tokens // MOST_ROWS)
        cuts = np.arange(pieces + 1) * tokens // pieces
        table = np.empty((heads, pieces, 3), np.int64)
        table[..., 0] = np.arange(heads)[:, None] * tokens + cuts[:-1]
        table[..., 1] = np.arange(heads)[:, None] * tokens + cuts[1:]
        table[..., 2] = np.arange(heads)[:, None]
        fields = heads * pieces, int(np.diff(cuts).max()), self._rows.ctypes.data, heads * tokens
        self._plan = np.array([*fields, *table.flat], np.int64)
        self.tokens, self.rows, self.address = tokens, heads * tokens, int(self._plan.ctypes.data)


class PackedHeads:
    """A HeadLinear of packed weights: one product, whatever the number of heads."""

    def __init__(self, linear: PackedLinear, plan_of: Callable[..., HeadPlan]) -> None:
        self.linear, self._plan_of = linear, plan_of

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H, in], strided along T and H or not -> [T, H, out], strided."""
        tokens, heads, width = x.shape
        if tokens == 0:
            return x.new_empty(0, heads, self.linear.out_features)
        plan = self._plan_of(tokens, heads, x.stride(0), x.stride(1))
        last = (tokens - 1) * x.stride(0) + (heads - 1) * x.stride(1)
        by_element = x.as_strided((last + 1, width), (1, 1))
        out = self.linear.of_experts(by_element, plan, True)
        return out.view(heads, tokens, -1).transpose(0, 1)
