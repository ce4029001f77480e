"""What a measurement needs of an engine, and what an engine is told. Only the standard library is used here.

Engines live in environments without this project's dependencies; a driver imports its engine when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

STEP_TOKENS = 4096  # token budget of a step, for every engine alike
ISA = "HEADWAY_BENCHMARK_ISA"  # in an engine's environment: the instructions that it is restricted to


@dataclass(frozen=True)
class Settings:
    """The same for every engine of a sitting, but for the model's files.

    Args:
        model: folder or file with the weights, in the form that this engine reads.
        precision: bf16, int8 or int4.
        threads: of computation.
        longest: prompt plus output of a sequence, in tokens.
        sequences: most of them at once.
        kv_bytes: of the KV cache at 16 bits a number; enough for all sequences.
        quantization: what the engine is to do with the weights as it reads them; "none" leaves them as they are.
        kv_bits: of a number in the KV cache, 16 or 8; 8 is not asked of engines that have none.
        structured: prompts may have a schema.
        speculative: how drafts are made, by the keys of vLLM's `speculative_config`; empty for none. A draft model
            lies there in the form that this engine reads.
        is_temporary: the model's files are gone soon, so nothing is to be kept of them.
    """

    model: str
    precision: str
    threads: int
    longest: int
    sequences: int
    kv_bytes: int
    quantization: str = "none"
    kv_bits: int = 16
    structured: bool = False
    speculative: dict[str, Any] = field(default_factory=dict)
    is_temporary: bool = False


class Engine(Protocol):
    """An engine with a model: one batch of prompts at a time, greedy, end token ignored, no prefix cache."""

    version: str

    def start(self, prompts: list[list[int]], new_tokens: int, schema: str = "") -> None:
        """Hand over prompts (token ids), each to get so many new tokens, held to a JSON schema if there is one."""
        ...

    def step(self) -> list[int]:
        """Compute one step; return how many new tokens each prompt has by now, in their order."""
        ...


class Speaking(Engine, Protocol):
    """An engine whose tokens can be asked for, and that may be told to make drafts."""

    @property
    def said(self) -> list[list[int]]:
        """The new tokens of each prompt by now."""
        ...
