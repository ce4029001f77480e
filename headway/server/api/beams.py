"""Beam search as vLLM's extension of completions and chats: what a body and this server allow."""

from __future__ import annotations

from headway.engine.messages import Ready
from headway.policy.step.beams import most_tokens
from headway.policy.step.sampling_params import SamplingParams
from headway.server.api.schemas import ChatBody, CompletionBody
from headway.server.errors import bad_request


def check_body(body: CompletionBody | ChatBody) -> None:
    """Raise ApiError 400 for fields that a search cannot have beside it."""
    if body.stream:
        raise bad_request("a beam search has no text before its end; stream must be false", "stream")
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        raise bad_request("tools and beam search cannot be had together; leave one of them out", "tools")


def check_room(ready: Ready, records_steps: bool, params: SamplingParams, prompt_len: int, limit_field: str) -> None:
    """Raise ApiError 400 where the engine could never run the search.

    Args:
        limit_field: the field that limits the tokens of an answer.
    """
    if ready.checkpoints is not None:
        said = "beam search needs a model without recurrent layers, whose states cannot be forked"
        raise bad_request(said, "use_beam_search")
    if records_steps:
        said = "this server records its steps (--record-steps), which beam search cannot be"
        raise bad_request(said, "use_beam_search")
    width, name = params.width, "n" if params.best_of is None else "best_of"
    if width > ready.max_num_seqs:
        said = f"{name} is {width}; this server runs at most {ready.max_num_seqs} sequences at once (--max-num-seqs)"
        raise bad_request(said, name)
    max_len = min(ready.max_model_len, prompt_len + (params.max_tokens or ready.max_model_len))
    needed = most_tokens(width, prompt_len, max_len, ready.block_size)
    if needed > ready.pool_tokens:
        raise bad_request(
            f"{width} beams of up to {max_len} tokens need {needed} tokens of the KV cache, which has "
            f"{ready.pool_tokens}; ask for fewer tokens or beams",
            limit_field,
        )
