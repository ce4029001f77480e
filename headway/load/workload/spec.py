"""The options of a workload. Without numpy, so that `--help` is quick."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from headway.flags import Flag
from headway.load.workload.arrival_flags import Arrival
from headway.load.workload.lengths import Distribution, Exponential, Uniform, parse_distribution, parse_length

DEFAULT_NUM_PROMPTS = 1000
DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 1024, 128
MOONCAKE_BLOCK_SIZE = 512
DEFAULT_TURNS = Uniform(2, 8)
DEFAULT_THINK_S = Exponential(5.0)


_workload, _load = functools.partial(Flag, panel="Workload"), functools.partial(Flag, panel="Load")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Where requests come from, and how patient their clients are. What a dataset has no use for is refused.

    Args:
        dataset_name: one of DATASETS.
        input_len: instead of random_input_len; of a turn for multi_turn.
        output_len: the answer's length for any dataset, instead of what it says itself.
        multi_turn_turns, multi_turn_prefix_len, multi_turn_think_s: see MultiTurn.
        cancel_share: the share of the requests, later turns included; each is one by chance.
        cancel_after_s: seconds after the send.
    """

    dataset_name: Annotated[
        str,
        _workload(
            "random, sharegpt, azure, mooncake, burstgpt, prefix_repetition, multi_turn, custom or agents.", common=True
        ),
    ] = "random"
    dataset_path: Annotated[
        Path | None, _workload("File of the dataset, or hf://OWNER/NAME/FILE of the Hugging Face hub.", common=True)
    ] = None
    input_len: Annotated[
        Distribution | None,
        _workload(
            "Prompt tokens: a number, or a distribution such as lognormal:mean=200,cv=0.8,max=4000.", parse=parse_length
        ),
    ] = None
    output_len: Annotated[
        Distribution | None, _workload("Output tokens: a number or a distribution.", parse=parse_length)
    ] = None
    random_input_len: Annotated[
        int | None,
        _workload(
            "Prompt tokens of the random dataset. Default: 1024, or half of the context if that is less.", common=True
        ),
    ] = None
    random_output_len: Annotated[
        int | None,
        _workload(
            "Output tokens of the random dataset. Default: 128, or 1/8 of the context if that is less.", common=True
        ),
    ] = None
    random_range_ratio: Annotated[
        str | float | Mapping[str, float],
        _workload("Spread of random lengths: from LEN * (1 - RATIO) to LEN * (1 + RATIO). Default: 0.", parse=str),
    ] = 0.0
    random_prefix_len: Annotated[int, _workload("Tokens of a prefix that all random prompts share.")] = 0
    prefix_repetition_prefix_len: Annotated[int, _workload("Tokens of a shared prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[int, _workload("Tokens of each prompt after the shared prefix.")] = 256
    prefix_repetition_num_prefixes: Annotated[int, _workload("Number of shared prefixes.")] = 10
    prefix_repetition_output_len: Annotated[int, _workload("Tokens of an answer.")] = 128
    sharegpt_output_len: Annotated[int | None, _workload("Output tokens. Default: those of the file's answer.")] = None
    custom_output_len: Annotated[int | None, _workload("Output tokens. Default: from each row, else 256.")] = None
    multi_turn_turns: Annotated[
        Distribution, _workload("Turns of a conversation.", parse=parse_length, default="uniform:min=2,max=8")
    ] = DEFAULT_TURNS
    multi_turn_prefix_len: Annotated[int, _workload("Tokens of a system prompt that all conversations share.")] = 0
    multi_turn_think_s: Annotated[
        Distribution,
        _workload(
            "Think time between an answer and the next turn, in seconds.",
            parse=parse_distribution,
            default="exponential:mean=5",
        ),
    ] = DEFAULT_THINK_S
    burstgpt_model: Annotated[str | None, _workload("Use only the trace's requests to this model.")] = None
    trace_block_size: Annotated[int, _workload("Tokens of a Mooncake trace's hash id.")] = MOONCAKE_BLOCK_SIZE
    max_input_len: Annotated[
        int | None, _workload("Shorten generated prompts to this many tokens; leave out longer texts.")
    ] = None
    max_output_len: Annotated[int | None, _workload("Shorten outputs to this many tokens.")] = None
    disable_shuffle: Annotated[bool, _workload("Use texts in the order of their file.", "--disable-shuffle")] = False
    cancel_share: Annotated[
        float, _workload("Share of requests that the client cancels after --cancel-after-s.", min=0, max=1)
    ] = 0.0
    cancel_after_s: Annotated[
        Distribution | None,
        _workload("Seconds until a client cancels: 2, or exponential:mean=2,max=10.", parse=parse_distribution),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec(DatasetOptions):
    """A whole workload. The same seed makes the same workload.

    Args:
        num_prompts: later turns included; None takes a trace to its end, and DEFAULT_NUM_PROMPTS of anything else.
        duration_s: requests (or conversations) that come within this time; with num_prompts, whatever ends first.
        prompt_seed: that of the prompts' words only: lengths and times stay those of `seed`. For a file of texts it
            decides which of them are taken. None is `seed`.
        arrival: None takes the times of the trace; other datasets then have no times.
        users: those of a closed loop, which has no times at all: the load generator sends when others are done. 0
            without.
        mix: it says the dataset of each class.
    """

    mix: Annotated[
        str | Path | None,
        _workload("Mix of request classes instead of a dataset: a TOML file or a bundled mix.", parse=str, common=True),
    ] = None
    no_oversample: Annotated[
        bool, _workload("Do not repeat rows of a dataset that has fewer than --num-prompts.", "--no-oversample")
    ] = False
    num_prompts: Annotated[
        int | None,
        _load("Number of requests. Default: 1000, the whole trace, or what --duration allows.", min=1, common=True),
    ] = None
    duration_s: Annotated[
        float | None, _load("Send requests for this many seconds.", "--duration", min=0.001, common=True)
    ] = None
    seed: Annotated[int, _load("Seed of arrivals, lengths and prompts.", min=0)] = 0
    prompt_seed: int | None = None
    arrival: Arrival | None = None
    users: int = 0
    time_scale: Annotated[float, _load("Speed-up of a trace, or of the arrivals of a mix's classes.")] = 1.0

    @property
    def seed_of_prompts(self) -> int:
        return self.seed if self.prompt_seed is None else self.prompt_seed


Options = TypeVar("Options", bound=DatasetOptions)
DATASET_FIELDS: dict[str, Any] = {each.name: each.default for each in fields(DatasetOptions)}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def fitted(options: Options, context: int | None) -> Options:
    """The options with the lengths that were left open, as a model's context has room for them.

    Random prompts have 1,024 tokens and answers 128, or half and an eighth of the context where that is less. A
    conversation ends before its prompt is longer than three quarters of the context.

    Args:
        context: tokens of prompt and answer together; None where it is not known.
    """
    most = context or math.inf
    lengths: dict[str, Any] = {}
    if options.dataset_name == "random":
        if options.random_input_len is None and options.input_len is None:
            lengths["random_input_len"] = max(1, int(min(DEFAULT_INPUT_LEN, most // 2 - options.random_prefix_len)))
        if options.random_output_len is None and options.output_len is None:
            lengths["random_output_len"] = max(1, int(min(DEFAULT_OUTPUT_LEN, most // 8)))
    elif options.dataset_name == "multi_turn" and context is not None:
        lengths = {
            "max_input_len": options.max_input_len or context * 3 // 4,
            "max_output_len": options.max_output_len or max(1, context // 8),
        }
    return replace(options, **lengths)


# Options that are distributions, and how a line or a table becomes one.
DISTRIBUTIONS: dict[str, Callable[[Any], Distribution]] = {
    "input_len": parse_length,
    "output_len": parse_length,
    "multi_turn_turns": parse_length,
    "multi_turn_think_s": parse_distribution,
    "cancel_after_s": parse_distribution,
}
