"""A request whose prompt one backend computes and another goes on with: what each of them is asked.

The first is asked for one token, which nobody sees. Its answer is a stream, which has the parameters with which the
second finds what is computed of the prompt as soon as its first chunk is. Then the second is asked, and fetches each
chunk while the next one is computed. Whatever fails on this way, the second computes the prompt itself.
"""

from __future__ import annotations

import contextlib

import msgspec

from headway.gateway.asked import Api, Body
from headway.gateway.attempt import Attempt
from headway.gateway.events import Part
from headway.gateway.joined import hop
from headway.gateway.member import clock
from headway.policy.fleet.backend import Backend

_FIELD = "kv_transfer_params"
_NULL = msgspec.Raw(b"null")
# Fields that need all of the prompt where the answer is made, or cut it by what is left for the answer.
_EXCLUDES = frozenset(("prompt_logprobs", "use_beam_search", "best_of", "truncate_prompt_tokens", "echo"))
# Fields that say nothing of the prompt.
_OF_OUTPUT = frozenset(
    (
        *("stream", "stream_options", "n", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids", "prediction"),
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
)


class _Event(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL
    phases_ns: dict[str, int] = {}


class Handover:
    """The handover of one request.

    Attributes:
        prompt_request: the body that a backend for prompts is sent.
        phases: nanoseconds of its ledger that passed there and on the way, until the second could be asked.
        ended_ns: when that backend had computed the prompt; 0 until then.
    """

    def __init__(self, fields: dict[str, msgspec.Raw]) -> None:
        own = {"max_tokens": 1, "stream": True, _FIELD: {"do_remote_decode": True}}
        asked = {name: value for name, value in fields.items() if name not in _OF_OUTPUT}
        self.prompt_request = msgspec.json.encode(asked | own)
        self.phases: dict[str, int] = {}
        self.ended_ns = 0
        self._parameters = _NULL

    @classmethod
    def of(cls, api: Api, path: str, body: Body, raw: bytes) -> Handover | None:
        """The handover of a request; None where its prompt is computed where it is answered."""
        if api.streams != "openai" or body.choices > 1:
            return None
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        if any(bytes(fields.get(name, _NULL)) != b"null" for name in _EXCLUDES):
            return None
        if path == "/v1/completions" and bytes(body.prompt).lstrip()[:1] != b'"':
            try:
                msgspec.json.decode(body.prompt, type=list[int])
            except msgspec.ValidationError:  # several prompts
                return None
        return cls(fields)

    def read(self, raw: bytes, part: Part | None, attempt: Attempt) -> bytes:
        """Take an event of the backend that computes the prompt: see Edit. Only the first one counts."""
        if part is None or self.phases:
            return b""
        self.phases = hop({}, clock() - attempt.sent_ns)
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            told = msgspec.json.decode(raw.removeprefix(b"data: "), type=_Event)
            self._parameters, self.phases = told.kv_transfer_params, hop(told.phases_ns, clock() - attempt.sent_ns)
        return raw

    def received(self, seen: Backend, ttft_ns: int) -> None:
        """Learn from a first token that has come just now, so long after the second was asked.

        What counts is what the second added: the time since the prompt was computed.
        """
        if self.ended_ns:
            seen.received(min(ttft_ns, clock() - self.ended_ns))

    @property
    def is_kept(self) -> bool:
        """Whether a backend has what was computed of the prompt."""
        return bytes(self._parameters) != b"null"

    def request(self, raw: bytes) -> bytes:
        """The body that the backend which answers is sent, in place of this one."""
        if not self.is_kept:
            return raw
        return msgspec.json.encode(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]) | {_FIELD: self._parameters})
