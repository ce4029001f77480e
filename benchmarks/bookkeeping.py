"""Microseconds a step spends outside the model: scheduler, tensors, sampler, outputs, encoding.

    python benchmarks/bookkeeping.py --sequences 64

The model is replaced by one that returns fixed logits at once, so that what is left is ours. The scheduler is then
timed alone, on a virtual clock, with requests of all classes: `--scheduler-only` does no more than that.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import msgspec
import torch

from headway.engine.core import EngineCore
from headway.engine.messages import AddRequest
from headway.engine.runner import Runner
from headway.kernels.cpu.kernels import CpuKernels
from headway.models.config import ModelConfig
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import BUILT_IN
from headway.policy.step.accounting import StepTimes
from headway.policy.step.policies import POLICIES
from headway.policy.step.request import Request, sequences_of
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig

STEP_NS, TOKEN_NS = 8_000_000, 10_000  # times on the scheduler's virtual clock
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
}  # fmt: skip
PARAMS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k + top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
}


class InstantModel:
    """Stands in for a decoder: the right shapes and no work."""

    def __init__(self, vocab_size: int, most_rows: int) -> None:
        self.config = ModelConfig.from_dict({**CONFIG, "vocab_size": vocab_size})
        self._logits = torch.randn(most_rows, vocab_size).to(torch.bfloat16)

    def forward(self, token_ids: torch.Tensor, step: Any, caches: Any) -> torch.Tensor:
        return torch.empty(len(token_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


def build(sequences: int, vocab_size: int, context: int) -> EngineCore:
    blocks = sequences * (context // 16 + 2)
    scheduler = Scheduler(SchedulerConfig(sequences, 8192, context), KVBlocks(blocks, 16))
    model: Any = InstantModel(vocab_size, sequences)
    device = torch.device("cpu")
    return EngineCore(scheduler, Runner(model, CpuKernels(), device, torch.bfloat16, blocks, 16, sequences, context))


def measure(core: EngineCore, sequences: int, steps: int, prompt_len: int, params: dict[str, Any]) -> list[float]:
    """Microseconds of each steady decoding step, its encoded message included."""
    encoder = msgspec.msgpack.Encoder()
    for i in range(sequences):
        wanted = SamplingParams(max_tokens=steps + 20, ignore_eos=True, **params)
        prompt = [(i + j) % 500 for j in range(prompt_len)]
        core.add(AddRequest(str(i), prompt, wanted, [0], arrival_ns=i))
    while len(core.scheduler.running) < sequences or not all(s.is_decoding for s in core.scheduler.running):
        core.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter_ns()
        encoder.encode(core.step())
        times.append((time.perf_counter_ns() - began) / 1e3)
    for i in range(sequences):
        core.abort(str(i))
    return times


def time_calls(owner: object, name: str) -> list[float]:
    """Replace a method by one that appends the microseconds of every call to the list."""
    times: list[float] = []
    method = getattr(owner, name)

    def timed(*args: Any) -> Any:
        began = time.perf_counter_ns()
        result = method(*args)
        times.append((time.perf_counter_ns() - began) / 1e3)
        return result

    setattr(owner, name, timed)
    return times


def schedulings(policy: str, running: int, waiting: int, steps: int) -> list[float]:
    """Microseconds of schedule() and complete() together, of each step with so many sequences of all classes."""
    scheduler = Scheduler(SchedulerConfig(running, 8192, 1024, policy=policy), KVBlocks(running * 40, 16))
    names = [each.name for each in BUILT_IN]
    now, times = 1, list[float]()

    def submit(count: int) -> None:
        for number in range(count):
            prompt = [(number + at) % 500 for at in range(128)]
            params = SamplingParams(max_tokens=800, ignore_eos=True)
            request = Request(
                str(number), prompt, params, [0], priority=number % 5, arrival_ns=now, service_class=names[number % 3]
            )
            scheduler.add(sequences_of(request, 1024)[0], now)

    def step() -> float:
        nonlocal now
        began = time.perf_counter_ns()
        plan = scheduler.schedule(now)
        took = time.perf_counter_ns() - began
        computed = now + STEP_NS + TOKEN_NS * plan.num_tokens
        drawn: dict[int, list[int] | None] = {item.seq_id: [7] for item in plan.scheduled if item.samples}
        began = time.perf_counter_ns()
        scheduler.complete(plan, drawn, StepTimes(now, computed, computed))
        took += time.perf_counter_ns() - began
        now = computed
        return took / 1e3

    submit(running)
    while len(scheduler.running) < running or not all(sequence.is_decoding for sequence in scheduler.running):
        step()
    submit(waiting)
    for _ in range(steps):
        times.append(step())
    return times


def print_schedulings(steps: int) -> None:
    """A table of three rounds in turn: medians, and the greatest of the 95th percentiles."""
    print("schedule and complete: median microseconds a step, three times in turn, and the greatest 95th percentile")
    for running, waiting in ((16, 0), (16, 100), (256, 10_000)):
        rounds = [{policy: schedulings(policy, running, waiting, steps) for policy in POLICIES} for _ in range(3)]
        for policy in POLICIES:
            medians = "  ".join(f"{statistics.median(times[policy]):6.0f}" for times in rounds)
            p95 = max(statistics.quantiles(times[policy], n=20)[-1] for times in rounds)
            print(f"  {running:3} running, {waiting:6} waiting, {policy:9s} {medians}   {p95:6.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scheduler-only", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the time of greedy steps goes")
    args = parser.parse_args()
    if args.scheduler_only:
        gc.freeze()
        return print_schedulings(args.steps)
    torch.set_num_threads(1)
    core = build(args.sequences, args.vocab, 1024)
    gc.freeze()
    if args.profile:
        import cProfile

        cProfile.runctx(
            "measure(core, args.sequences, args.steps, args.prompt_len, PARAMS['greedy'])",
            globals(),
            locals(),
            sort="tottime",
        )
        return
    ledger = time_calls(core.scheduler.accounting, "record_step")
    print(f"{args.sequences} sequences, vocabulary {args.vocab}, one thread: microseconds a step")
    for name, params in PARAMS.items():
        times = measure(core, args.sequences, args.steps, args.prompt_len, params)
        low, high = statistics.quantiles(times, n=20)[0], statistics.quantiles(times, n=20)[-1]
        print(f"  {name:14s} median {statistics.median(times):7.0f}   5..95 % {low:.0f}..{high:.0f}")
    print(f"  of which the ledger, median {statistics.median(ledger):.1f}, mean {statistics.fmean(ledger):.1f}")
    print_schedulings(args.steps)


if __name__ == "__main__":
    main()
