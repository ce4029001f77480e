"""POST /v1/completions and /infer: text that goes on from a prompt."""

from __future__ import annotations

from typing import Any

from headway.outputs.choices import Piece
from headway.server.api.answers import Answer, encode, written
from headway.server.api.choices import ScoredToken, ServedChoice, scored, scored_tokens
from headway.server.api.schemas import CompletionBody
from headway.server.generation import Generation
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer


class CompletionAnswer(Answer):
    """OpenAI's `text_completion`, with vLLM's token ids and prompt log-probabilities."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, generation: Generation, body: CompletionBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(generation, body, model, tokenizer)
        self._echo = bool(body.echo)
        self._with_logprobs = body.logprobs is not None
        self._skip_special_tokens = body.skip_special_tokens
        self._name = "token_id:{}".format if body.return_tokens_as_token_ids else tokenizer.token_text

    def opening(self, choice: ServedChoice) -> list[dict[str, Any]]:
        if not (self._echo or self.with_token_ids):
            return []
        text = self._prompt_text(choice) if self._echo else ""
        return [self.entry(choice, {"text": text} | self._prompt_ids(choice))]

    def growth(self, choice: ServedChoice, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(scored_tokens(piece)) if piece.logprobs is not None else None
        return self.entry(choice, {"text": piece.text}, logprobs, piece)

    def entire(self, choice: ServedChoice) -> dict[str, Any]:
        prompt_text = self._prompt_text(choice) if self._echo else ""
        logprobs = self._logprobs(choice.logprobs, len(prompt_text)) if self._with_logprobs else None
        if logprobs is not None and self._echo:
            before = self._logprobs_of_prompt(choice)
            logprobs = {name: before[name] + values for name, values in logprobs.items()}
        content = {"text": prompt_text + choice.text} | self._prompt_ids(choice)
        if self._with_prompt_logprobs:
            content["prompt_logprobs"] = self.prompt_logprobs(choice)
        return self.entry(choice, content, logprobs, choice)

    def _prompt_ids(self, choice: ServedChoice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.prompt.token_ids} if self.with_token_ids else {}

    def _prompt_text(self, choice: ServedChoice) -> str:
        if choice.prompt.text is None:
            choice.prompt.text = self.tokenizer.decode(choice.prompt.token_ids, self._skip_special_tokens)
        return choice.prompt.text

    # --- OpenAI's older form of log-probabilities: four parallel lists --------------------------------

    def _logprobs(self, tokens: list[ScoredToken], shift: int = 0) -> dict[str, Any]:
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": written(self._top(token) for token in tokens),
            "text_offset": [token.offset + shift for token in tokens],
        }

    def _top(self, token: ScoredToken) -> dict[str, float]:
        top = {self._name(token_id): logprob for token_id, logprob in token.top}
        top.setdefault(self._name(token.token_id), token.logprob)
        return top

    def _logprobs_of_prompt(self, choice: ServedChoice) -> dict[str, Any]:
        """Log-probabilities in this form for an echoed prompt, whose first token has none."""
        found = self.found_prompt_logprobs(choice)
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=self._skip_special_tokens)
        tokens = []
        offsets = []
        for token_id, one in zip(choice.prompt.token_ids, found, strict=True):
            offsets.append(detokenizer.num_chars)
            detokenizer.push([token_id])
            tokens.append(None if one is None else scored(token_id, one, offsets[-1]))
        return {
            "tokens": [self._name(token_id) for token_id in choice.prompt.token_ids],
            "token_logprobs": [None if token is None else token.logprob for token in tokens],
            "top_logprobs": written(None if token is None else self._top(token) for token in tokens),
            "text_offset": offsets,
        }


class InferAnswer(CompletionAnswer):
    """A text, and what its request is called."""

    def __init__(
        self, generation: Generation, body: CompletionBody, model: str, tokenizer: Tokenizer, request_id: str
    ) -> None:
        super().__init__(generation, body, model, tokenizer)
        self._request_id = request_id

    def _render(self) -> bytes:
        return encode({"text": self.generation.choices[0].text, "request_id": self._request_id})
