"""Whether a prompt is computed by a server for prompts, or by the server that generates the answer.

Where it is computed beside streams, each of these is held up by it. Elsewhere it holds up nobody who decodes, but it
waits behind other prompts, and its keys and values have to be sent. Most of them are sent while it is being computed:
what counts is what is left then (`received_ns`).
"""

from __future__ import annotations

from headway.policy.fleet.backend import Ask, Backend

WHEN = ("auto", "always", "never")
# A prompt with fewer tokens to compute is computed where its answer is generated.
LEAST_TOKENS = 64


class HandoverRule:
    """Decides for each request.

    Args:
        when: `auto` asks what is predicted; the others are what they say, but for prompts that are known or short.
    """

    def __init__(self, when: str) -> None:
        self._when = when

    def pays(self, ask: Ask, prefill: Backend, decode: Backend) -> bool:
        """Whether `prefill` is to compute the prompt of a request that `decode` answers.

        It pays if all together wait less for it: the request until its first token, and the streams that run at
        `decode` for as long as its prompt takes there. While one of these is not known yet, it pays if streams run.
        """
        tokens = round(ask.tokens * (1.0 - decode.cached_share(ask)))
        if self._when == "never" or tokens < LEAST_TOKENS:
            return False
        streams = decode.queues.of_all.choices
        apart_ns, beside_ns = prefill.predicted_ttft_ns(ask), decode.predicted_ttft_ns(ask)
        if self._when == "always" or not apart_ns or not beside_ns:
            return self._when == "always" or streams > 0
        return apart_ns + decode.received_ns < beside_ns + streams * decode.ttft.prefill_ns(tokens)
