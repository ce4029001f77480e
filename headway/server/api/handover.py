"""Prompts that one server computes and another goes on with: what of this is in bodies and answers.

The field is vLLM's `kv_transfer_params`. Whoever routes asks a server with --role prefill for one token, with
`do_remote_decode`; its answer has the parameters with which a server with --role decode is then asked for the whole. A
stream has an event with them for each chunk of the prompt that is computed, with the phases of its ledger so far.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.policy.cache.handle import Handle
from headway.policy.step.sampling_params import SamplingParams
from headway.server.api.schemas import ChatBody, CompletionBody
from headway.server.errors import bad_request

_FIELD = "kv_transfer_params"


def handover_of(
    role: str, body: CompletionBody | ChatBody, params: SamplingParams, prompts: int
) -> tuple[bool, Handle | None]:
    """Whether a request hands its prompt over, and the handle of a prompt that was handed over to it.

    Args:
        role: of this server.

    Raises:
        ApiError: 400 where the role is another, or the request asks for what has no meaning then.
    """
    asked = body.kv_transfer_params
    if asked is None or not (asked.do_remote_decode or asked.do_remote_prefill):
        return False, None
    if asked.do_remote_decode and asked.do_remote_prefill:
        raise bad_request(f"{_FIELD} has do_remote_decode and do_remote_prefill; give one of them", _FIELD)
    needed = "prefill" if asked.do_remote_decode else "decode"
    if role != needed:
        raise bad_request(f"{_FIELD} needs a server with --role {needed}; this one has {role}", _FIELD)
    if prompts > 1 or params.use_beam_search or params.prompt_logprobs is not None:
        said = "is for one prompt, without beam search and prompt_logprobs"
        raise bad_request(f"{_FIELD} {said}; leave it out", _FIELD)
    if asked.do_remote_decode:
        if params.max_tokens != 1 or params.n != 1:
            raise bad_request(f"{_FIELD} with do_remote_decode needs max_tokens 1 and n 1", _FIELD)
        return True, None
    given = {name: getattr(asked, name) for name in Handle.__struct_fields__}
    missing = next((name for name, value in given.items() if value is None), None)
    if missing is not None:
        raise bad_request(f"{_FIELD} has no {missing}; give what the server with --role prefill answered", _FIELD)
    return False, Handle(**given)


def parameters_of(handle: Handle | None) -> dict[str, Any] | None:
    """What an answer says of a prompt that is handed over; None where it could not be kept."""
    return None if handle is None else {"do_remote_prefill": True, **msgspec.structs.asdict(handle)}
