"""Adapters beside their base model: what they cost its requests and their own, and traffic of many through few slots.

    python -m benchmarks.adapters [--shapes qwen2.5-0.5b] [--vllm PYTHON]

Weights are random. The same sequences decode by turns in an engine without adapters (`off`), in one that serves
adapters but is asked for none (`base`), and with an adapter of each of several (`mixed`). vLLM runs in a process of its
own, with the same adapters. Then requests for many adapters, whose popularity is Zipf's, come at random times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.machine import RESULTS, keep
from benchmarks.processes import Timed
from benchmarks.rounds import Rounds, number, spread
from headway import LLM, LoRARequest, SamplingParams
from headway.engine.messages import AddRequest
from headway.models.config import ModelConfig
from headway.models.tensors import expected_tensors

TARGETS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "query_value": ("q_proj", "v_proj")}
# What the process with vLLM does: for each line with a kind, a run, and a line with its seconds.
_VLLM = """
import json, os, sys, time
folder, adapters, prompts, new, threads, rank = json.loads(sys.argv[1])
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}")
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
llm = LLM(folder, dtype="bfloat16", load_format="dummy", enforce_eager=True, max_model_len=2048, max_num_seqs=64,
          enable_prefix_caching=False, enable_lora=True, max_loras=len(adapters), max_lora_rank=rank)
params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
given = [{"prompt_token_ids": prompt} for prompt in prompts]
asked = [LoRARequest(str(n % len(adapters)), 1 + n % len(adapters), adapters[n % len(adapters)])
         for n in range(len(prompts))]
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    llm.generate(given, params, use_tqdm=False, lora_request=asked if line.strip() == "mixed" else None)
    print("took", time.perf_counter() - began, flush=True)
"""


def write_adapters(model: Path, folder: Path, count: int, rank: int, targets: str) -> list[Path]:
    """Random adapters of all linear layers in a model's layers, or of some."""
    shapes = expected_tensors(ModelConfig.from_folder(model))
    parts = TARGETS.get(targets)
    layers = [
        (name.removesuffix(".weight"), shape)
        for name, shape in shapes.items()
        if "_proj." in name and name.endswith(".weight") and (parts is None or name.split(".")[-2] in parts)
    ]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings["target_modules"] = sorted({name.rpartition(".")[2] for name, _ in layers})
    made = []
    for number_ in range(count):
        generator, tensors = torch.Generator().manual_seed(number_), {}
        for name, (rows, inputs) in layers:
            for matrix, size in (("A", (rank, inputs)), ("B", (rows, rank))):
                values = torch.randn(size, generator=generator) / 100
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values.bfloat16()
        path = folder / str(number_)
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(settings))
        made.append(path)
    return made


def seconds(llm: LLM, prompts: list[list[int]], new_tokens: int, asked: list[LoRARequest | None]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, lora_request=asked)  # type: ignore[arg-type]
    return time.perf_counter() - began


def steady(arguments: argparse.Namespace, found: Rounds) -> None:
    """Add tokens per second of each kind of engine, by turns."""
    new = arguments.new_tokens
    for shape in arguments.shapes:
        for quantization in arguments.quantizations:
            with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
                folder = Path(name)
                model = write_checkpoint(shape, folder / "model")
                paths = write_adapters(model, folder, arguments.adapters, arguments.rank, arguments.targets)
                prompts = [[20 + (at * 7 + row) % 400 for at in range(32)] for row in range(arguments.batch)]
                options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": 256 << 20, "weight_cache": False}
                options |= {"num_threads": arguments.threads, "quantization": quantization, "dtype": "bfloat16"}
                options |= {"load_format": "dummy", "enable_prefix_caching": False, "skip_tokenizer_init": True}
                off = LLM(str(model), **options)
                on = LLM(str(model), **options, enable_lora=True, max_loras=len(paths), max_lora_rank=arguments.rank)
                requests = [LoRARequest(path.name, 1, str(path)) for path in paths]
                mixed: list[LoRARequest | None] = [requests[row % len(paths)] for row in range(arguments.batch)]
                base: list[LoRARequest | None] = [None] * arguments.batch
                runs = [("off", off, base), ("base", on, base), ("mixed", on, mixed)]
                peer = None
                if arguments.vllm and quantization == "none":
                    given = str(model), list(map(str, paths)), prompts, new, arguments.threads, arguments.rank
                    peer = Timed(arguments.vllm, _VLLM, *given)
                    stack.callback(peer.close)
                for at in range(-1, arguments.rounds):
                    measured = {}
                    for kind, llm, asked in runs if at % 2 else reversed(runs):
                        took = seconds(llm, prompts, new, asked)
                        measured[kind] = {"tokens_per_s": new * arguments.batch / took}
                    for kind in ("base", "mixed") if peer is not None else ():
                        assert peer is not None
                        measured[f"vllm {kind}"] = {"tokens_per_s": new * arguments.batch / peer.seconds(kind)}
                    for kind, values in measured.items() if at >= 0 else ():
                        found.add(f"{shape}, {quantization}", kind, values)


def zipf(arguments: argparse.Namespace) -> dict[str, float]:
    """What comes of requests for many adapters through few slots, at random times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_checkpoint("story", folder / "model")
        paths = write_adapters(model, folder, arguments.zipf_adapters, 8, "all")
        options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": 256 << 20, "weight_cache": False}
        options |= {"num_threads": arguments.threads, "load_format": "dummy", "skip_tokenizer_init": True}
        llm = LLM(str(model), **options, enable_lora=True, max_loras=8, max_cpu_loras=arguments.host_adapters)
        core = llm.engine.core
        assert core.adapters is not None
        digests = [core.adapters.find(str(path)).result().digest for path in paths]
        draw, results = random.Random(0), dict[str, float]()
        weights = [1 / rank**arguments.exponent for rank in range(1, len(digests) + 1)]
        for kind in ("warm up", "base", "zipf"):
            due, dues = time.monotonic_ns(), []
            for _ in range(arguments.requests):
                due += int(draw.expovariate(arguments.rate) * 1e9)
                dues.append((due, "" if kind == "base" else draw.choices(digests, weights)[0]))
            dues = dues[:20] if kind == "warm up" else dues
            first, waited = _serve(core, dues, draw)
            results |= {f"{kind}_ttft_p50_ms": statistics.median(first), f"{kind}_ttft_p99_ms": _p99(first)}
            results[f"{kind}_queue_adapter_p50_ms"] = statistics.median(waited)
        slots = core.scheduler.sequences.slots
        assert slots is not None
        hits, misses, loads = slots.counts
        return results | {"hit_rate": hits / (hits + misses), "loads": float(loads), "requests": arguments.requests}


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def _serve(core: Any, dues: list[tuple[int, str]], draw: random.Random) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token of each request, and of its wait for a slot."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    arrived: dict[str, int] = {}
    first: dict[str, float] = {}
    waited: list[float] = []
    coming = list(enumerate(dues))
    while coming or arrived:
        now = time.monotonic_ns()
        while coming and coming[0][1][0] <= now:
            number_, (due, digest) = coming.pop(0)
            prompt = [draw.randrange(8000) for _ in range(64)]
            request = AddRequest(f"{due}-{number_}", prompt, params, [], arrival_ns=due, sent_ns=due, adapter=digest)
            arrived[request.request_id] = due
            core.add(request)
        if not core.has_work:
            time.sleep(max(0, (coming[0][1][0] - time.monotonic_ns()) / 1e9))
            continue
        time.sleep(core.waits_ms / 1000)
        for output in core.advance():
            if output.token_ids:
                first.setdefault(output.request_id, (time.monotonic_ns() - arrived[output.request_id]) / 1e6)
            if output.finish_reason is not None:
                del arrived[output.request_id]
                waited.append(output.timings.phases_ns.get("queue_adapter", 0) / 1e6)
    return list(first.values()), waited


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found = Rounds()
    steady(arguments, found)
    about = {"adapters": arguments.adapters, "rank": arguments.rank, "batch": arguments.batch}
    about["targets"] = arguments.targets
    return {"values": found.values, "zipf": zipf(arguments) if arguments.requests else None, **about}


def table(content: dict[str, Any]) -> str:
    found = Rounds(content["values"])
    lines = [
        "| model, weights | off, tokens/s | base / off | mixed / off | vLLM's base, tokens/s | vLLM's mixed / base |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for load, things in found.values.items():
        cells = [number(found.compared(load, "off", "tokens_per_s", "off").median)]
        for kind, first in (("base", "off"), ("mixed", "off"), ("vllm base", ""), ("vllm mixed", "vllm base")):
            if kind not in things:
                cells.append("")
            elif not first:
                cells.append(number(found.compared(load, kind, "tokens_per_s", kind).median))
            else:  # this one's by the first one's
                compared = found.compared(load, first, "tokens_per_s", kind)
                cells.append(spread(compared.ratio, compared.ratio_low, compared.ratio_high))
        lines.append(f"| {load} | " + " | ".join(cells) + " |")
    zipf = content["zipf"]
    if zipf:
        lines += ["", *(f"{name}: {number(value)}" for name, value in zipf.items())]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="*", default=["story", "qwen2.5-0.5b"])
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8"])
    parser.add_argument("--targets", choices=("all", *TARGETS), default="all")
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python interpreter of an environment with vLLM")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--zipf-adapters", type=int, default=200)
    parser.add_argument("--host-adapters", type=int, default=200)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=300, help="of the traffic with many adapters; 0: none")
    parser.add_argument("--output", type=Path, default=RESULTS / "adapters.json")
    keep(parser.parse_args(argv), measure, table)


if __name__ == "__main__":
    main()
