"""How drafts are made, as `--speculative-config` says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headway.policy.step.scheduler_config import MOST_DRAFTS

METHODS = ("ngram", "draft_model", "mtp", "eagle3")
_WITH_MODEL = {
    "draft_model": "a small model with the same tokenizer",
    "eagle3": "a head that was trained for the model",
}
_LIMITS = {"num_speculative_tokens": MOST_DRAFTS, "prompt_lookup_min": 64, "prompt_lookup_max": 64}
_LOOKUP = (None, "ngram", "[ngram]")  # what vLLM's `model` may be where there is no model


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, by the keys of vLLM's `--speculative-config`.

    Raises:
        ValueError: a value is beyond its limits; the message names both.
    """

    # `ngram`: what followed the last tokens when they stood in the prompt or the output before. `draft_model`: what a
    # smaller model says, or what followed before where that is likelier to be right. `mtp`: the same with the head for
    # multi-token prediction that the checkpoint brings; `eagle3`: with a head of a checkpoint of its own.
    method: str = "ngram"
    model: str | None = None  # the smaller model, or the head: a folder, a bundled name, a Hugging Face id
    num_speculative_tokens: int = 15  # most drafts behind a token
    prompt_lookup_min: int = 2  # least tokens that must have stood there before
    prompt_lookup_max: int = 16  # tokens that are compared; of several places the one with the longest match is taken

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        needed = _WITH_MODEL.get(self.method)
        if needed is not None and (type(self.model) is not str or not self.model.strip()):
            raise ValueError(f"model is {self.model!r}; method {self.method!r} needs the name of {needed}")
        if needed is None and self.model is not None:
            raise ValueError(f"model is {self.model!r}, but method {self.method!r} has none; leave one of them out")
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 to {most}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max "
                f"({self.prompt_lookup_max}); lower the first or raise the second"
            )

    @classmethod
    def of(cls, given: object) -> SpeculativeConfig:
        """What a JSON object says, as a text or already read. A model without a method is a draft model.

        Raises:
            ValueError: it is none, or has a key or a value that is not known; one line.
        """
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ValueError(f"{given!r} is not JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ValueError(f'{given!r} is not a JSON object, such as {{"method": "ngram"}}')
        said: dict[str, Any] = dict(given)
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in said if name not in known]:
            raise ValueError(f"{unknown[0]!r} is not known; its keys are {', '.join(known)}")
        if said.get("model") in _LOOKUP and said.get("method", "ngram") == "ngram":
            said.pop("model", None)
        elif "method" not in said:
            said["method"] = "draft_model"
        return cls(**said)
