"""The engine's sampling parameters, made of a checked body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from headway.policy.admission.lengths import fit_to_class, fit_to_context
from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.sampling_params import (
    MAX_LOGIT_BIAS_TOKENS,
    InvalidParameter,
    SamplingParams,
    check_number,
    sampling_defaults,
)
from headway.server.api.beams import check_body
from headway.server.api.fields import LEAST, MOST
from headway.server.api.schemas import ChatBody, CompletionBody, GenerationBody, TokenIds
from headway.server.api.structures import structured_outputs
from headway.server.errors import bad_request
from headway.text.tokenizer_files import TextError

COMPLETION_MAX_TOKENS = 16
# Fields of a body that SamplingParams takes as they are.
_SAME_NAME = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationBody.model_fields and field.name not in ("stop", "logit_bias", "structured_outputs")
)


def server_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The defaults that policy.sampling_params.sampling_defaults() finds, with an error for users.

    Raises:
        TextError: a default is out of its range.
    """
    try:
        return sampling_defaults(generation_config)
    except ValueError as error:
        raise TextError(f"{error}; --generation-config none ignores the file") from None


def sampling_params(body: CompletionBody | ChatBody, defaults: dict[str, Any], vocab_size: int) -> SamplingParams:
    """The parameters that `body` asks for, over the server's defaults; max_tokens may still be None.

    Raises:
        ApiError: 400 naming the parameter that is out of its range.
    """
    if body.use_beam_search:
        check_body(body)
        defaults = {name: value for name, value in defaults.items() if name == "max_tokens"}  # others are for drawing
    given: dict[str, Any] = dict(defaults)
    given |= {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    given["structured_outputs"] = structured_outputs(body)
    if body.stop is not None:
        given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    check_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or [], vocab_size, "allowed_token_ids")
    given |= _of_chat(body, defaults) if isinstance(body, ChatBody) else _of_completion(body, defaults)
    if given.get("top_k", 0) > vocab_size:
        given["top_k"] = 0  # stands for the whole vocabulary
    try:
        given["logit_bias"] = _logit_bias(body.logit_bias or {}, vocab_size)
        return SamplingParams(**given)
    except InvalidParameter as error:
        raise bad_request(str(error), _field_name(body, error.parameter)) from None


def _of_completion(body: CompletionBody, defaults: dict[str, Any]) -> dict[str, Any]:
    if body.max_tokens == 0 and not body.prompt_only:
        said = "max_tokens is 0; ask for at least 1, or for the prompt alone with echo: true or prompt_logprobs"
        raise bad_request(said, "max_tokens")
    if body.prompt_only and body.min_tokens:
        raise bad_request(f"min_tokens is {body.min_tokens}, more than max_tokens, which is 0", "min_tokens")
    given: dict[str, Any] = {"logprobs": body.logprobs}
    given["max_tokens"] = defaults.get("max_tokens", COMPLETION_MAX_TOKENS)
    if body.max_tokens is not None:
        given["max_tokens"] = 1 if body.prompt_only else body.max_tokens
    elif body.min_tokens is not None:
        given["max_tokens"] = max(given["max_tokens"], body.min_tokens)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    if body.stream and "prompt_logprobs" in given:
        raise bad_request("echo with logprobs needs stream to be false", "stream")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs needs stream to be false", "prompt_logprobs")
    return given


def _of_chat(body: ChatBody, defaults: dict[str, Any]) -> dict[str, Any]:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; give one"
        raise bad_request(message, "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs needs stream to be false", "prompt_logprobs")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return {
        "max_tokens": defaults.get("max_tokens") if asked is None else asked,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def _field_name(body: CompletionBody | ChatBody, parameter: str) -> str:
    if isinstance(body, ChatBody):
        if parameter == "logprobs":
            return "top_logprobs"
        if parameter == "max_tokens" and body.max_tokens is None:
            return "max_completion_tokens"
    return parameter


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    check_number("logit_bias", len(given), MAX_LOGIT_BIAS_TOKENS)
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad_request(f"logit_bias has the key {key[:60]!r}; keys are token ids", "logit_bias")
        bias[int(key)] = float(value)
    check_ids(list(bias), vocab_size, "logit_bias")
    return bias


def check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise ApiError 400, naming the first id that is not in the vocabulary."""
    if not token_ids:
        return
    if isinstance(token_ids, TokenIds):
        lowest, highest = token_ids.lowest, token_ids.highest
    else:
        lowest, highest = min(token_ids), max(token_ids)
    if lowest >= 0 and highest < vocab_size:
        return
    position, wrong = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    shown = str(wrong) if LEAST < wrong < MOST else "a huge number"
    raise bad_request(
        f"{field} has {shown} at position {position}; the vocabulary has the ids 0 to {vocab_size - 1}", field
    )


def fitted_params(
    params: SamplingParams,
    lengths: Sequence[int],
    max_model_len: int,
    service: ServiceClass,
    prompt_field: str,
    max_tokens_field: str | None,
) -> list[SamplingParams]:
    """The parameters for prompts of these lengths, as fit_to_context() and then fit_to_class() make them.

    Raises:
        ApiError: 400 when a prompt, or prompt and output together, do not fit the context or the class.
    """
    try:
        return [
            fit_to_class(
                fit_to_context(params, length, max_model_len, max_tokens_field), length, service, max_tokens_field
            )
            for length in lengths
        ]
    except InvalidParameter as error:
        raise bad_request(str(error), prompt_field if error.parameter == "prompt" else error.parameter) from None
