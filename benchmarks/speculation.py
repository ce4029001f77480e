"""Tokens per second with n-gram drafts beside the same engine without, where texts repeat themselves and where not.

    python -m benchmarks.speculation [--shapes story qwen2.5-0.5b] [--batches 1 4 16] [--rounds 7]

Each step computes what it always does, but of each row the token of a given text is taken: so texts are as alike with
trained weights as with random ones, and a draft is right as often. `quote` repeats its prompt; `edit` does with a new
token in every 24; `random` has no two tokens in the same order twice but by chance; `misleading` has 32 tokens, so that
each pair has stood somewhere before and says nothing of what follows. `story` is what the bundled model itself says,
greedily. Both engines are in one process and take turns, and their tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES
from benchmarks.machine import RESULTS, keep
from benchmarks.rounds import Rounds, number, spread
from headway import LLM, SamplingParams
from headway.bundled import STORY
from headway.engine.sampler import Sampled
from headway.policy.step.plan import SequenceState
from headway.policy.step.sampling_params import SamplingParams as Params

PROMPT_TOKENS = 192
LOADS = ("quote", "edit", "random", "misleading")
_EDITED = 24
_FEW = 32
_STORIES = [
    "Tell me a story about a fox and a lost key.",
    "Write a poem about winter.",
    "What is the moon?",
    "Once upon a time there was a king who had three sons.",
]


def text_of(load: str, index: int, new_tokens: int, vocab: int) -> list[int]:
    """A prompt and what follows it. Its first token is its own, so that texts are told apart by it."""
    rng = random.Random(f"{load} {index}")
    among = range(100, 100 + _FEW) if load == "misleading" else range(100, vocab)
    prompt = [10 + index] + [rng.choice(among) for _ in range(PROMPT_TOKENS - 1)]
    if load not in ("quote", "edit"):
        return prompt + [rng.choice(among) for _ in range(new_tokens)]
    new = (prompt[1:] * -(-new_tokens // len(prompt)))[:new_tokens]
    if load == "edit":
        new = [rng.choice(among) if at % _EDITED == _EDITED - 1 else token for at, token in enumerate(new)]
    return prompt + new


@contextmanager
def saying(llm: LLM, texts: list[list[int]]) -> Iterator[None]:
    """Let an engine say these texts, whatever its logits are."""
    sampler, by_first = llm.engine.runner.sampler, {text[0]: text for text in texts}
    draw = sampler.sample

    def forced(
        logits: Any, sequences: list[SequenceState], positions: list[int] | None = None, masks: Any = None
    ) -> Sampled:
        sampled = draw(logits, sequences, positions, masks)
        ends = positions or [len(sequence.tokens) for sequence in sequences]
        sampled.token_ids = [
            by_first[each.tokens[0]][at] if at < len(by_first[each.tokens[0]]) else 0
            for each, at in zip(sequences, ends, strict=True)
        ]
        return sampled

    sampler.sample = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        sampler.sample = draw  # type: ignore[method-assign]


def engines(shape: str, threads: int, folder: str) -> dict[str, LLM]:
    """The engine without drafts, and with them."""
    options: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": 1 << 30, "num_threads": threads}
    model = str(STORY)
    if shape != "story":
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        options |= {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "weight_cache": False}
        model = folder
    return {"plain": LLM(model, **options), "ngram": LLM(model, speculative_config={"method": "ngram"}, **options)}


def rate(llm: LLM, prompts: list[Any], params: Params) -> tuple[float, list[list[int]]]:
    """Tokens per second, and the tokens."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    tokens = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, tokens)) / seconds, tokens


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found = Rounds()
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            both = engines(shape, arguments.threads, folder)
            vocab = both["plain"].engine.runner.vocab_size
            params = SamplingParams(temperature=0.0, max_tokens=arguments.new_tokens, ignore_eos=True)
            for load in (*LOADS, "story") if shape == "story" else LOADS:
                for batch in arguments.batches:
                    texts = [text_of(load, index, arguments.new_tokens, vocab) for index in range(batch)]
                    prompts: list[Any] = [{"prompt_token_ids": text[:PROMPT_TOKENS]} for text in texts]
                    if load == "story":
                        prompts, texts = [_STORIES[index % len(_STORIES)] for index in range(batch)], []
                    _one_load(found, f"{shape} {load} {batch}", both, prompts, texts, params, arguments.rounds)
    return {"values": found.values}


def _one_load(
    found: Rounds,
    load: str,
    both: dict[str, LLM],
    prompts: list[Any],
    texts: list[list[int]],
    params: Params,
    rounds: int,
) -> None:
    """Measure a load after a round that does not count."""
    for at in range(rounds + 1):
        said = {}
        for name, llm in both.items() if at % 2 else reversed(both.items()):
            if texts:
                with saying(llm, texts):
                    tokens_per_s, said[name] = rate(llm, prompts, params)
            else:
                tokens_per_s, said[name] = rate(llm, prompts, params)
            if at:
                found.add(load, name, {"tokens_per_s": tokens_per_s})
        if said["plain"] != said["ngram"]:
            raise SystemExit(f"{load}: drafts have changed tokens")
    compared = found.compared(load, "plain", "tokens_per_s", "ngram")
    print(f"{load}: {spread(compared.ratio, compared.ratio_low, compared.ratio_high)}", flush=True)


def table(content: dict[str, Any]) -> str:
    found = Rounds(content["values"])
    lines = ["| model, load, batch | plain tokens/s | with drafts | ratio (by round) |", "|---|---:|---:|---:|"]
    for load in found.values:
        plain = found.compared(load, "plain", "tokens_per_s", "ngram")
        drafted = found.compared(load, "ngram", "tokens_per_s", "ngram")
        ratio = spread(plain.ratio, plain.ratio_low, plain.ratio_high)
        lines.append(f"| {load} | {number(plain.median)} | {number(drafted.median)} | {ratio} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("story", *SHAPES), nargs="+", default=["story", "qwen2.5-0.5b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "speculation.json")
    arguments = parser.parse_args(argv)
    for name, least, most in (("rounds", 1, 1000), ("new_tokens", 2, 1024 - PROMPT_TOKENS)):
        if not least <= (value := getattr(arguments, name)) <= most:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be between {least} and {most}")
    if not all(1 <= batch <= 64 for batch in arguments.batches):
        parser.error(f"--batches is {arguments.batches}; each must be between 1 and 64")
    keep(arguments, measure, table)


if __name__ == "__main__":
    main()
