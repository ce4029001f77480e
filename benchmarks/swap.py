"""How often the cheaper way is chosen for the KV of a preempted sequence: copies to the host and back, or recompute.

    python -m benchmarks.swap --shapes story qwen2.5-0.5b

A sequence of a random length is preempted while some others decode, and returns at once. Each way is forced in turn,
the same number of times, and costs what the steps until its next token take beyond steps without a prompt. Beside that
stands what the engine predicted for both when it decided. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES
from benchmarks.live_engine import engine_of
from benchmarks.machine import RESULTS, about, own_file, save
from headway.engine.core import EngineCore
from headway.engine.messages import AddRequest
from headway.policy.cache.swap import SwapSpace
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.sampling_params import SamplingParams

LONGEST = {"story": 896}
OUTPUT = 64
_NEVER_NS = 1e15
_FORCED = {"swap": SwapSpace, "recompute": lambda blocks: SwapSpace(blocks, fixed_ns=_NEVER_NS)}


@dataclass(frozen=True, slots=True)
class Case:
    """A victim of so many tokens beside others that decode. Times in ms, of a way that was taken or predicted."""

    tokens: int
    beside: int
    predicted: dict[str, float]
    took: dict[str, float]

    @property
    def chosen(self) -> str:
        return "swap" if self.predicted["swap"] <= self.predicted["recompute"] else "recompute"

    @property
    def is_right(self) -> bool:
        return self.took[self.chosen] == min(self.took.values())

    @property
    def lost(self) -> float:
        """What the chosen way takes, as a multiple of the cheaper one."""
        return self.took[self.chosen] / min(self.took.values())


def engine(shape: str, device: str, longest: int, threads: int | None) -> EngineCore:
    """Make an engine with as much memory on the host as in the pool. Weights are random, except the bundled model's."""
    return engine_of(
        shape,
        device=device,
        max_model_len=longest + 2 * OUTPUT,
        max_num_seqs=32,
        kv_cache_memory=2 << 30,
        swap_space=1.0,
        enable_prefix_caching=False,
        scheduling_policy="fcfs",
        num_threads=threads,
    )


class Trial:
    """Preempts sequences of an engine, and times what follows."""

    def __init__(self, core: EngineCore) -> None:
        host = core.scheduler.host
        assert host is not None
        self._core, self._host, self._space = core, host, host.space
        self._count = 0

    def add(self, tokens: int) -> Sequence:
        """Queue a prompt and run until its first token."""
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        self._core.add(AddRequest(str(self._count), [5 + self._count % 90] * tokens, params, []))
        sequence = self._core.scheduler.sequences[max(self._core.scheduler.sequences)]
        while not sequence.output_len:
            self._core.step()
        return sequence

    def clear(self) -> None:
        for sequence in list(self._core.scheduler.sequences.values()):
            self._core.abort(sequence.request_id)

    def case(self, tokens: int, beside: int, rounds: int) -> Case:
        """Both ways in turn. Of each the median counts."""
        for _ in range(beside):
            self.add(32)
        took: dict[str, list[float]] = {way: [] for way in _FORCED}
        predicted: dict[str, float] = {}
        victim = self.add(tokens)
        for _ in range(rounds):
            for way, space in _FORCED.items():
                if victim.output_len + 8 > OUTPUT:
                    self._core.abort(victim.request_id)
                    victim = self.add(tokens)
                predicted = self._predicted(victim.num_computed)
                self._host.space = space(self._space.num_blocks)
                took[way].append(self._cost_ms(victim))
        self.clear()
        return Case(tokens, beside, predicted, {way: statistics.median(each) for way, each in took.items()})

    def _predicted(self, computed: int) -> dict[str, float]:
        blocks = self._core.scheduler.blocks.blocks_for(computed)
        recompute = self._core.scheduler.accounting.step_time.prefill_ns(computed, 0)
        return {"swap": self._space.copy_ns(blocks) / 1e6, "recompute": recompute / 1e6}

    def _cost_ms(self, victim: Sequence) -> float:
        """The milliseconds that the return of a victim takes, beyond as many steps in which it decodes."""
        plain = min(self._step_ms() for _ in range(3))
        plan = StepPlan()
        self._core.scheduler.sequences.preempt(victim, plan, time.monotonic_ns())
        self._core._drop(victim.seq_id)
        known, cost = victim.output_len, 0.0
        while victim.output_len == known:
            cost += self._step_ms() - plain
        return max(cost, 1e-3)

    def _step_ms(self) -> float:
        began = time.perf_counter_ns()
        self._core.step()
        return (time.perf_counter_ns() - began) / 1e6


def measure(core: EngineCore, longest: int, cases: int, rounds: int, seed: int) -> list[Case]:
    """Victims of 16 tokens to the longest, evenly by the logarithm, beside none to 15 others."""
    rng, trial = random.Random(seed), Trial(core)
    for _ in range(24):  # the engine learns how long its steps take
        trial.add(int(math.exp(rng.uniform(math.log(16), math.log(longest)))))
        trial.clear()
    lengths = [int(math.exp(rng.uniform(math.log(16), math.log(longest)))) for _ in range(cases)]
    return [trial.case(tokens, rng.choice([0, 3, 15]), rounds) for tokens in lengths]


def summary(cases: list[Case]) -> dict[str, Any]:
    """Summarise the choices, and how far each prediction is off."""
    found: dict[str, Any] = {
        "right": sum(case.is_right for case in cases) / len(cases),
        "swapped": sum(case.chosen == "swap" for case in cases) / len(cases),
        "mean_lost": statistics.mean(case.lost for case in cases),
    }
    for way in _FORCED:
        found[f"{way}_predicted_to_taken"] = statistics.median(case.predicted[way] / case.took[way] for case in cases)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["story"], choices=SHAPES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--longest", type=int, default=2000, help="victim, in tokens")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5, help="of a case, each way")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "swap.json")
    args = parser.parse_args(argv)
    rows = {}
    for shape in args.shapes:
        longest = min(args.longest, LONGEST.get(shape, args.longest))
        core = engine(shape, args.device, longest, args.threads)
        cases = measure(core, longest, args.cases, args.rounds, args.seed)
        found = summary(cases)
        rows[shape] = {"summary": found, "cases": [asdict(case) for case in cases]}
        print(f"{shape}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    settings = {"device": args.device, "cases": args.cases, "rounds": args.rounds, "seed": args.seed}
    save({"machine": about(), "settings": settings, "shapes": rows}, own_file(args.output))


if __name__ == "__main__":
    main()
