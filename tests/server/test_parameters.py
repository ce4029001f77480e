"""Default sampling parameters from generation_config.json, and what a request may change."""

from __future__ import annotations

from typing import Any

import pytest

from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.sampling_params import SamplingParams
from headway.server.api.parameters import fitted_params, sampling_params, server_defaults
from headway.server.api.schemas import ChatBody, CompletionBody
from headway.server.errors import ApiError
from headway.text.tokenizer_files import TextError

CLASS = ServiceClass(name="any")


def of_completion(defaults: dict[str, Any], **fields: Any) -> SamplingParams:
    return sampling_params(CompletionBody(prompt="x", **fields), server_defaults(defaults), 100)


def of_chat(defaults: dict[str, Any], **fields: Any) -> SamplingParams:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    return sampling_params(body, server_defaults(defaults), 100)


def test_defaults_of_the_checkpoint_hold_unless_the_request_says_otherwise() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "bos": 1}
    params = of_completion(config, top_p=0.5)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.5, 20, 1.05)
    assert of_completion({}) == SamplingParams()
    assert of_completion(config, temperature=0).temperature == 0.0


def test_max_tokens_of_each_route() -> None:
    assert of_completion({}).max_tokens == 16
    assert of_completion({}, min_tokens=40).max_tokens == 40
    assert of_chat({}).max_tokens is None
    assert of_chat({"max_new_tokens": 300}).max_tokens == 300
    assert of_completion({"max_new_tokens": 300}).max_tokens == 300
    assert of_chat({"max_new_tokens": 300}, max_completion_tokens=5).max_tokens == 5
    assert of_chat({}, max_tokens=5, max_completion_tokens=5).max_tokens == 5


@pytest.mark.parametrize("config", [{"temperature": -1}, {"top_p": "much"}, {"max_new_tokens": 0}])
def test_broken_defaults_are_named(config: dict[str, Any]) -> None:
    with pytest.raises(TextError, match=r"generation_config\.json.*--generation-config none"):
        server_defaults(config)


def test_output_that_was_not_asked_for_gives_way_to_the_context() -> None:
    def fit(max_tokens: int | None, asked: bool) -> int | None:
        params = SamplingParams(max_tokens=max_tokens)
        field = "max_tokens" if asked else None
        return fitted_params(params, [90], 100, CLASS, "prompt", field)[0].max_tokens

    assert fit(None, False) == 10
    assert fit(16, False) == 10
    assert fit(10, True) == 10
    with pytest.raises(ApiError) as refused:
        fit(11, True)
    assert refused.value.param == "max_tokens"


def test_each_prompt_gets_its_own_limit() -> None:
    params = SamplingParams(max_tokens=None)
    fitted = fitted_params(params, [1, 99], 100, CLASS, "prompt", None)
    assert [one.max_tokens for one in fitted] == [99, 1]
    assert params.max_tokens is None
