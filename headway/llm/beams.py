"""What a beam search of the library looks for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from headway.policy.step.sampling_params import SamplingParams


@dataclass(slots=True)
class BeamSearchParams:
    """What LLM.beam_search looks for, with vLLM's names; SamplingParams explains length_penalty and early_stopping."""

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_token_ids: list[int] = field(default_factory=list)

    @property
    def sampling_params(self) -> SamplingParams:
        """The same as parameters of a request. Raises InvalidParameter for a value out of range."""
        same = {each.name: getattr(self, each.name) for each in fields(self)}
        return SamplingParams(use_beam_search=True, n=same.pop("beam_width"), logprobs=0, **same)
