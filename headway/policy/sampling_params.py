"""How a request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16


class InvalidParameter(ValueError):
    """A request parameter is out of its range; `parameter` names it."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters with the names and meanings of the OpenAI API and of vLLM.

    Args:
        n: choices to generate from one prompt.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the likeliest tokens whose probabilities sum to at least this.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        max_tokens: most tokens to generate; None means up to the model's context.
        min_tokens: no stop of any kind before this many tokens.
        logprobs: return the log-probability of the chosen token and of this many alternatives; None for none.
        prompt_logprobs: the same for every prompt token but the first.
        stop: strings that end the output; the text before the first of them is kept.
        logit_bias: token id to a value in [-100, 100] added to its logit.

    Raises:
        InvalidParameter: when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0
        self._check_integers()
        self._check_reals()
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        if any(not s for s in self.stop):
            raise InvalidParameter("stop", "stop contains an empty string; leave it out")

    def _check_integers(self) -> None:
        ranges: dict[str, tuple[int, float]] = {
            "n": (1, MAX_CHOICES),
            "top_k": (0, math.inf),
            "max_tokens": (1, math.inf),
            "min_tokens": (0, math.inf),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
            "seed": (-(2**63), 2**63 - 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                bound = f"between {low} and {high}" if high != math.inf else f"at least {low}"
                raise InvalidParameter(name, f"{name} is {value}; it must be {bound}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
            )

    def _check_reals(self) -> None:
        ranges = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses NaN
                raise InvalidParameter(name, f"{name} is {value}; it must be between {low:g} and {high:g}")
        if self.top_p == 0.0:
            raise InvalidParameter("top_p", "top_p is 0; it must be above 0 and at most 1")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidParameter("logit_bias", f"logit_bias of token {token} is {bias}; it must be in [-100, 100]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
