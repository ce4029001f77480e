"""One request at a time, stage by stage, for each model: what `headway bench profile` measures, in one table.

Loading, input, prefill, decode, output, memory, and what could be won. Weights are random, so that what is read from
storage is not among it. A model that the engine cannot run is left out by name, with the engine's reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.gpu.part import Machine, Row, Skipped, Tasks
from headway.cost.catalogue import find_model
from headway.models.config import ModelConfig

MODELS = ("qwen2.5-7b", "deepseek-r1-distill-qwen-7b", "gpt-oss-20b")
PROMPTS = "16,64,128,256,400"


def tasks(machine: Machine) -> Tasks:
    """One for each model."""
    return {name: partial(_profile, machine, name) for name in (("tiny", MODELS[-1]) if machine.small else MODELS)}


def _profile(machine: Machine, name: str) -> Iterable[Row]:
    """Raises Skipped where the engine does not run such a model."""
    config = SHAPES[name] if name in SHAPES else dict(find_model(name).config)
    try:
        ModelConfig.from_dict(config, name)
    except ValueError as error:
        raise Skipped(str(error)) from None
    folder = write_checkpoint(name, machine.folder, config)
    command = [sys.executable, "-m", "headway", "bench", "profile", str(folder), "--load-format", "dummy"]
    command += ["--dtype", "bfloat16", "--device", machine.device, "--max-model-len", "2048", "--repeats", "3"]
    command += ["--result-dir", str(machine.folder), "--result-name", f"profile-{name}"]
    command += ["--prompt-lens", "8,16" if machine.small else PROMPTS]
    if machine.small:
        command += ["--threads", "1", "--kv-cache-memory", "16M", "--output-len", "4"]
    if machine.peaks is not None:
        peaks = machine.folder / "peaks.json"
        peaks.write_text(json.dumps(machine.peaks))
        command += ["--calibration", str(peaks)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    result = machine.folder / f"profile-{name}" / "profile.json"
    if not result.exists():
        raise RuntimeError(f"headway bench profile ended with exit code {done.returncode} and left no result")
    yield row(json.loads(result.read_text()))


def row(profile: dict[str, Any]) -> Row:
    """The row of the table for a whole profile."""
    return {
        "model": Path(profile["model"]["name"]).name,
        "parameters": profile["model"]["parameters"],
        "loading_s": profile["model_loading"]["engine_s"],
        "ready_s": profile["model_loading"]["ready_s"],
        "lengths": [
            {
                "prompt": each["prompt_tokens"],
                "output": each["output_tokens"],
                "stages_ms": each["stages_ms"],
                "medians_ms": each["medians_ms"],
                "decode_step_ms": (each["decode_step"] or {}).get("measured_ms"),
                "decode_share": (each["decode_step"] or {}).get("share"),
                "prefill_share": (each["prefill"] or {}).get("share"),
                "memory": profile["memory"][str(each["asked_tokens"])],
                "opportunities": profile["opportunities"].get(str(each["asked_tokens"]), []),
            }
            for each in profile["prompt_lengths"]
        ],
        "notes": profile["notes"],
    }
