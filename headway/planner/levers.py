"""What to change next: one change of a plan at a time, ranked by what it gains, and the best of them together.

docs/plan-levers.md says what each assumes. Every figure is one of `make_plan`, of the plan with the lever's flags.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from headway.changes import typed
from headway.planner.changes import NotApplicable, Proposal, changes_of, largest_load, other_hardware, proposals
from headway.planner.compare import range_of_gain
from headway.planner.make import make_plan
from headway.planner.numbers import Numbers, gain_of, missed_by, numbers_of, value_of
from headway.planner.plan import Plan
from headway.planner.request import PlanError, PlanRequest
from headway.policy.objectives.objectives import OBJECTIVES

RANKED_BY = (*OBJECTIVES, "throughput", "cost")
# A chain of levers ends where the next one gains less than this.
LEAST_GAIN = 1.03
# A lever that moves no figure by more than this changes nothing.
NOTHING = 0.005
BEST_HARDWARE = 3


@dataclass(frozen=True, slots=True)
class Lever:
    """A proposal and what it comes to."""

    proposal: Proposal
    plan: Plan
    numbers: Numbers
    # How many times as good the objective gets, above 1 where it is better; None where the plan without it has no such
    # figure.
    gain: float | None
    # The bar of the gain, in which four of five measured gains lie; None where a figure has no bar.
    gain_range: tuple[float, float] | None
    misses: tuple[str, ...]  # objectives that the plan with the proposal misses

    @property
    def flags(self) -> str:
        """Flags to type in place of those that are there."""
        return typed(self.proposal.changes)


@dataclass(frozen=True, slots=True)
class Levers:
    """All levers that were tried for a plan."""

    base: Plan
    numbers: Numbers
    objective: str
    why: str  # why the objective is this one
    ranked: tuple[Lever, ...]  # levers, the best first; those that newly miss an objective come last
    left_out: tuple[tuple[str, str], ...]  # name of each change that is no lever, and the reason
    chain: tuple[Lever, ...]  # levers on the same devices put together, each on top of those before it

    @property
    def chain_gain(self) -> float | None:
        """The gain of the whole chain; None where there is no chain, or the plan without it has no such figure."""
        return gain_of(self.numbers, self.chain[-1].numbers, self.objective) if self.chain else None

    @property
    def chain_flags(self) -> str:
        """The flags of the whole chain."""
        return typed(change for lever in self.chain for change in lever.proposal.changes)


def find_levers(
    request: PlanRequest, objective: str | None = None, on_plan: Callable[[int], None] = lambda made: None
) -> Levers:
    """Try everything that is known to help.

    Args:
        on_plan: hears how many plans have been made, some dozens in all.

    Raises:
        PlanError: the plan itself cannot be made, or the objective is not known.
    """
    planner = _Planner(on_plan)
    base = planner.plan(request)
    pinned: dict[str, int] = {}
    if request.count is None and base.devices > 1:  # the plan chose the number, and might choose another with a change
        pinned = {"count": base.devices}
        base = planner.plan(replace(request, count=base.devices))
    chosen, why = choose_objective(base, objective)
    search = _Search(planner, base, chosen, pinned)
    levers, left_out = search.all_of(itertools.chain(proposals(base), largest_load(base, search.meets)), base)
    levers = sorted([*levers, *search.of_hardware(left_out)], key=search.rank)
    return Levers(base, numbers_of(base), chosen, why, tuple(levers), tuple(left_out), tuple(search.chain(levers)))


def choose_objective(base: Plan, wanted: str | None) -> tuple[str, str]:
    """What levers are ranked by, and why: what was asked for, the first objective that is missed, or throughput.

    Raises:
        PlanError: what was asked for is no objective, or the cost where no price is known.
    """
    if wanted is not None:
        if wanted not in RANKED_BY:
            raise PlanError(f"objective is {wanted!r}; it must be one of {', '.join(RANKED_BY)}")
        if wanted == "cost" and base.price_per_hour is None:
            raise PlanError(f"no price of {base.hardware_key} is known; give --price-per-hour")
        return wanted, "as asked for"
    if base.problem:
        return "throughput", "the load is more than can be served" if base.fits else "it must fit first"
    if missed := missed_by(base):
        return missed[0], f"the first of --slo that is missed, {missed[0]}:{base.request.slo[missed[0]]:g}"
    return "throughput", "no --slo is missed" if base.slo_met else "there is no --slo"


class _Planner:
    """Makes plans, each once."""

    def __init__(self, on_plan: Callable[[int], None]) -> None:
        self._known: dict[str, Plan | PlanError] = {}
        self._on_plan = on_plan

    def plan(self, request: PlanRequest) -> Plan:
        key = repr(request)
        if key not in self._known:
            try:
                self._known[key] = make_plan(request, brief=True)
            except PlanError as error:
                self._known[key] = error
            self._on_plan(len(self._known))
        found = self._known[key]
        if isinstance(found, PlanError):
            raise found
        return found


@dataclass(frozen=True, slots=True)
class _Search:
    """Tries changes of one plan for one objective."""

    planner: _Planner
    base: Plan
    objective: str
    pinned: dict[str, int]

    def lever(self, proposal: Proposal, before: Plan) -> Lever:
        """Raises NotApplicable where the plan with the change cannot be made, does not fit or changes nothing."""
        plan = self._made(proposal, before.request)
        numbers, old = numbers_of(plan), numbers_of(before)
        if not plan.fits or (plan.problem and not before.problem):
            raise NotApplicable("the model or the load does not fit then")
        if proposal.kind == "hardware" and plan.devices != before.devices:
            raise NotApplicable("the model does not fit on as many devices")
        if _alike(numbers, old):
            raise NotApplicable("changes no figure by more than 0.5 %")
        settled = self.pinned | {name: getattr(plan.request, name) for name in proposal.settings}
        return Lever(
            replace(proposal, changes=changes_of(settled)),
            plan,
            numbers,
            gain_of(old, numbers, self.objective),
            range_of_gain(before, plan, self.objective),
            missed_by(plan),
        )

    def _made(self, proposal: Proposal, request: PlanRequest) -> Plan:
        """The plan with a proposal. Speculation takes the number of tokens that is best under this load."""
        try:
            plan = self.planner.plan(replace(request, **proposal.settings))
            best = plan.speculated.best_tokens if plan.speculated and "speculation" in proposal.settings else None
            if best == 0:
                raise NotApplicable("no number of proposed tokens is faster than none, at this batch")
            if best is None:
                return plan
            return self.planner.plan(
                replace(plan.request, speculation=replace(proposal.settings["speculation"], tokens=best))
            )
        except PlanError as error:
            raise NotApplicable(str(error)) from None

    def all_of(
        self, tried: Iterable[Proposal | tuple[str, str]], before: Plan
    ) -> tuple[list[Lever], list[tuple[str, str]]]:
        """The proposals that are levers of a plan, and the names of those that are not, with the reasons."""
        levers, left_out = [], []
        for each in tried:
            if isinstance(each, tuple):
                left_out.append(each)
                continue
            try:
                levers.append(self.lever(each, before))
            except NotApplicable as reason:
                left_out.append((each.name, str(reason)))
        return levers, left_out

    def meets(self, request: PlanRequest) -> bool:
        """Whether the plan of a request fits and meets its objectives."""
        try:
            plan = self.planner.plan(request)
        except PlanError:
            return False
        return plan.fits and plan.problem is None and not missed_by(plan)

    def of_hardware(self, left_out: list[tuple[str, str]]) -> list[Lever]:
        """Levers that change the hardware: the best of the catalogue, and the cheapest that meets all objectives."""
        levers, reasons = self.all_of(other_hardware(self.base), self.base)
        best = sorted(levers, key=self.rank)[:BEST_HARDWARE]
        if reasons:
            left_out.append(("other hardware", f"{len(reasons)} of the catalogue: {_shortened(reasons)}"))
        hour = self.base.price_per_hour
        if not self.base.request.slo or hour is None:
            lacks = "no --slo is given" if hour is not None else "no price of this hardware is known"
            left_out.append(("cheaper hardware that meets the SLO", lacks))
            return best
        cheaper = [each for each in levers if not each.misses and (each.plan.price_per_hour or math.inf) < hour]
        if not cheaper:
            left_out.append(("cheaper hardware that meets the SLO", "none of the catalogue"))
            return best
        cheapest = min(cheaper, key=lambda each: each.plan.price_per_hour or math.inf)
        others = [each for each in best if each is not cheapest]
        name = f"{cheapest.proposal.name}, the cheapest that meets the SLO"
        return [*others, replace(cheapest, proposal=replace(cheapest.proposal, name=name))]

    def rank(self, lever: Lever) -> tuple[bool, float]:
        """A sort key that puts the best lever first.

        It has the figure itself and not the gain, as there is no gain where the plan before has no such figure.
        """
        spoils = bool(set(lever.misses) - set(missed_by(self.base)))
        value = value_of(lever.numbers, self.objective)
        return spoils, math.inf if value is None else value

    def chain(self, levers: list[Lever]) -> list[Lever]:
        """Apply the best, rank the others again on top of it, and go on while the next one gains 3 % or more.

        The chain has at most one change of each kind, and none that misses an objective which was met before. It stays
        on the same devices, unless the model fits only on others.
        """
        alone = any(each.proposal.combines for each in levers)
        left = self._combinable() if alone or self.base.fits else [each.proposal for each in levers]
        current, found = self.base, list[Lever]()
        while left:
            missed = set(missed_by(current))
            choices = [each for each in self.all_of(left, current)[0] if not set(each.misses) - missed]
            best = min(choices, key=self.rank, default=None)
            if best is None or not self._helps(best):
                break
            found.append(best)
            current = best.plan
            used = {each.proposal.kind for each in found}
            left = [each for each in self._combinable() if each.kind not in used]
        return found

    def _helps(self, lever: Lever) -> bool:
        """Whether a lever gains enough. Where the plan before had no such figure, to have one is enough."""
        if lever.gain is None:
            return value_of(lever.numbers, self.objective) is not None
        return lever.gain >= LEAST_GAIN

    def _combinable(self) -> list[Proposal]:
        """Proposals that a chain may have.

        Among them are some that do nothing for the plan alone, such as a narrower cache where the weights do not fit.
        """
        return [each for each in proposals(self.base) if isinstance(each, Proposal) and each.combines]


def _alike(one: Numbers, other: Numbers) -> bool:
    names = ("ttft_s", "tpot_s", "tokens_per_s", "cost")
    pairs = ((getattr(one, name), getattr(other, name)) for name in names)
    return all(a == b if a is None or b is None else math.isclose(a, b, rel_tol=NOTHING) for a, b in pairs)


def _shortened(reasons: list[tuple[str, str]]) -> str:
    """Reasons with names of hardware: hardware that is left out for the same reason shares a line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons:
        short = "does not fit" if "does not fit" in reason else "cannot run it like this"
        by_reason.setdefault(short, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
