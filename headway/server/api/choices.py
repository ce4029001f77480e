"""A choice of an answer, and what the server notes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from headway.engine.messages import SequenceOutput, TokenLogprobs
from headway.outputs.choices import Choice, Piece
from headway.server.timings import Stamps

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclass(slots=True)
class ScoredToken:
    """A token with its log-probability, its alternatives (id, log-probability), and where it begins in the text."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int = 0


def scored(token_id: int, found: TokenLogprobs, offset: int = 0) -> ScoredToken:
    top = [(i, max(p, LOWEST_LOGPROB)) for i, p in zip(found.top_ids, found.top_logprobs, strict=True)]
    return ScoredToken(token_id, max(found.logprob, LOWEST_LOGPROB), top, offset)


def scored_tokens(piece: Piece) -> list[ScoredToken]:
    """The tokens of a piece, if log-probabilities were asked for; else none."""
    return list(map(scored, piece.token_ids, piece.logprobs or [], piece.offsets))


@dataclass(slots=True, eq=False, kw_only=True)
class ServedChoice(Choice):
    """A choice with its part of the ledger."""

    stamps: Stamps
    keep: bool  # collect everything, for an answer in one piece
    prompt_only: bool = False  # drop the one token that the engine generates
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)

    def take(self, output: SequenceOutput) -> Piece:
        """Accept an output of the engine, as accept() does, and keep what came."""
        if self.prompt_only:
            end = output.finish_reason and "length"
            output = msgspec.structs.replace(output, token_ids=[], finish_reason=end, stop_token_id=None)
        piece = self.accept(output)
        if self.keep:
            self.texts.append(piece.text)
            self.token_ids += piece.token_ids
            self.logprobs += scored_tokens(piece)
        return piece

    @property
    def text(self) -> str:
        return "".join(self.texts)
