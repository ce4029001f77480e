"""What a grammar costs: decoding that is held to one beside free decoding, and a free stream beside constrained ones.

    python -m benchmarks.structured [--model FOLDER] [--rounds N] [--grammar json|regex]
    python -m benchmarks.structured --peer vllm=PYTHON --peer llama.cpp=PYTHON

The first: all in one process, on the bundled model unless another is named. A round measures each kind of batch, one
right after the other, and ratios are of neighbours: a shared machine drifts by more than the kinds differ. Each number
is the median of its rounds. Printed are milliseconds of decoding for each token of a sequence, at batch 1 and 16, and
of a step; the share of constrained draws that had to be repeated, because their mask was late; and the time between two
tokens of one free stream beside 15 others, free or constrained.

The second: Headway, vLLM and llama.cpp with their own grammars, on one checkpoint of random weights (--shape), each in
a process of its own, which is stopped while another is measured; see benchmarks/README.md on `offline`. A round
measures each schema and batch on one engine after the other, free and then held to the schema, all greedy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.checkpoint import SHAPES
from benchmarks.machine import RESULTS, keep
from benchmarks.offline import peer
from benchmarks.points import decode
from benchmarks.processes import Child, Died, running
from benchmarks.rounds import Rounds, number, spread
from benchmarks.sitting import entries, worker_command
from benchmarks.steal import undisturbed
from benchmarks.weights import CHECKPOINTS
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
# Answers that all engines can be held to: short fields, whose names are certain, and long texts, in which nothing is.
SCHEMAS: dict[str, dict[str, Any]] = {
    "records": {"type": "array", "items": RECORD, "minItems": 100},
    "texts": {"type": "array", "items": {"type": "string", "minLength": 60, "maxLength": 90}, "minItems": 100},
}
_PROMPT = 128  # tokens


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


# --- beside peers ---------------------------------------------------------------------------------------


def beside(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each engine, free and held, by schema and batch and round; and what they say of themselves."""
    points = [decode(size, _PROMPT, options.tokens) for size in options.batches]
    rounds, about, died = Rounds(), dict[str, Any](), dict[str, str]()
    with ExitStack() as stack:
        children: list[Child] = []
        for entry in entries("bf16", options.peers, True, False):
            command = worker_command(
                entry, options.shape, "bf16", points, options.rounds, options.threads, CHECKPOINTS, structured=True
            )
            children.append(stack.enter_context(running(entry.label, command)))
        about |= {child.name: child.about for child in children}
        for at in range(options.rounds + 1):
            for (schema, content), point in itertools.product(SCHEMAS.items(), points):
                for child in list(children):
                    asked = {"do": "run", "batch": point.batch, "prompt": point.prompt, "new": point.new, "seed": at}
                    try:
                        free = _rate(child, asked)
                        held = _rate(child, {**asked, "schema": json.dumps(content)})
                    except Died as end:
                        print(f"{end}\ngoing on without {child.name}", file=sys.stderr)
                        died[child.name] = end.line
                        children.remove(child)
                        continue
                    print(f"round {at}: {schema}, {point.label}: {child.name} {free:.1f}, {held:.1f}", file=sys.stderr)
                    if at:  # the first one only warms up
                        rounds.add(
                            f"{schema}, {point.label}", child.name, {"free": free, "held": held, "cost": free / held}
                        )
            children[:] = [*children[1:], *children[:1]]
    return {"rates": rounds.values, "about": about, "died": died}


def _rate(child: Child, asked: dict[str, Any]) -> float:
    reply, _ = undisturbed(lambda: child.ask(asked))
    return float(reply["decode"])


def peers_table(content: dict[str, Any]) -> str:
    """A row for each schema, batch and engine."""
    lines = [
        "| | engine | free, tokens/s | held, tokens/s | time of a token, held / free | Headway's rate / its, held |",
        "|---|---|---|---|---|---|",
    ]
    rounds = Rounds(content["rates"])
    for load, things in rounds.values.items():
        for thing, measures in things.items():
            cost = measures["cost"]
            of_cost = spread(median(cost), min(cost), max(cost))
            rates = f"{number(median(measures['free']))} | {number(median(measures['held']))}"
            ratio = rounds.compared(load, thing, "held", "headway") if "headway" in things else None
            compared = "-" if ratio is None else spread(ratio.ratio, ratio.ratio_low, ratio.ratio_high)
            lines.append(f"| {load} | {thing} | {rates} | {of_cost} | {'' if thing == 'headway' else compared} |")
    return "\n".join(lines)


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
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON", dest="peers")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="of the checkpoint beside peers")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="beside peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "structured.json", help="of what is beside peers")
    parser.add_argument("--grammar", choices=GRAMMARS, default="json")
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens < 8 or min(options.batches) < 1:
        parser.exit(2, "--rounds and --batches must be at least 1, and --tokens at least 8\n")
    if options.peers:
        options.threads = options.threads or os.cpu_count()
        keep(options, beside, peers_table)
        return
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
