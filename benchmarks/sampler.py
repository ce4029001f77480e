"""Microseconds of a sampler step, by vocabulary, batch and parameters.

    python -m benchmarks.sampler [--device cuda] [--tensors] [--threads 2] [--steps 30]

The batch stays the same and its sequences grow by a token a step, as in decoding. `flat` has logits of a
model with random weights, whose nucleus is tens of thousands of tokens wide: the worst case for top_p.
`host` is the same greedy step with a vocabulary of 128: what is left is bookkeeping.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from headway.engine.sampler import Sampler
from headway.kernels import kernels_for
from headway.kernels.interface import Draw
from headway.policy.step.plan import SequenceState
from headway.policy.step.sampling_params import SamplingParams

CASES: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_k + top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p": {"temperature": 0.6, "top_p": 0.9},
    "top_p, flat": {"top_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


def peaked_logits(rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Logits whose sorted probabilities fall as a power law of the rank, as those of a trained model do."""
    order = torch.argsort(torch.rand(rows, vocab_size), -1)
    return (-1.7 * torch.log1p(order.float())).bfloat16().to(device)


def microseconds(
    draw: Draw | None, params: SamplingParams, logits: torch.Tensor, prompt_len: int, steps: int
) -> tuple[float, float]:
    """(best, median) of a step; where they are far apart, something else wanted the processor."""
    rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, logits.device, draw)
    sequences = []
    for index in range(rows):
        prompt = torch.randint(vocab_size, (prompt_len,)).tolist()
        sequences.append(SequenceState(index, params, index, frozenset(), prompt_len, prompt, []))
    times = []
    for _ in range(steps + 3):
        began = time.perf_counter_ns()
        sampled = sampler.sample(logits, sequences)
        times.append((time.perf_counter_ns() - began) / 1000)
        for sequence, token in zip(sequences, sampled.token_ids, strict=True):
            sequence.tokens.append(token)
    times = times[3:]
    return min(times), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensors", action="store_true", help="draw without the device's kernel")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    draw = None if args.tensors else kernels_for(args.device, torch.bfloat16).draw
    print(f"torch {torch.__version__}, {args.device}, {args.threads} threads; best / median µs a step")
    print(f"{'':16}{'V':>8}" + "".join(f"{f'B={rows}':>20}" for rows in (1, 16, 64)))
    for vocab_size in (128, 8192, 151936):
        for name, values in CASES.items():
            if vocab_size == 128 and name != "greedy":
                continue
            cells = []
            for rows in (1, 16, 64):
                flat = torch.randn(rows, vocab_size).bfloat16().to(device)
                logits = flat if "flat" in name else peaked_logits(rows, vocab_size, device)
                params = SamplingParams(**values)  # type: ignore[arg-type]
                best, median = microseconds(draw, params, logits, 512, args.steps)
                cells.append(f"{best:.0f} / {median:.0f}")
            label = "host" if vocab_size == 128 else name
            print(f"{label:16}{vocab_size:>8}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
