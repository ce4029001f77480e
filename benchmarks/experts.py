"""What a mixture of experts takes on a CPU beside a dense model whose feed-forward layer is as wide as what is active.

    python -m benchmarks.experts --quantizations none int4

Both models have random weights and the same attention; they take turns, so that neighbours in time are compared. A
decode at batch 1 reads only the experts that its token goes to, so that it should take what the dense model does, and
the router's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES
from benchmarks.machine import RESULTS, about, save
from headway import LLM, SamplingParams

_DENSE = SHAPES["llama-3.2-1b"] | {"num_hidden_layers": 8, "vocab_size": 32768, "rope_scaling": None}
POINTS = {"decode:1": (1, 32, 33), "decode:16": (16, 32, 17), "prefill:512": (1, 512, 1)}  # prompts, tokens, new tokens


def configs(experts: int, per_token: int, width: int) -> dict[str, dict[str, Any]]:
    """The dense model, and the mixture of which as much is active."""
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    }
    dense = _DENSE | {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": per_token * width}
    return {"dense": dense, "mixture": dense | mixture}


def seconds(llm: LLM, prompts: int, tokens: int, new: int, seed: int) -> float:
    """The seconds of a decode step; those of the prompts if `new` is 1."""
    texts = [[(seed * 7919 + i * 104729 + j * 31) % 30000 + 1 for j in range(tokens)] for i in range(prompts)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new)
    first = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    started = time.perf_counter()
    if new == 1:
        llm.generate([{"prompt_token_ids": each} for each in texts], first)
        return time.perf_counter() - started
    llm.generate([{"prompt_token_ids": each} for each in texts], first)  # leaves the prompts in the prefix cache
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": each} for each in texts], first)
    once = time.perf_counter() - started
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": each} for each in texts], params)
    return (time.perf_counter() - started - once) / (new - 1)


def measure(quantization: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    models = {}
    for name, config in configs(args.experts, args.per_token, args.width).items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            models[name] = LLM(
                folder, skip_tokenizer_init=True, load_format="dummy", quantization=quantization, dtype="bfloat16",
                num_threads=args.threads, max_model_len=1024, kv_cache_memory=1 << 28,
            )  # fmt: skip
    rows = []
    for point, (prompts, tokens, new) in POINTS.items():
        took: dict[str, list[float]] = {name: [] for name in models}
        for number in range(args.rounds + 1):  # the first one compiles and warms up
            for name, llm in models.items():
                took[name].append(seconds(llm, prompts, tokens, new, number))
        ratios = [mixture / dense for dense, mixture in zip(took["dense"][1:], took["mixture"][1:], strict=True)]
        row: dict[str, Any] = {"quantization": quantization, "point": point, "ratio": statistics.median(ratios)}
        row |= {"ratio_low": min(ratios), "ratio_high": max(ratios)}
        row |= {f"{name}_s": statistics.median(values[1:]) for name, values in took.items()}
        rows.append(row)
        print(
            f"{quantization:17} {point:12} dense {row['dense_s'] * 1e3:8.2f} ms, "
            f"mixture {row['mixture_s'] * 1e3:8.2f} ms: {row['ratio']:.2f} "
            f"({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "experts.json")
    args = parser.parse_args()
    rows = [row for quantization in args.quantizations for row in measure(quantization, args)]
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    save({"machine": about(), "settings": settings, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
