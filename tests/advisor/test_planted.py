"""`headway doctor` on live servers with planted faults: each is to be named first, and a healthy server has none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.bundled import bundled_folder
from tests.live.conftest import Served

# The pool has room for one sequence of the longest kind and little more.
CRAMPED = ("--kv-cache-memory", "1500K", "--max-model-len", "512")
LARGE = ("--max-num-batched-tokens", "8192", "--max-prefill-stall-ms", "100000", "--scheduling-policy", "fcfs")
SMALL = ("--max-num-batched-tokens", "16", "--max-num-seqs", "16")


def _with_window(folder: Path) -> tuple[str, ...]:
    file = folder / "classes.toml"
    file.write_text('[[class]]\nname = "chat"\nwindow_ms = [200, 250]\n')
    return "--service-classes", str(file)


def _with_another_draft(folder: Path) -> tuple[str, ...]:
    """A draft model of the same tokenizer whose weights are noise."""
    own = bundled_folder("headway/story-draft")
    for file in own.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    chance = torch.Generator().manual_seed(1)
    noise = {
        name: torch.randn(each.shape, generator=chance).to(each.dtype) * 0.05
        for name, each in load_file(own / "model.safetensors").items()
    }
    save_file(noise, folder / "model.safetensors")
    return "--speculative-config", json.dumps({"method": "draft_model", "model": str(folder)})


# The machine is looked at only where it is what is wrong: that of a test may be busy.
PLANTED: dict[str, tuple[Callable[[Path], tuple[str, ...]], tuple[str, ...]]] = {
    "queue": (lambda _: ("--max-num-seqs", "1"), ("--no-local",)),
    "kv": (lambda _: CRAMPED, ("--no-local",)),
    "prefix": (lambda _: ("--no-enable-prefix-caching",), ("--no-local",)),
    "chunk-large": (lambda _: LARGE, ("--no-local",)),
    "chunk-small": (lambda _: SMALL, ("--no-local",)),
    "window": (_with_window, ("--no-local",)),
    "drafts": (_with_another_draft, ("--no-local",)),
    "threads": (lambda _: ("--threads", "1"), ()),
}


def doctor(url: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, "-m", "headway", "doctor", url, "--json", "--seconds", "90", *arguments],
        capture_output=True,
        text=True,
    )
    assert ran.returncode in (0, 1), ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return ran.returncode, found


def examined(flags: tuple[str, ...], arguments: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    served = Served(*flags)
    try:
        served.until_ready()
        return doctor(served.url, *arguments)
    finally:
        served.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_eight_planted_faults_at_least_seven_are_named_first(tmp_path: Path) -> None:
    named = {}
    for key, (flags, arguments) in PLANTED.items():
        (folder := tmp_path / key).mkdir()
        code, found = examined(flags(folder), arguments)
        named[key] = [each["key"] for each in found["findings"]][:1]
        assert code == 1 or not found["findings"]
    right = sum(found == [key] for key, found in named.items())
    assert right >= 7, named


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_planted_fault_is_named_and_a_healthy_server_has_none(tmp_path: Path, served: Served) -> None:
    code, found = doctor(served.url, "--no-local")
    assert (code, found["findings"]) == (0, []), found
    assert found["kind"] == "headway" and found["figures"]["ttft_crowd_ms"] > 0
    code, found = examined(PLANTED["queue"][0](tmp_path), PLANTED["queue"][1])
    assert code == 1 and found["findings"][0]["key"] == "queue"
    assert found["findings"][0]["changes"] == [{"flag": "--max-num-seqs 32", "where": "Engine", "needs": "restart"}]
