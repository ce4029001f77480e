"""An engine that says what a test tells it to, with the interface and the manners of EngineClient."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from array import array
from collections.abc import Callable, Sequence

from headway.engine.client import EngineDead
from headway.engine.config import EngineConfig
from headway.engine.messages import (
    AdapterFound,
    AddRequest,
    DropAdapter,
    EngineStats,
    Explain,
    ExplainedStep,
    Explanation,
    LiveSequence,
    LoadAdapter,
    PromptLogprobs,
    Ready,
    SequenceOutput,
    SequenceTimings,
    TokenLogprobs,
)
from headway.engine.served_adapters import ServedAdapters
from headway.policy.cache.handle import Handle
from headway.policy.objectives.service_class import BUILT_IN, ClassTable
from headway.policy.step.scheduler_config import StepLimits
from headway.text.tokenizer import Tokenizer

Reply = Callable[[AddRequest, int], list[int]]
Take = Callable[[SequenceOutput | Exception], None]

WIDTH = 8  # of embeddings


class FakeEngine:
    """Answers each choice with `reply`'s tokens and then an eos, one token a step.

    Attributes:
        step_s: seconds a step takes.
        open: while False, steps stand still: requests are parked.
        drops: how requests end at their first step, where they are not served: timeout or late.
        yielded: why requests were put behind others.
        passed_over: how often they were, as it was not their tenant's turn.
        tokens_per_step: tokens in each output.
        shares: of the engine's time of a request, by phase; the rest is decode_compute.
        requests, aborted: what was asked, and the ids of what was closed before its end.
        sequences: what explain() tells of.
    """

    def __init__(self, tokenizer: Tokenizer, text: str = "Once upon a time there was a fox.") -> None:
        self.tokenizer = tokenizer
        self.reply: Reply = lambda request, index: tokenizer.encode(text)
        self.step_s = 0.0
        self.open = True
        self.drops = ""
        self.yielded = ""
        self.passed_over = 0
        self.tokens_per_step = 1
        self.shares = {"queue_capacity": 0.2, "prefill_compute": 0.3}
        self.handle: Handle | None = None  # of every prompt that is handed over
        self.chunks = 0  # of each of these that are told of; while `holds`, the last of them does not end
        self.holds = False
        self.loads = True
        self.fails_with: str | None = None
        self.state = "loading"
        self.last_error = "the engine is not started"
        self.restarts = self.hangs = 0
        self.stalled_s = 0.0
        self.pid: int | None = None
        self.config = EngineConfig()
        self.adapters = ServedAdapters([], self._take_of_adapters)
        self.stats: EngineStats | None = None
        self.ready: Ready | None = None
        self.max_model_len = 256
        self.num_waiting = 0
        self.classes = BUILT_IN
        self.launched = False
        self.requests: list[AddRequest] = []
        self.sequences: list[LiveSequence] = []
        self.times_kernels = False
        self.explains_s = 0.0
        self.allocators: dict[str, int] = {}
        self.aborted: list[str] = []
        self.running: set[tuple[str, int]] = set()
        self.phases_total_ns: dict[tuple[str, int], int] = {}
        self._drop: set[tuple[str, int]] = set()
        self._subscribers: list[Callable[[EngineStats], None]] = []

    def reset(self) -> None:
        """As new, for the next test; the server stays."""
        subscribers = self._subscribers
        self.__init__(self.tokenizer)  # type: ignore[misc]
        self._subscribers = subscribers
        self.finish_loading()

    # --- life ---------------------------------------------------------------------------------------

    def launch(self) -> None:
        self.launched = True

    def kill(self) -> None:
        self.launched = False

    async def start(self) -> None:
        if self.loads and self.fails_with is None:
            self.finish_loading()

    def finish_loading(self) -> None:
        stages = {"storage_read": 5_000_000, "warm_up": 7_000_000}
        self.ready = Ready(1, stages, 64, 16, self.max_model_len, "cpu", "float32", 256, 64 * 16, block_bytes=1000)
        self.state = "ready"

    async def wait_ready(self) -> Ready:
        while self.state == "loading" and self.fails_with is None:
            await asyncio.sleep(0.005)
        if self.fails_with is not None:
            self.state, self.last_error = "dead", self.fails_with
        if self.state != "ready" or self.ready is None:
            raise EngineDead(self.last_error)
        return self.ready

    def die(self) -> None:
        self.restarts += 1
        self.state, self.last_error = "loading", "the engine process died; it is restarting"

    async def stop(self) -> None:
        self.state, self.last_error = "stopped", "the server is shutting down"

    async def explain(self, asked: Explain) -> Explanation:
        if self.state != "ready":
            raise EngineDead(self.last_error)
        steps = [
            ExplainedStep(time.monotonic_ns(), f"step {number} of {'6f1f' * 8}-0.", 3, 5, 2_000_000, 1.9e6)
            for number in range(100 - asked.most, 100)
        ]
        self.times_kernels = self.times_kernels if asked.kernels is None else asked.kernels
        await asyncio.sleep(self.explains_s)
        now = time.monotonic_ns()
        kernels = [("product", now - 30, now - 20), ("attend", now - 20, now)] if self.times_kernels else []
        kernels, allocators = kernels if asked.with_parts else [], self.allocators if asked.with_memory else {}
        return Explanation(steps, self.sequences[: asked.most_sequences], 7, kernels, allocators)

    def _take_of_adapters(self, message: LoadAdapter | DropAdapter) -> None:
        """Find an adapter in any folder that is not called none."""
        if isinstance(message, LoadAdapter):
            error = (
                f"{message.name}: adapter {message.path}: there is no such folder" if message.path == "/none" else ""
            )
            self.adapters.take(AdapterFound(message.name, message.path, f"{hash(message.path):x}", 8, 1000, error))

    def set_classes(self, classes: ClassTable, weights: dict[str, float], limits: StepLimits | None = None) -> None:
        self.classes, self.weights = classes, weights

    def subscribe(self, callback: Callable[[EngineStats], None]) -> None:
        self._subscribers.append(callback)

    # --- requests -----------------------------------------------------------------------------------

    def abort(self, request_id: str, index: int = -1) -> None:
        self._drop |= {key for key in self.running if key[0] == request_id and index in (-1, key[1])}

    def submit(self, requests: Sequence[AddRequest], take: Take) -> Callable[[], None]:
        if self.state != "ready":
            raise EngineDead(self.last_error)
        self.requests += requests
        mine = {(one.request_id, index): _Saying(self, one, index) for one in requests for index in range(one.params.n)}
        self.running |= mine.keys()
        saying = asyncio.create_task(self._say(mine, take))

        def leave() -> None:
            saying.cancel()
            self.running -= mine.keys()
            self.aborted += [one.request_id for one in requests if any(key[0] == one.request_id for key in mine)]

        return leave

    async def _say(self, mine: dict[tuple[str, int], _Saying], take: Take) -> None:
        try:
            while mine:
                await self._step(set(mine))
                for key, saying in list(mine.items()):
                    if key not in self._drop and not self.open:
                        continue
                    output = saying.dropped() if key in self._drop or self.drops else saying.next()
                    if output.finish_reason is not None:
                        del mine[key]
                        self.running.discard(key)
                    take(output)
        except EngineDead as error:
            take(error)

    async def _step(self, keys: set[tuple[str, int]]) -> None:
        await asyncio.sleep(self.step_s)
        while not self.open and self.state == "ready" and not keys & self._drop:
            await asyncio.sleep(0.002)
        if self.state != "ready":
            raise EngineDead(self.last_error)
        self.stats = EngineStats(
            len(self.running),
            self.num_waiting,
            0.25,
            step_ns=2_000_000,
            generation_tokens=len(keys),
            scheduled_tokens=len(keys),
            scheduled_sequences=len(keys),
            stall_ns={"decode_stall_prefill": 1_000},
            running_of_class={"voice": 2, "gone": 3},
            waiting_of_class={"voice": 1},
        )
        for callback in self._subscribers:
            callback(self.stats)


class _Saying:
    """One choice on its way."""

    def __init__(self, engine: FakeEngine, request: AddRequest, index: int) -> None:
        self.engine, self.request, self.index = engine, request, index
        self.params = request.params
        words = engine.reply(request, index)
        eos = request.eos_token_ids[-1:] if not self.params.ignore_eos else []
        self.words = iter(words + eos) if eos else itertools.cycle(words)
        self.stops = set(self.params.stop_token_ids) | set(eos)
        self.said = self.chunks = 0

    def next(self) -> SequenceOutput:
        output = SequenceOutput(self.request.request_id, self.index, [], cached_tokens=self._cached())
        if self.request.hands_over and (self.chunks < self.engine.chunks or self.engine.holds):
            self.chunks += 1
            output.handle, output.timings = self.engine.handle, self._timings()
            return output
        if (pooling := self.request.pooling) is not None:
            numbers = len(pooling.token_ids) or pooling.dimensions or WIDTH
            ends = [len(self.request.prompt_token_ids) / (at + 1) for at in range(numbers)]
            output.vector, output.finish_reason = array("f", ends).tobytes(), "stop"
            output.timings = self._timings()
            return output
        if self.said == 0 and self.params.prompt_logprobs is not None and self.index == 0:
            prompt = self.request.prompt_token_ids
            output.prompt_logprobs = self._packed(prompt[1:], self.params.prompt_logprobs)
        for _ in range(self.engine.tokens_per_step):
            token = next(self.words)
            output.token_ids.append(token)
            self.said += 1
            if token in self.stops and self.said >= self.params.min_tokens:
                output.finish_reason, output.stop_token_id = "stop", token
                break
            if self.said == self.params.max_tokens:
                output.finish_reason = "length"
                break
        if self.params.logprobs is not None:
            output.logprobs = [self._logprob(t, self.params.logprobs) for t in output.token_ids]
        if output.finish_reason is not None:
            output.timings = self._timings()
            output.handle = self.engine.handle if self.request.hands_over else None
        return output

    def dropped(self) -> SequenceOutput:
        output = SequenceOutput(self.request.request_id, self.index, [], "abort", timings=self._timings())
        if self.engine.drops == "timeout":
            output.finish_reason, output.error = "timeout", "it waited longer than 1 s (--max-queue-time)"
        elif self.engine.drops == "late":
            output.finish_reason, output.error, output.retry_after_s = "late", "the first token can't be there", 7
        return output

    def _cached(self) -> int:
        return len(self.request.prompt_token_ids) // 16 * 16

    def _logprob(self, token: int, number: int) -> TokenLogprobs:
        others = [token, *(i for i in range(3, 3 + number) if i != token)][:number]
        values = [-0.5, *(-1.5 - i for i in range(number - 2)), -math.inf][: len(others)]
        return TokenLogprobs(-0.5, 1, others, values)

    def _packed(self, tokens: list[int], number: int) -> list[PromptLogprobs]:
        """The same of tokens of a prompt, in two parts."""
        parts = []
        for part in (tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]):
            found = [self._logprob(token, number) for token in part]
            integers = array("i", [i for one in found for i in (one.rank, *one.top_ids)])
            reals = array("f", [p for one in found for p in (one.logprob, *one.top_logprobs)])
            parts.append(PromptLogprobs(number, integers.tobytes(), reals.tobytes()))
        return parts

    def _timings(self) -> SequenceTimings:
        ended = time.monotonic_ns()
        total = ended - self.request.sent_ns
        self.engine.phases_total_ns[self.request.request_id, self.index] = total
        parts = {phase: int(total * share) for phase, share in self.engine.shares.items()}
        parts["decode_compute"] = total - sum(parts.values())
        return SequenceTimings(parts, ended, self.said, 0, self.engine.yielded, self.engine.passed_over)
