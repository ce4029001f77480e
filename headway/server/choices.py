"""One choice of an answer, as it grows from the engine's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engine.messages import PromptLogprobs, SequenceOutput, SequenceTimings, TokenLogprobs
from headway.policy.sampling_params import SamplingParams
from headway.server.timings import Stamps
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclass(slots=True)
class Prompt:
    """A prompt ready for the engine; `text` is None when it came as token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass(slots=True)
class ScoredToken:
    """A token with its log-probability, its alternatives (id, log-probability), and where it begins in the text."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    offset: int = 0


@dataclass(slots=True)
class Piece:
    """What one output of the engine added to a choice."""

    text: str
    token_ids: list[int]
    logprobs: list[ScoredToken] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def scored(token_id: int, found: TokenLogprobs, offset: int = 0) -> ScoredToken:
    top = [(i, max(p, LOWEST_LOGPROB)) for i, p in zip(found.top_ids, found.top_logprobs, strict=True)]
    return ScoredToken(token_id, max(found.logprob, LOWEST_LOGPROB), found.rank, top, offset)


@dataclass(slots=True, eq=False)
class Choice:
    """Grows by accept(); `engine_done` when the engine has sent its last word on it.

    A choice that ends with a stop string is finished for the client before it is for the engine.
    """

    index: int
    prompt: Prompt
    params: SamplingParams
    tokenizer: Tokenizer
    stamps: Stamps
    keep: bool  # collect everything, for an answer in one piece
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    engine_done: bool = False
    timings: SequenceTimings | None = None
    _detokenizer: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(
            self.tokenizer,
            self.params.stop,
            include_stop_str_in_output=self.params.include_stop_str_in_output,
            skip_special_tokens=self.params.skip_special_tokens,
            min_tokens=self.params.min_tokens,
            context=self.prompt.token_ids[-16:],
        )

    def accept(self, output: SequenceOutput) -> Piece:
        """Take an output of a choice that is not finished."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        piece = self._push(output)
        if self._detokenizer.stopped_by is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._detokenizer.stopped_by
        elif output.finish_reason is not None:
            piece.text += self._detokenizer.finish()
            piece.finish_reason = output.finish_reason
            if output.stop_token_id in self.params.stop_token_ids:
                piece.stop_reason = output.stop_token_id
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        if self.keep:
            self.texts.append(piece.text)
            self.token_ids += piece.token_ids
            self.logprobs += piece.logprobs or []
        return piece

    def _push(self, output: SequenceOutput) -> Piece:
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[ScoredToken] | None = None if output.logprobs is None else []
        for position, token_id in enumerate(output.token_ids):
            if self._detokenizer.stopped_by is not None:
                break
            offset = self._detokenizer.num_chars
            # The token that stops is counted, but its text is not output.
            is_stop = output.stop_token_id is not None and position == len(output.token_ids) - 1
            if not is_stop or self.params.include_stop_str_in_output:
                texts.append(self._detokenizer.push([token_id]))
            token_ids.append(token_id)
            self.num_tokens += 1
            if logprobs is not None and output.logprobs is not None:
                logprobs.append(scored(token_id, output.logprobs[position], offset))
        return Piece("".join(texts), token_ids, logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def settle(self, output: SequenceOutput) -> None:
        """The engine's last word has come."""
        self.engine_done = True
        self.timings = output.timings
