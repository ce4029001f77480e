"""Typed reading of config.json, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ModelError(ValueError):
    """A model that cannot be served or costed; the message is one line that names the file and what is wrong in it."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """A JSON object and the file that it came from. A null counts as missing, unless a method says otherwise."""

    raw: Mapping[str, Any]
    source: str
    # What the architecture assumes for keys that are missing, which a null is not.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""  # put before keys in messages, for an object inside the file ("rope_scaling.")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; without the key, the architecture's default, then `default`."""
        return self.raw[key] if key in self.raw else self.defaults.get(key, default)

    def knows(self, key: str) -> bool:
        """Whether the file or the architecture says something of a key, a null included."""
        return key in self.raw or key in self.defaults

    def error(self, key: str, problem: str) -> ModelError:
        """An error that quotes the value of a key."""
        return ModelError(f"{self.source}: {self.prefix}{key} is {self.get(key)!r}, which {problem}")

    def positive_int(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; `default` stands for a missing key or a null."""
        return self._int(key, 1, default)

    def non_negative_int(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 0; `default` stands for a missing key or a null."""
        return self._int(key, 0, default)

    def _int(self, key: str, low: int, default: int | None) -> int:
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"is not a whole number of at least {low}; correct it")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; `default` stands for a missing key or a null."""
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "is not a number above 0; correct it")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """true or false; `default` stands for a missing key or a null."""
        value = self._needed(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false; correct it")
        return value

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {self.prefix}{key} is missing; the model is not known without it")
        return value
