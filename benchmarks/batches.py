"""What a batch takes from those who wait, and what a long conversation's next turn takes to tokenize.

    python -m benchmarks.batches

Interactive requests come at a fixed rate, alone and with a batch of offline requests behind them, in turns. The
figures: their goodput with and without, and the batch's tokens/s beside what the engine's idle time was worth (its
tokens/s alone, times the share of time without a step). Then 64 long texts arrive together for the tokenizer alone
while streams run, and a conversation of 32k tokens has its next turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, keep
from benchmarks.overload import put
from benchmarks.servers import CHECKPOINTS, MODEL, Server, Settings, running
from benchmarks.weights import write_weights
from headway.load.measures.slo import missed_objectives
from headway.text.tokenizer import Tokenizer

OBJECTIVES = {"interactive": {"ttft": 1000.0, "tpot": 100.0}}
MIX = """[[class]]
name = "interactive"
service_class = "interactive"
request_rate = {rate}
input_len = "lognormal:mean=200,cv=0.8,min=16,max=1000"
output_len = "lognormal:mean=48,cv=0.6,min=8,max=160"
goodput = {{ ttft = 1000, tpot = 100 }}
"""
TEMPLATE = "{% for m in messages %}<|end|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}<|end|>assistant:"
# The checkpoint's tokenizer has a token for each character of such words.
CHARS_OF_8K, CHARS_OF_32K, CROWD, STREAMS = 8192, 32_768 - 2048, 64, 4
WORDS = "the quick brown fox jumps over a lazy dog while we count tokens and wait for nothing at all".split()  # noqa: SIM905


@dataclass(frozen=True)
class Figures:
    """Figures of one stretch of the run. Tokens are those generated.

    Args:
        goodput: interactive requests a second that kept their objectives.
        interactive, offline: tokens a second.
        busy: share of time with a step in the engine.
    """

    goodput: float
    met: float
    interactive: float
    offline: float
    busy: float


def ask(url: str, path: str, body: Any = None, method: str | None = None, kind: str = "application/json") -> Any:
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, content, {"content-type": kind}, method=method)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.loads(reply.read())


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    found = re.search(rf"^headway:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def begin_batch(url: str, requests: int, seed: int) -> str:
    """Upload a file of requests and begin its batch; its id."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(requests):
        prompt = draw.integers(1000, 30_000, int(draw.integers(100, 400))).tolist()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "ignore_eos": True}
        rows.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    part = '--b\r\ncontent-disposition: form-data; name="{}"{}\r\n\r\n'
    content = part.format("purpose", "").encode() + b"batch\r\n" + part.format("file", '; filename="f"').encode()
    content += b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b"\r\n--b--\r\n"
    file = ask(url, "/v1/files", content, "POST", "multipart/form-data; boundary=b")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    begun: str = ask(url, "/v1/batches", asked)["id"]
    return begun


def tokens_of(url: str, batch: str) -> tuple[int, int]:
    """Tokens that a batch has generated, and its requests that were answered."""
    found = ask(url, f"/v1/batches/{batch}")
    return found["usage"]["output_tokens"], found["request_counts"]["completed"]


class Watch:
    """Notes every half second what a server has done, until it is left.

    Args:
        batch: whose tokens are noted; None for none.
    """

    def __init__(self, url: str, batch: str | None) -> None:
        self._url, self._batch = url, batch
        self._rows: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._note)

    def _note(self) -> None:
        while True:
            tokens = tokens_of(self._url, self._batch)[0] if self._batch else 0
            self._rows.append((time.monotonic(), tokens, metric(self._url, "step_duration_seconds_sum")))
            if self._stop.wait(0.5):
                return

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def rates(self, began: float, ended: float) -> tuple[float, float]:
        """Tokens of the batch a second, and seconds of steps a second, between two times."""
        times, *columns = np.array(self._rows).T
        at = [np.interp([began, ended], times, column) for column in columns]
        tokens, busy = (float(np.diff(values)[0]) / (ended - began) for values in at)
        return tokens, busy


def stretch(server: Server, arguments: argparse.Namespace, mix: Path, seed: int, batch: str | None) -> Figures:
    """Interactive requests for a while, with or without a batch behind them."""
    with Watch(server.url, batch) as watch:
        ran = put(server, ["--mix", str(mix)], arguments.shape, arguments.seconds, seed)
    missed = missed_objectives(ran.records, OBJECTIVES)
    met = [record for record in ran.records if missed.get(record.index) == ()]
    began = ran.began_ns / 1e9
    offline, busy = watch.rates(began, began + arguments.seconds)
    return Figures(
        goodput=len(met) / arguments.seconds,
        met=len(met) / max(1, len(ran.records)),
        interactive=sum(record.output_tokens or 0 for record in ran.records) / arguments.seconds,
        offline=offline,
        busy=busy,
    )


def alone(server: Server, batch: str, seconds: float) -> float:
    """Tokens a second of a batch that has the server for itself."""
    tokens, began = tokens_of(server.url, batch)[0], time.monotonic()
    time.sleep(seconds)
    return (tokens_of(server.url, batch)[0] - tokens) / (time.monotonic() - began)


def behind(arguments: argparse.Namespace) -> dict[str, Any]:
    """Interactive requests with and without a batch, in turns."""
    with tempfile.TemporaryDirectory(prefix="batches-") as folder:
        mix = Path(folder) / "mix.toml"
        mix.write_text(MIX.format(rate=arguments.rate))
        flags = ["--data-dir", f"{folder}/data", "--max-num-seqs", str(arguments.streams)]
        settings = Settings(arguments.shape, os.cpu_count() or 1, arguments.context, arguments.streams)
        with running("headway", sys.executable, settings, "headway", flags) as server, server.awake():
            stretch(server, arguments, mix, 0, None)  # the engine learns how long its steps take
            found: dict[str, list[Figures]] = {"without": [], "with": []}
            rates = []
            for seed in range(1, arguments.rounds + 1):
                found["without"].append(stretch(server, arguments, mix, seed, None))
                batch = begin_batch(server.url, arguments.requests, seed)
                found["with"].append(stretch(server, arguments, mix, seed, batch))
                rates.append(alone(server, batch, arguments.seconds / 2))
                done = tokens_of(server.url, batch)[1]
                ask(server.url, f"/v1/batches/{batch}/cancel", b"")
                print(f"round {seed}: {found['without'][-1]} {found['with'][-1]}, {done} done", file=sys.stderr)
                time.sleep(2)
    return {
        "stretches": {name: [asdict(each) for each in figures] for name, figures in found.items()},
        "batch_alone": rates,
    }


# --- the way in ---------------------------------------------------------------------------------------


def text_of(chars: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(WORDS[i] for i in draw.integers(0, len(WORDS), chars // 2))[:chars]


@contextmanager
def streams(url: str, gaps: list[list[tuple[float, float]]]) -> Iterator[None]:
    """Some streams that run meanwhile; gaps get, for each, when a chunk came and how long after the one before."""
    stop = threading.Event()

    def read(mine: list[tuple[float, float]], seed: int) -> None:
        body = {"model": MODEL, "prompt": [1000 + seed] * 32, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=600) as reply:
            before = time.monotonic()
            while reply.read1(65_536) and not stop.is_set():
                now = time.monotonic()
                mine.append((now, now - before))
                before = now

    threads = [threading.Thread(target=read, args=(mine, seed)) for seed, mine in enumerate(gaps)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def send_crowd(url: str) -> None:
    """Have long texts tokenized together, in a process of its own: its threads hold each other up."""
    texts = [text_of(CHARS_OF_8K, seed) for seed in range(CROWD)]
    with ThreadPoolExecutor(CROWD) as pool:
        counts = list(pool.map(lambda text: ask(url, "/tokenize", {"prompt": text})["count"], texts))
    print(min(counts))


def crowd(url: str) -> dict[str, float]:
    """Time between two reads of streams in ms, before long texts come together and while they are encoded."""
    gaps: list[list[tuple[float, float]]] = [[] for _ in range(STREAMS)]
    program = f"from benchmarks.batches import send_crowd; send_crowd({url!r}); send_crowd({url!r})"
    with streams(url, gaps):
        time.sleep(1.5)
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
        ended = time.monotonic()
    found: dict[str, float] = {}
    for name, first, last in (("quiet", began - 1.0, began), ("crowd", ended - 0.5, ended)):
        times = [1e3 * gap for mine in gaps for when, gap in mine if first <= when <= last]
        found |= {f"{name}_p{q}_ms": float(np.percentile(times, q)) for q in (50, 99, 100)}
    return found


def conversation(url: str, seed: int) -> list[float]:
    """Milliseconds in which the turns of a conversation that begins with 32k tokens were tokenized."""
    messages = [{"role": "user", "content": text_of(CHARS_OF_32K, seed)}]
    found = []
    for turn in range(3):
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "include_timings": True}
        answer = ask(url, "/v1/chat/completions", body)
        found.append(answer["timings"]["phases_ns"]["tokenize"] / 1e6)
        messages.append({"role": "assistant", "content": text_of(400, turn)})
        messages.append({"role": "user", "content": text_of(200, turn)})
    return found


def way_in(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = len(Tokenizer.load(CHECKPOINTS / arguments.shape).encode(text_of(CHARS_OF_32K, 0)))
    found: dict[str, Any] = {"tokens": tokens}
    settings = Settings(arguments.shape, os.cpu_count() or 1, tokens + 2048, arguments.streams)
    for name, flags in (("kept", []), ("not kept", ["--max-known-text", "0"])):
        flags = [*flags, "--chat-template", TEMPLATE]
        with running("headway", sys.executable, settings, "headway", flags) as server, server.awake():
            turns = [conversation(server.url, seed) for seed in range(arguments.rounds)]
            found[name] = [statistics.median(column) for column in zip(*turns, strict=True)]
            if name == "kept":
                found["crowd"] = [crowd(server.url) for _ in range(arguments.rounds)]
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    write_weights(arguments.shape, CHECKPOINTS)
    return {"batch": behind(arguments), "way_in": way_in(arguments)}


def table(content: dict[str, Any]) -> str:
    """Markdown: medians over the rounds."""
    mean = statistics.median
    lines = ["| | goodput, requests/s | in time | interactive tokens/s | batch tokens/s | engine busy |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, rounds in content["batch"]["stretches"].items():
        of = {key: mean(each[key] for each in rounds) for key in rounds[0]}
        rates = f"{of['interactive']:.0f} | {of['offline']:.0f} | {of['busy']:.0%}"
        lines.append(f"| {name} a batch | {of['goodput']:.2f} | {of['met']:.1%} | {rates} |")
    pairs = zip(content["batch"]["stretches"]["without"], content["batch"]["stretches"]["with"], strict=True)
    share = [
        beside["offline"] / (rate * (1 - without["busy"]))
        for (without, beside), rate in zip(pairs, content["batch"]["batch_alone"], strict=True)
    ]
    own = mean(content["batch"]["batch_alone"])
    lines.append(f"\nA batch alone: {own:.0f} tokens/s; of what is left: {mean(share):.0%}")
    way = content["way_in"]
    for name in ("kept", "not kept"):
        turns = ", ".join(f"{each:.1f}" for each in way[name])
        lines.append(f"Turns of a conversation of {way['tokens']} tokens, ids {name}: {turns} ms")
    crowds = {key: mean(each[key] for each in way["crowd"]) for key in way["crowd"][0]}
    lines.append(f"{CROWD} texts together: {json.dumps({key: round(value, 2) for key, value in crowds.items()})}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=4.0, help="interactive requests a second")
    parser.add_argument("--requests", type=int, default=2000, help="of the batch")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a stretch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS / "batches.json")
    keep(parser.parse_args(argv), run, table)


if __name__ == "__main__":
    main()
