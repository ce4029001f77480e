"""Perplexity of texts longer than the model was trained for: with attention sinks, with a plain window, with neither.

    python -m benchmarks.sinks [--texts 8] [--tokens 8192] [--windows 256,1024]

A text is a row of shorter ones, which the bundled model has written itself; or, with --text, a piece of a file. Every
token but the first is predicted from those before it that attention sees. All settings see the same texts.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway import LLM, SamplingParams
from headway.bundled import STORY
from headway.files import write_files
from headway.quantize.calibration import windows, written
from headway.quantize.quality import read
from headway.text.tokenizer import Tokenizer

_RESULTS = Path(__file__).parent / "results" / "sinks.json"
_PIECE = 512  # tokens of what the model writes at a time
_SINKS = 4


@dataclass(frozen=True)
class Row:
    """One setting.

    Args:
        window: tokens that attention sees; None for all.
        sinks: of them that are always the first.
        within, beyond: perplexity of tokens in the trained length, and of all behind it.
    """

    window: int | None
    sinks: int
    within: float
    beyond: float


def texts_of(folder: Path, text: Path | None, count: int, tokens: int) -> list[list[int]]:
    """Token ids of each text. Raises OSError and ValueError, as read() and windows()."""
    if text is not None:
        return windows(Tokenizer.load(folder), read(text), count, tokens)
    each = -(-tokens // _PIECE)
    pieces = written(folder, count * each, _PIECE)
    return [sum(pieces[at : at + each], [])[:tokens] for at in range(0, len(pieces), each)]


def changed(folder: Path, target: Path, **config: Any) -> Path:
    """The same model with another config."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    (target / "config.json").unlink()
    before = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(before | config))
    return target


def row(folder: Path, texts: list[list[int]], window: int | None, trained: int, **options: Any) -> Row:
    """What a model says of the texts. Raises ValueError as LLM."""
    longest = max(map(len, texts)) + 1
    llm = LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=longest,
        kv_cache_memory=1 << 30,
        weight_cache=False,
        skip_tokenizer_init=True,
        attention_window=window if options else None,
        **options,
    )
    groups = llm.engine.core.scheduler.blocks.groups
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    within, beyond = list[float](), list[float]()
    for output in llm.generate([{"prompt_token_ids": ids} for ids in texts], params):
        logs = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        within += logs[: trained - 1]
        beyond += logs[trained - 1 :]
    sinks = groups[0].sinks * llm.engine.core.scheduler.blocks.block_size if groups else 0
    del llm
    gc.collect()
    return Row(window, sinks, *(math.exp(-statistics.fmean(logs)) for logs in (within, beyond)))


def measure(folder: Path, texts: list[list[int]], sizes: list[int], trained: int) -> Iterator[Row]:
    """Everything seen, then each size of window without sinks and with. Raises ValueError as LLM."""
    longest = max(map(len, texts)) + 1
    with tempfile.TemporaryDirectory() as made:
        yield row(changed(folder, Path(made) / "all", max_position_embeddings=longest), texts, None, trained)
        for size in sizes:
            windowed = {"architectures": ["MistralForCausalLM"], "sliding_window": size}
            plain = changed(folder, Path(made) / str(size), max_position_embeddings=longest, **windowed)
            yield row(plain, texts, size, trained)
            yield row(folder, texts, size, trained, attention_sinks=_SINKS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sinks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=STORY, help="folder of a Llama's checkpoint")
    parser.add_argument("--text", type=Path, help="UTF-8, .gz too")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of a text")
    parser.add_argument("--windows", type=lambda text: [int(each) for each in text.split(",")], default=[256, 1024])
    parser.add_argument("--output", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    rows: list[Row] = []
    try:
        trained = json.loads((arguments.model / "config.json").read_text())["max_position_embeddings"]
        if arguments.tokens <= trained:
            parser.error(f"--tokens must be more than the model was trained for, {trained}")
        texts = texts_of(arguments.model, arguments.text, arguments.texts, arguments.tokens)
        print(f"| attention sees | sinks of it | tokens up to {trained:,} | behind |\n|---:|---:|---:|---:|")
        for each in measure(arguments.model, texts, arguments.windows, trained):
            seen = "all" if each.window is None else f"{each.window:,}"
            print(f"| {seen} | {each.sinks} | {each.within:,.2f} | {each.beyond:,.2f} |", flush=True)
            rows.append(each)
    except (OSError, ValueError) as error:
        print(f"sinks: {error}", file=sys.stderr)
        sys.exit(2)
    settings = {"model": arguments.model.name, "texts": arguments.texts, "tokens": arguments.tokens}
    content = {**settings, "trained": trained, "rows": [asdict(each) for each in rows]}
    write_files({arguments.output: (json.dumps(content, indent=1) + "\n").encode()})


if __name__ == "__main__":
    main()
