"""Whether a prompt, and what is to follow it, fit the model's context and the limits of a class."""

from __future__ import annotations

from dataclasses import replace

from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.sampling_params import InvalidParameter, SamplingParams


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def context_left(prompt_len: int, max_model_len: int, least: int = 1) -> int:
    """Tokens that may follow a prompt.

    Raises:
        InvalidParameter: `prompt`, there is no room for the `least` that must follow.
    """
    if prompt_len + least > max_model_len:
        raise InvalidParameter(
            "prompt",
            f"the prompt has {_tokens(prompt_len)}; the model's context is {max_model_len} tokens, "
            f"so a prompt may have at most {max_model_len - least}",
        )
    return max_model_len - prompt_len


def check_prompt(prompt_len: int, max_model_len: int, service: ServiceClass) -> None:
    """Raise InvalidParameter when a prompt that nothing follows does not fit the context or the class."""
    context_left(prompt_len, max_model_len, 0)
    _check_prompt_of_class(prompt_len, service)


def _check_prompt_of_class(prompt_len: int, service: ServiceClass) -> None:
    if prompt_len > service.max_prompt_tokens:
        raise InvalidParameter(
            "prompt",
            f"the prompt has {_tokens(prompt_len)}; service class {service.name!r} takes at most "
            f"{service.max_prompt_tokens} (max_prompt_tokens)",
        )


def fit_to_context(
    params: SamplingParams, prompt_len: int, max_model_len: int, max_tokens_field: str | None
) -> SamplingParams:
    """The parameters, with max_tokens set for a prompt of `prompt_len` tokens.

    Args:
        max_tokens_field: where the request gave max_tokens itself, so that it is not lowered in silence.

    Raises:
        InvalidParameter: the prompt, or prompt and output together, do not fit the context.
    """
    room = context_left(prompt_len, max_model_len)
    wishes = {max_tokens_field: params.max_tokens, "min_tokens": params.min_tokens}
    for name, wished in wishes.items():
        if name is not None and wished is not None and wished > room:
            raise InvalidParameter(
                name,
                f"{name} is {wished} and the prompt has {_tokens(prompt_len)}, together more than the model's "
                f"context of {max_model_len} tokens; ask for at most {room}",
            )
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    return params if params.max_tokens == most else replace(params, max_tokens=most)


def fit_to_class(
    params: SamplingParams, prompt_len: int, service: ServiceClass, max_tokens_field: str | None
) -> SamplingParams:
    """The parameters with max_tokens within what the class allows; the arguments are those of fit_to_context().

    Raises:
        InvalidParameter: the prompt is longer than the class takes, or more tokens are asked for than it gives.
    """
    _check_prompt_of_class(prompt_len, service)
    most = service.max_output_tokens
    for name, wished in ((max_tokens_field, params.max_tokens), ("min_tokens", params.min_tokens)):
        if name is not None and wished is not None and wished > most:
            raise InvalidParameter(
                name, f"{name} is {wished}; service class {service.name!r} gives at most {most} (max_output_tokens)"
            )
    return params if params.max_tokens is None or params.max_tokens <= most else replace(params, max_tokens=int(most))
