"""The engine as a library: `LLM` in this process, `AsyncLLM` with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from headway.choices import Choice, Piece, TokenizedPrompt
from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from headway.engine.messages import AddRequest, SequenceOutput, TokenLogprobs, of_prompt
from headway.models.folder import resolve_model
from headway.policy.sampling_params import SamplingParams, sampling_defaults
from headway.policy.service_class import BUILT_IN, ClassTable
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import TextError, Tokenizer, stated_eos_ids

if TYPE_CHECKING:
    from headway.engine.core import EngineCore

PromptType = str | list[int] | dict[str, Any]
Message = dict[str, Any]
MAX_TOKEN_ID = 2**31
_LINGER_S = 0.05  # how long the step thread waits for another call: starting a thread takes longer than waking one
# Ctrl-C just before a wait begins is noticed only when the wait ends, so waits are no longer than this.
_NOTICED_S = 0.5


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


class _Front:
    """What both forms share: tokenizer, chat template, and the making of requests."""

    def __init__(self, model: str, skip_tokenizer_init: bool, classes: ClassTable) -> None:
        self.folder = resolve_model(model)
        self._classes = classes
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.load(self.folder)
        self.chat_template = ChatTemplate.load(self.tokenizer) if self.tokenizer is not None else None
        self._eos_token_ids = self.tokenizer.eos_token_ids if self.tokenizer else sorted(stated_eos_ids(self.folder))
        self._ids = itertools.count(1)  # collectors are made in several threads

    def default_params(self) -> SamplingParams:
        """The checkpoint's own sampling defaults, from generation_config.json."""
        return SamplingParams(**sampling_defaults(self.tokenizer.generation_config if self.tokenizer else {}))

    def collector(
        self, prompt: PromptType, params: SamplingParams, service_class: str = "", request_id: str | None = None
    ) -> _Collector:
        text, given = self._tokenize(prompt)
        if not given:
            raise ValueError("the prompt is empty; give at least one token")
        for token in given:
            if not isinstance(token, Integral) or not 0 <= token < MAX_TOKEN_ID:
                raise ValueError(f"the prompt has {token!r:.60} for a token id; token ids are integers from 0")
        token_ids = [int(token) for token in given]
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids or load one")
        params = replace(params)  # the caller may change it while the request runs
        now = time.monotonic_ns()
        request = AddRequest(
            request_id=request_id or str(next(self._ids)),
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_ns=now,
            sent_ns=now,
            service_class=self._classes.named(service_class).name if service_class else "",
        )
        outputs = [CompletionOutput(index) for index in range(params.n)]
        return _Collector(self.tokenizer, RequestOutput(request.request_id, text, token_ids, outputs), request)

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


class _Call:
    """One call of `generate`: its requests, and how many choices of each are still to end.

    Args:
        advance: called for every request that has ended.
    """

    def __init__(self, collectors: list[_Collector], advance: Callable[[], None]) -> None:
        self.collectors = {collector.request.request_id: collector for collector in collectors}
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._advance = advance
        self._to_end = {name: collector.request.params.n for name, collector in self.collectors.items()}

    def take(self, output: SequenceOutput) -> bool:
        """Add new tokens; True when a stop string ended the choice and the engine should stop it."""
        name = output.request_id
        stopped = self.collectors[name].take(output)
        if output.finish_reason is not None:
            self._to_end[name] -= 1
            if not self._to_end[name]:
                del self._to_end[name]
                self._advance()
        return stopped

    @property
    def complete(self) -> bool:
        return not self._to_end


class _Batch:
    """The requests of all calls. One thread steps them together; it is there while there are any, and a moment longer.

    Only that thread touches the engine. Callers wait, so that Ctrl-C in one of them never interrupts a step that others
    share.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: dict[str, _Call] = {}  # by request
        self._changed = threading.Condition()  # holds what follows
        self._driver: threading.Thread | None = None
        self._joining: list[_Call] = []
        self._leaving: list[_Call] = []

    def run(self, call: _Call) -> None:
        """Wait until the call is complete, and raise what went wrong. Interrupting the wait aborts its requests."""
        if call.complete:
            return
        try:
            self._join(call)
            while not call.ended.wait(_NOTICED_S):
                pass
        except BaseException:
            with self._changed:
                self._leaving.append(call)
                self._changed.notify()
            raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # its traceback holds the call

    def _join(self, call: _Call) -> None:
        with self._changed:
            if self._driver is None:
                # A daemon if its caller is one, so that it keeps the interpreter alive for as long as its caller does.
                self._driver = threading.Thread(target=self._drive, name="headway-steps")
                try:
                    self._driver.start()
                except BaseException:
                    self._driver = None
                    raise
            self._joining.append(call)
            self._changed.notify()

    def _drive(self) -> None:
        while True:
            try:
                if not self._admit():
                    return
                for output in self._core.step().outputs:
                    self._hand_over(output)
            except BaseException as error:
                self._fail(error)

    def _admit(self) -> bool:
        """Let calls in and out between two steps. False when there is none left: then this thread ends."""
        with self._changed:
            if self._driver is not threading.current_thread():
                return False  # an interrupt came while it was being started
            if not (self._joining or self._leaving or self._calls):
                self._changed.wait(_LINGER_S)
            joining, self._joining = self._joining, []
            leaving, self._leaving = self._leaving, []
            if not (joining or leaving or self._calls):
                self._driver = None
                return False
        for call in joining:
            self._add(call)
        for call in leaving:
            self._end(call)
        return True

    def _add(self, call: _Call) -> None:
        try:
            for name, collector in call.collectors.items():
                self._calls[name] = call
                self._core.add(collector.request)
        except Exception as error:
            self._end(call, error)

    def _hand_over(self, output: SequenceOutput) -> None:
        call = self._calls.get(output.request_id)
        if call is None:  # of a call that has ended
            return
        try:
            if call.take(output):
                self._core.abort(output.request_id, output.index)
        except Exception as error:
            self._end(call, error)
        else:
            if call.complete:
                self._end(call)

    def _end(self, call: _Call, error: BaseException | None = None) -> None:
        for name in call.collectors:
            self._calls.pop(name, None)
            self._core.abort(name)
        call.error = error
        call.ended.set()

    def _fail(self, error: BaseException) -> None:
        """A step failed: every call fails, as all share the step."""
        for name, call in self._calls.items():
            call.error = error
            with suppress(Exception):
                self._core.abort(name)
        calls, self._calls = set(self._calls.values()), {}
        for call in calls:
            call.ended.set()


_process: int | None = None  # that made the first LLM


def _check_process() -> None:
    """Refuse to run in a fork of the process that made an LLM: it has neither the engine's threads nor torch's."""
    if _process not in (None, os.getpid()):
        raise RuntimeError(
            f"process {os.getpid()} is a fork of {_process}, and an LLM cannot be used after a fork; create the LLM "
            "in the child, and start the child with multiprocessing's 'spawn' method or before the first LLM is created"
        )


class LLM:
    """A model in this process, for batches of prompts. Calls from several threads share one batch.

    Args:
        model: folder or hub id of a checkpoint.
        skip_tokenizer_init: load no tokenizer; prompts are then token ids and outputs carry no text.
        engine_args: fields of EngineConfig, as dtype, max_model_len, load_format. Nobody reads a batch while it
            runs, so prompts are computed as fast as possible unless max_prefill_stall_ms is given.

    Raises:
        ValueError: the model or a setting cannot be used; one line that says why.
        RuntimeError: here or in a call, in a fork of a process that made an LLM.
    """

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **engine_args: Any) -> None:
        global _process
        from headway.engine.start import start_engine

        _check_process()
        self._front = _Front(model, skip_tokenizer_init, engine_args.get("classes", BUILT_IN))
        engine_args = {"max_prefill_stall_ms": math.inf, "scheduling_policy": "fcfs", **engine_args}
        _process = os.getpid()
        self.engine = start_engine(EngineConfig(model=str(self._front.folder), **engine_args))
        self._batch = _Batch(self.engine.core)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
        service_class: str = "",
    ) -> list[RequestOutput]:
        """Complete every prompt, batched together; results are in the order of the prompts.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids".
        """
        _check_process()
        listed = _as_prompts(prompts)
        params = sampling_params if sampling_params is not None else self._front.default_params()
        each = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(each)} sampling_params; give one, or one for each")
        collectors = [self._front.collector(p, s, service_class) for p, s in zip(listed, each, strict=True)]
        with _progress(len(collectors), use_progress) as advance:
            self._batch.run(_Call(collectors, advance))
        return [c.output for c in collectors]

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
        service_class: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the checkpoint's chat template."""
        _check_process()
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [{"prompt_token_ids": self._front.render(conversation)} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_progress, service_class)


class AsyncLLM:
    """A model in a process of its own, for asyncio programs. Use as `async with AsyncLLM(model) as llm`."""

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **engine_args: Any) -> None:
        self._front = _Front(model, skip_tokenizer_init, engine_args.get("classes", BUILT_IN))
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
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        service_class: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing RequestOutput after every step; the last one has finished=True.

        Leaving the iteration early aborts the request.
        """
        params = sampling_params or self._front.default_params()
        collector = await asyncio.to_thread(self._front.collector, prompt, params, service_class, request_id)
        async with aclosing(self.engine.generate(collector.request)) as outputs:
            async for output in outputs:
                if collector.take(output):
                    self.engine.abort(output.request_id, output.index)
                yield collector.output


def _as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
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
