"""The changes that a server may make of its own settings: the next values of each, within bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from headway.advisor.tuning.candidates import BUDGETS, STALLS_MS, candidates
from headway.changes import Change, change_of
from headway.flags import Needs
from headway.policy.objectives.service_class import SHARES, ClassTable, InvalidEntry, ServiceClass
from headway.policy.step.bounds import Bounds
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.scheduler_config import StepLimits

SEATS = tuple(2**power for power in range(15))
WINDOWS_MS = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
DRAFTS = (0, 1, 2, 4, 8, 15, 32, 64)
PARTS = (0.0, 0.1, 0.25, 0.5, 0.75)
NEXT = 2  # values in each direction of what a setting is


def limits_of(options: SchedulingOptions, device: str) -> StepLimits:
    """The limits of a step that these settings stand for."""
    return StepLimits(
        options.max_num_seqs, options.batched_tokens(device), options.max_prefill_stall_ms, options.most_drafts
    )


class Levers:
    """The changes of a server that runs.

    Args:
        bounds: as declared.
        start: what the server begins with.
        most_seqs, most_tokens, most_drafts: what its engine was built for.
    """

    def __init__(
        self,
        bounds: Bounds,
        start: SchedulingOptions,
        device: str,
        most_seqs: int,
        most_tokens: int,
        most_drafts: int = 0,
    ) -> None:
        begin, self._device = limits_of(start, device), device
        assert begin.max_num_seqs is not None and begin.max_num_batched_tokens is not None
        seqs = bounds.max_num_seqs or (max(1, begin.max_num_seqs // 4), begin.max_num_seqs)
        tokens = bounds.max_num_batched_tokens or (1, begin.max_num_batched_tokens)
        self._seqs = max(1, min(seqs[0], most_seqs)), min(seqs[1], most_seqs)
        # Everybody who runs has a token in each step, also who began when there were more seats.
        self._tokens = max(most_seqs, min(tokens[0], most_tokens)), min(tokens[1], most_tokens)
        self._bounds = bounds
        self._drafts = bounds.drafts[0], min(bounds.drafts[1], most_drafts)

    def changes(self, now: SchedulingOptions, classes: Iterable[str]) -> Iterator[Change]:
        """Each change of one setting.

        Args:
            classes: names of those that requests are of.
        """
        tokens = now.batched_tokens(self._device)
        for field, value, grid, bound in (
            ("max_num_seqs", now.max_num_seqs, SEATS, self._seqs),
            ("max_num_batched_tokens", tokens, BUDGETS, self._tokens),
            ("max_prefill_stall_ms", now.max_prefill_stall_ms, STALLS_MS, self._bounds.max_prefill_stall_ms),
        ):
            for each in near(value, grid, bound, NEXT):
                yield change_of(SchedulingOptions, field, each)
        for most in near(now.most_drafts, DRAFTS, self._drafts, 1) if self._drafts[1] else ():
            yield Change("most_drafts", most, f"num_speculative_tokens = {most}", "Engine", Needs.RESTART)
        named = [each for each in now.classes if each.name in set(classes)]
        for each in named:
            for longest in near(each.window_ms[1], WINDOWS_MS, self._bounds.window_ms, 1):
                window = min(each.window_ms[0], longest), longest
                yield from _of_class(now.classes, each, "window_ms", window, f"[{window[0]:g}, {window[1]:g}]")
            for key in SHARES if len(named) > 1 else ():
                for part in near(getattr(each, key), PARTS, self._bounds.share, 1):
                    yield from _of_class(now.classes, each, key, part, f"{part:g}")

    def with_restart(self, now: SchedulingOptions) -> Iterator[Change]:
        """What would take a restart."""
        for change in candidates(now, self._device):
            bound = {"max_num_seqs": self._seqs, "max_num_batched_tokens": self._tokens}.get(change.field)
            if change.field != "max_prefill_stall_ms" and (bound is None or change.value > bound[1]):
                yield change


def near(now: float, grid: Sequence[float], bound: tuple[float, float], count: int) -> list[Any]:
    """The next values of a grid, and of its bounds, below and above what a setting is."""
    values = sorted({each for each in (*grid, *bound) if bound[0] <= each <= bound[1]})
    below, above = [each for each in values if each < now], [each for each in values if each > now]
    return below[-count:] + above[:count]


def _of_class(table: ClassTable, service: ServiceClass, key: str, value: Any, typed: str) -> Iterator[Change]:
    """A change of a key of a class, as in a file of classes; none where the table would contradict itself."""
    others = [each if each.name != service.name else None for each in table]
    try:
        classes = tuple(each or replace(service, **{key: value}) for each in others)
        changed = replace(table, classes=classes)
    except InvalidEntry:
        return
    yield Change("classes", changed, f"{service.name}: {key} = {typed}", "Classes", Needs.RELOAD)


def begun(options: SchedulingOptions, limits: StepLimits, classes: ClassTable) -> SchedulingOptions:
    """The settings of an engine that begins with these limits and classes."""
    return replace(options, classes=classes, **limits.changed)
