"""The engine as a library: `LLM` in this process, `AsyncLLM` with the engine in a process of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from headway.engine.config import EngineConfig
from headway.engine.libraries import load_libraries
from headway.llm.asynchronous import AsyncLLM
from headway.llm.batch import Batch, Call
from headway.llm.beams import BeamSearchParams
from headway.llm.requests import Collector, CompletionOutput, Front, LoRARequest, Message, PromptType, RequestOutput
from headway.llm.vectors import (
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    VectorCollector,
    compared,
    embedding,
    judged,
    judgement,
)
from headway.outputs.pooling import pairs
from headway.policy.objectives.service_class import BUILT_IN
from headway.policy.step.sampling_params import SamplingParams
from headway.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "RequestOutput",
    "ScoringRequestOutput",
]

_process: int | None = None  # the process that made the first LLM


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
            runs, so prompts are computed as fast as possible unless max_prefill_stall_ms is given. Ranks are not bound
            to cores unless bind_ranks is given, as that binds the calling thread.

    Raises:
        ValueError: the model or a setting cannot be used; one line that says why.
        RuntimeError: here or in a call, in a fork of a process that made an LLM.
    """

    def __init__(self, model: str | os.PathLike[str], *, skip_tokenizer_init: bool = False, **engine_args: Any) -> None:
        global _process
        load_libraries()
        from headway.engine.start import start_engine

        _check_process()
        self._front = Front(model, skip_tokenizer_init, engine_args.get("classes", BUILT_IN))
        own: dict[str, Any] = {"max_prefill_stall_ms": math.inf, "scheduling_policy": "fcfs", "bind_ranks": False}
        engine_args = own | engine_args
        _process = os.getpid()
        self.engine = start_engine(EngineConfig(model=str(self._front.folder), **engine_args))
        self._batch = Batch(self.engine.core)
        self._digests: dict[object, str] = {}  # of adapters, by the stamps of their folders

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
        service_class: str = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, batched together; results are in the order of the prompts.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids".

        Args:
            lora_request: an adapter for all prompts, or one for each, None for the model itself.

        Raises:
            ValueError: a prompt, parameters or an adapter that cannot be used; one line.
        """
        _check_process()
        listed = _as_prompts(prompts)
        params = sampling_params if sampling_params is not None else self._front.default_params()
        each = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(each)} sampling_params; give one, or one for each")
        asked = [lora_request] * len(listed) if isinstance(lora_request, LoRARequest | None) else list(lora_request)
        if len(asked) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(asked)} lora_requests; give one, or one for each")
        collectors = [
            self._front.collector(prompt, its, service_class, None, "" if adapter is None else self._digest(adapter))
            for prompt, its, adapter in zip(listed, each, asked, strict=True)
        ]
        self._run(collectors, use_progress)
        return [c.output for c in collectors]

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
        service_class: str = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the checkpoint's chat template."""
        _check_process()
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [{"prompt_token_ids": self._front.render(conversation)} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_progress, service_class, lora_request)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        use_progress: bool = False,
        service_class: str = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Search for the likeliest continuations of every prompt; each has `beam_width` outputs, the best first."""
        return self.generate(prompts, params.sampling_params, use_progress, service_class, lora_request)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        dimensions: int | None = None,
        use_progress: bool = False,
        service_class: str = "",
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt, batched together; results are in the order of the prompts.

        Args:
            dimensions: keep only so many of the first numbers.

        Raises:
            ValueError: a prompt is too long, or the model gives no embeddings of this kind.
        """
        _check_process()
        collectors = [embedding(self._front, p, dimensions, service_class) for p in _as_prompts(prompts)]
        self._run(collectors, use_progress)
        return [c.output for c in collectors]

    def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        instruction: str | None = None,
        use_progress: bool = False,
        service_class: str = "",
    ) -> list[ScoringRequestOutput]:
        """How relevant each text of `data_2` is to that of `data_1`, or to each of as many.

        A reranker judges each pair, as does a model with a chat template and no files on embeddings; scores are then
        probabilities. Of other models they are cosines of embeddings.

        Args:
            instruction: what relevant means, for a model that judges.

        Raises:
            ValueError: there is no text on one side, or their numbers differ.
        """
        _check_process()
        front = self._front
        queries, documents = [[each] if isinstance(each, str) else list(each) for each in (data_1, data_2)]
        asked = pairs(queries, documents)
        if front.pooler.judges is not None:
            found = [judgement(front, queries[q], documents[d], instruction, service_class) for q, d in asked]
            self._run(found, use_progress)
            return [judged(collector) for collector in found]
        if instruction is not None:
            raise ValueError("this model scores by the cosine of embeddings, without an instruction")
        embedded = self.embed([*queries, *documents], None, use_progress, service_class)
        return [compared(embedded[q], embedded[len(queries) + d]) for q, d in asked]

    def _digest(self, asked: LoRARequest) -> str:
        """The digest of an adapter, which is read unless its folder is as it was before."""
        adapters, stamp = self.engine.core.adapters, asked.stamp
        if adapters is None:
            raise ValueError("lora_request needs an LLM that was made with enable_lora=True")
        if stamp not in self._digests:
            self._digests[stamp] = adapters.find(asked.lora_path).result().digest
        return self._digests[stamp]

    def _run(self, collectors: Sequence[Collector | VectorCollector], use_progress: bool) -> None:
        if not use_progress:
            self._batch.run(Call(collectors))
            return
        from rich.progress import Progress

        with Progress() as bar:
            task = bar.add_task("Prompts", total=len(collectors))
            self._batch.run(Call(collectors, lambda: bar.advance(task)))


def _as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    if isinstance(prompts, str | dict):
        return [prompts]
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
