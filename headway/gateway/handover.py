"""A request whose prompt one backend computes and another goes on with: what each of them is asked.

The first is asked for one token, which nobody sees. Its answer has the parameters with which the second finds what was
computed. Whatever fails on this way, the second computes the prompt itself.
"""

from __future__ import annotations

import msgspec

from headway.gateway.asked import Api, Body
from headway.gateway.attempt import Attempt
from headway.gateway.joined import hop, phases_of_header

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


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL


class Handover:
    """The handover of one request.

    Attributes:
        prompt_request: the body that a backend for prompts is sent.
        phases: nanoseconds of its ledger that passed there and on the way, once it has answered.
    """

    def __init__(self, fields: dict[str, msgspec.Raw]) -> None:
        own = {"max_tokens": 1, "include_timings": True, _FIELD: {"do_remote_decode": True}}
        asked = {name: value for name, value in fields.items() if name not in _OF_OUTPUT}
        self.prompt_request = msgspec.json.encode(asked | own)
        self.phases: dict[str, int] = {}
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

    def take(self, attempt: Attempt, ended_ns: int) -> None:
        """Take the answer of the backend that has computed the prompt."""
        assert attempt.head is not None
        self.phases = hop(phases_of_header(attempt.head.headers.get(b"server-timing", b"")), ended_ns - attempt.sent_ns)
        try:
            self._parameters = msgspec.json.decode(attempt.body, type=_Answer).kv_transfer_params
        except (msgspec.MsgspecError, RecursionError):
            self._parameters = _NULL

    @property
    def is_kept(self) -> bool:
        """Whether a backend has what was computed of the prompt."""
        return bytes(self._parameters) != b"null"

    def request(self, raw: bytes) -> bytes:
        """The body that the backend which answers is sent, in place of this one."""
        if not self.is_kept:
            return raw
        return msgspec.json.encode(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]) | {_FIELD: self._parameters})
