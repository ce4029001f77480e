"""`python -m headway.calibration`: measure this machine, print one JSON object, and say on stderr what is going on."""

from __future__ import annotations

import argparse
import sys


def main() -> None:
    """Exits with code 2 and one line on stderr when it can't measure what was asked."""
    parser = argparse.ArgumentParser(prog="python -m headway.calibration", description="Measure this machine's peaks.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="What to measure.")
    parser.add_argument("--threads", type=int, help="CPU threads. Default: one a core.")
    parser.add_argument("--dtype", action="append", help="Of matrix products; may be repeated.")
    parser.add_argument("--full", action="store_true", help="More sizes and repeats: a minute instead of seconds.")
    arguments = parser.parse_args()

    from headway.calibration.measure import CalibrationError, measure

    def say(stage: str) -> None:
        print(stage, file=sys.stderr, flush=True)  # noqa: T201

    try:
        dtypes = arguments.dtype or ["float32", "bfloat16"]
        peaks = measure(arguments.device, arguments.threads, dtypes, not arguments.full, say)
    except CalibrationError as error:
        sys.exit(_refuse(error))
    sys.stdout.buffer.write(peaks.to_json() + b"\n")


def _refuse(error: Exception) -> int:
    sys.stderr.write(f"headway: {error}\n")
    return 2


if __name__ == "__main__":
    main()
