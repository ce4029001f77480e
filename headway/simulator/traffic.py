"""The requests that come to a simulated server, with what only their clients and the model know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.policy.step.request import Request
from headway.policy.step.sampling_params import SamplingParams

# Made-up token ids. Prompts and answers that share none of their blocks consist of other ids each.
_OWN, _ANSWER, EOS = 1 << 22, 1 << 28, 1 << 29  # in one digit of Python's integers, which hash in no time


@dataclass(slots=True)
class Arrival:
    """A request that comes to a server."""

    at_ns: int  # when its last byte comes
    request: Request  # the server fills in its times
    # Tokens after which the model ends each of its answers; None lets them go on to max_tokens.
    output_len: int | None = None
    cancel_ns: int | None = None  # when its client goes away, if it is still there
    answer: int = _ANSWER  # the token that its answers consist of


def arrival(
    number: int,
    at_ns: int,
    prompt: list[int] | int,
    max_tokens: int | None,
    *,
    output_len: int | None = None,
    cancel_ns: int | None = None,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> Arrival:
    """A request with this number, unlike that of any other.

    Args:
        prompt: token ids; or how many tokens, which no other prompt has.
        sampling: fields of SamplingParams.
        fields: fields of policy's Request, as its priority.
    """
    ids = made_prompt(number, prompt) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, **(sampling or {}))
    request = Request(str(number), ids, params, [EOS], **fields)
    return Arrival(at_ns, request, output_len, cancel_ns, _ANSWER + number)


def made_prompt(number: int, tokens: int, shared: Sequence[tuple[int, int]] = ()) -> list[int]:
    """Ids of a prompt of so many tokens.

    Args:
        number: the number of the prompt; what it does not share has ids of its own.
        shared: hash id, and tokens, of the blocks that it begins with. What does not fit is cut off.
    """
    ids: list[int] = []
    for block, length in shared:
        ids += [block] * length
    del ids[tokens:]
    return ids + [_OWN + number] * (tokens - len(ids))
