"""The machine that a result is of, and the file that is kept for a machine of its kind."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.files import write_files

RESULTS = Path(__file__).parent / "results"
_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("asimddp", "i8mm", "bf16"),  # extensions of ARM
)
_NO_SETTINGS = (
    "output",
    "before",
    "vllm",
    "traces",
    "llama_cpp",
    "suite",
    "peers",
)  # where something lies, not what is measured
_MARKETING = re.compile(r"\((r|tm)\)|\bprocessor\b|\bcpu\b|@.*")


def about(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Describe this machine: processor, vector instructions that kernels use, cores, system.

    The processor's family and model are given if its name says neither.
    """
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "family": ", ".join(f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields),
        "features": [name for name in _FEATURES if name in flags],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def kind(machine: dict[str, Any]) -> str:
    """A name for its kind of processor, for a file: "Intel(R) Xeon(R) Processor" with AMX is intel-xeon-amx."""
    words = re.findall(r"[a-z0-9]+", _MARKETING.sub(" ", str(machine["processor"]).lower()))
    return "-".join([*words, "amx"] if "amx_int8" in machine.get("features", []) else words)


def own_file(output: Path) -> Path:
    """`output`, or one beside it named after this machine's processor where `output` is of another kind."""
    try:
        theirs, ours = kind(json.loads(output.read_text())["machine"]), kind(about())
    except (OSError, ValueError, KeyError):
        return output
    if theirs == ours:
        return output
    beside = output.with_stem(f"{output.stem}_{ours}")
    print(f"{output} is of another processor, {theirs}; the result goes to {beside}", file=sys.stderr)
    return beside


def save(report: dict[str, Any], output: Path) -> None:
    """Write it whole or not at all; paths in it are shortened."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text, root = json.dumps(report, indent=1), str(RESULTS.parent.parent)
    text = text.replace(f'"{root}"', '"."').replace(f"{root}/", "").replace(str(Path.home()), "~") + "\n"
    write_files({output: text.encode()})


def heading(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a result begins with: when, where, and with which settings it was measured."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about(),
        "settings": {key: str(value) for key, value in vars(arguments).items() if key not in _NO_SETTINGS},
    }


def keep(
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """Measure, save the result in --output of this kind of machine, and print its table."""
    output = own_file(arguments.output)
    content = heading(arguments) | measure(arguments)
    save(content, output)
    print(table(content))
