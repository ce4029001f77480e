"""How much of the prompts is found again in the KV cache, by who decides which cached block is given up.

    python -m benchmarks.eviction --trace conversation_trace.jsonl synthetic_trace.jsonl

Requests go through a pool of blocks one after the other, on no clock: each looks its prompt up, takes the blocks that
it lacks, and gives all back when some others have come. `classes` is the pool as it is, `lru` the same pool without
protection and classes. Workloads are made up by the seed: `sessions` are conversations that begin with one of many
system prompts, in the manner of Mooncake's traces; `flood` has an offline class beside them that reads documents of its
own, and `share` keeps a share of the pool for the conversations. A pool is a part of the working set, which is all
distinct blocks of a workload. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import RESULTS, about, save
from headway.load.workload.traces import read_mooncake
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import BUILT_IN

SHARE = 0.5  # share of the pool that is kept for the conversations of `share`
HELD = 8  # requests that hold their blocks at once
FLOOD = 4.0  # offline requests for each of a conversation
PARTS = (0.75, 0.5, 0.25, 0.15, 0.1, 0.05)
_LAST = -1  # no prompt's last token is looked up


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the numbers of its blocks; the first `system` of them are a system prompt."""

    service_class: str
    blocks: list[int]
    system: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Shares of what was looked up, 0 to 1.

    Args:
        all: blocks of prompts, and of each class.
        protected: blocks of system prompts that three requests had begun with before.
        ideal: blocks that had been there before.
        evict_us: microseconds that the choice of a block to be given up took, on average.
    """

    all: float
    of_class: dict[str, float]
    protected: float
    ideal: float
    evict_us: float
    evictions: dict[str, int]


def sessions(seed: int, count: int, flood: float = 0.0) -> list[Prompt]:
    """Conversations of `count` requests, with so many offline requests for each of theirs."""
    rng = random.Random(seed)
    number = iter(range(2**40))
    systems = [[next(number) for _ in range(rng.randint(2, 12))] for _ in range(100)]
    popularity = [1 / rank for rank in range(1, len(systems) + 1)]
    coming: list[tuple[float, int, list[int], int]] = []  # when a conversation goes on, and what it consists of
    prompts: list[Prompt] = []
    now = 0.0
    while len(prompts) < count * (1 + flood):
        now += rng.expovariate(1.0)
        if coming and coming[0][0] <= now:
            _, _, blocks, system = heapq.heappop(coming)
        else:
            (chosen,) = rng.choices(systems, popularity)
            blocks, system = list(chosen), len(chosen)
        blocks += [next(number) for _ in range(1 + int(rng.lognormvariate(1.5, 1.0)))]
        prompts.append(Prompt("interactive", list(blocks), system))
        if rng.random() < 0.6:
            thinking = rng.lognormvariate(4.0, 1.0)  # in units of the time between two requests
            heapq.heappush(coming, (now + thinking, next(number), [*blocks, next(number)], system))
        for _ in range(int(flood) + (rng.random() < flood % 1)):
            prompts.append(Prompt("offline", [next(number) for _ in range(rng.randint(5, 40))]))
    return prompts


def of_trace(path: Path) -> list[Prompt]:
    """The prompts of a Mooncake trace."""
    turns = read_mooncake(path).draw(None, np.random.default_rng(0))
    return [Prompt("interactive", [block for block, _ in request.shared]) for (request,) in turns]


def replay(prompts: Iterable[Prompt], pool: KVBlocks) -> Found:
    """Have the prompts looked up, taken and given back."""
    looked_up, found, known = Counter[str](), Counter[str](), Counter[str]()
    begun: Counter[tuple[int, ...]] = Counter()
    seen: set[int] = set()
    held: deque[list[int]] = deque()
    evict_ns = 0
    for prompt in prompts:
        name, tokens = prompt.service_class, [*prompt.blocks, _LAST]
        system = tuple(prompt.blocks[: prompt.system])
        table = list(pool.match(tokens, ""))
        looked_up[name] += len(prompt.blocks)
        found[name] += len(table)
        known["all"] += len(seen.intersection(prompt.blocks))
        seen.update(prompt.blocks)
        if system and begun[system] >= 3:
            known["protected"] += len(system)
            found["protected"] += min(len(table), len(system))
        begun[system] += 1
        node: int | str = ""
        pool.share(table, name)
        if table:
            pool.cached.found(table)
            node = pool.node_of(table[-1])
        missing = len(prompt.blocks) - len(table)
        while held and (missing > pool.num_free or len(held) >= HELD):
            pool.release(held.popleft())
        began = time.perf_counter_ns()
        new = pool.allocate(missing, name)
        evict_ns += time.perf_counter_ns() - began
        pool.register(new, node, list(prompt.blocks), len(table))
        held.append(table + new)
    for table in held:
        pool.release(table)
    pool.check([])
    classes = looked_up.keys()
    total = looked_up.total()
    return Found(
        all=sum(found[name] for name in classes) / total,
        of_class={name: found[name] / looked_up[name] for name in sorted(classes)},
        protected=found["protected"] / max(1, known["protected"]),
        ideal=known["all"] / total,
        evict_us=evict_ns / 1e3 / max(1, pool.cached.evictions.total()),
        evictions={f"{name}, {reason}": count for (name, reason), count in sorted(pool.cached.evictions.items())},
    )


def pool_of(num_blocks: int, decides: str) -> KVBlocks:
    """An empty pool with blocks of one token."""
    if decides == "lru":
        return KVBlocks(num_blocks, 1, protected_share=0.0)
    pool = KVBlocks(num_blocks, 1)
    pool.cached.set_classes(BUILT_IN, {"interactive": int(SHARE * num_blocks)} if decides == "share" else {})
    return pool


def measure(prompts: list[Prompt], part: float, decides: Iterable[str] = ("lru", "classes")) -> dict[str, Found]:
    """The same prompts through pools of a part of their working set."""
    working_set = len({block for prompt in prompts for block in prompt.blocks})
    return {each: replay(prompts, pool_of(int(part * working_set), each)) for each in decides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="traces of Mooncake, measured too")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "eviction.json")
    args = parser.parse_args()
    workloads = {
        "sessions": (sessions(args.seed, args.requests), ("lru", "classes")),
        "flood": (sessions(args.seed, args.requests, FLOOD), ("lru", "classes", "share")),
    }
    for trace in args.trace:
        workloads[trace.stem] = of_trace(trace), ("lru", "classes")
    rows = []
    print("shares of blocks that were found: of all, of system prompts known well, of each class")
    for name, (prompts, decides) in workloads.items():
        for part in PARTS:
            for decided, found in measure(prompts, part, decides).items():
                rows.append({"workload": name, "pool": part, "decides": decided, **asdict(found)})
                by_class = ", ".join(f"{each} {share:.1%}" for each, share in found.of_class.items())
                print(
                    f"  {name:19}pool {part:4.0%} of the working set, {decided:8}{found.all:6.1%} of {found.ideal:.1%}"
                    f"  system {found.protected:6.1%}  {by_class}  {found.evict_us:.2f} us a block"
                )
    settings = {
        "requests": args.requests,
        "seed": args.seed,
        "traces": [trace.name for trace in args.trace],
        "held": HELD,
        "flood": FLOOD,
        "share": SHARE,
    }
    save({"machine": about(), "settings": settings, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
