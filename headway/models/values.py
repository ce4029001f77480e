"""Typed reading of config.json, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ModelError(ValueError):
    """A model that cannot be served; the message is one line that names the file and what is wrong in it."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """A JSON object and the file that it came from; a null counts as missing unless a default says otherwise.

    Args:
        prefix: put before keys in messages, for an object inside the file ("rope_scaling.").
    """

    raw: Mapping[str, Any]
    source: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; without the key, the architecture's default, then `default`."""
        return self.raw[key] if key in self.raw else self.defaults.get(key, default)

    def error(self, key: str, problem: str) -> ModelError:
        """An error that quotes the value of a key."""
        return ModelError(f"{self.source}: {self.prefix}{key} is {self.get(key)!r}, which {problem}")

    def positive_int(self, key: str, or_none: int | None = None) -> int:
        """A whole number above 0; `or_none` stands for a null, or for a key that the architecture lets be missing."""
        if or_none is not None and (key in self.raw or key in self.defaults) and self.get(key) is None:
            return or_none
        return self._int(key, 1)

    def non_negative_int(self, key: str) -> int:
        """A whole number of at least 0."""
        return self._int(key, 0)

    def _int(self, key: str, low: int) -> int:
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"is not a whole number of at least {low}; correct it")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; `default` stands for a missing key or a null."""
        if default is not None and self.get(key) is None:
            return default
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "is not a number above 0; correct it")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """true or false; `default` stands for a missing key or a null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false; correct it")
        return value

    def _needed(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.source}: {self.prefix}{key} is missing; the model cannot be built without it")
        return value
