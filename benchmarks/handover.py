"""Prompts on a server of their own beside prompts between streams, with as many threads in all.

    python -m benchmarks.handover [--rounds 3] [--seconds 25] [--load 1.0]
    python -m benchmarks.handover --alone [--before CHECKOUT] [--rounds 9]

The contestants are the same behind the same gateway: one server with all threads, which chunks prompts; two with half
of them each, which both do everything (`never`); and a server for prompts and one for tokens, where all prompts are
handed over (`always`) or those for which it pays (`auto`). All run at once and are stopped but while they are measured.
Each gets the mix in turn in each round: chats that are judged by TTFT and ITL, and documents that are long prompts.

With --alone, single prompts are sent while nothing else runs, and the table says what of their TTFT the handover takes:
beside one server for prompts and one for tokens, as they are, and as they are in another checkout, by turns.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.classes import GOODPUT, figures
from benchmarks.clients import HEADWAY
from benchmarks.machine import RESULTS, about, heading, own_file, save
from benchmarks.processes import ROOT, environment
from benchmarks.servers import CHECKPOINTS, MODEL
from benchmarks.weights import write_weights
from headway.bench.results import load_json

MIX = Path(__file__).parent / "mixes" / "handover.toml"
ONE, NEVER, ALWAYS, AUTO = CONTESTANTS = ("one", "never", "always", "auto")
LENGTHS, PARTS = (512, 1024, 2048, 4096, 6144), {"computed": "prefill_compute", "transfer": "kv_transfer"}
KEYS = ("ttft", "itl", GOODPUT, f"{GOODPUT} chat", f"{GOODPUT} document", "failed")


def up_file(contestant: str, shape: str, threads: int, context: int) -> str:
    """The file of `headway up`."""
    model = write_weights(shape, CHECKPOINTS)
    roles = [""] if contestant == ONE else ["prefill", "decode"]
    flags = f'max-model-len = {context}, kv-cache-memory = "1G", threads = {threads // len(roles)}'
    text = "" if contestant == ONE else f'handover = "{contestant}"\n'
    for number, role in enumerate(roles):
        text += f'[[server]]\nname = "{number}"\nserved_model_name = "{MODEL}"\nmodel = "{model}"\n'
        text += f"flags = {{ {flags} }}\n" + (f'role = "{role}"\n' if role else "")
    return text


@contextmanager
def running(
    contestant: str, arguments: argparse.Namespace, folder: Path, root: Path = ROOT
) -> Iterator[tuple[str, psutil.Process]]:
    """Start a gateway and its servers of a checkout; gives its URL, and stops all of them once they are ready."""
    folder /= root.name
    folder.mkdir(exist_ok=True)
    file = folder / f"{contestant}.toml"
    file.write_text(up_file(contestant, arguments.shape, arguments.threads, arguments.context))
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{trial.getsockname()[1]}"
    command = [sys.executable, "-m", "headway", "up", str(file), "--host=127.0.0.1", f"--port={url.rpartition(':')[2]}"]
    command.append(f"--log-dir={folder / contestant}")
    with (folder / f"{contestant}.log").open("w") as log:
        own = environment(root)
        process = psutil.Popen(command, env=own, cwd=root, stdout=log, stderr=log, start_new_session=True)
    try:
        backends, until = 1 if contestant == ONE else 2, time.monotonic() + 120
        while (ready := _ready(url)) < backends:
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(f"{contestant}: {ready} of {backends} servers are ready; see {folder}")
            time.sleep(0.2)
        yield url, process
    finally:
        for each in [process, *process.children(recursive=True)]:
            each.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _ready(url: str) -> int:
    try:
        told = httpx.get(f"{url}/metrics").text.splitlines()
    except httpx.HTTPError:
        return 0
    return sum("backend_state" in line and 'state="closed"' in line and line.endswith(" 1.0") for line in told)


@contextmanager
def awake(process: psutil.Process) -> Iterator[None]:
    own = [process, *process.children(recursive=True)]
    for each in own:
        each.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        for each in own:
            each.send_signal(signal.SIGSTOP)


def measure(url: str, process: psutil.Process, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """One run of the mix at one contestant, whose processes run meanwhile."""
    with awake(process), tempfile.TemporaryDirectory(prefix="handover-") as folder:
        command = [*HEADWAY, "--base-url", url, "--model", MODEL, "--mix", str(MIX), "--seed", str(seed)]
        command += ["--duration", str(arguments.seconds), "--time-scale", str(arguments.load)]
        command += ["--tokenizer", str(CHECKPOINTS / arguments.shape)]
        command += ["--result-dir", folder, "--result-filename", "result.json"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if not (Path(folder) / "result.json").exists():
            raise SystemExit("\n".join((done.stdout + done.stderr).splitlines()[-15:]))
        return figures(load_json(Path(folder) / "result.json"), arguments.seconds)


def one(url: str, process: psutil.Process, prompt: list[int]) -> dict[str, float]:
    """Milliseconds of a single prompt: until its first token, for computing it, on its way, and for all else."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "include_timings": True}
    with awake(process):
        timings = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()["timings"]
    phases = timings["phases_ns"]
    found = {key: phases.get(phase, 0) / 1e6 for key, phase in PARTS.items()}
    return {"ttft": timings["ttft_ns"] / 1e6, **found, "rest": timings["ttft_ns"] / 1e6 - sum(found.values())}


def alone(arguments: argparse.Namespace) -> dict[str, dict[int, list[dict[str, float]]]]:
    """Single prompts by contestant and length."""
    drawn = random.Random(0)
    roots = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    found: dict[str, dict[int, list[dict[str, float]]]] = {name: {size: [] for size in LENGTHS} for name in roots}
    with tempfile.TemporaryDirectory(prefix="handover-") as name, ExitStack() as stack:
        servers = {
            each: stack.enter_context(running(ALWAYS, arguments, Path(name), root)) for each, root in roots.items()
        }
        for number in range(arguments.rounds + 1):
            for size in LENGTHS:
                prompt = [drawn.randrange(5, 200) for _ in range(size)]
                for each in list(roots)[:: 1 if number % 2 else -1]:
                    measured = one(*servers[each], prompt)
                    if number:  # the first round warms up
                        found[each][size].append(measured)
    return found


def table_alone(found: dict[str, dict[int, list[dict[str, float]]]]) -> str:
    """Markdown: the median over the rounds, with the quartiles."""
    titles = ("TTFT, ms", "prompt computed", "`kv_transfer`", "all else")
    lines = [f"| prompt | | {' | '.join(titles)} |", "|---:|---" + "|---:" * len(titles) + "|"]
    for size in LENGTHS:
        for name, values in found.items():
            cells = []
            for key in ("ttft", *PARTS, "rest"):
                low, middle, high = statistics.quantiles([each[key] for each in values[size]], n=4, method="inclusive")
                cells.append(f"{middle:.3g} ({low:.3g} to {high:.3g})")
            lines.append(f"| {size:,} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: the median over the rounds, with the least and the most."""
    titles = ("TTFT P99 of chats, ms", "their ITL P99, ms", "goodput, requests/s", "of chats", "of documents", "failed")
    lines = [f"| | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for name, values in rounds.items():
        cells = []
        for key in KEYS:
            found = [each[key] for each in values]
            cells.append(f"{statistics.median(found):.3g} ({min(found):.3g} to {max(found):.3g})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--load", type=float, default=1.0, help="how much quicker than in the mix requests come")
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--output", type=Path, default=RESULTS / "handover.json")
    parser.add_argument("--alone", action="store_true", help="single prompts")
    parser.add_argument("--before", type=Path, help="with --alone: another checkout, which takes turns with this one")
    arguments = parser.parse_args(argv)
    if arguments.alone:
        found = alone(arguments)
        print(table_alone(found))
        return save(heading(arguments) | {"alone": found}, own_file(arguments.output.with_stem("handover_alone")))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="handover-") as name, ExitStack() as stack:
        servers = {}
        for each in CONTESTANTS:
            servers[each] = stack.enter_context(running(each, arguments, Path(name)))
            measure(*servers[each], argparse.Namespace(**vars(arguments) | {"seconds": 5.0}), 0)  # to learn from
        for number in range(1, arguments.rounds + 1):
            for each in CONTESTANTS[number % 4 :] + CONTESTANTS[: number % 4]:
                rounds[each].append(measure(*servers[each], arguments, number))
    print(table(rounds))
    settings: dict[str, Any] = {key: str(value) for key, value in vars(arguments).items() if key != "output"}
    result = {"machine": about(), "settings": settings, "mix": MIX.read_text(), "rounds": rounds}
    save(result, own_file(arguments.output))


if __name__ == "__main__":
    main()
