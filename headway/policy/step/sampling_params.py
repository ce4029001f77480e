"""How a request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from headway.policy.step.beams import problem_of
from headway.policy.step.structured_outputs import InvalidStructure, StructuredOutputs

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 100.0
# vLLM's limits (vllm/v1/worker/gpu/sample/logit_bias.py).
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_COUNT = 2**31 - 1

# Parameters whose defaults generation_config.json may give.
_DEFAULTABLE = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# The kind of each number, and its limits.
_NUMBERS: dict[str, tuple[type[Any], float, float]] = {
    "n": (int, 1, MAX_CHOICES),
    "top_k": (int, 0, MAX_COUNT),
    "max_tokens": (int, 1, MAX_COUNT),
    "min_tokens": (int, 0, MAX_COUNT),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS),
    "seed": (int, -(2**63), 2**63 - 1),
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, math.ulp(0.0), 1.0),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 0.01, 100.0),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
}
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """The value for a message, whatever its size; Python refuses to print integers of many thousand digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class InvalidParameter(ValueError):
    """A request parameter is out of its range; `parameter` names it."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def check_number(name: str, given: int, most: int) -> None:
    """Raise InvalidParameter when more token ids are given than are allowed."""
    if given > most:
        raise InvalidParameter(name, f"{name} has {given} token ids; at most {most} are allowed")


def _items(name: str, value: Iterable[Any] | None) -> list[Any]:
    if isinstance(value, list | tuple | set | frozenset | None):
        return list(value or ())
    raise InvalidParameter(name, f"{name} is {_shown(value)}; it must be a list")


def _number(name: str, value: Any, kind: type[Any], low: float, high: float) -> int | float:
    """A number of another type, as one of this kind. Raises InvalidParameter for what is none, or out of range."""
    if not (_is_integer(value) if kind is int else _is_real(value)):
        wanted = "an integer" if kind is int else "a number"
        raise InvalidParameter(name, f"{name} is {_shown(value)}; it must be {wanted}")
    if not low <= value <= high:  # also refuses NaN
        limits = (low, high) if kind is int else (f"{low:g}", f"{high:g}")
        bound = "above 0 and at most 1" if name == "top_p" else f"between {limits[0]} and {limits[1]}"
        raise InvalidParameter(name, f"{name} is {_shown(value)}; it must be {bound}")
    return int(value) if kind is int else float(value)


def _token_ids(name: str, given: list[Any]) -> list[int]:
    for token in given:
        if not _is_integer(token) or token < 0:
            raise InvalidParameter(name, f"{name} contains {_shown(token)}; token ids are integers from 0")
    return [int(token) for token in given]


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters with the names and meanings of the OpenAI API and of vLLM.

    Raises:
        InvalidParameter: when a value is out of range.
    """

    n: int = 1  # choices to generate from one prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    top_p: float = 1.0  # keep the likeliest tokens whose probabilities sum to at least this
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # most tokens to generate; None means up to the model's context
    min_tokens: int = 0  # no stop of any kind before this many tokens
    # Return the log-probability of the chosen token and of this many alternatives; None for none.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    # Strings that end the output; the text before the first of them is kept. A single string stands for a list of one;
    # None, here and for the other lists, for an empty one.
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id to a value in [-100, 100] added to its logit
    # Only these tokens may come, and the end token only if it is one of them; None for all.
    allowed_token_ids: list[int] | None = None
    # What the output has to be; a mapping is read as StructuredOutputs.of() does. The end token comes when that is
    # complete, whatever min_tokens and ignore_eos say.
    structured_outputs: StructuredOutputs | None = None
    # In place of drawing tokens, search for the likeliest texts, and give the best `n`. A text ends with an end token
    # or a stop token.
    use_beam_search: bool = False
    best_of: int | None = None  # how many beams a search has; None for `n`
    # Texts are ranked by the sum of their log-probabilities, divided by their number of tokens to the power of this.
    length_penalty: float = 1.0
    # True ends a search with the first `best_of` texts; False when no beam would be ranked before the last of them if
    # it ended now; "never" when none can be any more.
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else _items("stop", self.stop)
        self.stop_token_ids = _items("stop_token_ids", self.stop_token_ids)
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidParameter("logit_bias", f"logit_bias is {_shown(self.logit_bias)}; it must be a dict")
        self.logit_bias = dict(self.logit_bias or {})
        if isinstance(self.top_k, Integral) and self.top_k == -1:
            self.top_k = 0
        for name, (kind, low, high) in _NUMBERS.items():
            value = getattr(self, name)
            if not (type(value) is kind and low <= value <= high) and (value is not None or name not in _OPTIONAL):
                setattr(self, name, _number(name, value, kind, low, high))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, f"{name} is {_shown(getattr(self, name))}; it must be true or false")
        if self.stop or self.stop_token_ids:
            self._check_stops()
        if self.logit_bias:
            self._check_logit_bias()
        if self.allowed_token_ids is not None:
            self._check_allowed(_items("allowed_token_ids", self.allowed_token_ids))
        if self.structured_outputs is not None:
            self._check_structure(self.structured_outputs)
        if self.use_beam_search:
            if (problem := problem_of(self)) is not None:
                raise InvalidParameter(*problem)
        elif self.best_of not in (None, self.n) or self.length_penalty != 1.0 or self.early_stopping is not False:
            self._refuse_without_beams()

    def _refuse_without_beams(self) -> None:
        for name, value in (("length_penalty", 1.0), ("early_stopping", False), ("best_of", self.n)):
            given = getattr(self, name)
            if given is not None and given != value:
                raise InvalidParameter(name, f"{name} is {_shown(given)}; it needs use_beam_search to be true")

    def _check_structure(self, given: StructuredOutputs | Mapping[str, Any]) -> None:
        try:
            self.structured_outputs = given if isinstance(given, StructuredOutputs) else StructuredOutputs.of(given)
        except (InvalidStructure, AttributeError, TypeError) as error:
            said = str(error) if isinstance(error, InvalidStructure) else f"it is {_shown(given)}, not a mapping"
            raise InvalidParameter("structured_outputs", f"structured_outputs: {said}") from None

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidParameter("stop", f"stop contains {_shown(text)}; it must contain strings only")
            if not text:
                raise InvalidParameter("stop", "stop contains an empty string; leave it out")
            if len(text) > MAX_STOP_CHARS:
                message = f"stop contains a string of {len(text)} characters; at most {MAX_STOP_CHARS} are allowed"
                raise InvalidParameter("stop", message)
        check_number("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)

    def _check_allowed(self, given: list[Any]) -> None:
        name = "allowed_token_ids"
        check_number(name, len(given), MAX_ALLOWED_TOKEN_IDS)
        if not given:
            raise InvalidParameter(name, f"{name} is empty; give at least one token id, or leave it out")
        if self.structured_outputs is not None:
            raise InvalidParameter(name, f"{name} and a structured output are given together; give one of them")
        self.allowed_token_ids = _token_ids(name, given)

    def _check_logit_bias(self) -> None:
        check_number("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS_TOKENS)
        for token, bias in self.logit_bias.items():
            if not _is_integer(token) or token < 0:
                raise InvalidParameter(
                    "logit_bias", f"logit_bias has the key {_shown(token)}; its keys are token ids, integers from 0"
                )
            if not _is_real(bias) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise InvalidParameter(
                    "logit_bias",
                    f"logit_bias of token {token} is {_shown(bias)}; "
                    f"it must be between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
                )
        self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}

    @property
    def width(self) -> int:
        """How many beams a search has."""
        return self.n if self.best_of is None else self.best_of

    def for_beams(self, num_stops: int) -> SamplingParams:
        """The parameters of each sequence of a search: the likeliest tokens are wanted, with their log-probabilities.

        Args:
            num_stops: how many tokens end a text.
        """
        params = replace(self, temperature=0.0)
        params.logprobs = max(self.width + num_stops, self.logprobs or 0)
        return params

    @property
    def ends_at_eos(self) -> bool:
        """Whether the model's eos ends a choice. Nothing can follow the end of a structured output."""
        return not self.ignore_eos or self.structured_outputs is not None

    @property
    def without_drafts(self) -> str:
        """What keeps drafts from being tried, as penalties, which would count them too; empty for nothing."""
        if self.use_beam_search:
            return "beam search"
        if self.penalises:
            return "penalties"
        return "structured outputs" if self.structured_outputs is not None else ""

    @property
    def penalises(self) -> bool:
        """Whether a penalty makes the tokens so far count for the next one."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's own defaults, as arguments of SamplingParams, from what its generation_config.json holds.

    Raises:
        ValueError: one of them is out of its range.
    """
    found = {ours: generation_config.get(name) for name, ours in _DEFAULTABLE.items()}
    defaults = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except InvalidParameter as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return defaults
