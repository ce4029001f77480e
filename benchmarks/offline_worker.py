"""One engine under measurement: runs in that engine's own Python and answers requests on standard input.

    PYTHON benchmarks/offline_worker.py ENGINE CHECKPOINT DTYPE THREADS

Reads one JSON object a line, {"batch", "prompt", "new", "seed"}, runs that many random prompts greedily at once
and answers {"decode", "prefill", "seconds"}, rates in tokens a second. Only the standard library and the engine
itself may be imported here, as other engines live in environments without this project's dependencies.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

MOST_TOKENS_AT_ONCE = 4096  # token budget of a step, for every engine alike
LONGEST = 2048


class Engine(Protocol):
    """What the measurement needs of an engine."""

    version: str

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[tuple[float, list[int]]]:
        """Generate greedily, ignoring the end token, without reuse of earlier prompts.

        Returns, each time new tokens came to light, the clock in seconds and how many tokens each prompt has by then.
        """
        ...


class Headway:
    def __init__(self, checkpoint: str, dtype: str, threads: int) -> None:
        import headway
        from headway.engine.messages import AddRequest

        self.version = headway.__version__
        self._params = headway.SamplingParams
        self._request = AddRequest
        self._core = headway.LLM(
            checkpoint,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            num_threads=threads,
            max_model_len=LONGEST,
            max_num_batched_tokens=MOST_TOKENS_AT_ONCE,
            kv_cache_memory=2 << 30,
            enable_prefix_caching=False,
        ).engine.core

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[tuple[float, list[int]]]:
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        counts = {str(number): 0 for number in range(len(prompts))}
        for name, prompt in zip(counts, prompts, strict=True):
            self._core.add(self._request(name, prompt, params, eos_token_ids=[], sent_ns=time.monotonic_ns()))
        history = []
        while self._core.has_work:
            outputs = self._core.step().outputs
            now = time.perf_counter()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                counts[output.request_id] += len(output.token_ids)
            history.append((now, list(counts.values())))
        return history


class Vllm:
    def __init__(self, checkpoint: str, dtype: str, threads: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        import vllm

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            checkpoint,
            load_format="dummy",
            dtype=dtype,
            enforce_eager=os.environ.get("VLLM_COMPILED") != "1",
            max_model_len=LONGEST,
            max_num_batched_tokens=MOST_TOKENS_AT_ONCE,
            enable_prefix_caching=False,
        ).llm_engine
        self._requests = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[tuple[float, list[int]]]:
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        counts: dict[str, int] = {}
        for prompt in prompts:
            self._requests += 1
            name = str(self._requests)
            counts[name] = 0
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        history = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                counts[output.request_id.split("-")[0]] = len(output.outputs[0].token_ids)
            history.append((now, list(counts.values())))
        return history


ENGINES: dict[str, Callable[[str, str, int], Engine]] = {"headway": Headway, "vllm": Vllm}


def measure(
    engine: Engine, vocabulary: int, *, batch: int, prompt: int, new: int, seed: int
) -> dict[str, float | None]:
    """Rates of one run.

    decode: tokens after the last prompt got its first, over the time from then to the end; None for one token.
    prefill: prompt tokens over the time from hand-over to every prompt's first token.
    """
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, vocabulary) for _ in range(prompt)] for _ in range(batch)]
    began = time.perf_counter()
    history = engine.run(prompts, new)
    ended, counts = history[-1]
    if counts != [new] * batch:
        raise RuntimeError(f"asked for {new} tokens of each of {batch} prompts, got {counts}")
    first, first_counts = next(entry for entry in history if min(entry[1]) > 0)
    decoded = sum(counts) - sum(first_counts)
    return {
        "decode": decoded / (ended - first) if decoded else None,
        "prefill": batch * prompt / (first - began),
        "seconds": ended - began,
    }


def answer(replies: TextIO, content: dict[str, Any]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


def main() -> None:
    name, checkpoint, dtype, threads = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to standard error
    with open(os.path.join(checkpoint, "config.json")) as file:
        vocabulary = json.load(file)["vocab_size"]
    began = time.perf_counter()
    engine = ENGINES[name](checkpoint, dtype, int(threads))
    answer(replies, {"version": engine.version, "start_seconds": time.perf_counter() - began})
    for line in sys.stdin:
        answer(replies, measure(engine, vocabulary, **json.loads(line)))


if __name__ == "__main__":
    main()
