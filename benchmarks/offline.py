"""Speed without a server: Headway beside OpenVINO GenAI, llama.cpp and vLLM, at every precision of the weights.

    python -m benchmarks.offline --peer openvino=PYTHON --peer llama.cpp=PYTHON --peer vllm=PYTHON

All read the same random weights. A sitting is of one shape and one precision: every engine runs in a process of its own
that stays up and is stopped (SIGSTOP) while another one is measured. Each point is measured on all engines, one right
after the other, before the next point: a shared machine drifts by more than the engines differ, and only neighbours in
time can be compared. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.checkpoint import SHAPES
from benchmarks.engines.worker import ENGINES
from benchmarks.exports import GGUF_KINDS, PACKED_KINDS, PRECISIONS
from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.points import Point, decode, held, named, prefill, product
from benchmarks.sitting import ISAS, Entry, Sitting, entries, sit, sit_held
from benchmarks.start import PROMPT, start_times
from benchmarks.tables import compared, rows, table
from benchmarks.weights import CHECKPOINTS

_POINTS = ("decode:1", "decode:4", "decode:16", "prefill:1x512", "prefill:8x128")
_KV_BITS = {"auto": 16, "int8": 8}
_AT_LEAST_ONE = ("rounds", "threads", "prompt_len")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def peer(text: str) -> tuple[str, str]:
    name, separator, python = text.partition("=")
    if not separator or not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with the path of a Python interpreter")
    if name not in ENGINES[1:]:
        raise argparse.ArgumentTypeError(f"{name!r} is not a peer known here; choose one of {', '.join(ENGINES[1:])}")
    return name, str(Path(python).absolute())


def checkout(text: str) -> str:
    if not Path(text, "benchmarks", "engines", "worker.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a checkout of Headway with benchmarks/engines/worker.py")
    return str(Path(text).absolute())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m benchmarks.offline", description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON", dest="peers")
    parser.add_argument("--no-headway", action="store_true", help="measure the peers alone")
    parser.add_argument(
        "--old", type=checkout, metavar="CHECKOUT", help="another checkout of Headway, as a row that is compared with"
    )
    parser.add_argument(
        "--isa", choices=ISAS, help="restrict all engines to these instructions; llama.cpp must be built for them"
    )
    parser.add_argument("--variants", action="store_true", help="more settings of Headway and OpenVINO, as more rows")
    parser.add_argument(
        "--kv-cache-dtype", choices=_KV_BITS, default="auto", help="int8: of every engine; auto: 16 bits (default)"
    )
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["qwen2.5-0.5b"])
    parser.add_argument(
        "--precisions", choices=PRECISIONS + GGUF_KINDS + PACKED_KINDS, nargs="+", default=list(PRECISIONS),
        help="of the weights as each engine rounds them, a GGUF file that Headway and llama.cpp both read, or a "
        "packed checkpoint that Headway and vLLM both read; "
        "default: " + " ".join(PRECISIONS),
    )  # fmt: skip
    parser.add_argument(
        "--points", type=named, nargs="*", default=[named(each) for each in _POINTS], metavar="POINT",
        help="decode:BATCH or prefill:BATCHxTOKENS; default: " + " ".join(_POINTS),
    )  # fmt: skip
    parser.add_argument("--prompt-len", type=int, default=128, help="of decode:BATCH; default: 128")
    parser.add_argument("--new-tokens", type=int, default=64, help="of decode:BATCH; default: 64")
    parser.add_argument(
        "--contexts", type=product, nargs="*", default=[], metavar="BATCHxTOKENS",
        help="decode after long prompts that are kept over the rounds, such as 1x4096 8x4096",
    )  # fmt: skip
    parser.add_argument("--context-tokens", type=int, default=16, help="new tokens of each round; default: 16")
    parser.add_argument("--start", action="store_true", help="time processes from start to first token")
    parser.add_argument("--llama-simple", metavar="PROGRAM", help="of llama.cpp, for --start")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=CHECKPOINTS, help="of the models' files")
    parser.add_argument("--output", type=Path, default=RESULTS / "offline.json")
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
    for name in ("new_tokens", "context_tokens"):
        if getattr(arguments, name) < 2:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; a decode rate needs at least 2")
    if "llama.cpp" not in dict(arguments.peers) and (kinds := [p for p in arguments.precisions if p in GGUF_KINDS]):
        parser.error(f"--precisions {kinds[0]} is a GGUF file, which llama.cpp makes; give --peer llama.cpp=PYTHON")
    if arguments.no_headway and not arguments.peers:
        parser.error("--no-headway leaves nothing to measure; name a --peer")
    if not (arguments.points or arguments.contexts or arguments.start):
        parser.error("there is nothing to measure; give --points, --contexts or --start")
    if arguments.isa and "vllm" in dict(arguments.peers):
        parser.error(f"--isa {arguments.isa} cannot restrict vllm, whose kernels ask the processor; leave it out")
    if arguments.isa and arguments.llama_simple:
        parser.error(f"--isa {arguments.isa} cannot check what --llama-simple was built for; leave it out")
    if arguments.old and arguments.no_headway:
        parser.error("--old is compared with Headway, which --no-headway leaves out")
    if arguments.llama_simple and not os.access(arguments.llama_simple, os.X_OK):
        parser.error(f"--llama-simple is {arguments.llama_simple!r}, which is no program")
    for shape in arguments.shapes:
        limit = SHAPES[shape]["max_position_embeddings"]
        longest = max(point.longest(arguments.rounds) for point in points(arguments)) if points(arguments) else 0
        if longest > limit:
            parser.error(f"a sequence would have {longest} tokens, and {shape} has room for {limit}")


def points(arguments: argparse.Namespace) -> list[Point]:
    found = [
        decode(batch, arguments.prompt_len, arguments.new_tokens) if kind == "decode" else prefill(batch, tokens)
        for kind, batch, tokens in arguments.points
    ]
    return found + [held(batch, tokens, arguments.context_tokens) for batch, tokens in arguments.contexts]


def measure(arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> list[Sitting]:
    """All sittings, their tables on stdout as they end. `keep` gets the report's parts after every round."""
    parts: dict[str, Any] = {"sittings": [], "starts": {}}
    sat = []
    settings = (arguments.rounds, arguments.threads, arguments.folder)
    for shape in arguments.shapes if points(arguments) else []:
        for precision in arguments.precisions:
            kv_bits = _KV_BITS[arguments.kv_cache_dtype]
            found = _entries(arguments, precision, arguments.variants, kv_bits)
            if not found:
                continue
            sitting = Sitting(shape, precision, points(arguments), found)
            sat.append(sitting)
            parts["sittings"].append({})
            so_far = partial(_keep, sitting, parts, keep)
            if arguments.points:
                sit(sitting, *settings, so_far)
            sit_held(sitting, *settings, so_far)
            so_far()
            cache = "" if kv_bits == 16 else ", 8-bit KV cache"
            isa = f", {arguments.isa} alone" if arguments.isa else ""
            title = f"{shape}, {precision}{cache}{isa}: tokens/s"
            print(table(title, rows(sitting), sitting.left_out, sitting.died.values()), flush=True)
    for shape in arguments.shapes if arguments.start else []:
        starts = parts["starts"][shape] = {}
        for precision in arguments.precisions:
            sitting, starts[precision] = _start(arguments, shape, precision)
            sat.append(sitting)
            keep(parts)
    return sat


def _entries(arguments: argparse.Namespace, precision: str, variants: bool, kv_bits: int = 16) -> list[Entry]:
    """The engines of a sitting, with the other checkout last."""
    found = entries(precision, arguments.peers, not arguments.no_headway, variants, kv_bits)
    found += [replace(found[0], label="old", root=arguments.old)] if arguments.old else []
    return [replace(entry, isa=arguments.isa or "") for entry in found]


def _keep(sitting: Sitting, parts: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    parts["sittings"][-1] = _content(sitting)
    keep(parts)


def _content(sitting: Sitting) -> dict[str, Any]:
    """All of it but where its engines are installed, and the logs of those that died."""
    content = asdict(replace(sitting, died={})) | {"died": {label: end.line for label, end in sitting.died.items()}}
    for entry in content["entries"]:
        del entry["python"], entry["root"]
    return content | {"summary": [asdict(row) for row in rows(sitting)]}


def _start(arguments: argparse.Namespace, shape: str, precision: str) -> tuple[Sitting, dict[str, Any]]:
    sitting = Sitting(shape, precision, [PROMPT], _entries(arguments, precision, variants=False))
    start_times(sitting, arguments.rounds, arguments.threads, arguments.folder, arguments.llama_simple)
    seconds = sitting.rates.get(PROMPT.label, {})
    summary = compared(PROMPT.label, seconds, set(), min)
    print(table(f"{shape}, {precision}: seconds", summary, {}, sitting.died.values()), flush=True)
    died = {label: end.line for label, end in sitting.died.items()}
    return sitting, {"seconds": seconds, "died": died, "summary": [asdict(row) for row in summary]}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    left_out = ("peers", "old", "output", "folder", "no_headway", "llama_simple")
    output = own_file(arguments.output)
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about(),
        "settings": {name: value for name, value in vars(arguments).items() if name not in left_out},
    }
    sat = measure(arguments, lambda parts: save(report | parts, output))
    if died := [f"{each.shape}, {each.precision}: {end}" for each in sat for end in each.died.values()]:
        sys.exit("\n\n".join(["These died; what was measured before is kept.", *died]))


if __name__ == "__main__":
    main()
