"""One engine under measurement: runs in that engine's own Python and answers requests on standard input.

    PYTHON -m benchmarks.engines.worker ENGINE SETTINGS

SETTINGS is Settings as JSON. The first answer is {"version", "start_seconds"}; then each line of input is one of

    {"do": "run", "batch", "prompt", "new", "seed"}    random prompts, to the end: {"decode", "prefill", "seconds"};
                                                       with "schema", answers are held to it
    {"do": "hold", "batch", "prompt", "new", "seed"}   random prompts, until each has its first token: {"seconds"}
    {"do": "advance", "new"}                           so many tokens more for each prompt held: {"decode", "seconds"}
    {"do": "say", "prompts", "new"}                    these prompts, to the end: {"decode", "decode_cpu", "tokens"}

Rates are in tokens a second, `decode_cpu` in tokens a second of the processor's time. Only the standard library and the
engine itself may be imported here.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks.engines.interface import Engine, Settings, Speaking

ENGINES = ("headway", "openvino", "llama.cpp", "vllm")


def make(name: str, settings: Settings) -> Engine:
    """Load an engine with its model. Raises KeyError for one that is not in ENGINES."""
    if name == "headway":
        from benchmarks.engines.headway import Headway

        return Headway(settings)
    if name == "openvino":
        from benchmarks.engines.openvino import OpenVino

        return OpenVino(settings)
    if name == "llama.cpp":
        from benchmarks.engines.llama_cpp import LlamaCpp, Speculating

        return Speculating(settings) if settings.speculative else LlamaCpp(settings)
    if name == "vllm":
        from benchmarks.engines.vllm import Vllm

        return Vllm(settings)
    raise KeyError(name)


def random_prompts(vocabulary: int, batch: int, prompt: int, seed: int) -> list[list[int]]:
    """The same for every engine; different within a batch and between seeds."""
    draw = random.Random(seed)
    return [[draw.randrange(1, vocabulary) for _ in range(prompt)] for _ in range(batch)]


class Measured:
    """An engine, and the clock beside it."""

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._counts: list[int] = []

    def run(self, *, batch: int, prompt: int, new: int, seed: int, schema: str = "") -> dict[str, float | None]:
        """Rates of one run.

        decode: tokens after the last prompt got its first, over the time from then to the end; None for one token.
        prefill: prompt tokens over the time from hand-over to every prompt's first token.
        """
        prompts = random_prompts(self._vocabulary, batch, prompt, seed)
        began = time.perf_counter()
        self._engine.start(prompts, new, schema)
        first = self._step_until(1)
        after_first = sum(self._counts)
        ended = first if min(self._counts) >= new else self._step_until(new)
        decoded = sum(self._counts) - after_first
        if self._counts != [new] * batch:
            raise RuntimeError(f"asked for {new} tokens of each of {batch} prompts, got {self._counts}")
        return {
            "decode": decoded / (ended - first) if decoded else None,
            "prefill": batch * prompt / (first - began),
            "seconds": ended - began,
        }

    def hold(self, *, batch: int, prompt: int, new: int, seed: int) -> dict[str, float | None]:
        """Take in prompts that will get `new` tokens in all, and stop when each has its first."""
        began = time.perf_counter()
        self._engine.start(random_prompts(self._vocabulary, batch, prompt, seed), new)
        return {"seconds": self._step_until(1) - began}

    def advance(self, *, new: int) -> dict[str, float | None]:
        """Generate at least `new` tokens more for each prompt that is held."""
        before, began = sum(self._counts), time.perf_counter()
        ended = self._step_until(min(self._counts) + new)
        return {"decode": (sum(self._counts) - before) / (ended - began), "seconds": ended - began}

    def say(self, *, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """The tokens behind these prompts, and the rates of those behind the first of each."""
        engine: Speaking = self._engine  # type: ignore[assignment]  # others are not asked
        engine.start(prompts, new)
        first, used = self._step_until(1), time.process_time()
        before = sum(self._counts)
        ended, used = self._step_until(new), time.process_time() - used
        decoded = sum(self._counts) - before
        return {"decode": decoded / (ended - first), "decode_cpu": decoded / used, "tokens": engine.said}

    def answer(self, do: str, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one line of input asks for. Raises KeyError for anything else."""
        asked: dict[str, Callable[..., dict[str, Any]]]
        asked = {"run": self.run, "hold": self.hold, "advance": self.advance, "say": self.say}
        return asked[do](**request)

    def _step_until(self, least: int) -> float:
        """The clock when every prompt has that many new tokens."""
        while True:
            self._counts = self._engine.step()
            now = time.perf_counter()
            if min(self._counts) >= least:
                return now


def answer(replies: TextIO, content: dict[str, Any]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


def main() -> None:
    name, text = sys.argv[1:]
    content = json.loads(text)
    vocabulary = content.pop("vocabulary")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to standard error
    began = time.perf_counter()
    engine = make(name, Settings(**content))
    measured = Measured(engine, vocabulary)
    answer(replies, {"version": engine.version, "start_seconds": time.perf_counter() - began})
    for line in sys.stdin:
        request = json.loads(line)
        answer(replies, measured.answer(request.pop("do"), request))


if __name__ == "__main__":
    main()
