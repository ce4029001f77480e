"""A mix: classes of requests, each with its share or its arrivals, its lengths and its objectives, from a TOML file.

    description = "one line, for titles"

    [[class]]
    name = "chat"
    request_rate = 2
    input_len = "lognormal:mean=200,cv=0.8,max=2000"
    output_len = { distribution = "normal", mean = 100, cv = 0.3 }
    goodput = { ttft = 200, tpot = 50 }
    service_class = "interactive"

    [[class]]
    name = "offline"
    max_concurrency = 4
    num_prompts = 200
    input_len = 2000

A class takes every option of a dataset and of arrivals under the name of its flag with underscores, `dataset_name` and
`dataset_path` (from the file's folder on) among them. Instead of arrivals all classes may have a `share`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from headway.load.endpoint import check_headers
from headway.load.errors import BenchError
from headway.load.option_values import check_objectives
from headway.load.workload.arrival_flags import Arrival, ArrivalFlags
from headway.load.workload.arrivals import make_arrival
from headway.load.workload.files import is_of_hub
from headway.load.workload.spec import DATASET_FIELDS, DISTRIBUTIONS, DatasetOptions, flag
from headway.load.workload.spelling import hint

S = TypeVar("S")
T = TypeVar("T")
BODY_KEYS: dict[str, type] = {"priority": int, "service_tier": str, "service_class": str}  # fields of the body
LOAD_KEYS: dict[str, type] = {
    **{each.name: str if each.name in ("arrival", "ramp_up_strategy") else float for each in fields(ArrivalFlags)},
    "max_concurrency": int,
    "num_prompts": int,
}
CLASS_KEYS = ("name", "share", "goodput", "extra_body", "headers", "tenant", *BODY_KEYS, *LOAD_KEYS)
TYPE_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}


@dataclass(frozen=True)
class ClassLoad:
    """The arrivals of a class that has its own."""

    arrival: Arrival | None  # None takes the recorded times of its trace, or leaves them to the users of a closed loop
    users: int | None  # the users of a closed loop; None where there is none
    num_prompts: int | None  # most requests of the class; None is as many as come within the run's duration

    def describe(self) -> str:
        if self.users is not None:
            return f"closed loop of {self.users}"
        return self.arrival.describe() if self.arrival is not None else "as recorded"


@dataclass(frozen=True)
class MixClass:
    """One class."""

    name: str
    # That of all requests, later turns of conversations included; shares of a mix add up to 1. Without a meaning where
    # there is a `load`.
    share: float
    options: DatasetOptions  # where its requests come from
    # {"ttft": 200.0, ...} in ms; empty where the run's own are meant.
    objectives: dict[str, float] = field(default_factory=dict)
    # Fields of each request's body, those of BODY_KEYS among them.
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # headers of each request
    load: ClassLoad | None = None  # its own arrivals; None where one process is for all classes
    tenant: str = ""  # whose they are


@dataclass(frozen=True)
class Mix:
    """Either all classes have a load of their own, or none."""

    name: str
    description: str
    classes: tuple[MixClass, ...]

    @property
    def has_own_arrivals(self) -> bool:
        return self.classes[0].load is not None


def bundled_mixes() -> list[str]:
    """Names of the mixes that come with the package."""
    folder = resources.files("headway.load.workload") / "mixes"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def load_mix(path_or_name: str | Path) -> Mix:
    """The mix of a TOML file, or a bundled one by its name.

    Raises:
        BenchError: naming the file, the class, and what is wrong.
    """
    path = Path(path_or_name)
    if path.suffix != ".toml":
        if str(path_or_name) not in bundled_mixes():
            nearest = hint(str(path_or_name), bundled_mixes())
            raise BenchError(f"there is no bundled mix '{path_or_name}', and it is not a .toml file; {nearest}")
        path = Path(str(resources.files("headway.load.workload") / "mixes" / f"{path_or_name}.toml"))
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"the mix {path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"the mix {path} is not TOML: {error}") from None
    return _mix(path, table)


def _mix(path: Path, table: dict[str, Any]) -> Mix:
    _known_keys(str(path), table, ("description", "class"))
    classes = table.get("class")
    if not isinstance(classes, list) or not classes or not all(isinstance(each, dict) for each in classes):
        raise BenchError(f"the mix {path} has no classes; write [[class]] once for each")
    made = [_class(path, each, number) for number, each in enumerate(classes, start=1)]
    names = [each.name for each in made]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"the mix {path} has two classes named '{name}'; give each its own name")
    without = next((each.name for each in made if each.load is None), None)
    if without is not None and any(each.load for each in made):
        raise BenchError(
            f"{path}, class '{without}' has no arrivals of its own, and others have; give it, for example, "
            "request_rate = 2, or max_concurrency = 4 for a closed loop"
        )
    total = sum(each.share for each in made)
    normalised = tuple(replace(each, share=each.share / total) for each in made)
    return Mix(path.stem, _typed(str(path), table, "description", str, ""), normalised)


def _class(path: Path, table: dict[str, Any], number: int) -> MixClass:
    name = _typed(f"{path}, class {number}", table, "name", str, "")
    where = f"{path}, class '{name}'" if name else f"{path}, class {number}"
    if not name:
        raise BenchError(f'{where} has no name; write name = "..."')
    _known_keys(where, table, (*CLASS_KEYS, *DATASET_FIELDS))
    given = {key: value for key, value in table.items() if key in DATASET_FIELDS}
    options = _options(path, where, given)
    load = _load(where, table, options.dataset_name)
    extra_body = dict(_typed(where, table, "extra_body", dict, {}))
    extra_body |= {key: _typed(where, table, key, kind, None) for key, kind in BODY_KEYS.items() if key in table}
    headers = {key: str(value) for key, value in _typed(where, table, "headers", dict, {}).items()}
    return MixClass(
        name,
        _share(where, table, load),
        options,
        check_objectives(_typed(where, table, "goodput", dict, {}), where),
        extra_body,
        _named(where, check_headers, headers),
        load,
        _typed(where, table, "tenant", str, ""),
    )


def _share(where: str, table: Mapping[str, Any], load: ClassLoad | None) -> float:
    share = table.get("share")
    if load is not None:
        if share is not None:
            raise BenchError(f"{where}: share is {share}, and it has arrivals of its own; leave one of the two out")
        return 1.0
    if isinstance(share, bool) or not isinstance(share, int | float) or not (math.isfinite(share) and share > 0):
        raise BenchError(
            f"{where}: share is {share}; every class needs one, a number above 0 (they are normalised), or arrivals "
            "of its own (request_rate, ...)"
        )
    return float(share)


def _load(where: str, table: Mapping[str, Any], dataset_name: str) -> ClassLoad | None:
    given = {key: _typed(where, table, key, kind, None) for key, kind in LOAD_KEYS.items() if key in table}
    if not given:
        return None
    users, num_prompts = given.pop("max_concurrency", None), given.pop("num_prompts", None)
    for key, value in (("max_concurrency", users), ("num_prompts", num_prompts)):
        if value is not None and value < 1:
            raise BenchError(f"{where}: {key} is {value}; it must be 1 or more")
    if bool(given) == (users is not None):
        both = "both arrivals and max_concurrency" if given else "neither arrivals nor max_concurrency"
        raise BenchError(
            f"{where} has {both}; a class needs either arrivals (request_rate, ...) or the clients of a closed loop"
        )
    arrival = _named(where, lambda flags: make_arrival(flags, dataset_name), ArrivalFlags(**given))
    return ClassLoad(arrival, users, num_prompts)


def _named(where: str, make: Callable[[S], T], said: S) -> T:
    """Call `make` with what was said. An error names where it was said."""
    try:
        return make(said)
    except BenchError as error:
        raise BenchError(f"{where}: {error}") from None


def _options(path: Path, where: str, given: Mapping[str, Any]) -> DatasetOptions:
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in DISTRIBUTIONS:
            values[key] = _named(f"{where}, {key}", DISTRIBUTIONS[key], value)
        elif key == "dataset_path":
            file = Path(_typed(where, given, key, str, ""))
            values[key] = file if is_of_hub(file) else path.parent / file
        elif key == "random_range_ratio":
            values[key] = value
        else:
            # Options that may be absent are numbers, but for a model's name.
            default = DATASET_FIELDS[key]
            kind = type(default) if default is not None else str if key == "burstgpt_model" else int
            values[key] = _typed(where, given, key, kind, default)
    return DatasetOptions(**values)


def _typed(where: str, table: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = table.get(key, default)
    wanted = int | float if kind is float else kind
    # Python counts True as an int.
    if key in table and (not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool)):
        raise BenchError(f"{where}: {key} is {value!r}; {TYPE_NAMES[kind]} is expected")
    return value


def _known_keys(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise BenchError(f"{where}: unknown key '{key}'; {hint(key, known)}")


def options_beside_a_mix(options: DatasetOptions) -> list[str]:
    """The flags that say what a mix says itself, and were given beside it."""
    named = {name for name, default in DATASET_FIELDS.items() if getattr(options, name) != default}
    return [flag(name) for name in DATASET_FIELDS if name in named - {"max_input_len", "max_output_len"}]
