"""Turns token ids into text, a few at a time: only whole characters, and stop strings are found as they appear."""

from __future__ import annotations

import codecs

from headway.text.stop_strings import StopMatcher
from headway.text.tokenizer import Tokenizer

# A sentencepiece word needs its neighbours to know its leading space; this many are enough.
CONTEXT_TOKENS = 6
# An unfinished character is at most three byte tokens; more pending than this is not text and is let go.
MAX_PENDING_TOKENS = 16


class _ByteDecoder:
    """Decodes byte-level vocabularies, exactly for every sequence of tokens, valid UTF-8 or not."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes other vocabularies: it decodes a short window of tokens and keeps what the newest ones added."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._skip = bool(skipped) and skipped == tokenizer.special_ids
        self._window = self._whole_characters(context[-CONTEXT_TOKENS:])
        self._num_read = len(self._window)
        self._text_read = self._decode(self._window)

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        while token_ids and self._decode(token_ids).startswith("\ufffd"):
            token_ids = token_ids[1:]
        return token_ids

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        if not self._tokenizer.token_bytes(token_id) or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._num_read
        if text.endswith("\ufffd") and pending < MAX_PENDING_TOKENS:
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        new = text[len(self._text_read) :]
        # The text that was released last begins with a whole character, so it is context enough for what follows.
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._text_read = self._decode(self._window)
        return new

    def finish(self) -> str:
        return self._decode(self._window)[len(self._text_read) :]


class Detokenizer:
    """The text of one choice, grown token by token in time proportional to the new tokens.

    Text is released as soon as it can no longer change: an unfinished character is kept back, and so is the
    longest end of the text that a stop string could begin with. Of several stop strings the one that is complete
    first ends the text (of those complete at the same character, the longest), however the text is cut into tokens.

    Args:
        context: tokens before the output; they settle the first word's leading space in sentencepiece vocabularies.
        min_tokens: a stop string completed by an earlier token than this does not count.
        shown: special tokens that are part of the text, also where others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: list[str] | None = None,
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        context: list[int] | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        skipped = skipped - shown if shown else skipped
        self._decoder = (
            _ByteDecoder(tokenizer, skipped)
            if tokenizer.is_byte_level
            else _WindowDecoder(tokenizer, skipped, context or [])
        )
        self._matchers = [StopMatcher(text) for text in sorted(stop or [], key=len, reverse=True)]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        self.num_chars = 0  # decoded, whether released or held
        self.stopped_by: str | None = None

    def push(self, token_ids: list[int]) -> str:
        """Take new tokens and return the text that became certain.

        Tokens after the one that completes a stop string are not taken: `num_tokens` counts those that were.
        """
        released: list[str] = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            text = self._decoder.push(token_id)
            if text:
                released.append(self._release(text))
        return "".join(released)

    def finish(self) -> str:
        """Return what was kept back; the end of the output is here and no stop string can grow any more."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._decoder.finish())
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        self.num_chars += len(text)
        if not self._matchers:
            return text
        text = self._held + text
        for position in range(len(self._held), len(text)):
            complete = [matcher for matcher in self._matchers if matcher.push(text[position])]
            if complete and self.num_tokens >= self._min_tokens:
                self.stopped_by = complete[0].stop
                self._held = ""
                end = position + 1
                return text[: end if self._include_stop else end - len(self.stopped_by)]
        safe = len(text) - max(matcher.possible for matcher in self._matchers)
        self._held = text[safe:]
        return text[:safe]
