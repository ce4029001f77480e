"""POST /v1/chat/completions: the assistant's answer to a conversation."""

from __future__ import annotations

from typing import Any

from headway.outputs.choices import Piece
from headway.server.api.answers import Answer, logprob_entries, written
from headway.server.api.choices import ScoredToken, ServedChoice, scored_tokens
from headway.server.api.schemas import ChatBody
from headway.server.generation import Generation
from headway.text.tokenizer import Tokenizer


class ChatAnswer(Answer):
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(generation, body, model, tokenizer)
        self._with_logprobs = bool(body.logprobs)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._num_top = body.top_logprobs or 0

    def opening(self, choice: ServedChoice) -> list[dict[str, Any]]:
        return [self.entry(choice, {"delta": {"role": "assistant", "content": ""}})]

    def opening_extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.generation.prompts[0].token_ids} if self.with_token_ids else {}

    def growth(self, choice: ServedChoice, piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.logprobs is None else self._logprobs(scored_tokens(piece))
        return self.entry(choice, {"delta": self._delta_content(piece)}, logprobs, piece)

    def _delta_content(self, piece: Piece) -> dict[str, Any]:
        return {"content": piece.text} if piece.text else {}

    def entire(self, choice: ServedChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
        logprobs = self._logprobs(choice.logprobs) if self._with_logprobs else None
        return self.entry(choice, {"message": message}, logprobs, choice)

    def extras(self) -> dict[str, Any]:
        extras = self.opening_extras()
        if self._with_prompt_logprobs:
            extras["prompt_logprobs"] = self.prompt_logprobs(self.generation.choices[0])
        return extras

    def _logprobs(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        entries = logprob_entries(tokens, self.tokenizer, self._num_top, self._as_ids)
        return {"content": written(entries), "refusal": None}
