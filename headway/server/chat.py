"""POST /v1/chat/completions: the assistant's answer to a conversation."""

from __future__ import annotations

from typing import Any

from headway.choices import Piece
from headway.server.answers import Answer, written
from headway.server.choices import ScoredToken, ServedChoice, scored_tokens
from headway.server.generation import Generation
from headway.server.schemas import ChatBody
from headway.text.tokenizer import Tokenizer


class ChatAnswer(Answer):
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(generation, body, model, tokenizer)
        self._with_logprobs = bool(body.logprobs)
        self._num_top = body.top_logprobs or 0
        self._with_prompt_logprobs = body.prompt_logprobs is not None

    def opening(self, choice: ServedChoice) -> list[dict[str, Any]]:
        entry = self._entry(choice, {"delta": {"role": "assistant", "content": ""}}, None, None, None)
        if self.with_token_ids:
            entry["token_ids"] = []
        return [entry]

    def opening_extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.generation.prompts[0].token_ids} if self.with_token_ids else {}

    def growth(self, choice: ServedChoice, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        logprobs = None if piece.logprobs is None else self._logprobs(scored_tokens(piece))
        entry = self._entry(choice, {"delta": delta}, logprobs, piece.finish_reason, piece.stop_reason)
        if self.with_token_ids:
            entry["token_ids"] = piece.token_ids
        return entry

    def entire(self, choice: ServedChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = self._logprobs(choice.logprobs) if self._with_logprobs else None
        entry = self._entry(choice, {"message": message}, logprobs, choice.finish_reason, choice.stop_reason)
        if self.with_token_ids:
            entry["token_ids"] = choice.token_ids
        return entry

    def extras(self) -> dict[str, Any]:
        extras = self.opening_extras()
        if self._with_prompt_logprobs:
            extras["prompt_logprobs"] = self.prompt_logprobs(self.generation.choices[0])
        return extras

    def _entry(
        self,
        choice: ServedChoice,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _logprobs(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        content = written(
            {
                **self._token(token.token_id, token.logprob),
                "top_logprobs": [self._token(*one) for one in token.top[: self._num_top]],
            }
            for token in tokens
        )
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
