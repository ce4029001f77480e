"""How a request comes in: whether it fits the model and its context, and which sequences it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from headway.policy.objectives.service_class import BUILT_IN, ClassTable, ServiceClass
from headway.policy.step.request import NEVER, Request, Sequence
from headway.policy.step.sampling_params import InvalidParameter, SamplingParams
from headway.policy.step.stopping import stop_ids

# Messages are read for this long between two steps: a crowd that arrives at once adds no more than this to a step.
INTAKE_NS = 2_000_000
# Share of an objective for the first token that is kept for the client's side of it: until the first byte is read here,
# and from the last write until it is there. In a server that refuses what it cannot serve, all are served just in time.
ON_THE_WIRE = 0.1
T = TypeVar("T")


def taken_up(messages: Iterable[T], clock: Callable[[], int]) -> Iterator[T]:
    """Yield messages for INTAKE_NS at most. The rest wait for the next call, because a step comes first."""
    until = 0
    for message in messages:
        until = until or clock() + INTAKE_NS
        yield message
        if clock() >= until:
            return


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


def check(request: Request, max_model_len: int, vocab_size: int | None) -> None:
    """Refuse a request that would break a step that others share.

    Args:
        vocab_size: None where token ids are made up.

    Raises:
        ValueError: one line for the user.
    """
    if not request.prompt_token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    least = int(request.pooling is None)
    context_left(len(request.prompt_token_ids), max_model_len, least)
    known = len(request.prompt_token_ids) + max(len(choice.token_ids) for choice in request.choices)
    if known + least > max_model_len:  # the engine that began the request had memory for more
        raise ValueError(f"{known} tokens are known, and the context is now {max_model_len}: there is no room to go on")
    if vocab_size is None:
        return
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("logit_bias", request.params.logit_bias),
        ("stop_token_ids", request.params.stop_token_ids),
        ("token_ids", request.pooling.token_ids if request.pooling is not None else ()),
    ):
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} has token id {token}; the model's vocabulary has ids 0 to {vocab_size - 1}")


def _objectives(request: Request, service: ServiceClass) -> tuple[float, float]:
    """The milliseconds until its first token and between two tokens by which a request keeps all its objectives.

    Of an objective for the whole, the first token has half of the time, or all where it is the only one; the other
    tokens share what is left evenly, where max_tokens says how many they may be.
    """
    ttft_ms, tpot_ms = min(service.ttft_ms, request.ttft_ms), min(service.tpot_ms, request.tpot_ms)
    if math.isinf(service.e2e_ms):
        return ttft_ms, tpot_ms
    further = 0 if request.pooling is not None else (request.params.max_tokens or math.inf) - 1
    ttft_ms = min(ttft_ms, service.e2e_ms / 2 if further else service.e2e_ms)
    if 0 < further < math.inf:
        tpot_ms = min(tpot_ms, (service.e2e_ms - ttft_ms) / further)
    return ttft_ms, tpot_ms


def sequences_of(request: Request, max_model_len: int, classes: ClassTable = BUILT_IN) -> list[Sequence]:
    """A sequence for each choice that is to be computed; the others share the prompt of the first.

    One whose class is no longer in the table is of the default class. The first token is due in the engine before it is
    due at the client: by the time that it takes to the API process, and by ON_THE_WIRE of the objective for what nobody
    here sees. That is never before half of its time.
    """
    names = [each.name for each in classes]
    service = classes.named(request.service_class) if request.service_class in names else classes.default_class
    ttft_ms, tpot_ms = _objectives(request, service)
    due_ns = NEVER
    if ttft_ms < math.inf and not request.pins_prompt:
        in_time_ns = (1 - ON_THE_WIRE) * ttft_ms * 1e6 - request.way_back_ns
        due_ns = request.arrival_ns + round(max(in_time_ns, ttft_ms * 0.5e6))
    params, prompt = request.params, request.prompt_token_ids
    seed = (request.seed or 0) if params.seed is None else params.seed
    longest = (
        len(prompt)
        if request.pooling is not None
        else max_model_len
        if params.max_tokens is None
        else min(max_model_len, len(prompt) + params.max_tokens)
    )
    sequences: list[Sequence] = []
    for choice in request.choices:
        sequence = Sequence(
            request_id=request.request_id,
            index=choice.index,
            params=params,
            tokens=[*prompt, *choice.token_ids],
            prompt_len=len(prompt),
            max_len=longest,
            stop_ids=stop_ids(params, request.eos_token_ids),
            seed=seed + choice.index,
            priority=request.priority,
            arrival_ns=request.arrival_ns,
            service=service,
            tenant=request.tenant,
            rank=classes.rank(service.name),
            due_ns=due_ns,
            tpot_ns=NEVER if math.isinf(tpot_ms) else round(tpot_ms * 1e6),
            cache_salt=request.cache_salt,
            parent=sequences[0] if sequences else None,
            cached_tokens=choice.cached_tokens,
            pins_prompt=request.pins_prompt,
            pooling=request.pooling,
        )
        sequence.ledger.began_ns = sequence.ledger.last_ns = request.sent_ns
        sequences.append(sequence)
    return sequences
