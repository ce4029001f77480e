"""What a server may change of its own settings, within which bounds, and what it is told to change."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.scheduler_config import MOST_DRAFTS, StepLimits

_WHOLE = ("max_num_seqs", "max_num_batched_tokens")
_MOST = {"window_ms": 1000.0, "share": 0.9, "drafts": MOST_DRAFTS}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most of each setting.

    Raises:
        ValueError: the least is more than the most, or one of them is out of range.
    """

    max_num_seqs: tuple[int, int] | None = None  # None for a quarter of what a server begins with, up to that
    # None for as few as its sequences need, up to what it begins with.
    max_num_batched_tokens: tuple[int, int] | None = None
    max_prefill_stall_ms: tuple[float, float] = (10.0, 250.0)
    window_ms: tuple[float, float] = (0.0, 40.0)  # of the longest window of a class
    share: tuple[float, float] = (0.0, 0.5)  # of a class's seats, step tokens or KV blocks
    drafts: tuple[int, int] = (0, MOST_DRAFTS)  # most drafts behind a token; with speculation

    def __post_init__(self) -> None:
        for each in fields(self):
            if (given := getattr(self, each.name)) is not None:
                least, most = given
                floor, ceiling = int(each.name in _WHOLE), _MOST.get(each.name, 1e9)
                if not floor <= least <= most <= ceiling:
                    name = _typed(each.name)
                    raise ValueError(f"{name} is {least:g}:{most:g}; give LEAST:MOST, from {floor} to {ceiling:g}")

    def make_room(self, options: Any) -> StepLimits:
        """Let options of an engine have room for the upper bounds; what it begins with.

        Args:
            options: SchedulingOptions, which are changed.

        Raises:
            ValueError: what it begins with is out of bounds, or a step has too few tokens; one line.
        """
        begins: dict[str, int | None] = {}
        for name in _WHOLE:
            bound, start = getattr(self, name), getattr(options, name)
            begins[name] = start
            if bound is None:
                continue
            begins[name] = start = bound[1] if start is None else start
            if not bound[0] <= start <= bound[1]:
                flag = _typed(name)
                raise ValueError(
                    f"{flag}={bound[0]}:{bound[1]} leaves out --{flag} {start}, where it begins; widen the bounds or "
                    "change the flag"
                )
            setattr(options, name, bound[1])
        fewest = self.max_num_batched_tokens and self.max_num_batched_tokens[0]
        if fewest and fewest < options.max_num_seqs:
            raise ValueError(
                f"max-num-batched-tokens may become {fewest}, and there are up to {options.max_num_seqs} sequences, "
                f"each with a token in a step; let it begin at {options.max_num_seqs} or more"
            )
        return StepLimits(**begins)


def _typed(name: str) -> str:
    return name.replace("_", "-")


def parse_bounds(text: str) -> Bounds:
    """Bounds like max-num-seqs=8:64,window-ms=0:20; those that are left out have their defaults. Raises ValueError."""
    known = {_typed(each.name): each.name for each in fields(Bounds)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, span = part.strip().partition("=")
        least, colon, most = span.partition(":")
        if name not in known:
            raise ValueError(f"{name!r} is no setting that the server changes; there are {', '.join(known)}")
        kind = int if known[name] in (*_WHOLE, "drafts") else float
        try:
            values[known[name]] = kind(least), kind(most if colon else least)
        except ValueError:
            raise ValueError(f"{name} is {span!r}; write LEAST:MOST, such as {name}=8:64") from None
    return Bounds(**values)


# --- between a server and the process that decides for it -------------------------------------------


class Begin(msgspec.Struct):
    """What the process is told first, and again when the operator has given other classes."""

    traffic: str  # the file with the records of the engine's traffic
    bounds: Bounds
    limits: StepLimits  # of the engine's first steps, where these are not what it was built for
    classes: ClassTable
    weights: dict[str, float]


class Told(msgspec.Struct):
    """What the process says."""

    kind: str = ""  # what was done with a change, such as `tried`; empty where nothing was, but the rest is new
    words: str = ""  # one line; empty without a kind
    change: str = ""  # as it is typed
    # limits, classes: what the engine is to have from now on; None where all stays.
    limits: StepLimits | None = None
    classes: ClassTable | None = None
    doing: str = ""  # what the process does
    cpu_s: float = 0.0  # seconds of a processor that it has taken


def line_of(message: Begin | Told) -> bytes:
    """A message as a line: MessagePack, which has infinities as JSON has not, in hexadecimal digits."""
    return msgspec.msgpack.encode(message).hex().encode() + b"\n"


def begin_in(line: bytes) -> Begin:
    return msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=Begin)


def told_in(line: bytes) -> Told:
    return msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=Told)
