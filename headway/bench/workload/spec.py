"""What the command line says of a workload."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from headway.bench.errors import BenchError
from headway.bench.workload.arrivals import Arrival
from headway.bench.workload.datasets import Dataset
from headway.bench.workload.lengths import (
    Distribution,
    Exponential,
    Fixed,
    Uniform,
    parse_distribution,
    parse_length,
    parse_range_ratio,
)
from headway.bench.workload.prompts import TokenSource
from headway.bench.workload.spelling import hint
from headway.bench.workload.synthetic import MultiTurn, PrefixRepetition, RandomLengths, check_whole
from headway.bench.workload.texts import Custom, ShareGPT
from headway.bench.workload.traces import MOONCAKE_BLOCK_SIZE, TraceRows, read_azure, read_burstgpt, read_mooncake
from headway.flags import Flag

DEFAULT_NUM_PROMPTS = 1000
DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 1024, 128
DEFAULT_TURNS = Uniform(2, 8)
DEFAULT_THINK_S = Exponential(5.0)
DEFAULT_TURN_LEN = Uniform(50, 150)


_workload, _load = functools.partial(Flag, panel="Workload"), functools.partial(Flag, panel="Load")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Where requests come from, and how patient their clients are. What a dataset has no use for is refused.

    Args:
        dataset_name: one of DATASETS.
        input_len: instead of random_input_len; of a turn for multi_turn.
        output_len: for any dataset, instead of what it says itself.
        multi_turn_turns, multi_turn_prefix_len, multi_turn_think_s: see MultiTurn.
        cancel_share: of the requests, later turns included; each is one by chance.
        cancel_after_s: seconds after the send.
    """

    dataset_name: Annotated[
        str,
        _workload("random, sharegpt, azure, mooncake, burstgpt, prefix_repetition, multi_turn or custom.", common=True),
    ] = "random"
    dataset_path: Annotated[Path | None, _workload("File of the dataset.", common=True)] = None
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
    sharegpt_output_len: Annotated[int | None, _workload("Default: as long as the answer in the file.")] = None
    custom_output_len: Annotated[int | None, _workload("Default: what each row says.")] = None
    multi_turn_turns: Annotated[
        Distribution,
        _workload("Turns of a conversation.", parse=parse_length, default="uniform:min=2,max=8"),
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
        int | None, _workload("Clip made-up prompts to this many tokens; leave out longer texts.")
    ] = None
    max_output_len: Annotated[int | None, _workload("Clip outputs to this many tokens.")] = None
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
        prompt_seed: of the prompts' words only: lengths and times stay those of `seed`. For a file of texts it decides
            which of them are taken. None is `seed`.
        arrival: None takes the times of the trace; other datasets then have no times.
        users: of a closed loop, which has no times at all: the load generator sends when others are done. 0 without.
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
# Of any dataset; the rest belongs to one, by the beginning of its name or as said here.
SHARED_FIELDS = {"dataset_name", "output_len", "max_input_len", "max_output_len", "cancel_share", "cancel_after_s"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A dataset's own options, and how it is made of them."""

    fields: tuple[str, ...]
    make: Callable[[DatasetOptions, TokenSource], Dataset]
    is_file: bool = False


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


def make_dataset(options: DatasetOptions, source: TokenSource) -> Dataset:
    """The dataset that is asked for.

    Raises:
        BenchError: for an unknown name, an option of another dataset, a missing path, and what the file has wrong.
    """
    kind = DATASETS.get(options.dataset_name)
    if kind is None:
        raise BenchError(f"there is no dataset '{options.dataset_name}'; {hint(options.dataset_name, DATASETS)}")
    own = SHARED_FIELDS.union(kind.fields, {"dataset_path"} if kind.is_file else ())
    for name, default in DATASET_FIELDS.items():
        if name not in own and getattr(options, name) != default:
            raise BenchError(f"{flag(name)} does not apply to --dataset-name {options.dataset_name}; leave it out")
    if kind.is_file and options.dataset_path is None:
        raise BenchError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    for name in ("max_input_len", "max_output_len", "sharegpt_output_len", "custom_output_len"):
        if (value := getattr(options, name)) is not None:
            check_whole(flag(name), value, 1)
    if not 0 <= options.cancel_share <= 1:
        raise BenchError(f"--cancel-share is {options.cancel_share:g}; it must be from 0 to 1")
    if (options.cancel_share > 0) != (options.cancel_after_s is not None):
        raise BenchError("of --cancel-share and --cancel-after-s one was given; clients that cancel need both")
    return kind.make(options, source)


def _only_one(options: DatasetOptions, *names: str) -> None:
    """Raises BenchError where two options that say the same were given."""
    given = [flag(name) for name in names if getattr(options, name) != DATASET_FIELDS[name]]
    if len(given) > 1:
        raise BenchError(f"{given[0]} and {given[1]} say the same length; leave one of the two out")


def _random(options: DatasetOptions, source: TokenSource) -> Dataset:
    _only_one(options, "input_len", "random_input_len")
    _only_one(options, "output_len", "random_output_len")
    if options.input_len is not None and options.output_len is not None:
        _only_one(options, "input_len", "random_range_ratio")
    ratios = parse_range_ratio(options.random_range_ratio)
    return RandomLengths(
        options.input_len or _around("random_input_len", options, ratios[0]),
        options.output_len or _around("random_output_len", options, ratios[1]),
        options.random_prefix_len,
    )


def _around(name: str, options: DatasetOptions, ratio: float) -> Distribution:
    length = getattr(options, name)
    check_whole(flag(name), length, 1)
    return Uniform.around(length, ratio)


def _answer_len(options: DatasetOptions, name: str) -> Distribution | None:
    """--output-len, or the dataset's own option of that name, or None."""
    _only_one(options, "output_len", name)
    own = getattr(options, name)
    return options.output_len or (None if own is None else Fixed(own))


def _prefix_repetition(options: DatasetOptions, source: TokenSource) -> Dataset:
    check_whole("--prefix-repetition-output-len", options.prefix_repetition_output_len, 1)
    return PrefixRepetition(
        options.prefix_repetition_num_prefixes,
        options.prefix_repetition_prefix_len,
        options.prefix_repetition_suffix_len,
        _answer_len(options, "prefix_repetition_output_len") or Fixed(options.prefix_repetition_output_len),
    )


def _multi_turn(options: DatasetOptions, source: TokenSource) -> Dataset:
    if source.token_ids:
        raise BenchError("conversations cannot be sent as token ids, as answers are text; send texts or use the chat")
    return MultiTurn(
        options.multi_turn_turns,
        options.input_len or DEFAULT_TURN_LEN,
        options.output_len or DEFAULT_TURN_LEN,
        options.multi_turn_think_s,
        options.multi_turn_prefix_len,
        options.max_input_len,
    )


def _path(options: DatasetOptions) -> Path:
    assert options.dataset_path is not None  # make_dataset has looked
    return Path(options.dataset_path)


def _sharegpt(options: DatasetOptions, source: TokenSource) -> Dataset:
    answers = _answer_len(options, "sharegpt_output_len")
    return ShareGPT(_path(options), source, answers, options.max_input_len, not options.disable_shuffle)


def _custom(options: DatasetOptions, source: TokenSource) -> Dataset:
    answers = _answer_len(options, "custom_output_len")
    return Custom(_path(options), source, answers, options.max_input_len, not options.disable_shuffle)


def _trace(read: Callable[[DatasetOptions], TraceRows]) -> Callable[[DatasetOptions, TokenSource], Dataset]:
    def make(options: DatasetOptions, source: TokenSource) -> Dataset:
        rows = read(options)
        rows.output_len = options.output_len
        return rows

    return make


_azure = _trace(lambda options: read_azure(_path(options)))
_mooncake = _trace(lambda options: read_mooncake(_path(options), options.trace_block_size))
_burstgpt = _trace(lambda options: read_burstgpt(_path(options), options.burstgpt_model))

RANDOM = ("input_len", "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len")
REPETITION = tuple(name for name in DATASET_FIELDS if name.startswith("prefix_repetition_"))
MULTI_TURN = ("input_len", "multi_turn_turns", "multi_turn_prefix_len", "multi_turn_think_s")
DATASETS: dict[str, Kind] = {
    "random": Kind(RANDOM, _random),
    "sharegpt": Kind(("sharegpt_output_len", "disable_shuffle"), _sharegpt, is_file=True),
    "azure": Kind((), _azure, is_file=True),
    "mooncake": Kind(("trace_block_size",), _mooncake, is_file=True),
    "burstgpt": Kind(("burstgpt_model",), _burstgpt, is_file=True),
    "prefix_repetition": Kind(REPETITION, _prefix_repetition),
    "multi_turn": Kind(MULTI_TURN, _multi_turn),
    "custom": Kind(("custom_output_len", "disable_shuffle"), _custom, is_file=True),
}
# Options that are distributions, and how a line or a table becomes one.
DISTRIBUTIONS: dict[str, Callable[[Any], Distribution]] = {
    "input_len": parse_length,
    "output_len": parse_length,
    "multi_turn_turns": parse_length,
    "multi_turn_think_s": parse_distribution,
    "cancel_after_s": parse_distribution,
}
