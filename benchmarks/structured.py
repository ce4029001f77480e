"""What a grammar costs: decoding that is held to one beside free decoding, and a free stream beside constrained ones.

    python -m benchmarks.structured [--model FOLDER] [--rounds N] [--grammar json|regex]

All in one process, on the bundled model unless another is named. A round measures each kind of batch, one right after
the other, and ratios are of neighbours: a shared machine drifts by more than the kinds differ. Each number is the
median of its rounds. Printed are milliseconds of decoding for each token of a sequence, at batch 1 and 16, and of a
step; the share of constrained draws that had to be repeated, because their mask was late; and the time between two
tokens of one free stream beside 15 others, free or constrained.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from headway import LLM, SamplingParams
from headway.engine.messages import AddRequest
from headway.grammars.compile import translated
from headway.policy.step.structured_outputs import StructuredOutputs

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
# Neither ends within the tokens of a measurement.
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "array", "items": RECORD, "minItems": 1000}},
    "regex": {"regex": "([a-z]{1,8} ){1000}"},
}
BATCHES = (1, 16)


class Bench:
    """Runs batches on one engine.

    Args:
        tokens: tokens of each answer.
    """

    def __init__(self, llm: LLM, tokens: int) -> None:
        assert llm.tokenizer is not None
        self._core, self._ends, self._tokens = llm.engine.core, llm.tokenizer.eos_token_ids, tokens
        self._prompt = llm.tokenizer.encode("Once upon a time there was")
        self._names = map(str, itertools.count())

    def times(self, asked: Sequence[StructuredOutputs | None]) -> tuple[list[float], list[float], float]:
        """Run a sequence for each of these.

        Returns:
            milliseconds of each step after the first; those between two tokens of the first sequence; and the share of
            draws of which nothing came.
        """
        names = [next(self._names) for _ in asked]
        for seed, (name, each) in enumerate(zip(names, asked, strict=True)):
            params = SamplingParams(
                max_tokens=self._tokens, ignore_eos=True, temperature=1.0, seed=seed, structured_outputs=each
            )
            now = time.monotonic_ns()
            self._core.add(AddRequest(name, self._prompt, params, self._ends, arrival_ns=now, sent_ns=now))
        steps, between, last_ms, draws, late = list[float](), list[float](), 0.0, 0, 0
        while self._core.has_work:
            began = time.perf_counter()
            outputs = self._core.step().outputs
            now_ms = time.perf_counter() * 1e3
            if outputs:
                steps.append(now_ms - began * 1e3)
            for output in outputs:
                draws, late = draws + 1, late + (not output.token_ids)
                if output.request_id == names[0] and output.token_ids:
                    if last_ms:
                        between.append(now_ms - last_ms)
                    last_ms = now_ms
        return steps[1:], between[2:], late / max(1, draws)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="headway/story")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--grammar", choices=GRAMMARS, default="json")
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens < 8:
        parser.exit(2, "--rounds must be at least 1, and --tokens at least 8\n")
    llm = LLM(options.model, num_threads=options.threads, enable_prefix_caching=False)
    bench, grammar = Bench(llm, options.tokens), translated(StructuredOutputs.of(GRAMMARS[options.grammar]))[0]
    bench.times([grammar, None])  # the grammar is compiled, and what it explores first is known
    print(f"{options.model}, {options.grammar}, {options.rounds} rounds of {options.tokens} tokens\n")
    print("batch  free ms  constrained ms  ratio  of a step  late draws")
    for size in BATCHES:
        free, held, late, longer = (list[float]() for _ in range(4))
        for _ in range(options.rounds):
            before, _, _ = bench.times([None] * size)
            steps, _, share = bench.times([grammar] * size)
            free.append(sum(before) / (options.tokens - 1))
            held.append(sum(steps) / (options.tokens - 1))
            longer.append(median(steps) / median(before))
            late.append(share)
        ratio = median(b / a for a, b in zip(free, held, strict=True))
        numbers = f"{median(free):>7.3f}  {median(held):>14.3f}  {ratio:>5.3f}  {median(longer):>9.3f}"
        print(f"{size:>5}  {numbers}  {median(late):>10.2%}")
    pairs = list[tuple[list[float], list[float]]]()
    for _ in range(options.rounds):
        pairs.append((bench.times([None] * 16)[1], bench.times([None, *[grammar] * 15])[1]))
    print("\na free stream's time between tokens, beside 15:  free ms  constrained ms  ratio")
    for quantile in (50, 99):
        free, held = ([float(np.percentile(pair[side], quantile)) for pair in pairs] for side in (0, 1))
        ratio = median(b / a for a, b in zip(free, held, strict=True))
        print(f"{f'P{quantile}':>46}  {median(free):>7.3f}  {median(held):>14.3f}  {ratio:>5.3f}")


if __name__ == "__main__":
    main()
