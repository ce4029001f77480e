"""What a beam search of the library looks for."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            stop_token_ids=self.stop_token_ids,
            logprobs=0,
        )
