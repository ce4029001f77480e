"""The work of a closed loop of streams without a server: how fast the engine itself does what it is served with.

    python -m benchmarks.closed_loop SETTINGS

SETTINGS is {"model", "quantization", "threads", "context", "kv_bytes", "vocabulary"} as JSON. The first answer is
{"version", "start_seconds"}; then each line of input, {"streams", "prompts", "input_len", "output_len", "seed"}, is
answered with {"rate"}, output tokens/s from the first request to the end of the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.engines.worker import answer, random_prompts

if TYPE_CHECKING:
    from headway.engine.core import EngineCore


def engine(settings: dict[str, Any]) -> EngineCore:
    """Make an engine as the library does, but with the server's limits."""
    from headway import LLM

    return LLM(
        settings["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        quantization=settings["quantization"],
        num_threads=settings["threads"],
        max_model_len=settings["context"],
        kv_cache_memory=settings["kv_bytes"],
        enable_prefix_caching=False,
    ).engine.core


def rate(
    core: EngineCore, vocabulary: int, *, streams: int, prompts: int, input_len: int, output_len: int, seed: int
) -> float:
    """Output tokens/s of so many requests, of which `streams` are there at any time."""
    from headway import SamplingParams
    from headway.engine.messages import AddRequest

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    waiting = [
        AddRequest(str(number), prompt, params, eos_token_ids=[])
        for number, prompt in enumerate(random_prompts(vocabulary, prompts, input_len, seed))
    ]
    running = made = 0
    began = time.perf_counter()
    while waiting or running:
        while waiting and running < streams:
            request = waiting.pop()
            request.arrival_ns = request.sent_ns = time.monotonic_ns()
            core.add(request)
            running += 1
        for output in core.step().outputs:
            made += len(output.token_ids)
            running -= output.finish_reason is not None
    if made != prompts * output_len:
        raise RuntimeError(f"asked for {output_len} tokens of each of {prompts} prompts, got {made} in all")
    return made / (time.perf_counter() - began)


def main() -> None:
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.perf_counter()
    core = engine(settings)
    answer(replies, {"version": settings["quantization"], "start_seconds": time.perf_counter() - began})
    for line in sys.stdin:
        answer(replies, {"rate": rate(core, settings["vocabulary"], **json.loads(line))})


if __name__ == "__main__":
    main()
