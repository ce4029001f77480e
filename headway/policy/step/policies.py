"""The scheduling policies by name, and a user's own as `module:Class`."""

from __future__ import annotations

import inspect

from headway.policy.objectives.priority import PriorityPolicy
from headway.policy.objectives.slo import SloPolicy
from headway.policy.own_class import own_class
from headway.policy.step.order import Orders
from headway.policy.step.request import Sequence
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduling_policy import FcfsPolicy, SchedulingPolicy

POLICIES: dict[str, type[SchedulingPolicy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy, "slo": SloPolicy}
_BASE = f"{SchedulingPolicy.__module__}.{SchedulingPolicy.__name__}"


def policy_class(name: str) -> type[SchedulingPolicy]:
    """The class of a policy: one of POLICIES, or one that is imported.

    Raises:
        ValueError: there is none, or it is no policy; one line that says what to do.
    """
    if name in POLICIES:
        return POLICIES[name]
    return _checked(name, own_class("scheduling policy", name, POLICIES))


def policy_name(text: str) -> str:
    """The text, if it names a policy. Raises ValueError as policy_class() does."""
    policy_class(text)
    return text


def _checked(name: str, found: object) -> type[SchedulingPolicy]:
    """The class, if what it overrides can be asked as a policy is. Raises ValueError."""
    if not (isinstance(found, type) and issubclass(found, SchedulingPolicy)):
        raise ValueError(f"scheduling policy {name!r} is not a policy; derive the class from {_BASE}")
    for hook, ours in vars(SchedulingPolicy).items():
        override = inspect.getattr_static(found, hook)
        if override is ours or hook.startswith("_"):
            continue
        if inspect.isfunction(ours):
            _check_hook(f"scheduling policy {name!r}: {hook}", override, list(inspect.signature(ours).parameters))
        elif not isinstance(override, property | type(ours)):
            kind = type(ours).__name__
            raise ValueError(f"scheduling policy {name!r}: {hook} is {override!r}; it must be of type {kind}")
    _check_orders(name, found.orders)
    return found


def _check_hook(where: str, override: object, wanted: list[str]) -> None:
    if not inspect.isfunction(override):
        raise ValueError(f"{where} is {override!r}; it must be a method with ({', '.join(wanted)})")
    given = inspect.signature(override)
    try:
        given.bind(*wanted)
    except TypeError:
        raise ValueError(f"{where} takes ({', '.join(given.parameters)}), not ({', '.join(wanted)})") from None


def _check_orders(name: str, orders: Orders) -> None:
    """Try each order on a sequence. Raises ValueError."""
    sample = Sequence("0", 0, SamplingParams(), [1], 1, 2, frozenset(), 0)
    for name_of_order in ("admission", "running", "victims", "level", "line"):
        where, order = f"scheduling policy {name!r}: orders.{name_of_order}", getattr(orders, name_of_order)
        try:
            key = order(sample)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"{where} fails for a sequence: {reason}") from None
        numbers, wanted = (key if isinstance(key, tuple) else ()), "a tuple of numbers"
        if name_of_order in ("level", "line"):
            numbers, wanted = (key,), "a whole number"
        if not numbers or not all(isinstance(each, int | float) for each in numbers):
            raise ValueError(f"{where} gives {key!r} for a sequence; it must give {wanted}")
