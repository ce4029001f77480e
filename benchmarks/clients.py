"""Load generators: `headway bench` and `vllm bench serve`, called with the same flags, their result files read."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Died

HEADWAY = [sys.executable, "-m", "headway", "bench"]
_LINES_OF_A_FAILURE = 15


@dataclass(frozen=True)
class Load:
    """What is sent.

    Args:
        label: its name in tables.
        prompts: requests, of `input_len` random tokens each, that ask for `output_len` tokens.
        rate: requests/s, Poisson; None sends as soon as `streams` allows.
        streams: most requests at once; None is an open loop.
        warmups: requests before, which are not counted.
        range_ratio: lengths are drawn evenly from 1 - range_ratio to 1 + range_ratio times these; 0: all are alike.
    """

    label: str
    input_len: int
    output_len: int
    prompts: int
    rate: float | None = None
    streams: int | None = None
    warmups: int = 0
    range_ratio: float = 0.0

    def flags(self) -> list[str]:
        flags = ["--dataset-name", "random", "--ignore-eos", "--num-prompts", str(self.prompts)]
        flags += ["--random-input-len", str(self.input_len), "--random-output-len", str(self.output_len)]
        flags += ["--num-warmups", str(self.warmups)]
        if self.range_ratio:
            flags += ["--random-range-ratio", f"{self.range_ratio:g}"]
        if self.rate is not None:
            flags += ["--request-rate", f"{self.rate:g}"]
        if self.streams is not None:
            flags += ["--max-concurrency", str(self.streams)]
        return flags


def measure(client: list[str], base_url: str, model: str, tokenizer: Path, load: Load, seed: int) -> dict[str, Any]:
    """Run the client to its end; return the keys of its result file.

    A client that ends with an error but saved its results, as with some requests failed, has measured.

    Raises:
        Died: it left no results, or not one request of the run was answered.
    """
    with tempfile.TemporaryDirectory(prefix="bench-client-") as folder:
        file = Path(folder) / "result.json"
        command = [*client, "--backend", "openai", "--base-url", base_url, "--model", model]
        command += ["--tokenizer", str(tokenizer), "--seed", str(seed), *load.flags()]
        command += ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", file.name]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not result.get("completed"):
        said = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES_OF_A_FAILURE:])
        what = "answered none of the requests" if result else "left no results"
        raise Died(f"{base_url} {what} (exit code {done.returncode}):\n{' '.join(command)}\n{said}")
    if not load.range_ratio and result["total_output_tokens"] != result["completed"] * load.output_len:
        correct_counts(result, load.output_len)
    return result


def correct_counts(result: dict[str, Any], output_len: int) -> None:
    """Put right what depends on how many tokens came, where each answer is known to have `output_len`.

    `vllm bench serve` reads `usage` only in a chunk without choices. Of a server that sends it otherwise, it takes the
    tokens of the text instead, which are others than those that were generated.
    """
    tokens = result["completed"] * output_len
    seconds_each = [sum(gaps) / (output_len - 1) for gaps in result["itls"] if gaps]
    result["total_output_tokens"] = tokens
    result["output_throughput"] = tokens / result["duration"]
    result["median_tpot_ms"] = 1e3 * statistics.median(seconds_each)
