"""Speculation beside that of vLLM and llama.cpp: tokens per second with drafts and without, of each with the same pair.

    python -m benchmarks.speculation_peers --peer vllm=PYTHON --peer llama.cpp=PYTHON

Each engine is a process of its own as it comes, once plain and once with drafts, and is stopped while another one is
measured. All read the same two checkpoints, whose weights say given texts (`write_speaking` in `benchmarks.weights`):
`quote`, `edit` and `random`, as in `benchmarks.speculation`, for drafts of n-grams; and for those of a model one text
for each --acceptance, behind whose tokens the draft says what the model says so often. `story` is what the bundled
model says beside the bundled draft. A round measures each engine, one right after the other. An engine that tells
another text than it must ends the benchmark.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.engines.interface import Settings
from benchmarks.gguf_checkpoint import write_gguf_of
from benchmarks.machine import RESULTS, keep
from benchmarks.offline import peer
from benchmarks.processes import Child, Died, running
from benchmarks.rounds import Rounds, number, spread
from benchmarks.speculation import DRAFT_OF_A_SHAPE, DRAFTERS, EDITED, PROMPT_TOKENS, STORIES
from benchmarks.weights import write_speaking
from headway.bundled import DRAFT, STORY
from headway.policy.step.speculative_config import SpeculativeConfig

LOADS = ("quote", "edit", "random", "story")

_TEXTS = 4  # that differ; in larger batches, they are said several times
_OWN_OUTPUT = {"tie_word_embeddings": False}
_TOLD = 10  # tokens below this are in no text


def told(load: str | float, tokens: Iterator[int], prompt: int, new: int) -> list[int]:
    """A prompt and what follows it, in which each token is followed by one alone. See text_of for the kinds."""
    text = [next(tokens) for _ in range(prompt)]
    if load not in ("quote", "edit"):
        return text + [next(tokens) for _ in range(new)]
    edited = [next(tokens) if load == "edit" and at % EDITED == EDITED - 1 else text[at] for at in range(new)]
    return text + edited


def following(said: list[list[int]], vocab: int) -> npt.NDArray[np.int64]:
    """[vocab]: the token behind each, by what is said; a permutation, with the other tokens in their order."""
    found = np.full(vocab, -1)
    for text in said:
        found[text[:-1]] = text[1:]
    found[found < 0] = np.setdiff1d(np.arange(vocab), found)
    return found


def seldom_right(after: npt.NDArray[np.int64], said: Mapping[float, list[list[int]]]) -> npt.NDArray[np.int64]:
    """The same where the tokens of some texts are followed by others, but for the share that is right by chance."""
    found = after.copy()
    for acceptance, texts in said.items():
        rng = random.Random(f"{acceptance}")
        wrong = [token for text in texts for token in text[:-1] if rng.random() >= acceptance]
        found[wrong] = np.roll(after[wrong], 1)
    return found


def _pair(shape: str, loads: list[str | float], new: int, folder: Path) -> dict[str | float, list[list[int]]]:
    """Write a model and a draft that tell texts; returns these, by load."""
    config, prompt = SHAPES[shape] | _OWN_OUTPUT, max(PROMPT_TOKENS, new)
    vocab = config["vocab_size"]
    tokens = iter(random.Random(0).sample(range(_TOLD, vocab), vocab - _TOLD))
    try:
        texts = {load: [told(load, tokens, prompt, new) for _ in range(_TEXTS)] for load in loads}
        said = {load: [text[prompt - 1 :] for text in of_load] for load, of_load in texts.items()}
        after = following([text for of_load in said.values() for text in of_load], vocab)
    except StopIteration:
        raise SystemExit(f"{shape} has {vocab} tokens, too few for so many --loads and --acceptance") from None
    of_draft = seldom_right(after, {load: of_load for load, of_load in said.items() if not isinstance(load, str)})
    small = json.loads((DRAFT / "config.json").read_text()) if shape == "story" else DRAFT_OF_A_SHAPE
    for name, content, follows in (("model", config, after), ("draft", SHAPES[shape] | small | _OWN_OUTPUT, of_draft)):
        checkpoint = write_checkpoint(name, folder, content)
        write_speaking(content, follows, checkpoint)
        write_gguf_of(content, checkpoint, name, folder / f"{name}.gguf")
    return texts


def _bundled(folder: Path) -> dict[str | float, list[list[int]]]:
    """Put the bundled model and its draft there; returns prompts of tokens."""
    for name, checkpoint in (("model", STORY), ("draft", DRAFT)):
        (folder / name).symlink_to(checkpoint)
        config = json.loads((checkpoint / "config.json").read_text())
        write_gguf_of(config, checkpoint, name, folder / f"{name}.gguf")
    tokenizer = Tokenizer.from_file(str(STORY / "tokenizer.json"))
    return {"story": [tokenizer.encode(prompt).ids for prompt in STORIES]}


def beside(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each engine, plain and with drafts, by load, batch, kind of drafts and round."""
    found = _Found(Rounds(), {}, {})
    for shape, drafter, most in itertools.product(
        arguments.shapes, arguments.drafters, arguments.num_speculative_tokens
    ):
        named = [load for load in arguments.loads if load in ("quote", "edit", "random")]
        given: list[str | float] = [*named] if drafter == "ngram" else [*arguments.acceptance]
        has_story = shape == "story" and "story" in arguments.loads
        for is_told in [*([True] if given else []), *([False] if has_story else [])]:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                texts = _pair(shape, given, arguments.new_tokens, folder) if is_told else _bundled(folder)
                _sit(arguments, found, shape, drafter, most, texts, folder, is_told)
    return asdict(found)


@dataclass
class _Found:
    """What was measured.

    Args:
        rates: by load, and by engine and whether it has drafts.
        about: what each engine says of itself.
        died: those that ended by themselves, and why.
    """

    rates: Rounds
    about: dict[str, Any]
    died: dict[str, str]


def _sit(
    arguments: argparse.Namespace,
    found: _Found,
    shape: str,
    drafter: str,
    most: int,
    texts: dict[str | float, list[list[int]]],
    folder: Path,
    is_told: bool,
) -> None:
    """Measure all engines on these texts; where they are told, what an engine says must be what is expected."""
    new, speculative = arguments.new_tokens, asdict(SpeculativeConfig(num_speculative_tokens=most))
    del speculative["model"]
    with ExitStack() as stack:
        children: list[Child] = []
        for engine, python in [("headway", sys.executable), *arguments.peers]:
            model, draft = (str(folder / f"{each}{'.gguf' * (engine == 'llama.cpp')}") for each in ("model", "draft"))
            if drafter == "draft":
                speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": most}
            for has_drafts in (False, True):
                settings = Settings(
                    model=model,
                    precision="bf16",
                    threads=arguments.threads,
                    longest=2 * max(PROMPT_TOKENS, new),
                    sequences=max(arguments.batches),
                    kv_bytes=1 << 30,
                    speculative=speculative if has_drafts else {},
                    is_temporary=True,
                )
                content = json.dumps(asdict(settings) | {"vocabulary": SHAPES[shape]["vocab_size"]})
                command = [python, "-m", "benchmarks.engines.worker", engine, content]
                try:
                    name = f"{engine}, {'drafts' if has_drafts else 'plain'}"
                    children.append(stack.enter_context(running(name, command)))
                except Died as end:
                    _lose(found, f"{shape}, {drafter}: {end}")
        found.about |= {child.name: child.about for child in children}
        for at, load, batch in itertools.product(range(arguments.rounds + 1), texts, arguments.batches):
            of_batch = [texts[load][index % _TEXTS] for index in range(batch)]
            prompts = [text[: len(text) - new * is_told] for text in of_batch]
            row = f"{shape} {load}, batch {batch}, {drafter} of at most {most}"
            for child in list(children):
                try:
                    reply = child.ask({"do": "say", "prompts": prompts, "new": new})
                except Died as end:
                    _lose(found, f"{row}: {end}")
                    children.remove(child)
                    continue
                said = [text[-new:] for text in of_batch] if is_told else reply["tokens"]
                if reply["tokens"] != said:
                    raise SystemExit(f"{row}: {child.name} says other tokens than it must")
                print(f"round {at}: {row}: {child.name} {reply['decode']:.1f}", file=sys.stderr)
                if at:  # the first one only warms up
                    found.rates.add(row, child.name, {key: reply[key] for key in ("decode", "decode_cpu")})
            children[:] = [*children[1:], *children[:1]]


def _lose(found: _Found, why: str) -> None:
    print(f"{why}\ngoing on without it", file=sys.stderr)
    found.died[why.partition("\n")[0]] = why


def beside_table(content: dict[str, Any]) -> str:
    """A row for each load and engine."""
    lines = ["| model, load, batch, drafts | engine | plain tokens/s | with drafts | ratio (by round) |"]
    lines[0] += " by processor time | Headway's rate with drafts / its |"
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    rounds = Rounds(content["rates"]["values"])
    for load, things in rounds.values.items():
        for name in [each.partition(",")[0] for each in things if each.endswith(", drafts")]:
            plain, drafts = f"{name}, plain", f"{name}, drafts"
            cells = [load, name, "-", number(median(things[drafts]["decode"])), "-", "-", "-"]
            if plain in things:
                cells[2] = number(median(things[plain]["decode"]))
                for at, measure in ((4, "decode"), (5, "decode_cpu")):
                    ratio = rounds.compared(load, plain, measure, drafts)
                    cells[at] = spread(ratio.ratio_middle, ratio.ratio_low, ratio.ratio_high)
            if name != "headway" and "headway, drafts" in things:
                ratio = rounds.compared(load, drafts, "decode", "headway, drafts")
                cells[6] = spread(ratio.ratio_middle, ratio.ratio_low, ratio.ratio_high)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *content["died"]])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON", dest="peers")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["story", "qwen2.5-0.5b"])
    parser.add_argument("--drafters", choices=DRAFTERS, nargs="+", default=list(DRAFTERS))
    parser.add_argument("--loads", choices=LOADS, nargs="*", default=list(LOADS))
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.5, 0.7, 0.9], help="of a draft model")
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[3, 15], help="one after the other")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "speculation_peers.json")
    arguments = parser.parse_args(argv)
    if unknown := [name for name, _ in arguments.peers if name not in ("llama.cpp", "vllm")]:
        parser.error(f"--peer {unknown[0]} is not driven with drafts; llama.cpp and vllm are")
    if not all(0.0 <= chance <= 1.0 for chance in arguments.acceptance):
        parser.error(f"--acceptance is {arguments.acceptance}; each must be between 0 and 1")
    for name, least, most in (
        ("rounds", 1, 1000), ("new_tokens", 2, 400), ("threads", 1, 64), ("batches", 1, 64),
        ("num_speculative_tokens", 1, 64),
    ):  # fmt: skip
        value = getattr(arguments, name)
        if not all(least <= each <= most for each in (value if isinstance(value, list) else [value])):
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be between {least} and {most}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    keep(arguments, beside, beside_table)


if __name__ == "__main__":
    main()
