"""What is here: the GPU, its driver, torch, Triton, the packages that are missing; and one line where it does not do.

python -m benchmarks.gpu.environment     prints it as JSON, from a process of its own that imports torch
"""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

# What every part imports, by way of the engine.
NEEDED = ("torch", "triton", "numpy", "msgspec", "numba", "safetensors", "tokenizers")
LEAST_BYTES = 8 * 2**30
_INSTALL = "install them for this Python; where there is no network, carry them as wheels (pip download)"


class NotHere(Exception):
    """Nothing can be measured here. One line says why and what to do."""


def look(packages: tuple[str, ...]) -> dict[str, Any]:
    """What `collect` returns, from another process of this Python, so that this one leaves the GPU alone."""
    command = [sys.executable, "-m", "benchmarks.gpu.environment", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NotHere(f"torch cannot be looked at with {sys.executable}: {last}") from None
    return found


def check(found: dict[str, Any]) -> None:
    """Check that everything is here that a measurement needs. Raises NotHere."""
    python = found["python"]["executable"]
    if missing := [name for name in found["missing"] if name in NEEDED]:
        raise NotHere(f"{python} has no {', '.join(missing)}: {_INSTALL}, or name another Python with PYTHON=")
    for name in ("torch", "triton"):
        if problem := found["problems"].get(name):
            raise NotHere(f"{name} cannot be imported by {python}: {problem}")
    if not found["torch"].get("cuda"):
        raise NotHere(
            f"torch {found['torch']['version']} of {python} is built without CUDA: install a CUDA build of it, or name "
            "a Python that has one with PYTHON="
        )
    if not found["gpus"]:
        raise NotHere("torch finds no CUDA GPU: run this on a machine with one, and see that nvidia-smi shows it")
    gpu = found["gpus"][0]
    if gpu["free_bytes"] < LEAST_BYTES:
        raise NotHere(
            f"{gpu['name']} has {gpu['free_bytes'] / 2**30:.1f} GiB free of {gpu['total_bytes'] / 2**30:.1f}; it takes "
            f"{LEAST_BYTES / 2**30:.0f}: end what else uses it, or choose another with CUDA_VISIBLE_DEVICES"
        )


def collect(packages: list[str]) -> dict[str, Any]:
    """Find out what is here: Python, its packages, torch, Triton, the driver and the GPUs."""
    found: dict[str, Any] = {
        "python": {"executable": sys.executable, "version": platform.python_version()},
        "missing": [name for name in packages if find_spec(name) is None],
        "problems": {},
        "torch": {},
        "triton": None,
        "driver": _driver(),
        "gpus": [],
    }
    for name in ("torch", "triton"):
        if name in found["missing"]:
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:
            found["problems"][name] = " ".join(f"{type(error).__name__}: {error}".split())
            continue
        if name == "triton":
            found["triton"] = module.__version__
        else:
            found["torch"] = {"version": str(module.__version__), "cuda": module.version.cuda}
            found["gpus"] = _gpus(module)
    return found


def _gpus(torch: Any) -> list[dict[str, Any]]:
    """The GPUs that torch sees."""
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": about.name,
                "capability": f"{about.major}.{about.minor}",
                "multiprocessors": about.multi_processor_count,
                "l2_bytes": getattr(about, "L2_cache_size", None),
                "free_bytes": free,
                "total_bytes": total,
            }
        )
    return gpus


def _driver() -> str | None:
    """The version of the driver by nvidia-smi; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return words[0] if done.returncode == 0 and words else None


if __name__ == "__main__":
    print(json.dumps(collect(sys.argv[1:])))
