"""Datasets out of the options of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.load.errors import BenchError
from headway.load.workload.agents import Agents
from headway.load.workload.datasets import Dataset
from headway.load.workload.files import local_file
from headway.load.workload.lengths import Distribution, Fixed, Uniform, parse_range_ratio
from headway.load.workload.prompts import TokenSource
from headway.load.workload.spec import DATASET_FIELDS, DatasetOptions, flag
from headway.load.workload.spelling import hint
from headway.load.workload.synthetic import MultiTurn, PrefixRepetition, RandomLengths, check_whole
from headway.load.workload.texts import Custom, ShareGPT
from headway.load.workload.traces import TraceRows, read_azure, read_burstgpt, read_mooncake

DEFAULT_TURN_LEN = Uniform(50, 150)
# Fields that apply to every dataset. Each other field applies to the datasets whose `Kind` allows it.
SHARED_FIELDS = {"dataset_name", "output_len", "max_input_len", "max_output_len", "cancel_share", "cancel_after_s"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A dataset's own options, and how it is made of them."""

    fields: tuple[str, ...]
    make: Callable[[DatasetOptions, TokenSource], Dataset]
    is_file: bool = False


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
        raise BenchError("--cancel-share and --cancel-after-s need each other; give both")
    return kind.make(options, source)


def _refuse_both(options: DatasetOptions, *names: str) -> None:
    """Raises BenchError where two options that say the same were given."""
    given = [flag(name) for name in names if getattr(options, name) != DATASET_FIELDS[name]]
    if len(given) > 1:
        raise BenchError(f"{given[0]} and {given[1]} set the same length; leave one of the two out")


def _random(options: DatasetOptions, source: TokenSource) -> Dataset:
    _refuse_both(options, "input_len", "random_input_len")
    _refuse_both(options, "output_len", "random_output_len")
    if options.input_len is not None and options.output_len is not None:
        _refuse_both(options, "input_len", "random_range_ratio")
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
    _refuse_both(options, "output_len", name)
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
        raise BenchError(
            "conversations cannot be sent as token ids, because answers are text; send text or use the chat API"
        )
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
    return local_file(Path(options.dataset_path))


def _sharegpt(options: DatasetOptions, source: TokenSource) -> Dataset:
    answers = _answer_len(options, "sharegpt_output_len")
    return ShareGPT(_path(options), source, answers, options.max_input_len, not options.disable_shuffle)


def _custom(options: DatasetOptions, source: TokenSource) -> Dataset:
    answers = _answer_len(options, "custom_output_len")
    return Custom(_path(options), source, answers, options.max_input_len, not options.disable_shuffle)


def _agents(options: DatasetOptions, source: TokenSource) -> Dataset:
    return Agents(_path(options), source, options.output_len, options.max_input_len, not options.disable_shuffle)


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
    "agents": Kind(("disable_shuffle",), _agents, is_file=True),
}
