"""Requests of the library, and what their callers get."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from headway.engine.messages import AddRequest, SequenceOutput, TokenLogprobs, of_prompt
from headway.grammars.compile import translated
from headway.models.folder import resolve_model
from headway.outputs.choices import Choice, TokenizedPrompt
from headway.outputs.pooling import Pooler
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.sampling_params import SamplingParams, sampling_defaults
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError, stated_eos_ids

PromptType = str | list[int] | dict[str, Any]
Message = dict[str, Any]
MAX_TOKEN_ID = 2**31


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a call, with vLLM's fields: a name, a number that is not needed here, and the folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    @property
    def stamp(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Differs where the folder may hold something else than before."""
        try:
            path = Path(self.lora_path)
            parts = [path] if path.is_file() else [p for p in sorted(path.iterdir()) if p.name.startswith("adapter_")]
            return self.lora_path, tuple((each.st_mtime_ns, each.st_size) for each in (p.stat() for p in parts))
        except OSError:  # what is wrong is said when it is read
            return self.lora_path, ()


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
        ended_by = request.eos_token_ids
        self._choices = [
            Choice(index=index, prompt=prompt, params=request.params, tokenizer=tokenizer, eos_token_ids=ended_by)
            for index in range(request.params.n)
        ]
        self._to_finish = len(self._choices)

    def take(self, output: SequenceOutput) -> bool:
        """Add new tokens; True when a stop string ended the choice and the engine should stop it."""
        if output.error is not None:
            raise ValueError(output.error)
        if output.timings is not None and output.timings.ended_ns >= self._last_ended_ns:
            self._last_ended_ns = output.timings.ended_ns
            self.output.timings_ns = dict(output.timings.phases_ns)
        choice, grown = self._choices[output.index], self.output.outputs[output.index]
        if choice.finish_reason is not None:
            return False
        piece = choice.accept(output)
        grown.text += piece.text
        grown.token_ids += piece.token_ids
        if piece.logprobs is not None:
            grown.logprobs = (grown.logprobs or []) + piece.logprobs
            grown.cumulative_logprob = sum(entry.logprob for entry in grown.logprobs)
        grown.finish_reason, grown.stop_reason = piece.finish_reason, piece.stop_reason
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, choice.cached_tokens)
        if output.prompt_logprobs is not None:
            self.output.prompt_logprobs = of_prompt(output.prompt_logprobs)
        if piece.finish_reason is None:
            return False
        self._to_finish -= 1
        self.output.finished = not self._to_finish
        return output.finish_reason is None


class Front:
    """The part that LLM and AsyncLLM share: it has the tokenizer and the chat template, and makes requests."""

    def __init__(self, model: str | os.PathLike[str], skip_tokenizer_init: bool, classes: ClassTable) -> None:
        self.folder = resolve_model(os.fspath(model))
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
        self,
        prompt: PromptType,
        params: SamplingParams,
        service_class: str = "",
        request_id: str | None = None,
        adapter: str = "",
    ) -> Collector:
        prompted = self.prompted(prompt)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids or load one")
        params = replace(params)  # the caller may change it while the request runs
        if params.structured_outputs is not None:
            params.structured_outputs = translated(params.structured_outputs)[0]
        request = self.request(prompted, params, service_class, request_id)
        request.adapter = adapter
        outputs = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(request.request_id, prompted.text, prompted.token_ids, outputs)
        return Collector(self.tokenizer, output, request)

    def prompted(self, prompt: PromptType) -> TokenizedPrompt:
        """The token ids of a prompt. Raises ValueError where there are none, or they cannot be had."""
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            text, token_ids = prompt.get("prompt"), _checked(prompt["prompt_token_ids"])
        elif isinstance(prompt, list):
            text, token_ids = None, _checked(prompt)
        else:
            text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
            if not isinstance(text, str):
                raise ValueError(f"a prompt is {str(prompt)[:60]!r}; give a text, token ids, or a dict with either")
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer; give {'prompt_token_ids': [...]} instead")
            token_ids = self.tokenizer.encode(text)
        if not token_ids:
            raise ValueError("the prompt is empty; give at least one token")
        return TokenizedPrompt(token_ids, text)

    def request(
        self, prompt: TokenizedPrompt, params: SamplingParams, service_class: str, request_id: str | None = None
    ) -> AddRequest:
        """A request that arrives now."""
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

    def render(self, messages: list[Message]) -> list[int]:
        if self.chat_template is None or self.tokenizer is None:
            raise TextError(f"{self.folder} has no chat template; use generate with a prompt")
        if not messages:
            raise ValueError("the conversation has no messages; give at least one")
        text = self.chat_template.render([_with_text(each) for each in messages])
        return self.tokenizer.encode(text, add_special_tokens=False)


def _with_text(message: Message) -> Message:
    """A message as chat templates take it: with a text. Raises ValueError where it has none."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "\n".join(str(part.get("text", "")) for part in content)
    elif content is None and isinstance(message, dict) and message.get("role") == "assistant":
        content = ""  # as of an answer that is nothing but calls
    if not isinstance(content, str):
        raise ValueError(f"{str(message)[:80]!r} is no message with text; give a dict with role and content")
    return {**message, "content": content}


def _checked(given: Iterable[int]) -> list[int]:
    """Token ids that a caller gave. Raises ValueError for what is none."""
    token_ids: list[int] = []
    for token in given:
        if not isinstance(token, Integral) or not 0 <= token < MAX_TOKEN_ID:
            raise ValueError(f"the prompt has {token!r:.60} for a token id; token ids are integers from 0")
        token_ids.append(int(token))
    return token_ids
