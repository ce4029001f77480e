"""The bundled model in every scheme: perplexity, bytes, and speed, in one table.

    python -m benchmarks.schemes --llama-cpp PYTHON           # perplexity and bytes, at any time
    python -m benchmarks.schemes --speed --llama-cpp PYTHON   # speed, on a quiet machine; it is added to the result

Perplexity is that of texts which the model itself writes: there, the logarithm of a change is the divergence from the
model (Kullback and Leibler). With a TEXT, it is that of windows of it, as of `headway bench quality`. Checkpoints are
made once, in benchmarks/checkpoints/schemes. Without --llama-cpp, which quantises GGUF files, their rows are left
out. For speed, all engines are in one process and take turns: a decode of 384 tokens at batch 1, and 8 prompts of 512
tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.exports import quantized_gguf
from benchmarks.gguf_checkpoint import write_gguf_of
from benchmarks.machine import RESULTS, heading, own_file, save
from benchmarks.weights import CHECKPOINTS
from headway import LLM, SamplingParams
from headway.bundled import NAME, STORY
from headway.kernels.cpu.linear import PackedLinear
from headway.models.decoder import DenseMLP
from headway.models.weights import AttentionWeights
from headway.quantize.calibration import Calibration, windows, written
from headway.quantize.quality import changed, mean_logs, read
from headway.quantize.run import quantize
from headway.quantize.schemes import Recipe
from headway.text.tokenizer import Tokenizer

_FOLDER = CHECKPOINTS / "schemes"
_DECODED, _PROMPTS, _PROMPT = 384, 8, 512
_KV_BYTES = 96 << 20
_SAMPLES, _OWN_SEED = 32, 1_000_000  # number of texts that methods look at; and first seed of the others
_GGUF = ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl")


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        recipe: of `headway quantize`; or
        gguf: the kind of a GGUF file; or
        arguments: of the engine, which rounds while it loads.
        twin: a row of the same size and speed, which is measured in its place.
    """

    label: str
    recipe: Recipe | None = None
    gguf: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    twin: str | None = None

    def model(self, calibration: Calibration, python: str | None) -> str:
        """A checkpoint of it, made where there is none."""
        if self.gguf is not None:
            source = _FOLDER / "bf16.gguf"
            if not source.exists():
                _FOLDER.mkdir(parents=True, exist_ok=True)
                write_gguf_of(json.loads((STORY / "config.json").read_text()), STORY, "story", source)
            return str(source if self.gguf == "bf16" or python is None else quantized_gguf(source, self.gguf, python))
        if self.recipe is None:
            return NAME
        folder = _FOLDER / self.label.replace(" ", "-").lower()
        if not folder.exists():
            quantize(STORY, folder, self.recipe, calibration, lambda done, what: None)
        return str(folder)


def cases(with_gguf: bool) -> Iterator[Case]:
    """All rows, the one that rounds nothing first."""
    yield Case("bfloat16")
    yield Case("int8 KV cache", arguments={"kv_cache_dtype": "int8"})
    for scheme in ("int8", "int8-weight-only", "int4"):
        yield Case(f"--quantization {scheme}", arguments={"quantization": scheme})
    for scheme in ("W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"):
        yield Case(f"{scheme} rtn", Recipe.of(scheme, "rtn", None))
    for scheme in ("W4A16", "W4A16_ASYM"):
        for method in ("rtn", "awq", "gptq"):
            twin = None if method == "rtn" else f"{scheme} g128 rtn"
            yield Case(f"{scheme} g128 {method}", Recipe.of(scheme, method, 128), twin=twin)
    for size in (64, 32):
        yield Case(f"W4A16 g{size} rtn", Recipe.of("W4A16", "rtn", size))
    for method in ("rtn", "gptq"):  # the head as of int4, with which it is packed alike
        plain = Recipe.of("W4A8", method, None)
        yield Case(f"W4A8 {method}", plain, arguments={"quantization": "int4"}, twin="--quantization int4")
    yield from (Case(f"GGUF {kind.upper()}", gguf=kind) for kind in _GGUF if with_gguf)


class _Written(Calibration):
    """What the bundled model writes, once for all recipes."""

    _ids: list[list[int]] | None = None

    def windows(self, folder: Path, longest: int) -> list[list[int]]:
        self._ids = self._ids or super().windows(folder, longest)
        return self._ids


def engine(case: Case, calibration: Calibration, python: str | None, longest: int) -> LLM:
    return LLM(
        case.model(calibration, python),
        device="cpu",
        dtype="bfloat16",
        max_model_len=longest,
        enable_prefix_caching=False,
        kv_cache_memory=_KV_BYTES,
        **case.arguments,
    )


def packed_bytes(llm: LLM) -> int:
    """Bytes of all matrices in memory. The embedding is the same matrix as the head."""
    weights = llm.engine.runner.model.weights
    linears: list[object] = [weights.lm_head]
    for layer in weights.layers:
        assert isinstance(layer.mlp, DenseMLP) and isinstance(layer.mixer, AttentionWeights)
        linears += [layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up, layer.mlp.down]
    return sum(each._packed.nbytes for each in linears if isinstance(each, PackedLinear))


def windows_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Token ids. Raises OSError and ValueError for a text that cannot be read or is too short."""
    if arguments.text is None:
        return written(STORY, arguments.windows, arguments.tokens, _OWN_SEED)
    return windows(Tokenizer.load(STORY), read(arguments.text), arguments.windows, arguments.tokens)


def perplexities(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case. Raises as windows_of()."""
    calibration, plain = _Written(samples=_SAMPLES), None
    prompts = windows_of(arguments)
    for case in cases(arguments.llama_cpp is not None):
        llm = engine(case, calibration, arguments.llama_cpp, arguments.tokens + 1)
        logs = mean_logs(llm, prompts)
        plain = plain or logs
        change, error = changed(logs, plain)
        size = packed_bytes(llm)
        del llm
        gc.collect()
        values = {"perplexity": math.exp(-statistics.fmean(logs)), "change": change, "standard_error": error}
        yield {"label": case.label, "bytes": size, **values}


def speeds(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by row, of each round."""
    wanted = [case for case in cases(arguments.llama_cpp is not None) if case.twin is None]
    engines = {case.label: engine(case, _Written(), arguments.llama_cpp, 1024) for case in wanted}
    found: dict[str, dict[str, list[float]]] = {label: {"decode": [], "prefill": []} for label in engines}
    for number in range(arguments.rounds + 1):
        order = list(engines)
        for label in order[number % len(order) :] + order[: number % len(order)]:
            prompts = [
                [(number * 7919 + which * 131 + place * 17) % 8000 + 3 for place in range(_PROMPT)]
                for which in range(_PROMPTS)
            ]
            decode = _seconds(engines[label], prompts[:1], _DECODED + 1) - _seconds(engines[label], prompts[:1], 1)
            prefill = _seconds(engines[label], prompts, 1)
            if number:  # the first round is thrown away
                found[label]["decode"].append(_DECODED / decode)
                found[label]["prefill"].append(_PROMPTS * _PROMPT / prefill)
    return found


def _seconds(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return time.perf_counter() - began


def table(report: dict[str, Any]) -> str:
    """The rows of a result, in Markdown."""
    lines = ["| weights | MB | perplexity | | decode | prefill |", "|---|---:|---:|---:|---:|---:|"]
    twins = {case.label: case.twin for case in cases(True)}
    for each in report["rows"]:
        label = each["label"]
        speed = report.get("speed", {}).get(twins.get(label) or label, {})
        rates = [f"{statistics.median(speed[kind]):,.0f}" if speed.get(kind) else "" for kind in ("decode", "prefill")]
        change = f"{each['change']:+.2%} ± {each['standard_error']:.2%}" if each["change"] else ""
        cells = [label, f"{each['bytes'] / 1e6:.1f}", f"{each['perplexity']:.2f}", change, *rates]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schemes", description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?", help="UTF-8, .gz too; default: what the model writes")
    parser.add_argument("--speed", action="store_true", help="measure speed, and add it to the result")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python with llama-cpp-python")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "schemes.json")
    arguments = parser.parse_args(argv)
    output = own_file(arguments.output)
    report = json.loads(output.read_text()) if output.exists() else {}
    try:
        if arguments.speed:
            if "rows" not in report:
                parser.error(f"{output} has no perplexities yet; leave --speed out first")
            report["speed"] = speeds(arguments)
        else:
            report = heading(arguments) | {"rows": list(perplexities(arguments))} | {"speed": report.get("speed", {})}
    except (OSError, ValueError) as error:
        print(f"schemes: {error}", file=sys.stderr)
        sys.exit(2)
    save(report, output)
    print(table(report))


if __name__ == "__main__":
    main()
