"""Adapters beside their base model: what they cost its requests and their own, and traffic of many through few slots.

    python -m benchmarks.adapters [--shapes qwen2.5-0.5b] [--vllm PYTHON] [--llama-cpp PYTHON]

Weights are random. The same sequences decode by turns in an engine without adapters (`off`), in one that serves
adapters but is asked for none (`base`), and with an adapter of each of several (`mixed`). vLLM and llama.cpp run in
processes of their own, with the same adapters. Then requests for many adapters, whose popularity is Zipf's, come at
random times, and the same traffic is simulated.
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

import gguf
import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.gguf_checkpoint import write_gguf
from benchmarks.machine import RESULTS, keep
from benchmarks.processes import Timed
from benchmarks.rounds import Rounds, number, spread
from benchmarks.weights import CHECKPOINTS
from headway import LLM, LoRARequest, SamplingParams
from headway.engine.messages import AddRequest
from headway.models.config import ModelConfig
from headway.models.gguf.names import gguf_name
from headway.models.tensors import expected_tensors
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.ledger import Phase
from headway.policy.step.recording import Arrival, Step
from headway.policy.step.scheduler import Scheduler
from headway.simulator.adapters import AdapterPlan, Adapters
from headway.simulator.learnt import Learnt, steps_of
from headway.simulator.recording import Recording, read_recordings
from headway.simulator.server import NO_LIMITS, NO_TIME, Server
from headway.simulator.traffic import arrival

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

# The same for llama.cpp, which has the adapters of a context for all of a batch, so that it decodes group by group.
_LLAMA = """
import ctypes, json, sys, time
import numpy
import llama_cpp.llama_cpp as lib
path, adapters, prompts, new, threads = json.loads(sys.argv[1])
silent = lib.llama_log_callback(lambda level, text, data: None)
lib.llama_log_set(silent, ctypes.c_void_p(0))
lib.llama_backend_init()
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
loras = [lib.llama_adapter_lora_init(model, each.encode()) for each in adapters]
assert model and all(loras)
params = lib.llama_context_default_params()
params.n_ctx, params.n_seq_max = 512 * len(prompts), len(prompts)
params.n_batch = params.n_ubatch = 2048
params.n_threads = params.n_threads_batch = threads
params.flash_attn_type, params.no_perf = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED, True
context = lib.llama_init_from_model(model, params)
size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
batch = lib.llama_batch_init(2048, 0, 1)

def choose(lora):
    found = [] if lora is None else [lora]
    given, count = (lib.llama_adapter_lora_p_ctypes * len(found))(*found), len(found)
    scales = (ctypes.c_float * count)(*[1.0] * count)
    assert lib.llama_set_adapters_lora(context, given, count, scales) == 0

def decode(rows):
    batch.n_tokens = len(rows)
    for at, (token, position, number, wanted) in enumerate(rows):
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
    assert lib.llama_decode(context, batch) == 0
    return {number: int(numpy.ctypeslib.as_array(lib.llama_get_logits_ith(context, at), (size,)).argmax())
            for at, (_, _, number, wanted) in enumerate(rows) if wanted}

def run(groups):
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    last = {}
    for step in range(new):
        for lora, numbers in groups:
            if len(groups) > 1 or step == 0:
                choose(lora)
            last |= decode([(token, at, number, at == len(prompts[number]) - 1) for number in numbers
                            for at, token in enumerate(prompts[number])] if step == 0 else
                           [(last[number], len(prompts[number]) + step - 1, number, True) for number in numbers])

numbers = range(len(prompts))
mixed = [(lora, [n for n in numbers if n % len(loras) == at]) for at, lora in enumerate(loras)]
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    run(mixed if line.strip() == "mixed" else [(None, list(numbers))])
    print("took", time.perf_counter() - began, flush=True)
"""


def as_gguf(folder: Path) -> Path:
    """An adapter of Qwen2 as a GGUF file in float16, as llama.cpp's converter writes it."""
    path = folder.with_suffix(".gguf")
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((folder / "adapter_config.json").read_text())["lora_alpha"])
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer, _, matrix = name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".lora_")
        writer.add_tensor(f"{gguf_name(layer + '.weight', 'qwen2')[0]}.lora_{matrix.lower()}", tensor.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
                peers: dict[str, Timed] = {}
                of_peers = prompts, new, arguments.threads
                if arguments.vllm and quantization == "none":
                    given = str(model), list(map(str, paths)), *of_peers, arguments.rank
                    peers["vllm"] = Timed(arguments.vllm, _VLLM, *given)
                if arguments.llama_cpp and quantization == "none" and "Qwen2" in SHAPES[shape]["architectures"][0]:
                    files = str(write_gguf(shape, CHECKPOINTS)), [str(as_gguf(path)) for path in paths]
                    peers["llama.cpp"] = Timed(arguments.llama_cpp, _LLAMA, *files, *of_peers)
                for peer in peers.values():
                    stack.callback(peer.close)
                for at in range(-1, arguments.rounds):
                    measured = {}
                    for kind, llm, asked in runs if at % 2 else reversed(runs):
                        took = seconds(llm, prompts, new, asked)
                        measured[kind] = {"tokens_per_s": new * arguments.batch / took}
                    for name_, kind in ((each, kind) for each in peers for kind in ("base", "mixed")):
                        took = peers[name_].seconds(kind)
                        measured[f"{name_} {kind}"] = {"tokens_per_s": new * arguments.batch / took}
                    for kind, values in measured.items() if at >= 0 else ():
                        found.add(f"{shape}, {quantization}", kind, values)


def zipf(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What comes of requests for many adapters through few slots, at random times: measured, and simulated.

    The simulation has learnt how long steps take without adapters (`base`) and with (`learnt`, other traffic), and how
    long a load takes when nothing else runs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_checkpoint("story", folder / "model")
        paths = write_adapters(model, folder, arguments.zipf_adapters, 8, "all")
        options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": 256 << 20, "weight_cache": False}
        options |= {"num_threads": arguments.threads, "load_format": "dummy", "skip_tokenizer_init": True}
        options |= {"record_steps": str(folder / "steps"), "enable_lora": True, "max_loras": 8}
        llm = LLM(str(model), **options, max_cpu_loras=arguments.host_adapters)
        core = llm.engine.core
        adapters, slots = core.adapters, core.scheduler.sequences.slots
        assert adapters is not None and slots is not None
        digests = [adapters.find(str(path)).result().digest for path in paths]
        took = []
        for digest, path in list(zip(digests, paths, strict=True))[:30]:
            began = time.monotonic_ns()
            adapters.fill(digest, str(path), 0).result()
            took.append(time.monotonic_ns() - began)
        draw, results, spans = random.Random(0), dict[str, dict[str, float]](), dict[str, tuple[int, int]]()
        weights = [1 / rank**arguments.exponent for rank in range(1, len(digests) + 1)]
        for kind in ("warm up", "base", "learnt", "zipf"):
            due, dues = 0, []
            for _ in range(20 if kind == "warm up" else arguments.requests):
                due += int(draw.expovariate(arguments.rate) * 1e9)
                dues.append((due, "" if kind == "base" else draw.choices(digests, weights)[0]))
            before, began = list(slots.counts), time.monotonic_ns()
            first, waited = _serve(core, dues, draw)
            spans[kind] = began, time.monotonic_ns()
            results[kind] = _figures(first, waited, [now - old for now, old in zip(slots.counts, before, strict=True)])
        (recording,) = read_recordings(folder / "steps")
        learnt = Learnt.of(steps_of(recording, *spans["base"]))
        step_ns = _adapter_ns(recording, learnt, *spans["learnt"])
        plan = AdapterPlan(1, 1.0, round(statistics.median(took)), round(step_ns))
        config, blocks = core.scheduler.config, core.scheduler.blocks
        scheduler = Scheduler(config, KVBlocks(blocks.num_blocks, blocks.block_size, enable_prefix_caching=True))
        results["simulated"] = _simulated(Server(scheduler, learnt, NO_LIMITS, NO_TIME, None, None), plan, dues)
        results["costs"] = {"load_ms": plan.load_ns / 1e6, "step_ms_of_an_adapter": step_ns / 1e6}
        return results


def _figures(first: list[float], waited: list[float], counts: list[int]) -> dict[str, float]:
    hits, misses, loads = counts
    found = {"ttft_p50_ms": statistics.median(first), "ttft_p99_ms": _p99(first), "queue_adapter_p99_ms": _p99(waited)}
    return found | ({"hit_rate": hits / (hits + misses), "loads": float(loads)} if hits + misses else {})


def _adapter_ns(recording: Recording, learnt: Learnt, began_ns: int, ended_ns: int) -> float:
    """Nanoseconds that each adapter of a step adds to it."""
    steps = steps_of(recording, began_ns, ended_ns)
    took = sum(step.between_ns + step.forward_ns + step.sampling_ns for step in steps)
    adapter = {record.seq_id: record.adapter for record in recording.records if isinstance(record, Arrival)}
    each = [
        len({adapter[item.seq_id] for item in record.items} - {""})
        for record in recording.records
        if isinstance(record, Step) and began_ns <= record.now < ended_ns
    ]
    return max(0.0, took * (1 - 1 / learnt.slower(steps))) / max(1, sum(each))


def _simulated(server: Server, plan: AdapterPlan, dues: list[tuple[int, str]]) -> dict[str, float]:
    server.adapters = Adapters(plan, server.scheduler)
    slots = server.scheduler.sequences.slots
    assert slots is not None
    server.expect(
        arrival(number_, due, 64, 32, sampling={"ignore_eos": True}, adapter=digest)
        for number_, (due, digest) in enumerate(dues)
    )
    server.run()
    first = [(answer.token_ns[0] - answer.arrived_ns) / 1e6 for answer in server.answers]
    waited = [answer.ledger.phases_ns.get(Phase.QUEUE_ADAPTER, 0) / 1e6 for answer in server.answers]
    return _figures(first, waited, slots.counts)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def _serve(core: Any, dues: list[tuple[int, str]], draw: random.Random) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token of each request, and of its wait for a slot."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    arrived: dict[str, int] = {}
    first: dict[str, float] = {}
    waited: list[float] = []
    began = time.monotonic_ns()
    coming = [(number_, (began + due, digest)) for number_, (due, digest) in enumerate(dues)]
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
        "| model, weights | engine | base model, tokens/s | with adapters, unused | mixed |",
        "|---|---|---:|---:|---:|",
    ]
    for load, things in found.values.items():
        for name, first, *others in (
            ("headway", "off", "base", "mixed"),
            ("vllm", "vllm base", "", "vllm mixed"),
            ("llama.cpp", "llama.cpp base", "", "llama.cpp mixed"),
        ):
            if first not in things:
                continue
            cells = [number(found.compared(load, first, "tokens_per_s", first).median)]
            for kind in others:  # by the first one's
                compared = found.compared(load, first, "tokens_per_s", kind) if kind else None
                cells.append(spread(compared.ratio, compared.ratio_low, compared.ratio_high) if compared else "")
            lines.append(f"| {load} | {name} | " + " | ".join(cells) + " |")
    zipf = content["zipf"]
    if zipf:
        names = list(zipf["zipf"])
        lines += ["", f"| traffic | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
        for kind, figures in zipf.items():
            cells = [number(figures[name]) if name in figures else "" for name in names]
            lines += [f"| {kind} | {' | '.join(cells)} |"] if kind not in ("warm up", "costs") else []
        lines += ["", *(f"{name}: {number(value)}" for name, value in zipf["costs"].items())]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="*", default=["story", "qwen2.5-0.5b"])
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8"])
    parser.add_argument("--targets", choices=("all", *TARGETS), default="all")
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python interpreter of an environment with vLLM")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="one with llama-cpp-python; for shapes of Qwen2")
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
