"""What the bodies of requests are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LEAST, MOST = -(2**63), 2**63 - 1
# Integers that the engine's messages can't carry are out of every range.
Int = Annotated[int, Field(ge=LEAST, le=MOST)]


def must_be(form: str, check: Callable[[Any], bool]) -> BeforeValidator:
    """Check the whole value in one function: pydantic's unions would try and report every branch for every item."""

    def validate(value: Any) -> Any:
        if not check(value):
            raise ValueError(f"must be {form}")
        return value

    return BeforeValidator(validate)


def said(description: str, default: Any = None, **limits: Any) -> Any:
    """A field with its description in /docs; `...` for a default makes it required."""
    return Field(default, description=description, **limits)


class Body(BaseModel):
    """Refuses unknown fields, values of another JSON type, and numbers that JSON does not have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
