"""`python -m headway.calibration`: measure this machine, print one JSON object, and say on stderr what is going on.

It prints the machine's peaks; or with --machine what `headway calibrate` stores: those, and what the engine's own
kernels and its host reach of them; or with --kernels which way each product of a CPU takes, and compiles the kernels of
the bundled model. Lines of progress begin with the share that is done.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

from headway.installation import EngineNotInstalled, require_engine


def main() -> None:
    """Exits with code 2 and one line on stderr when it can't measure what was asked."""
    parser = argparse.ArgumentParser(prog="python -m headway.calibration", description="Measure this machine's peaks.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="What to measure.")
    parser.add_argument("--threads", type=int, help="CPU threads. Default: one a physical core.")
    parser.add_argument("--dtype", action="append", help="Of matrix products; may be repeated. Not with --machine.")
    parser.add_argument("--full", action="store_true", help="More sizes and repeats: minutes instead of seconds.")
    parser.add_argument("--quick", action="store_true", help="Fewer of them; only with --machine.")
    parser.add_argument("--machine", action="store_true", help="Measure the engine too, and print a machine's entry.")
    parser.add_argument("--name", help="Of that entry. Default: from the processor's or GPU's name.")
    parser.add_argument("--kernels", action="store_true", help="Only choose and compile CPU kernels.")
    arguments = parser.parse_args()
    if arguments.machine and arguments.dtype:
        parser.error("--dtype does not apply to --machine, which measures all types of the device")
    if (arguments.quick or arguments.name) and not arguments.machine:
        parser.error("--quick and --name work only with --machine")
    if arguments.quick and arguments.full:
        parser.error("--quick and --full contradict each other; give one")
    try:
        require_engine()
        text = _kernels() if arguments.kernels else _machine(arguments) if arguments.machine else _peaks(arguments)
    except (ValueError, EngineNotInstalled) as error:
        sys.stderr.write(f"headway: {' '.join(str(error).split())}\n")
        sys.exit(2)
    sys.stdout.buffer.write(text + b"\n")


def _peaks(arguments: argparse.Namespace) -> bytes:
    from headway.calibration.measure import measure

    dtypes = arguments.dtype or ["float32", "bfloat16"]
    return measure(arguments.device, arguments.threads, dtypes, not arguments.full, _say).to_json()


def _kernels() -> bytes:
    from headway.kernels.cpu.choice import choice_for

    choice = choice_for()
    _say("0.0000 measuring CPU kernels")
    choice.measure_again()
    _compile()
    return choice.to_json()


def _compile() -> None:
    """Compile what the first start of the bundled model would compile, and that of most models in bfloat16."""
    from headway.bundled import STORY
    from headway.engine.config import EngineConfig
    from headway.engine.start import start_engine

    def say(stage: str, taken_ns: int) -> None:
        left = re.search(r"(\d+) of (\d+)", stage)
        if left is not None and not taken_ns:
            _say(f"{int(left[1]) / int(left[2]):.4f} {stage}")

    start_engine(EngineConfig(str(STORY), device="cpu", kv_cache_memory=1 << 24), say)


def _machine(arguments: argparse.Namespace) -> bytes:
    from headway.calibration.calibrate import calibrate
    from headway.calibration.measure import device_kind

    if arguments.threads is not None and device_kind(arguments.device) == "cuda":
        raise ValueError("--threads is for CPUs, but the device is cuda; leave it out, or give --device cpu")
    if arguments.threads is not None and arguments.threads > (cores := len(os.sched_getaffinity(0))):
        raise ValueError(f"--threads is {arguments.threads}; this process may use {cores} cores: give no more")
    effort = "full" if arguments.full else "quick" if arguments.quick else "default"

    def say(stage: str, done: float) -> None:
        _say(f"{done:.4f} {stage}")

    return calibrate(arguments.name, arguments.device, arguments.threads, effort, say).to_json()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
