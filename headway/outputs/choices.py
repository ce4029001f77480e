"""A choice as it grows from the engine's outputs, for the server and for the library."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headway.engine.messages import PromptLogprobs, SequenceOutput, SequenceTimings, TokenLogprobs
from headway.policy.step.sampling_params import SamplingParams
from headway.text.calls.events import Event
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer

# Tokens of the prompt's end: the first tokens of an answer are decoded together with them.
CONTEXT_TOKENS = 16


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt ready for the engine; `text` is None when it came as token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass(slots=True)
class Piece:
    """What one output of the engine added to a choice."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids
    # Where the text of each token begins in the text of the choice; only with logprobs.
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: Sequence[Event] = ()  # what the text amounts to, where the answer is parsed


class TokenText(Protocol):
    """Turns the tokens of a choice into text, as Detokenizer does."""

    @property
    def num_chars(self) -> int: ...

    @property
    def stopped_by(self) -> str | None: ...

    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class _NoText:
    """Stands in for a detokenizer where there is no tokenizer."""

    num_chars = 0
    stopped_by = None

    def push(self, token_ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(slots=True, eq=False, kw_only=True)
class Choice:
    """Grows by accept(). `engine_done` is set when the engine has sent its last output.

    A choice that ends with a stop string is finished for the client first; then the engine has to be told.
    `stop_reason` is the stop string or the stop token that ended it, None for the model's eos.
    """

    index: int
    prompt: TokenizedPrompt
    params: SamplingParams
    tokenizer: Tokenizer | None  # None for a choice without text
    eos_token_ids: Collection[int]  # they end it, unless the parameters ignore them
    shown: frozenset[int] = frozenset()  # special tokens that are part of its text in any case
    num_tokens: int = 0
    cached_tokens: int = 0
    drafts: int = 0  # that were tried for it
    accepted_drafts: int = 0
    prompt_logprobs: list[PromptLogprobs] | None = None
    vector: bytes | None = None  # in place of tokens
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    engine_done: bool = False
    timings: SequenceTimings | None = None
    _detokenizer: TokenText = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self._detokenizer = (
            _NoText()
            if self.tokenizer is None
            else Detokenizer(
                self.tokenizer,
                params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
                context=self.prompt.token_ids[-CONTEXT_TOKENS:],
                shown=self.shown,
            )
        )

    def accept(self, output: SequenceOutput) -> Piece:
        """Take an output of a choice that is not finished."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.drafts, self.accepted_drafts = output.drafts, output.accepted_drafts
        self.vector = output.vector
        piece = self._push(output)
        if output.finish_reason is not None:
            piece.text += self._detokenizer.finish()
            piece.finish_reason = output.finish_reason
            is_eos = self.params.ends_at_eos and output.stop_token_id in self.eos_token_ids
            piece.stop_reason = None if is_eos else output.stop_token_id  # as in vLLM
        if self._detokenizer.stopped_by is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._detokenizer.stopped_by
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        return piece

    def _push(self, output: SequenceOutput) -> Piece:
        piece = Piece("", [], None if output.logprobs is None else [])
        for position, token_id in enumerate(output.token_ids):
            if self._detokenizer.stopped_by is not None:
                break
            if piece.logprobs is not None and output.logprobs is not None:
                piece.logprobs.append(output.logprobs[position])
                piece.offsets.append(self._detokenizer.num_chars)
            # The token that stops is counted, but its text is not output.
            is_stop = output.stop_token_id is not None and position == len(output.token_ids) - 1
            if not is_stop or self.params.include_stop_str_in_output:
                piece.text += self._detokenizer.push([token_id])
            piece.token_ids.append(token_id)
        self.num_tokens += len(piece.token_ids)
        return piece

    def settle(self, output: SequenceOutput) -> None:
        """Take the engine's last output of a choice that is finished."""
        self.engine_done = True
        self.timings = output.timings
