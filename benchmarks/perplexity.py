"""What rounding of weights and of the KV cache costs in perplexity, on a text and a checkpoint of one's own.

    python -m benchmarks.perplexity MODEL TEXT [--windows 32] [--tokens 1024]

Windows of so many tokens are taken from places evenly spread over the text (UTF-8, .gz too). Every token of a window
but the first is predicted from those before it, whose keys and values are read from the cache. All settings see the
same windows, so the change of the mean logarithm is that of pairs, and its standard error is given.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headway import LLM, SamplingParams
from headway.files import write_files
from headway.kernels.interface import KV_CACHE_DTYPES
from headway.kernels.weights import QUANTIZATIONS
from headway.quantize.calibration import windows

_RESULTS = Path(__file__).parent / "results" / "perplexity.json"


@dataclass(frozen=True)
class Row:
    """One setting.

    Args:
        perplexity: over all windows.
        change: relative to the first setting, which rounds nothing.
        standard_error: of `change`, over windows.
    """

    quantization: str
    kv_cache_dtype: str
    perplexity: float
    change: float
    standard_error: float


def row(quantization: str, kv_cache_dtype: str, logs: list[float], plain: list[float]) -> Row:
    """Make a row from mean log-probabilities by window and those of the plain setting. Needs at least two windows."""
    worse = [before - now for before, now in zip(plain, logs, strict=True)]
    change = math.expm1(statistics.fmean(worse))
    error = (1 + change) * statistics.stdev(worse) / math.sqrt(len(worse))
    return Row(quantization, kv_cache_dtype, math.exp(-statistics.fmean(logs)), change, error)


def mean_logs(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """The mean log-probability of each prompt's tokens after its first."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    means = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params):
        assert output.prompt_logprobs is not None
        means.append(statistics.fmean(entry.logprob for entry in output.prompt_logprobs if entry is not None))
    return means


def measure(model: str, text: str, count: int, tokens: int, dtype: str) -> Iterator[Row]:
    """Every scheme of weights, with every kind of cache. Raises ValueError as LLM and windows()."""
    prompts, plain = None, None
    for quantization in QUANTIZATIONS:
        for kv_cache_dtype in KV_CACHE_DTYPES:
            llm = LLM(
                model,
                device="cpu",
                dtype=dtype,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                max_model_len=tokens + 1,
                enable_prefix_caching=False,
                kv_cache_memory=1 << 30,
            )
            assert llm.tokenizer is not None
            prompts = prompts or windows(llm.tokenizer, text, count, tokens)
            logs = mean_logs(llm, prompts)
            plain = plain or logs
            yield row(quantization, kv_cache_dtype, logs, plain)
            del llm
            gc.collect()


def read(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perplexity", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("text", type=Path, help="UTF-8, .gz too")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    if arguments.windows < 2 or arguments.tokens < 2:
        parser.error("--windows and --tokens must be at least 2")
    rows: list[Row] = []
    try:
        text = read(arguments.text)
        print("| weights | cache | perplexity | change |\n|---|---|---:|---:|")
        for each in measure(arguments.model, text, arguments.windows, arguments.tokens, arguments.dtype):
            change = f"{each.change:+.2%} ± {each.standard_error:.2%}" if rows else ""
            print(f"| `{each.quantization}` | {each.kv_cache_dtype} | {each.perplexity:.3f} | {change} |", flush=True)
            rows.append(each)
    except (OSError, ValueError) as error:
        print(f"perplexity: {error}", file=sys.stderr)
        sys.exit(2)
    settings = {"model": Path(arguments.model).name, "windows": arguments.windows, "tokens": arguments.tokens}
    content = {**settings, "dtype": arguments.dtype, "rows": [asdict(each) for each in rows]}
    write_files({arguments.output: (json.dumps(content, indent=1) + "\n").encode()})


if __name__ == "__main__":
    main()
