"""Whether loading kept KV blocks is quicker than computing them, and how often the engine says so (--kv-offload).

    python -m benchmarks.offload --shapes story qwen2.5-0.5b [--to FOLDER|redis://HOST:PORT]

A prompt is computed and its blocks are kept. Then its first token is asked for by both ways in turn, each forced, with
an empty prefix cache. Beside that stands what the engine predicts for both. Files that were just written are read from
the system's cache, so a disk is slower than this for prompts of long ago.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.checkpoint import SHAPES
from benchmarks.live_engine import engine_of
from benchmarks.machine import RESULTS, about, own_file, save
from headway.engine.core import EngineCore
from headway.engine.messages import AddRequest
from headway.engine.offload import Offload
from headway.policy.cache.offload import LoadTime
from headway.policy.step.sampling_params import SamplingParams

LONGEST = {"story": 896}
WAYS = ("load", "compute")
_FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_NEVER_NS, _KEEP_S = 1e15, 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """Times to the first token in ms by each way, taken and predicted."""

    tokens: int
    took: dict[str, float]
    predicted: dict[str, float]

    @property
    def is_right(self) -> bool:
        return min(WAYS, key=self.predicted.__getitem__) == min(WAYS, key=self.took.__getitem__)


class Forced(LoadTime):
    """Says that loads take no time, or for ever; what they take is learnt by the `true` one."""

    def __init__(self, true: LoadTime, ns: float) -> None:
        super().__init__(ns, 0.0)
        self._true = true

    def took(self, pages: int, ns: float) -> None:
        self._true.took(pages, ns)


def engine(shape: str, target: str, longest: int, threads: int | None) -> EngineCore:
    """Make an engine that keeps blocks there; weights are random, except the bundled model's."""
    sizes = {"max_model_len": longest + 64, "kv_cache_memory": 1 << 30, "num_threads": threads}
    return engine_of(shape, device="cpu", kv_offload=target, **sizes)


def first_token_ms(core: EngineCore, name: str, tokens: list[int]) -> float:
    """The time to the first token of a prompt that comes to an idle engine."""
    began = time.perf_counter_ns()
    core.add(AddRequest(name, list(tokens), _FIRST, []))
    while core.has_work:
        time.sleep(core.waits_ms / 1e3)
        core.step()
    return (time.perf_counter_ns() - began) / 1e6


def measure(core: EngineCore, lengths: list[int], rounds: int) -> list[Case]:
    """Both ways for a prompt of each length; of each the median counts."""
    (offload,), blocks, host = core.hooks, core.scheduler.blocks, core.scheduler.host
    assert isinstance(offload, Offload) and host is not None
    policy, cases = offload.policy, []
    true = policy.load_time
    for number in range(24):  # the engine learns how long its steps take
        first_token_ms(core, f"warm {number}", [5 + number] * (16 + lengths[-1] * (number % 4) // 4))
    for number, length in enumerate(lengths):
        tokens = [(7 * at + 31 * number) % 90 + 5 for at in range(length)]
        first_token_ms(core, "kept", tokens)
        policy.evicted(list(blocks.cached))
        blocks.reset_prefix_cache()
        first_token_ms(core, "next", [3] * 8)  # whose step copies what was evicted
        until = time.monotonic() + _KEEP_S
        while host.num_used and time.monotonic() < until:
            time.sleep(0.01)
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                blocks.reset_prefix_cache()
                policy.load_time = Forced(true, 1e-9 if way == "load" else _NEVER_NS)
                took[way].append(first_token_ms(core, way, tokens))
        pages = (length - 1) // blocks.block_size
        predicted = {
            "load": (true.ns(pages) + host.space.copy_ns(pages) / 2) / 1e6,
            "compute": core.scheduler.accounting.step_time.prefill_ns(pages * blocks.block_size, 0) / 1e6,
        }
        cases.append(Case(length, {way: statistics.median(each) for way, each in took.items()}, predicted))
    return cases


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["story"], choices=SHAPES)
    parser.add_argument("--to", help="a folder or a Redis; default: a folder of its own")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 896, 2048], help="prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=5, help="of a prompt, each way")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=RESULTS / "offload.json")
    args = parser.parse_args(argv)
    rows = {}
    for shape in args.shapes:
        lengths = sorted(length for length in args.lengths if length <= LONGEST.get(shape, length))
        with tempfile.TemporaryDirectory() as own:
            core = engine(shape, args.to or own, lengths[-1], args.threads)
            cases = measure(core, lengths, args.rounds)
        rows[shape] = [asdict(case) for case in cases]
        for case in cases:
            said = ", ".join(f"{way} {case.took[way]:.1f} ms (predicted {case.predicted[way]:.1f})" for way in WAYS)
            print(f"{shape}, {case.tokens} tokens: {said}; {'right' if case.is_right else 'wrong'}", flush=True)
    save({"machine": about(), "settings": {"rounds": args.rounds}, "shapes": rows}, own_file(args.output))


if __name__ == "__main__":
    main()
