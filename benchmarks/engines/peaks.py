"""The machine's peaks under measurement, as another engine among the engines: a process that answers on request.

    python -m benchmarks.engines.peaks THREADS

Every line of input is answered with {"read", "bf16", "int8"}: bytes a second of a streaming read far larger than the
caches, and operations a second of matrix products, as `headway calibrate` measures them.
"""

from __future__ import annotations

import os
import sys

from benchmarks.engines.worker import answer
from headway.calibration.measure import measure
from headway.calibration.peaks import MachinePeaks


def rates(peaks: MachinePeaks) -> dict[str, float]:
    flops = peaks.gemm_flops_per_s
    return {"read": peaks.memory_read.best, "bf16": flops["bfloat16"].best, "int8": flops["int8"].best}


def main() -> None:
    threads = int(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer(replies, {"version": "", "start_seconds": 0.0})
    for _ in sys.stdin:
        answer(replies, rates(measure("cpu", threads, ["bfloat16", "int8"], quick=True)))


if __name__ == "__main__":
    main()
