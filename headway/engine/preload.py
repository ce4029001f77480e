"""Computes the prompts that stay in the prefix cache for good, before the first request."""

from __future__ import annotations

import time

from headway.engine.core import EngineCore
from headway.engine.messages import AddRequest
from headway.policy.cache.preload import PreloadedPrompt, room_for
from headway.policy.step.sampling_params import SamplingParams


def preload(core: EngineCore, prompts: list[PreloadedPrompt], what_fits: bool = False) -> list[str]:
    """Compute prompts one after the other, and keep their blocks for good.

    Args:
        what_fits: leave out prompts that do not fit, or that cannot be computed.

    Returns:
        why prompts were left out: one line for each, which names it.

    Raises:
        ValueError: a prompt does not fit and none may be left out; the message is this line.
    """
    fitting, left_out = room_for(prompts, core.scheduler.blocks, core.scheduler.config.max_model_len)
    for number, prompt in enumerate(fitting):
        if left_out and not what_fits:
            break
        params, now = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), time.monotonic_ns()
        request = AddRequest(f"preload-{number}", prompt.token_ids, params, [], arrival_ns=now, sent_ns=now)
        request.cache_salt, request.pins_prompt = prompt.cache_salt, True
        core.add(request)
        while core.has_work:
            failed = [output.error for output in core.advance() if output.error]
            left_out += [f"{prompt.where}: the prompt cannot be computed: {why}" for why in failed]
    if left_out and not what_fits:
        raise ValueError(left_out[0])
    return left_out
