"""How long prompts and answers are, how many turns a conversation has, how long people think: distributions.

A distribution is a frozen dataclass in the unit of what it describes (tokens, turns or seconds). One line says it on
the command line, `lognormal:mean=200,cv=0.8,max=4000`, and the same words say it in a TOML table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headway.load.errors import BenchError
from headway.load.workload.spelling import hint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


DRAWS = 16_384  # by which the mean and the longest of a batch are found


class Distribution(Protocol):
    """A distribution of lengths or times."""

    @property
    def mean(self) -> float:
        """The mean before clipping."""
        ...

    def values(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draws, of shape [count], clipped to the distribution's own bounds."""
        ...

    def describe(self) -> str: ...


def tokens(distribution: Distribution, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Whole numbers of 1 or more drawn from `distribution`, of shape [count]."""
    return distribution.values(count, rng).round().clip(1).astype("int64")


def sorted_tokens(distribution: Distribution) -> NDArray[np.int64]:
    """Draws in ascending order, the same in every run, of shape [DRAWS]: what a distribution comes to when clipped."""
    import numpy as np

    return np.sort(tokens(distribution, DRAWS, np.random.default_rng(0)))


def mean_tokens(distribution: Distribution) -> int:
    """The mean length in whole tokens, after clipping."""
    return max(1, round(float(sorted_tokens(distribution).mean())))


def longest_tokens(distribution: Distribution, count: int) -> float:
    """The mean length of the longest of `count` draws.

    Of the draws x_1 <= ... <= x_n, x_i is the longest with probability (i/n)^count - ((i-1)/n)^count.
    """
    import numpy as np

    drawn = sorted_tokens(distribution)
    below = (np.arange(DRAWS + 1) / DRAWS) ** count
    return float((drawn * np.diff(below)).sum())


@dataclass(frozen=True, slots=True)
class Fixed:
    """A distribution that always gives the same value."""

    value: float

    def __post_init__(self) -> None:
        _check(value=self.value)

    @property
    def mean(self) -> float:
        return self.value

    def values(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        import numpy as np

        return np.full(count, float(self.value))

    def describe(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from `minimum` to `maximum`, both included, is equally likely."""

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        _check(minimum=self.minimum, maximum=self.maximum)
        if self.minimum > self.maximum:
            raise BenchError(f"a uniform length goes from {self.minimum} to {self.maximum}; min may not be above max")

    @classmethod
    def around(cls, mean: int, ratio: float) -> Uniform:
        """The range floor(mean * (1 - ratio)) .. ceil(mean * (1 + ratio)), as by --random-range-ratio in vLLM."""
        if not 0 <= ratio < 1:
            raise BenchError(f"the range ratio is {ratio:g}; it must be 0 or more and below 1")
        return cls(max(math.floor(mean * (1 - ratio)), 1), max(math.ceil(mean * (1 + ratio)), 1))

    @property
    def mean(self) -> float:
        return (self.minimum + self.maximum) / 2

    def values(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return rng.integers(self.minimum, self.maximum, count, endpoint=True).astype("float64")

    def describe(self) -> str:
        return f"uniform {self.minimum} to {self.maximum}" if self.minimum < self.maximum else str(self.minimum)


@dataclass(frozen=True, slots=True)
class Normal:
    """Bell-shaped with standard deviation cv * mean; what falls outside the bounds is set to the bound."""

    mean: float
    cv: float
    minimum: float = 0.0
    maximum: float = math.inf

    def __post_init__(self) -> None:
        _check_shape(self.mean, self.cv, self.minimum, self.maximum)

    def values(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        drawn = self.mean * (1 + self.cv * rng.standard_normal(count))
        return drawn.clip(self.minimum, self.maximum)

    def describe(self) -> str:
        return f"{type(self).__name__.lower()}, mean {self.mean:g}, cv {self.cv:g}{_bounds(self.minimum, self.maximum)}"


@dataclass(frozen=True, slots=True)
class LogNormal(Normal):
    """A distribution with a long tail. Mean and coefficient of variation are of the values, not of their logarithms.

    sigma^2 = ln(1 + cv^2) and mu = ln(mean) - sigma^2 / 2; what falls outside the bounds is set to the bound.
    """

    def values(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        variance = math.log1p(self.cv * self.cv)
        import numpy as np

        drawn = np.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * rng.standard_normal(count))
        return drawn.clip(self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Exponential:
    """The exponential distribution, which has no memory. Values outside the bounds are set to the bound."""

    mean: float
    minimum: float = 0.0
    maximum: float = math.inf

    def __post_init__(self) -> None:
        _check_shape(self.mean, 1.0, self.minimum, self.maximum)

    def values(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return (self.mean * rng.standard_exponential(count)).clip(self.minimum, self.maximum)

    def describe(self) -> str:
        return f"exponential, mean {self.mean:g}" + _bounds(self.minimum, self.maximum)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise BenchError(f"the {name} of a distribution is {value:g}; it must be a finite number, 0 or more")


def _check_shape(mean: float, cv: float, minimum: float, maximum: float) -> None:
    _check(cv=cv, minimum=minimum)
    if not (math.isfinite(mean) and mean > 0):
        raise BenchError(f"the mean of a distribution is {mean:g}; it must be a finite number above 0")
    if not minimum <= maximum:
        raise BenchError(f"a distribution is bounded by {minimum:g} and {maximum:g}; min may not be above max")


def _bounds(minimum: float, maximum: float) -> str:
    return (f", at least {minimum:g}" if minimum else "") + (f", at most {maximum:g}" if maximum < math.inf else "")


# Name, to what it needs and what it may have beside that.
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fixed": (("value",), ()),
    "uniform": ((), ("min", "max", "mean", "ratio")),
    "normal": (("mean", "cv"), ("min", "max")),
    "lognormal": (("mean", "cv"), ("min", "max")),
    "exponential": (("mean",), ("min", "max")),
}
EXAMPLE = "lognormal:mean=200,cv=0.8,max=4000"


def parse_length(said: str | float | Mapping[str, Any]) -> Distribution:
    """A distribution of lengths in tokens; see `parse_distribution`.

    Raises:
        BenchError: also when its mean is below 1 token.
    """
    distribution = parse_distribution(said)
    if distribution.mean < 1:
        raise BenchError(f"a mean of {distribution.mean:g} is too small; it must be 1 or more")
    return distribution


def parse_distribution(said: str | float | Mapping[str, Any]) -> Distribution:
    """A distribution from one line, a number, or a table.

    Args:
        said: a number (fixed); "100" or "fixed:100"; "uniform:min=10,max=20" or "uniform:mean=100,ratio=0.5";
            "normal:mean=100,cv=0.3", "lognormal:mean=200,cv=0.8,max=4000", "exponential:mean=5", each with min= and
            max= where wanted; or the same as a table, {"distribution": "normal", "mean": 100, "cv": 0.3}.

    Raises:
        BenchError: naming the part that is not understood.
    """
    if isinstance(said, Mapping):
        table = dict(said)
        form = table.pop("distribution", None)
        if not isinstance(form, str):
            raise BenchError(
                f"the distribution {dict(said)} has no distribution; add distribution = one of {', '.join(FORMS)}"
            )
        return _build(form, table, str(dict(said)))
    if isinstance(said, bool) or not isinstance(said, str | int | float):
        raise BenchError(f"{said!r} is not a distribution; write a number or, for example, '{EXAMPLE}'")
    if not isinstance(said, str):
        return Fixed(said)
    form, colon, rest = said.strip().partition(":")
    if not colon:
        form, rest = "fixed", form
    if form == "fixed" and "=" not in rest:
        rest = f"value={rest}"
    parts = [part.partition("=") for part in rest.split(",") if part.strip()]
    return _build(form.strip(), {name.strip(): value.strip() for name, _, value in parts}, said)


def _build(form: str, given: dict[str, Any], said: str) -> Distribution:
    if form not in FORMS:
        raise BenchError(f"'{form}' in '{said}' is not a distribution; {hint(form, FORMS)}")
    needed, optional = FORMS[form]
    for name in given:
        if name not in needed + optional:
            nearest = hint(name, needed + optional)
            raise BenchError(f"'{name}' in '{said}' is unknown to a {form} distribution; {nearest}")
    for name in needed:
        if name not in given:
            raise BenchError(f"'{said}' lacks {name}=; a {form} distribution needs {', '.join(needed)}")
    values = {name: _number(name, value, said) for name, value in given.items()}
    if form == "fixed":
        return Fixed(values["value"])
    if form == "uniform":
        return _uniform(values, said)
    bounds = {"minimum": values.get("min", 0.0), "maximum": values.get("max", math.inf)}
    if form == "exponential":
        return Exponential(values["mean"], **bounds)
    return (Normal if form == "normal" else LogNormal)(values["mean"], values["cv"], **bounds)


def _uniform(values: dict[str, float], said: str) -> Uniform:
    for name in ("min", "max", "mean"):
        if not values.get(name, 0.0).is_integer():
            raise BenchError(f"{name}={values[name]:g} in '{said}' is not a whole number, which a uniform length needs")
    if set(values) == {"min", "max"}:
        return Uniform(int(values["min"]), int(values["max"]))
    if set(values) == {"mean", "ratio"}:
        return Uniform.around(int(values["mean"]), values["ratio"])
    raise BenchError(f"'{said}' needs either min= and max=, or mean= and ratio=")


def _number(name: str, value: Any, said: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise BenchError(f"{name}={value} in '{said}' is not a number; write, for example, '{EXAMPLE}'") from None
    if not math.isfinite(number):
        raise BenchError(f"{name}={value} in '{said}' is not finite; write, for example, '{EXAMPLE}'")
    return number


def parse_range_ratio(said: str | float | Mapping[str, float]) -> tuple[float, float]:
    """--random-range-ratio: one number for prompts and answers, or {"input": 0.3, "output": 0.5}, also as JSON.

    Raises:
        BenchError: when it is neither, or outside [0, 1).
    """
    try:
        read: Any = json.loads(said) if isinstance(said, str) else said
        pair = (read["input"], read["output"]) if isinstance(read, Mapping) and len(read) == 2 else (read, read)
        ratios = float(pair[0]), float(pair[1])
    except (KeyError, TypeError, ValueError):
        raise BenchError(
            f'--random-range-ratio is {said}; write a number, or {{"input": 0.3, "output": 0.5}}'
        ) from None
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise BenchError(f"--random-range-ratio is {said}; ratios must be 0 or more and below 1")
    return ratios
