"""Requests of the library, and what their callers get."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from headway.engine.messages import AddRequest, SequenceOutput, TokenLogprobs, of_prompt
from headway.grammars.compile import translated
from headway.models.folder import resolve_model
from headway.outputs.choices import Choice, Piece, TokenizedPrompt
from headway.outputs.pooling import Pooler, floats, judged_messages
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.sampling_params import SamplingParams, sampling_defaults
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import TextError, Tokenizer, stated_eos_ids

PromptType = str | list[int] | dict[str, Any]
Message = dict[str, Any]
MAX_TOKEN_ID = 2**31
_NOTHING = SamplingParams(temperature=0.0, max_tokens=1)  # is sampled


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `stop_reason` is the stop string or stop token id that ended it, None for eos."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices; `timings_ns` is the ledger of the choice that ended last, in nanoseconds."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    timings_ns: dict[str, int] = field(default_factory=dict)


class Collector:
    """Gathers the engine's outputs of one request into a RequestOutput."""

    def __init__(self, tokenizer: Tokenizer | None, output: RequestOutput, request: AddRequest) -> None:
        self.output = output
        self.request = request
        self._last_ended_ns = 0
        prompt = TokenizedPrompt(request.prompt_token_ids, output.prompt)
        self._choices = [
            Choice(
                index=index,
                prompt=prompt,
                params=request.params,
                tokenizer=tokenizer,
                eos_token_ids=request.eos_token_ids,
            )
            for index in range(request.params.n)
        ]

    def take(self, output: SequenceOutput) -> bool:
        """Add new tokens; True when a stop string ended the choice and the engine should stop it."""
        if output.error is not None:
            raise ValueError(output.error)
        self._take_timings(output)
        choice = self._choices[output.index]
        if choice.finish_reason is not None:
            return False
        self._grow(self.output.outputs[output.index], choice.accept(output))
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, choice.cached_tokens)
        if output.prompt_logprobs is not None:
            self.output.prompt_logprobs = of_prompt(output.prompt_logprobs)
        self.output.finished = all(choice.finish_reason is not None for choice in self._choices)
        return choice.finish_reason is not None and output.finish_reason is None

    def _grow(self, grown: CompletionOutput, piece: Piece) -> None:
        grown.text += piece.text
        grown.token_ids += piece.token_ids
        if piece.logprobs is not None:
            grown.logprobs = (grown.logprobs or []) + piece.logprobs
            grown.cumulative_logprob = sum(entry.logprob for entry in grown.logprobs)
        grown.finish_reason, grown.stop_reason = piece.finish_reason, piece.stop_reason

    def _take_timings(self, output: SequenceOutput) -> None:
        if output.timings is not None and output.timings.ended_ns >= self._last_ended_ns:
            self._last_ended_ns = output.timings.ended_ns
            self.output.timings_ns = dict(output.timings.phases_ns)


@dataclass(slots=True)
class Embedding:
    """A prompt's vector."""

    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding; `timings_ns` is its ledger, in nanoseconds."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Embedding = field(default_factory=Embedding)
    num_cached_tokens: int = 0
    finished: bool = False
    timings_ns: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Scored:
    """How relevant a text is."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score.

    Args:
        prompt_token_ids: those that the model was given: of both texts, one after the other where each was embedded.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: Scored
    finished: bool = True


class VectorCollector:
    """Takes the vector of one request."""

    def __init__(self, request: AddRequest) -> None:
        self.output = EmbeddingRequestOutput(request.request_id, request.prompt_token_ids)
        self.request = request

    def take(self, output: SequenceOutput) -> bool:
        """Take the vector. Returns False, because there is nothing for the engine to stop."""
        if output.error is not None:
            raise ValueError(output.error)
        if output.timings is not None:
            self.output.timings_ns = dict(output.timings.phases_ns)
        if output.vector is not None:
            self.output.outputs.embedding = floats(output.vector)
            self.output.num_cached_tokens, self.output.finished = output.cached_tokens, True
        return False


class Front:
    """The part that LLM and AsyncLLM share: it has the tokenizer and the chat template, and makes requests."""

    def __init__(self, model: str, skip_tokenizer_init: bool, classes: ClassTable) -> None:
        self.folder = resolve_model(model)
        self._classes = classes
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.load(self.folder)
        self.chat_template = ChatTemplate.load(self.tokenizer) if self.tokenizer is not None else None
        self._eos_token_ids = self.tokenizer.eos_token_ids if self.tokenizer else sorted(stated_eos_ids(self.folder))
        self._ids = itertools.count(1)  # collectors are made in several threads
        self.pooler = Pooler.load(self.tokenizer, self.chat_template) if self.tokenizer else Pooler(PoolingParams())

    def default_params(self) -> SamplingParams:
        """The checkpoint's own sampling defaults, from generation_config.json."""
        return SamplingParams(**sampling_defaults(self.tokenizer.generation_config if self.tokenizer else {}))

    def collector(
        self, prompt: PromptType, params: SamplingParams, service_class: str = "", request_id: str | None = None
    ) -> Collector:
        prompted = self._prompted(prompt)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids or load one")
        params = replace(params)  # the caller may change it while the request runs
        if params.structured_outputs is not None:
            params.structured_outputs = translated(params.structured_outputs)[0]
        request = self._request(prompted, params, service_class, request_id)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(request.request_id, prompted.text, prompted.token_ids, outputs)
        return Collector(self.tokenizer, output, request)

    def embedding(self, prompt: PromptType, dimensions: int | None, service_class: str) -> VectorCollector:
        """Make the collector of a request for an embedding."""
        request = self._request(self.pooler.ended(self._prompted(prompt)), _NOTHING, service_class)
        request.pooling = self.pooler.embedding(dimensions)
        return VectorCollector(request)

    def judgement(self, query: str, document: str, instruction: str | None, service_class: str) -> VectorCollector:
        """Make the collector of a request in which the model judges a pair."""
        assert self.chat_template is not None and self.tokenizer is not None
        messages, variables = judged_messages(self.chat_template, query, document, instruction)
        text = self.chat_template.render(messages, variables=variables)
        prompted = TokenizedPrompt(self.tokenizer.encode(text, add_special_tokens=False), text)
        request = self._request(prompted, _NOTHING, service_class)
        request.pooling = self.pooler.judgement
        return VectorCollector(request)

    def _prompted(self, prompt: PromptType) -> TokenizedPrompt:
        text, given = self._tokenize(prompt)
        if not given:
            raise ValueError("the prompt is empty; give at least one token")
        for token in given:
            if not isinstance(token, Integral) or not 0 <= token < MAX_TOKEN_ID:
                raise ValueError(f"the prompt has {token!r:.60} for a token id; token ids are integers from 0")
        return TokenizedPrompt([int(token) for token in given], text)

    def _request(
        self, prompt: TokenizedPrompt, params: SamplingParams, service_class: str, request_id: str | None = None
    ) -> AddRequest:
        now = time.monotonic_ns()
        return AddRequest(
            request_id=request_id or str(next(self._ids)),
            prompt_token_ids=prompt.token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_ns=now,
            sent_ns=now,
            service_class=self._classes.named(service_class).name if service_class else "",
        )

    def _tokenize(self, prompt: PromptType) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            text = str(prompt["prompt"])
        elif isinstance(prompt, list):
            return None, list(prompt)
        else:
            text = prompt
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; give {'prompt_token_ids': [...]} instead")
        return text, self.tokenizer.encode(text)

    def render(self, messages: list[Message]) -> list[int]:
        if self.chat_template is None or self.tokenizer is None:
            raise TextError(f"{self.folder} has no chat template; use generate with a prompt")
        return self.tokenizer.encode(self.chat_template.render(messages), add_special_tokens=False)
