"""OpenVINO GenAI, driven at its continuous batching pipeline."""

from __future__ import annotations

import math
import os
from typing import Any

from benchmarks.engines.interface import ISA, STEP_TOKENS, Settings

_GIB = 1 << 30


def _properties(settings: Settings) -> dict[str, Any]:
    """Properties of the CPU plugin. They are what was fastest, if that is not the default.

    It computes in f32 where it is restricted to AVX2, as it does on such processors: they have no bf16.
    """
    computed, cached = ("f32", "f16") if os.environ.get(ISA) == "avx2" else ("bf16", "bf16")
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": settings.threads,
        "INFERENCE_PRECISION_HINT": computed,
        "KV_CACHE_PRECISION": cached if settings.kv_bits == 16 else "u8",
    }
    if settings.precision != "bf16":  # activations in 8 bits by groups as long as those of the weights; default: 32
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 128
    return properties


class OpenVino:
    """See benchmarks.engines.interface.Engine."""

    def __init__(self, settings: Settings) -> None:
        import numpy
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]

        self.version = openvino_genai.__version__
        self._genai: Any = openvino_genai
        self._tensor = lambda prompt: openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = settings.sequences
        scheduler.cache_size = math.ceil(settings.kv_bytes / _GIB)
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings.model, scheduler, "CPU", _properties(settings)
        )
        self._handles: list[Any] = []
        self._counts: list[int] = []

    def start(self, prompts: list[list[int]], new_tokens: int, schema: str = "") -> None:
        """See Engine. Raises NotImplementedError for a schema."""
        if schema:
            raise NotImplementedError("structured output of OpenVINO is not measured here")
        config = self._genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._counts = [0] * len(prompts)
        self._handles = [
            self._pipeline.add_request(number, self._tensor(prompt), config) for number, prompt in enumerate(prompts)
        ]

    def step(self) -> list[int]:
        """See Engine."""
        self._pipeline.step()
        for number, handle in enumerate(self._handles):
            while handle.can_read():
                self._counts[number] += sum(len(output.generated_ids) for output in handle.read().values())
        return list(self._counts)
