"""What the bodies of requests are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headway.server.errors import bad_request

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


def string_in(item: dict[str, Any], name: str, path: str) -> str:
    """A string that an object at a path of the body must have. Raises ApiError 400."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{path}.{name} is missing or not a string", f"{path}.{name}")
    return value


def joined(content: Any, path: str, parts: str, text_of: Callable[[Any, str], str]) -> str:
    """The text of a string, or of a list of parts, each on lines of its own.

    Args:
        parts: what the API calls them, for errors.
        text_of: the text of a part and its path.

    Raises:
        ApiError: 400 for another value.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{path} must be a string or a list of {parts}", path)
    return "\n".join(text_of(part, f"{path}[{number}]") for number, part in enumerate(content))


class Body(BaseModel):
    """Refuses unknown fields, values of another JSON type, and numbers that JSON does not have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
