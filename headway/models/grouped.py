"""Stacks matrices that are packed in groups: parts of a fused product may be packed in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.kernels.weights import CODES, Groups, Product, Weight


def stacked_groups(parts: Sequence[Weight | Tensor]) -> Weight:
    """Matrices one under the other, each packed in groups or, as a tensor, plain.

    What is packed alike stays so. Four bits beside eight become eight, and large groups the size of the smallest,
    which changes no number. Beside plain matrices, or in two orders of the inputs, all become plain.
    """
    packed = [part for part in parts if isinstance(part, Weight)]
    if len(parts) == 1:
        return packed[0]
    groups = [part.groups for part in packed if part.groups is not None]
    alike = {"int" if part.scheme.startswith("int") else part.scheme for part in packed}
    if len(groups) < len(parts) or len(alike) > 1 or not _same_order(groups):
        return Weight(torch.cat([expanded(part) if isinstance(part, Weight) else part for part in parts]))
    values = [part.values for part in packed if isinstance(part.values, Tensor)]
    if len({part.scheme for part in packed}) > 1:
        values = [each.view(torch.int8) for each in values]
        scheme = "int8-weight-only"
    else:
        scheme = packed[0].scheme
    return replace(packed[0], values=torch.cat(values), scheme=scheme, groups=_stacked(groups))


def with_rows(product: Product, rows: Tensor) -> Product:
    """A matrix and its bias with their rows in another order, however it is packed."""
    weight, bias = product
    values = torch.cat(weight.parts)
    rows = rows.to(values.device)
    groups = weight.groups
    if groups is not None:
        minima = None if groups.minima is None else groups.minima[rows]
        groups = replace(
            groups,
            factors=groups.factors[rows],
            offsets=groups.offsets[rows],
            scales=groups.scales[rows],
            minima=minima,
        )
    scales = None if weight.scales is None else weight.scales[rows]
    moved = replace(weight, values=_taken(values, rows), scales=scales, groups=groups)
    return moved, None if bias is None else bias[rows]


def grouped_rows(groups: int, *sizes: int) -> Tensor:
    """The order of rows, in groups with parts of these sizes, that brings the first part of all together, and so on."""
    rows = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


def _taken(values: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix; torch takes none of float8."""
    if values.dtype == torch.float8_e4m3fn:
        return values.view(torch.uint8)[rows].view(values.dtype)
    return values[rows]


def expanded(weight: Weight) -> Tensor:
    """The numbers that a matrix stands for, however it is packed, in its dtype."""
    groups = weight.groups
    if groups is None:
        plain = torch.cat(weight.parts)
        return plain if weight.scales is None else (plain.float() * weight.scales).to(weight.dtype)
    values = weight.values
    assert isinstance(values, Tensor)
    minima = groups.scales if groups.minima is None else groups.minima
    scales, least = (
        (_spread(floats, groups) * bytes_).repeat_interleave(groups.size, 1)
        for floats, bytes_ in ((groups.scales, groups.factors), (minima, groups.offsets))
    )
    codes = CODES.get(weight.scheme)
    numbers = values.float() if codes is None else torch.tensor(codes, device=values.device)[values.int()]
    plain = scales * numbers - least
    if groups.order is not None:
        plain = torch.empty_like(plain).index_copy_(1, groups.order.long(), plain)
    return plain.to(weight.dtype)


def _same_order(groups: Sequence[Groups]) -> bool:
    first = groups[0].order
    if first is None:
        return all(each.order is None for each in groups)
    return all(each.order is not None and torch.equal(first, each.order) for each in groups)


def _spread(floats: Tensor, groups: Groups) -> Tensor:
    """Spread scales [out, runs], so that there is one for each group."""
    count = groups.factors.shape[1]
    return floats.repeat_interleave(groups.run if floats.shape[1] > 1 else count, 1)[:, :count]


def _stacked(groups: Sequence[Groups]) -> Groups:
    size = min(each.size for each in groups)
    fine = [smaller_groups(each, size) for each in groups]
    run = min(each.run if each.scales.shape[1] > 1 else each.factors.shape[1] for each in fine)
    if len({each.scales.shape[1] for each in fine}) > 1:  # runs of a power of two groups, as short as the shortest
        run &= -run
        fine = [_with_runs(each, run) for each in fine]
    own_minima = any(each.minima is not None for each in fine)
    return Groups(
        size,
        torch.cat([each.factors for each in fine]),
        torch.cat([each.offsets for each in fine]),
        torch.cat([each.scales for each in fine]),
        run,
        torch.cat([each.scales if each.minima is None else each.minima for each in fine]) if own_minima else None,
        fine[0].order,
    )


def smaller_groups(groups: Groups, size: int) -> Groups:
    """Cut groups into smaller ones of `size` inputs."""
    times = groups.size // size
    factors, offsets = (each.repeat_interleave(times, 1) for each in (groups.factors, groups.offsets))
    return replace(groups, size=size, factors=factors, offsets=offsets, run=groups.run * times)


def _with_runs(groups: Groups, run: int) -> Groups:
    """The same groups, with scales in runs of `run` groups."""
    scales, minima = (
        None if each is None else _spread(each, groups)[:, ::run].contiguous()
        for each in (groups.scales, groups.minima)
    )
    assert scales is not None
    return replace(groups, scales=scales, run=run, minima=minima)
