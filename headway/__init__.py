"""Headway: an LLM inference server built around latency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "__version__",
]

if TYPE_CHECKING:
    from headway.llm import (
        LLM,
        AsyncLLM,
        BeamSearchParams,
        CompletionOutput,
        EmbeddingRequestOutput,
        LoRARequest,
        RequestOutput,
        ScoringRequestOutput,
    )
    from headway.policy.step.sampling_params import SamplingParams

_HOMES = {
    "LLM": "headway.llm",
    "AsyncLLM": "headway.llm",
    "BeamSearchParams": "headway.llm",
    "CompletionOutput": "headway.llm",
    "EmbeddingRequestOutput": "headway.llm",
    "LoRARequest": "headway.llm",
    "ScoringRequestOutput": "headway.llm",
    "RequestOutput": "headway.llm",
    "SamplingParams": "headway.policy.step.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the library's classes when they are first used: `headway --version` needs none of them.

    Raises:
        EngineNotInstalled: the class needs the engine.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    from importlib import import_module

    if _HOMES[name] == "headway.llm":
        from headway.installation import require_engine

        require_engine()
    return getattr(import_module(_HOMES[name]), name)
