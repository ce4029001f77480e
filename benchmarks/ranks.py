"""Steps of an engine of several ranks beside one rank that has as many threads alone.

    python -m benchmarks.ranks --shape qwen2.5-0.5b --ranks 2 --threads 2
    python -m benchmarks.ranks --ranks 1 --stages 2 --nodes 2   # over the loopback, beside the same in shared memory

Both engines have the same random weights and are in this process; the other ranks sleep while the one rank is measured.
Each point is measured on both, one right after the other and in changing order, and all points again in each round.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.checkpoint import SHAPES
from benchmarks.live_engine import LiveEngine
from benchmarks.machine import RESULTS, about, own_file, save

Point = tuple[str, int]  # "decode" and the batch, or "prefill" and the tokens
# What a step consists of, by the names of kernels.
PARTS = {"product": "products", "attend": "attention", "join": "sums", "add_up": "sums", "pick": "sums"}
PARTS |= dict.fromkeys(["meet", "wait", "linked_meet", "linked_wait"], "waits")
POINTS: list[Point] = [("decode", 1), ("decode", 4), ("decode", 16), ("prefill", 128), ("prefill", 512)]


def steps_of(engine: LiveEngine, point: Point, context: int, budget_s: float) -> list[float]:
    """Seconds of some steps."""
    what, size = point
    with engine.bound():
        return engine.prefill(size, budget_s) if what == "prefill" else engine.decode(context, size, budget_s)[0]


def step_ms(engine: LiveEngine, point: Point, context: int, budget_s: float) -> float:
    """The median of some steps."""
    return 1000 * statistics.median(steps_of(engine, point, context, budget_s))


def measure(
    engines: dict[str, LiveEngine], points: list[Point], context: int, rounds: int, budget_s: float, stages: int = 1
) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of a step on each engine, by point and round, and of its parts; and what `in_stages` says."""
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        order = list(engines) if number % 2 == 0 else list(engines)[::-1]
        for point in points:
            took = {name: step_ms(engines[name], point, context, budget_s) for name in order}
            for name in order:
                parts = parts_ms(engines[name], point, context, budget_s / 2)
                took |= {f"{name}_{part}": milliseconds for part, milliseconds in parts.items()}
            if stages > 1:
                took |= in_stages(engines["ranks"], point, context, budget_s)
            found.setdefault(f"{point[0]}:{point[1]}", []).append(took)
    return found


def parts_ms(engine: LiveEngine, point: Point, context: int, budget_s: float) -> dict[str, float]:
    """Mean milliseconds of a step by what this process does in it: one rank with all threads, or rank 0 of several.

    sums are those of several ranks' parts, waits those for another rank, and host what is no kernel.
    """
    engine.runner.timed(True)
    seconds = steps_of(engine, point, context, budget_s)
    timed = engine.runner.timed(None)
    engine.runner.timed(False)
    found = dict.fromkeys(["products", "attention", "sums", "waits", "others"], 0.0)
    since_ns = timed[-1][2] - round(1e9 * sum(seconds))  # steps before were not timed by steps_of
    for name, began_ns, ended_ns in timed:
        if began_ns >= since_ns:
            found[PARTS.get(name, "others")] += (ended_ns - began_ns) / 1e6 / len(seconds)
    return found | {"host": 1000 * statistics.fmean(seconds) - sum(found.values())}


def in_stages(engine: LiveEngine, point: Point, context: int, budget_s: float) -> dict[str, float]:
    """Micro-batches of a step, the share of turns in which a stage is idle, and milliseconds of an undivided step."""
    count, turns = engine.divided_into
    with engine.in_turn():
        in_turn = step_ms(engine, point, context, budget_s)
    return {"in_turn": in_turn, "micro_batches": count, "bubbles": 1 - count / turns}


def speeds(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of each point, and the speed of the ranks as a multiple of that of one, of neighbours in time."""
    rows = {}
    for point, each in found.items():
        rows[point] = {name: statistics.median(took[name] for took in each) for name in each[0]}
        ratios = sorted(took["one"] / took["ranks"] for took in each)
        rows[point] |= {"speed": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=2, help="of a stage")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--context-ranks", type=int, default=1, help="share the rows of prompts; with --ranks 1")
    parser.add_argument("--nodes", type=int, default=1, help="beside the same ranks on one node, instead of one rank")
    parser.add_argument("--whole-experts", action="store_true", help="deal experts out whole to ranks")
    parser.add_argument("--unbound", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("--threads", type=int, default=2, help="of one rank, and of all ranks together")
    parser.add_argument("--context", type=int, default=256, help="of decodes, in tokens")
    parser.add_argument("--points", nargs="+", default=[f"{what}:{size}" for what, size in POINTS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of steps of a point on an engine")
    parser.add_argument("--output", type=Path, default=RESULTS / "ranks.json")
    args = parser.parse_args(argv)
    points = [(what, int(size)) for what, size in (text.split(":") for text in args.points)]
    batch = max((size for what, size in points if what == "decode"), default=1)
    prompt = max((size for what, size in points if what == "prefill"), default=1)
    sizes = SHAPES[args.shape], batch, args.context, prompt, args.threads
    more = {"stages": args.stages, "whole_experts": args.whole_experts, "bind_ranks": not args.unbound}
    more |= {"context_ranks": args.context_ranks}
    ranks = args.ranks * args.stages * args.context_ranks
    one = {"ranks": args.ranks, **more} if args.nodes > 1 else {}
    engines = {
        "one": LiveEngine(*sizes, **one),
        "ranks": LiveEngine(*sizes, ranks=args.ranks, **more, nodes=args.nodes),
    }
    found = measure(engines, points, args.context, args.rounds, args.budget, args.stages)
    rows = speeds(found)
    beside = f"{ranks} ranks" if args.nodes > 1 else f"one rank of {args.threads} threads"
    print(f"{args.shape}: milliseconds of a step, {beside} beside {ranks} ranks on {args.nodes} nodes")
    for point, row in rows.items():
        spread = f"{row['least']:.2f} to {row['most']:.2f}"
        print(f"{point:>12} {row['one']:8.2f} {row['ranks']:8.2f}   {row['speed']:.2f} of the speed ({spread})")
        for name in ("one", "ranks"):
            parts = {key.removeprefix(f"{name}_"): ms for key, ms in row.items() if key.startswith(f"{name}_")}
            print(f"{name:>12}   {', '.join(f'{part} {ms:.2f}' for part, ms in parts.items())}")
        if args.stages > 1:
            divided = f"{row['micro_batches']:g} micro-batches, stages idle in {row['bubbles']:.0%} of the turns"
            print(f"{'in turn':>12} {row['in_turn']:8.2f}   {divided}")
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    save({"machine": about(), "settings": settings, "rows": rows, "rounds": found}, own_file(args.output))


if __name__ == "__main__":
    main()
