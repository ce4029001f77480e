"""vLLM's CPU build, driven at its engine in this process."""

from __future__ import annotations

import math
import os
from typing import Any

from benchmarks.engines.interface import STEP_TOKENS, Settings

_GIB = 1 << 30


class Vllm:
    """See benchmarks.engines.interface.Engine.

    Eager, as it is fastest at batch 1 to 4 and starts in seconds; VLLM_COMPILED=1 in the environment compiles.
    """

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(math.ceil(settings.kv_bytes / _GIB)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings.threads - 1}")
        import vllm

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            settings.model,
            skip_tokenizer_init=not settings.structured,
            dtype="bfloat16",
            enforce_eager=os.environ.get("VLLM_COMPILED") != "1",
            max_model_len=settings.longest,
            max_num_batched_tokens=max(STEP_TOKENS, settings.longest),
            max_num_seqs=max(settings.sequences, 16),
            enable_prefix_caching=False,
            speculative_config=settings.speculative or None,
        ).llm_engine
        self._requests = 0
        self._tokens: dict[str, list[int]] = {}

    def start(self, prompts: list[list[int]], new_tokens: int, schema: str = "") -> None:
        """See Engine."""
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        if schema:
            from vllm.sampling_params import StructuredOutputsParams

            params.structured_outputs = StructuredOutputsParams(json=schema)
        self._tokens = {}
        for prompt in prompts:
            self._requests += 1
            name = str(self._requests)
            self._tokens[name] = []
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[int]:
        """See Engine."""
        for output in self._engine.step():
            self._tokens[output.request_id.split("-")[0]] = output.outputs[0].token_ids
        return [len(tokens) for tokens in self._tokens.values()]

    @property
    def said(self) -> list[list[int]]:
        """See Speaking."""
        return [list(tokens) for tokens in self._tokens.values()]
