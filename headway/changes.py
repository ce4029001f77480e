"""One language of changes: a flag with another value, where it applies, and what it takes to apply it.

Plans, simulations, the advisor and configuration files all speak of changes. A change is made of the flag that a
dataclass of options declares (`flags`), so that it is typed, checked and applied like the flag itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from headway.flags import Flag, Needs, arguments_of, flags_of, option, value_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """A flag with another value.

    Args:
        field: name of the field of the options.
        value: what the field becomes.
        typed: as it is typed on a command line; empty where nothing is typed.
        where: what it applies to: the heading of the flag in the help, such as Engine, Deployment or Load.
        needs: what it takes to apply it.
    """

    field: str
    value: Any
    typed: str
    where: str
    needs: Needs = Needs.RESTART

    def as_json(self) -> dict[str, str]:
        """The change in words, without the value as an object."""
        return {"flag": self.typed, "where": self.where, "needs": self.needs.value}


def typed(changes: Iterable[Change]) -> str:
    """All changes as they are typed, such as `--kv-cache-dtype int8 --max-num-seqs 64`; the last of a field counts."""
    last = {each.field: each for each in changes}
    return " ".join(each.typed for each in last.values() if each.typed)


def most_needed(changes: Iterable[Change]) -> Needs:
    """What it takes to apply all of them; Needs has the order."""
    order = list(Needs)
    return max((each.needs for each in changes), key=order.index, default=Needs.RELOAD)


def change_of(kind: type, field: str, value: Any) -> Change:
    """Make the change of a field of options of this kind. Raises KeyError where no flag sets the field."""
    flag_name, flag = {name: (flag_name, flag) for name, flag_name, _, flag in _flags((kind,))}[field]
    words = "" if value is None else " ".join(arguments_of(flag_name, value))
    return Change(field, value, words, flag.panel or "", flag.needs)


def parse_change(name: str, text: str | None, kinds: Iterable[type]) -> Change:
    """Parse a flag with a value.

    Args:
        name: the flag, with or without its dashes, such as max-num-seqs.
        text: its value; None if none was given.
        kinds: dataclasses of options whose flags may change.

    Raises:
        ValueError: there is no such flag, or this is no value of it; one line.
    """
    name = name.strip().removeprefix("--").replace("_", "-")
    known = {flag_name.removeprefix("--"): (field, hint, flag) for field, flag_name, hint, flag in _flags(kinds)}
    if text is None or name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near and near[0] != name else "write FLAG=VALUE, such as max-num-seqs=64"
        raise ValueError(f"{name!r} does not change a flag of the server; {hint}")
    field, kind, flag = known[name]
    value = value_of(f"--{name}", kind, flag, text)
    words = " ".join(arguments_of(f"--{name}", value if isinstance(value, bool) else text))
    return Change(field, value, words, flag.panel or "", flag.needs)


def parse_changes(text: str, kinds: Iterable[type]) -> tuple[Change, ...]:
    """Parse a text like hardware=H200,tensor-parallel-size=2. Raises ValueError, one line."""
    parts = (part.partition("=") for part in text.split(","))
    return tuple(parse_change(name, value.strip() if equals else None, kinds) for name, equals, value in parts)


def applied(options: T, changes: Iterable[Change]) -> T:
    """The options with those of the changes that are theirs. All changes count as given, where options keep that."""
    known: Any = options
    own, changes = {each.name for each in fields(known)}, list(changes)
    values = {each.field: each.value for each in changes if each.field in own}
    if "given" in own:
        values["given"] = known.given | {each.field for each in changes}
    made: T = replace(known, **values)
    return made


def _flags(kinds: Iterable[type]) -> Iterator[tuple[str, str, Any, Flag]]:
    """All flags of dataclasses: the field's name, the flag as it is typed, the field's type, and what it says."""
    for kind in kinds:
        for field, hint, flag in flags_of(kind):
            if flag is None:
                yield from _flags((hint,))
            else:
                yield field.name, option(field, flag), hint, flag
