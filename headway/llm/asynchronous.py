"""The engine as a library for asyncio programs, in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from headway.engine.messages import AdapterFound
from headway.llm.requests import Front, LoRARequest, PromptType, RequestOutput
from headway.llm.vectors import EmbeddingRequestOutput, embedding
from headway.policy.objectives.service_class import BUILT_IN
from headway.policy.step.sampling_params import SamplingParams


class AsyncLLM:
    """A model in a process of its own, for asyncio programs. Use as `async with AsyncLLM(model) as llm`."""

    def __init__(self, model: str | os.PathLike[str], *, skip_tokenizer_init: bool = False, **engine_args: Any) -> None:
        self._front = Front(model, skip_tokenizer_init, engine_args.get("classes", BUILT_IN))
        self.engine = EngineClient(EngineConfig(model=str(self._front.folder), **engine_args))
        self._loads: dict[str, asyncio.Future[AdapterFound]] = {}  # adapters, by a name for what their folder has

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
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing RequestOutput after every step; the last one has finished=True.

        Leaving the iteration early aborts the request. Raises ValueError for an adapter that cannot be used.
        """
        params = sampling_params or self._front.default_params()
        digest = "" if lora_request is None else await self._digest(lora_request)
        collector = await asyncio.to_thread(self._front.collector, prompt, params, service_class, request_id, digest)
        async with aclosing(self.engine.generate(collector.request)) as outputs:
            async for output in outputs:
                if collector.take(output):
                    self.engine.abort(output.request_id, output.index)
                yield collector.output

    async def _digest(self, asked: LoRARequest) -> str:
        """The digest of an adapter, which the engine loads unless its folder is as it was before."""
        if not self.engine.config.lora_slots:
            raise ValueError("lora_request needs an AsyncLLM that was made with enable_lora=True")
        name = f"{asked.lora_name} ({hash(asked.stamp):x})"
        if name not in self._loads:
            self._loads[name] = asyncio.ensure_future(self.engine.adapters.load(name, asked.lora_path))
        try:
            return (await asyncio.shield(self._loads[name])).digest
        except ValueError:
            self._loads.pop(name, None)  # it may be there the next time
            raise

    async def embed(
        self, prompt: PromptType, dimensions: int | None = None, service_class: str = ""
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt. Cancelling it aborts the request."""
        collector = await asyncio.to_thread(embedding, self._front, prompt, dimensions, service_class)
        async with aclosing(self.engine.generate(collector.request)) as outputs:
            async for output in outputs:
                collector.take(output)
        return collector.output
