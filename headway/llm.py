"""The engine as a library: `LLM` in this process, `AsyncLLM` with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from headway.engine.messages import AddRequest, SequenceOutput, TokenLogprobs, of_prompt
from headway.models.config import ModelConfig
from headway.models.folder import resolve_model
from headway.policy.sampling_params import SamplingParams
from headway.text.chat_template import ChatTemplate
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import TextError, Tokenizer

Prompt = str | list[int] | dict[str, Any]
Message = dict[str, Any]
MAX_TOKEN_ID = 2**31


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


class _Collector:
    """Gathers the engine's outputs of one request into a RequestOutput."""

    def __init__(self, tokenizer: Tokenizer | None, output: RequestOutput, request: AddRequest) -> None:
        self.output = output
        self.request = request
        self._eos = set(request.eos_token_ids)
        self._last_ended_ns = 0
        params = request.params
        self._texts: list[Detokenizer] = []
        if tokenizer is not None:
            self._texts = [
                Detokenizer(
                    tokenizer,
                    params.stop,
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                    min_tokens=params.min_tokens,
                    context=request.prompt_token_ids,
                )
                for _ in range(params.n)
            ]

    def take(self, output: SequenceOutput) -> bool:
        """Add new tokens; True when a stop string ended the choice and the engine should stop it."""
        choice = self.output.outputs[output.index]
        if output.error is not None:
            raise ValueError(output.error)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            self.output.prompt_logprobs = of_prompt(output.prompt_logprobs)
        self._take_timings(output)
        if choice.finish_reason is not None:
            return False
        choice.token_ids += output.token_ids
        self._take_logprobs(choice, output)
        choice.finish_reason = output.finish_reason
        if output.stop_token_id is not None and output.stop_token_id not in self._eos:
            choice.stop_reason = output.stop_token_id
        stopped = self._take_text(choice, output)
        self.output.finished = all(c.finish_reason is not None for c in self.output.outputs)
        return stopped and output.finish_reason is None

    def _take_text(self, choice: CompletionOutput, output: SequenceOutput) -> bool:
        if not self._texts:
            return False
        text = self._texts[choice.index]
        drops_stop = output.stop_token_id is not None and not self.request.params.include_stop_str_in_output
        choice.text += text.push(output.token_ids[:-1] if drops_stop else output.token_ids)
        if output.finish_reason is not None:
            choice.text += text.finish()
        if text.stopped_by is None:
            return False
        choice.finish_reason, choice.stop_reason = "stop", text.stopped_by
        return True

    def _take_logprobs(self, choice: CompletionOutput, output: SequenceOutput) -> None:
        if output.logprobs is None:
            return
        choice.logprobs = (choice.logprobs or []) + output.logprobs
        choice.cumulative_logprob = sum(entry.logprob for entry in choice.logprobs)

    def _take_timings(self, output: SequenceOutput) -> None:
        if output.timings is not None and output.timings.ended_ns >= self._last_ended_ns:
            self._last_ended_ns = output.timings.ended_ns
            self.output.timings_ns = dict(output.timings.phases_ns)


class _Front:
    """What both forms share: tokenizer, chat template, and the making of requests."""

    def __init__(self, model: str, skip_tokenizer_init: bool) -> None:
        self.folder = resolve_model(model)
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.load(self.folder)
        self.chat_template = ChatTemplate.load(self.tokenizer) if self.tokenizer is not None else None
        known = self.tokenizer or ModelConfig.from_folder(self.folder)
        self._eos_token_ids = list(known.eos_token_ids)
        self._ids = itertools.count(1)  # collectors are made in several threads

    def default_params(self) -> SamplingParams:
        """The checkpoint's own sampling defaults, from generation_config.json."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        found = self.tokenizer.generation_config if self.tokenizer is not None else {}
        values = {name: found[name] for name in names if found.get(name) is not None}
        return SamplingParams(**values)

    def collector(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> _Collector:
        text, given = self._tokenize(prompt)
        if not given:
            raise ValueError("the prompt is empty; give at least one token")
        for token in given:
            if not isinstance(token, Integral) or not 0 <= token < MAX_TOKEN_ID:
                raise ValueError(f"the prompt has {token!r:.60} for a token id; token ids are integers from 0")
        token_ids = [int(token) for token in given]
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids or load one")
        now = time.monotonic_ns()
        request = AddRequest(
            request_id=request_id or str(next(self._ids)),
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_ns=now,
            sent_ns=now,
        )
        outputs = [CompletionOutput(index) for index in range(params.n)]
        return _Collector(self.tokenizer, RequestOutput(request.request_id, text, token_ids, outputs), request)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
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


class LLM:
    """A model in this process, for batches of prompts.

    Args:
        model: folder or hub id of a checkpoint.
        skip_tokenizer_init: load no tokenizer; prompts are then token ids and outputs carry no text.
        engine_args: fields of EngineConfig, as dtype, max_model_len, load_format. Nobody reads along with a batch, so
            prompts are computed as fast as they can be unless max_prefill_stall_ms says otherwise.

    Raises:
        ValueError: the model or a setting cannot be used; one line that says why.
    """

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **engine_args: Any) -> None:
        from headway.engine.start import start_engine

        self._front = _Front(model, skip_tokenizer_init)
        engine_args = {"max_prefill_stall_ms": math.inf, **engine_args}
        self.engine = start_engine(EngineConfig(model=str(self._front.folder), **engine_args))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt, batched together; results are in the order of the prompts.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids".
        """
        listed = _as_prompts(prompts)
        params = sampling_params if sampling_params is not None else self._front.default_params()
        each = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(each)} sampling_params; give one, or one for each")
        collectors = [self._front.collector(p, s) for p, s in zip(listed, each, strict=True)]
        self._run({c.request.request_id: c for c in collectors}, use_progress)
        return [c.output for c in collectors]

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the checkpoint's chat template."""
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [{"prompt_token_ids": self._front.render(conversation)} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_progress)

    def _run(self, collectors: dict[str, _Collector], use_progress: bool) -> None:
        core = self.engine.core
        try:
            for collector in collectors.values():
                core.add(collector.request)
            with _progress(len(collectors), use_progress) as advance:
                while core.has_work:
                    for output in core.step().outputs:
                        collector = collectors[output.request_id]
                        if collector.take(output):
                            core.abort(output.request_id, output.index)
                        elif collector.output.finished and output.finish_reason is not None:
                            advance()
        finally:
            for request_id in collectors:
                core.abort(request_id)


class AsyncLLM:
    """A model in a process of its own, for asyncio programs. Use as `async with AsyncLLM(model) as llm`."""

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **engine_args: Any) -> None:
        self._front = _Front(model, skip_tokenizer_init)
        self.engine = EngineClient(EngineConfig(model=str(self._front.folder), **engine_args))

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Start the engine and wait until it serves."""
        await self.engine.start()
        await self.engine.wait_ready()

    async def shutdown(self) -> None:
        await self.engine.stop()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the growing RequestOutput after every step; the last one has finished=True.

        Leaving the iteration early aborts the request.
        """
        params = sampling_params or self._front.default_params()
        collector = await asyncio.to_thread(self._front.collector, prompt, params, request_id)
        outputs = self.engine.generate(collector.request)
        async for output in outputs:
            if collector.take(output):
                self.engine.abort(output.request_id, output.index)
            yield collector.output


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Any]:
    if not shown:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("Prompts", total=total)
        yield lambda: bar.advance(task)
