"""Headway, driven at its engine core: no server, no tokenizer, no process of its own."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.interface import STEP_TOKENS, Settings


class Headway:
    """See benchmarks.engines.interface.Engine."""

    def __init__(self, settings: Settings) -> None:
        from headway.engine.libraries import begin_import

        begin_import()  # as the engine's process does
        import headway
        from headway.engine.messages import AddRequest

        self.version = headway.__version__
        from headway.grammars.compile import translated
        from headway.policy.step.structured_outputs import StructuredOutputs

        self._params = headway.SamplingParams
        self._grammar = lambda schema: translated(StructuredOutputs("json", schema))[0]
        self._ends = _end_token_ids(settings) if settings.structured else []
        self._request = AddRequest
        extra: dict[str, Any] = {} if settings.quantization == "none" else {"quantization": settings.quantization}
        extra |= {"speculative_config": settings.speculative} if settings.speculative else {}
        self._core = headway.LLM(
            settings.model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            num_threads=settings.threads,
            max_model_len=settings.longest,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_dtype="auto" if settings.kv_bits == 16 else "int8",
            kv_cache_memory=settings.kv_bytes,
            enable_prefix_caching=False,
            weight_cache=not settings.is_temporary,
            **extra,
        ).engine.core
        self._tokens: dict[str, list[int]] = {}
        for thread in threading.enumerate():  # threads of the first start write the weights that later ones read
            if thread.name == "headway-weights":
                thread.join()

    def start(self, prompts: list[list[int]], new_tokens: int, schema: str = "") -> None:
        """See Engine."""
        held = self._grammar(schema) if schema else None
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, structured_outputs=held)
        self._tokens = {str(number): [] for number in range(len(prompts))}
        for name, prompt in zip(self._tokens, prompts, strict=True):
            self._core.add(self._request(name, prompt, params, eos_token_ids=self._ends, sent_ns=time.monotonic_ns()))

    def step(self) -> list[int]:
        """See Engine. Raises RuntimeError when a request fails."""
        for output in self._core.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            self._tokens[output.request_id] += output.token_ids
        return [len(tokens) for tokens in self._tokens.values()]

    @property
    def said(self) -> list[list[int]]:
        """See Speaking."""
        return list(self._tokens.values())


def _end_token_ids(settings: Settings) -> list[int]:
    """The ids of the end tokens; a grammar needs one to end."""
    found = json.loads((Path(settings.model) / "generation_config.json").read_text())["eos_token_id"]
    return [found] if isinstance(found, int) else list(found)
