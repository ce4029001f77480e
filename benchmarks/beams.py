"""Beam search: steps per second beside as many plain sequences and beside vLLM, and the KV blocks that beams take.

    python -m benchmarks.beams [--shapes story qwen2.5-0.5b] [--widths 2 4 8] [--vllm PYTHON]

Weights are random, and the end token does not end a text, so each search takes as many steps as it may. Beside it
stand as many greedy sequences of the same prompt: they compute the same rows, and choose and copy nothing. `naive` is
how many blocks as many copies of the longest text would take. vLLM runs in a process of its own, by turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.machine import RESULTS, keep
from benchmarks.processes import Timed
from benchmarks.rounds import Rounds, number, spread
from headway import LLM, BeamSearchParams, SamplingParams
from headway.bundled import STORY

_BLOCK = 16
_LONGEST = 2048
# What the process with vLLM does: for each line with a width, a search, and a line with its seconds.
_VLLM = """
import json, os, sys, time
folder, prompt, new, threads = json.loads(sys.argv[1])
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}")
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM
from vllm.sampling_params import BeamSearchParams
llm = LLM(folder, dtype="bfloat16", load_format="dummy", enforce_eager=True, max_model_len=2048, max_num_seqs=64,
          enable_prefix_caching=True, max_logprobs=128)
print("ready", flush=True)
for line in sys.stdin:
    params = BeamSearchParams(beam_width=int(line), max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    llm.beam_search([{"prompt_token_ids": prompt}], params)
    print("took", time.perf_counter() - began, flush=True)
"""


def search(llm: LLM, prompt: list[int], width: int, new_tokens: int) -> tuple[float, int]:
    """The seconds of a search, and the most blocks that were in use."""
    core, most = llm.engine.core, 0
    advance = core.advance

    def watched() -> Any:
        nonlocal most
        outputs = advance()
        most = max(most, core.scheduler.blocks.num_blocks - core.scheduler.blocks.num_free)
        return outputs

    core.advance = watched  # type: ignore[method-assign]
    try:
        began = time.perf_counter()
        llm.beam_search([prompt], BeamSearchParams(width, new_tokens, ignore_eos=True))
        return time.perf_counter() - began, most
    finally:
        core.advance = advance  # type: ignore[method-assign]


def plain(llm: LLM, prompt: list[int], width: int, new_tokens: int) -> float:
    """The seconds of as many greedy sequences."""
    params = SamplingParams(n=width, temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([prompt], params)
    return time.perf_counter() - began


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found, new = Rounds(), arguments.new_tokens
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            path = STORY if shape == "story" else write_checkpoint(shape, Path(folder) / "model")
            prompt = [20 + at % 1000 for at in range(arguments.prompt_tokens)]
            options: dict[str, Any] = {"max_model_len": min(_LONGEST, 1024 if shape == "story" else _LONGEST)}
            options |= {"kv_cache_memory": 1 << 30, "num_threads": arguments.threads, "weight_cache": False}
            llm = LLM(str(path), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", **options)
            peer = None
            if arguments.vllm and shape != "story":
                peer = Timed(arguments.vllm, _VLLM, str(path), prompt, new, arguments.threads)
                stack.callback(peer.close)
            for width in arguments.widths:
                for at in range(-1, arguments.rounds):
                    seconds, blocks = search(llm, prompt, width, new)
                    measured = {"beams": {"steps_per_s": new / seconds, "blocks": float(blocks)}}
                    measured["plain"] = {"steps_per_s": new / plain(llm, prompt, width, new)}
                    if peer is not None:
                        measured["vllm"] = {"steps_per_s": new / peer.seconds(width)}
                    for name, each in measured.items() if at >= 0 else ():
                        found.add(f"{shape}, {width}", name, each)
    naive = {str(width): width * -(-(arguments.prompt_tokens + new) // _BLOCK) for width in arguments.widths}
    return {"values": found.values, "naive_blocks": naive}


def table(content: dict[str, Any]) -> str:
    found = Rounds(content["values"])
    lines = [
        "| model, beams | steps/s | beams / plain | beams / vLLM | blocks | naive |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for load, things in found.values.items():
        ours = found.compared(load, "beams", "steps_per_s", "beams")
        ratios = []
        for name in ("plain", "vllm"):
            compared = found.compared(load, name, "steps_per_s", "beams") if name in things else None
            ratios.append("" if compared is None else spread(compared.ratio, compared.ratio_low, compared.ratio_high))
        blocks, naive = max(things["beams"]["blocks"]), content["naive_blocks"][load.split(", ")[1]]
        lines.append(f"| {load} | {number(ours.median)} | {ratios[0]} | {ratios[1]} | {blocks:.0f} | {naive} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("story", *SHAPES), nargs="+", default=["story", "qwen2.5-0.5b"])
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python interpreter of an environment with vLLM")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "beams.json")
    keep(parser.parse_args(argv), measure, table)


if __name__ == "__main__":
    main()
