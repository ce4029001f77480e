"""A mix: classes of requests, each with its share, its lengths and its objectives, from a TOML file.

    description = "one line, for titles"

    [[class]]
    name = "chat"
    share = 0.8
    input_len = "lognormal:mean=200,cv=0.8,max=2000"
    output_len = { distribution = "normal", mean = 100, cv = 0.3 }
    goodput = { ttft = 200, tpot = 50 }
    priority = -1

A class takes every option of a dataset under the name of its flag with underscores, `dataset_name` and `dataset_path`
(from the file's folder on) among them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from headway.bench.errors import BenchError
from headway.bench.measures.slo import check_objectives
from headway.bench.workload.spec import DATASET_FIELDS, DISTRIBUTIONS, DatasetOptions, flag
from headway.bench.workload.spelling import hint

CLASS_KEYS = ("name", "share", "goodput", "priority", "extra_body")


@dataclass(frozen=True)
class MixClass:
    """One class.

    Args:
        share: of all requests, later turns of conversations included; shares of a mix add up to 1.
        options: where its requests come from.
        objectives: {"ttft": 200.0, ...} in ms; empty where the run's own are meant.
        extra_body: fields of each request's body, `priority` among them where the class has one.
    """

    name: str
    share: float
    options: DatasetOptions
    objectives: dict[str, float] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mix:
    name: str
    description: str
    classes: tuple[MixClass, ...]


def bundled_mixes() -> list[str]:
    """Names of the mixes that come with the package."""
    folder = resources.files("headway.bench.workload") / "mixes"
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
            raise BenchError(f"there is no mix '{path_or_name}' in the package, and it is no .toml file; {nearest}")
        path = Path(str(resources.files("headway.bench.workload") / "mixes" / f"{path_or_name}.toml"))
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
    total = sum(each.share for each in made)
    normalised = tuple(
        MixClass(each.name, each.share / total, each.options, each.objectives, each.extra_body) for each in made
    )
    return Mix(path.stem, _of_type(str(path), table, "description", str, ""), normalised)


def _class(path: Path, table: dict[str, Any], number: int) -> MixClass:
    name = _of_type(f"{path}, class {number}", table, "name", str, "")
    where = f"{path}, class '{name}'" if name else f"{path}, class {number}"
    if not name:
        raise BenchError(f'{where} has no name; write name = "..."')
    _known_keys(where, table, (*CLASS_KEYS, *DATASET_FIELDS))
    share = _number(where, table.get("share"))
    extra_body = dict(_of_type(where, table, "extra_body", dict, {}))
    if "priority" in table:
        extra_body["priority"] = _of_type(where, table, "priority", int, 0)
    objectives = check_objectives(_of_type(where, table, "goodput", dict, {}), where)
    given = {key: value for key, value in table.items() if key in DATASET_FIELDS}
    return MixClass(name, share, _options(path, where, given), objectives, extra_body)


def _number(where: str, share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not (math.isfinite(share) and share > 0):
        raise BenchError(f"{where}: share is {share}; every class needs one, a number above 0 (they are normalised)")
    return float(share)


def _options(path: Path, where: str, given: Mapping[str, Any]) -> DatasetOptions:
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in DISTRIBUTIONS:
            try:
                values[key] = DISTRIBUTIONS[key](value)
            except BenchError as error:
                raise BenchError(f"{where}, {key}: {error}") from None
        elif key == "dataset_path":
            values[key] = path.parent / _of_type(where, given, key, str, "")
        elif key == "random_range_ratio":
            values[key] = value
        else:
            # Options that may be absent are numbers, but for a model's name.
            default = DATASET_FIELDS[key]
            kind = type(default) if default is not None else str if key == "burstgpt_model" else int
            values[key] = _of_type(where, given, key, kind, default)
    return DatasetOptions(**values)


def _of_type(where: str, table: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = table.get(key, default)
    # To Python true is the number 1.
    if key in table and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        names = {str: "a text", int: "a whole number", bool: "true or false", dict: "a table"}
        raise BenchError(f"{where}: {key} is {value!r}; {names.get(kind, kind.__name__)} is expected")
    return value


def _known_keys(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise BenchError(f"{where}: unknown key '{key}'; {hint(key, known)}")


def options_beside_a_mix(options: DatasetOptions) -> list[str]:
    """The flags that say what a mix says itself, and were given beside it."""
    named = {name for name, default in DATASET_FIELDS.items() if getattr(options, name) != default}
    return [flag(name) for name in DATASET_FIELDS if name in named - {"max_input_len", "max_output_len"}]
