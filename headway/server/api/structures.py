"""What the text of an answer has to be, by whichever field of a body."""

from __future__ import annotations

import json

from headway.policy.step.structured_outputs import InvalidStructure, StructuredOutputs
from headway.server.api.schemas import GenerationBody, ResponseFormat
from headway.server.errors import ApiError, bad_request

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_SCHEMA = "response_format.json_schema"


def structured_outputs(body: GenerationBody) -> StructuredOutputs | None:
    """The one value that a body asks for; None for any text.

    Raises:
        ApiError: 400 naming the field that is wrong, or one of two that are given together.
    """
    field = _field_of(body)
    try:
        if field is None:
            return None
        if field == "structured_outputs":
            return StructuredOutputs.of(body.structured_outputs or {})
        if field in _GUIDED:
            return StructuredOutputs.of({field.removeprefix("guided_"): getattr(body, field)})
        assert body.response_format is not None
        return _of_format(body.response_format)
    except InvalidStructure as error:
        raise bad_request(f"{field}: {error}", field) from None


def refused(body: GenerationBody, reason: str) -> ApiError:
    """The error for a structured output that cannot be had."""
    field, asked = _field_of(body), body.response_format
    if asked is not None and asked.json_schema is not None:
        field = f"{_SCHEMA}.schema"
    return bad_request(reason if field is None else f"{field}: {reason}", field)


def _field_of(body: GenerationBody) -> str | None:
    """The field that says what the text has to be; None where none does. Raises ApiError 400 where several do."""
    wanted = [name for name in ("structured_outputs", *_GUIDED) if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type != "text":
        wanted.append("response_format")
    elif body.response_format is not None and body.response_format.json_schema is not None:
        raise bad_request(f"{_SCHEMA} needs the type json_schema", _SCHEMA)
    if len(wanted) > 1:
        raise bad_request(f"{' and '.join(wanted)} are given together; give one of them", wanted[1])
    return wanted[0] if wanted else None


def _of_format(asked: ResponseFormat) -> StructuredOutputs:
    schema = asked.json_schema
    if asked.type == "json_object":
        if schema is not None:
            raise bad_request(f"{_SCHEMA} needs the type json_schema", _SCHEMA)
        return StructuredOutputs("json_object")
    if schema is None:
        raise bad_request(f"{_SCHEMA} is missing", _SCHEMA)
    return StructuredOutputs("json", json.dumps(schema.schema_, ensure_ascii=False), relaxed=schema.strict is False)
