"""The options of `headway bench quality`. Without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from headway.flags import Flag


def words(text: str) -> tuple[str, ...]:
    """Parse names with commas between them. Raises ValueError where there is none."""
    found = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not found:
        raise ValueError(f"{text!r} names nothing; write names with commas between them")
    return found


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers of 1 or more with commas between them. Raises ValueError."""
    found = words(text)
    if not all(each.isdecimal() and int(each) > 0 for each in found):
        raise ValueError(f"{text!r}: give whole numbers of 1 or more, with commas between them")
    return tuple(map(int, found))


@dataclass(slots=True, kw_only=True)
class QualityOptions:
    """What is measured, and on which texts.

    Args:
        quantizations, kv_cache_dtypes: None takes all that the engine has.
    """

    model: Annotated[
        str | None, Flag("Folder of a checkpoint, or a Hugging Face id. Default: the bundled model.", positional=True)
    ] = None
    text: Annotated[
        Path | None,
        Flag("Text (UTF-8, .gz too) to predict. Default: what the model itself writes.", metavar="FILE", common=True),
    ] = None
    tasks: Annotated[
        Path | None,
        Flag(
            'JSON Lines to solve: {"prompt", "choices", "answer": INDEX}, or {"prompt", "answer": TEXT}. Default: '
            "which of four continuations is the text's own.",
            metavar="FILE",
            common=True,
        ),
    ] = None
    quantizations: Annotated[
        tuple[str, ...] | None,
        Flag(
            "Schemes of weights, such as none,int4. Default: all of headway serve.",
            "--quantization",
            parse=words,
            metavar="NAMES",
            common=True,
        ),
    ] = None
    kv_cache_dtypes: Annotated[
        tuple[str, ...] | None,
        Flag(
            "Types of the KV cache, such as auto,int8. Default: all of headway serve.",
            "--kv-cache-dtype",
            parse=words,
            metavar="NAMES",
            common=True,
        ),
    ] = None
    checkpoints: Annotated[
        tuple[str, ...],
        Flag(
            "A further checkpoint of the same model, as headway quantize writes it; may be repeated.",
            "--checkpoint",
            parse=tuple,
            repeated=True,
            common=True,
        ),
    ] = ()
    kv_heads: Annotated[
        tuple[int, ...],
        Flag(
            "Also the model with so many KV heads, such as 1,8: heads are averaged, or repeated, and nothing is "
            "trained.",
            parse=counts,
            metavar="N[,N...]",
            common=True,
        ),
    ] = ()
    dtype: Annotated[str, Flag("Type of weights and activations.", choices=("auto", "float32", "bfloat16"))] = "auto"
    windows: Annotated[int, Flag("Pieces of the text.", min=4, max=10_000, common=True)] = 16
    tokens: Annotated[int, Flag("Tokens of a piece.", min=32, common=True)] = 256
    rounds: Annotated[int, Flag("Rounds by which speed is measured; 0 leaves it out.", min=0, common=True)] = 3
    output: Annotated[Path | None, Flag("Write the table as JSON.", metavar="FILE", common=True)] = None
