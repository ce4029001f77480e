"""Prompts of many lengths through one engine, in a process of its own, and what memory it has then.

    python -m tests.engine.mixed_lengths DTYPE SECONDS

It prints resident bytes when the engine is ready and afterwards. Steps have as many different numbers of tokens as
come of batches of random size with prompts of random length, among them chunks of long ones.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from headway import LLM, SamplingParams
from tests.engine.models import write_config

LEAST_ROUNDS = 40  # on a machine so slow that the time is over before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    dtype, seconds = sys.argv[1], float(sys.argv[2])
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_attention_heads": 8,
            "max_position_embeddings": 2048,
        }
        llm = LLM(
            write_config(Path(folder), **sizes), load_format="dummy", dtype=dtype, device="cpu", num_threads=2,
            skip_tokenizer_init=True, kv_cache_memory=16 << 20, max_num_batched_tokens=1024, max_num_seqs=32,
        )  # fmt: skip
        # The pool is touched once by one crowd of short texts, so that what it takes is not counted as growth.
        touch = [{"prompt_token_ids": [1 + i] * 400} for i in range(24)]
        llm.generate(touch, SamplingParams(temperature=0.0, max_tokens=1))
        ready, end, rounds = resident(), time.monotonic() + seconds, 0
        while rounds < LEAST_ROUNDS or time.monotonic() < end:
            prompts = [
                {"prompt_token_ids": [chance.randrange(5, 500) for _ in range(chance.randrange(1, 700))]}
                for _ in range(chance.randrange(1, 8))
            ]
            llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=chance.randrange(1, 6), ignore_eos=True))
            rounds += 1
        print(ready, resident())


if __name__ == "__main__":
    main()
