"""Whatever is wrong with a request is a 4xx that says what; see docs/faults.md."""

from __future__ import annotations

from typing import Any

import pytest

from headway.policy.step.sampling_params import SamplingParams
from headway.server.api.schemas import UNSUPPORTED, CompletionBody
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer

JSON = {"content-type": "application/json"}
ROUTES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


def raw(server: LiveServer, content: bytes, path: str = "/v1/completions") -> dict[str, Any]:
    answer = server.client.post(path, content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "x",}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\xc3"}', "not valid JSON"),
        (rb'{"prompt": "\ud800"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": -Infinity}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "not valid JSON"),
        (b"[]", "is a JSON array"),
        (b"null", "is a JSON null"),
        (b'"text"', "is a JSON string"),
        (b"5", "is a JSON number"),
    ],
)
def test_malformed_json(server: LiveServer, path: str, content: bytes, says: str) -> None:
    assert says in raw(server, content, path)["message"]


@pytest.mark.parametrize("name", ["max_tokenz", "tools", "suffix", "__class__", "", "model_config", "truncate"])
def test_unknown_or_unsupported_field_is_named(server: LiveServer, name: str) -> None:
    answer = server.post("/v1/completions", **{"prompt": "x", name: "y"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_tokens", True),
        ("max_tokens", []),
        ("temperature", "hot"),
        ("temperature", {}),
        ("stream", "yes"),
        ("stream", 1),
        ("n", "1"),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("logit_bias", [1]),
        ("logit_bias", {"5": "x"}),
        ("stop_token_ids", "5"),
        ("echo", 0),
        ("model", 5),
        ("seed", 1.5),
        ("cache_salt", 5),
        ("priority", "high"),
        ("user", 5),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", {}),
        ("prompt", ["a", 5]),
        ("prompt", [5, "a"]),
        ("prompt", [[5], "a"]),
        ("prompt", [[5.5]]),
        ("prompt", [True]),
        ("stream_options", True),
        ("include_timings", "yes"),
    ],
)
def test_wrong_type(server: LiveServer, name: str, value: Any) -> None:
    answer = server.post("/v1/completions", **{"prompt": "x", name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name)


def test_temperatures_above_openai_s_2_are_taken_and_the_error_names_the_limit(
    server: LiveServer, engine: FakeEngine
) -> None:
    for taken in (0, 2, 2.5, 100):
        assert server.post("/v1/completions", prompt="x", temperature=taken, max_tokens=1).status_code == 200
    assert [request.params.temperature for request in engine.requests[-4:]] == [0, 2, 2.5, 100]
    refused = server.post("/v1/completions", prompt="x", temperature=100.5).json()["error"]
    assert refused["param"] == "temperature"
    assert refused["message"] == "temperature is 100.5; it must be between 0 and 100"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("n", 0),
        ("n", 129),
        ("best_of", 2),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("min_tokens", -1),
        ("min_tokens", 10**6),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [512]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [5] * 129),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"5": 101}),
        ("cache_salt", ""),
        ("cache_salt", "x" * 300),
        ("priority", 1),
        ("priority", 2**40),
    ],
)
def test_value_out_of_range(server: LiveServer, name: str, value: Any) -> None:
    answer = server.post("/v1/completions", **{"prompt": "x", name: value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name
    assert name in answer.json()["error"]["message"]


def test_number_too_large_for_its_type(server: LiveServer) -> None:
    assert raw(server, b'{"prompt": "x", "temperature": 1e999}')["param"] == "temperature"
    for name in ("max_tokens", "temperature", "priority", "seed"):
        for digits in (100, 4000, 5000):
            raw(server, b'{"prompt": "x", "%s": 1%s}' % (name.encode(), b"0" * digits))
    raw(server, b'{"prompt": [1%s]}' % (b"0" * 4000))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt is empty"),
        ([], "empty list"),
        ([[]], "prompt is empty"),
        ([""], "prompt is empty"),
        (["x", ""], "prompt 1 is empty"),
        ([[5], []], "prompt 1 is empty"),
        ([5, 512], "prompt has 512 at position 1; the vocabulary has the ids 0 to 511"),
        ([-1], "prompt has -1"),
        ([2**80], "prompt has a huge number"),
        (["x"] * 1025, "1025 prompts"),
    ],
)
def test_empty_prompt_and_ids_out_of_the_vocabulary(server: LiveServer, prompt: Any, says: str) -> None:
    answer = server.post("/v1/completions", prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert says in answer.json()["error"]["message"]


def test_prompt_longer_than_the_context(server: LiveServer) -> None:
    answer = server.post("/v1/completions", prompt=[50] * 300)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "300 tokens" in message
    assert "256 tokens" in message
    assert server.post("/v1/completions", prompt=[50] * 256).status_code == 400
    assert server.post("/v1/completions", prompt=[50] * 255, max_tokens=1).status_code == 200


def test_prompt_and_output_longer_than_the_context(server: LiveServer, engine: FakeEngine) -> None:
    answer = server.post("/v1/completions", prompt=[50] * 250, max_tokens=7)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert "at most 6" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", prompt=[50] * 250).status_code == 200  # the default gives way
    assert engine.requests[0].params.max_tokens == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "echo": True, "logprobs": 1}, "stream"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_fields_that_do_not_go_together(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", prompt="x", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_unknown_model(server: LiveServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        answer = server.post(path, model="gpt-9", **body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "gpt-9" in answer.json()["error"]["message"]
    assert server.client.get("/v1/models/gpt-9").status_code == 404


def test_unknown_route_and_wrong_method(server: LiveServer) -> None:
    answer = server.client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    wrong = server.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed" and "use POST" in wrong.json()["error"]["message"]


def test_a_misspelt_field_is_told_the_right_one(server: LiveServer) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_token": 3})
    assert answer.status_code == 400 and "did you mean max_tokens?" in answer.json()["error"]["message"]


def test_bad_tokens_to_detokenize(server: LiveServer) -> None:
    for tokens in ([512], [-1], [2**70]):
        assert server.post("/detokenize", tokens=tokens).json()["error"]["param"] == "tokens"
    assert server.post("/detokenize", tokens="5").json()["error"]["param"] == "tokens"
    error = server.post("/tokenize", messages=[]).json()["error"]
    assert (error["param"], error["message"]) == (
        "messages",
        "messages is a JSON array; it must have at least 1 item",
    )
    assert server.post("/tokenize").json()["error"]["param"] == "prompt"


def test_null_is_the_same_as_absent(server: LiveServer, engine: FakeEngine) -> None:
    nothing = dict.fromkeys((*CompletionBody.model_fields, *UNSUPPORTED, "a_field_of_others"))
    assert server.post("/v1/completions", **(nothing | {"prompt": "x"})).status_code == 200
    assert engine.requests[0].params == SamplingParams()


def test_long_values_are_cut_in_messages(server: LiveServer, tokenizer: Tokenizer) -> None:
    answer = server.post("/v1/completions", prompt="x", temperature="y" * 10_000)
    assert len(answer.text) < 500
    assert len(server.post("/v1/completions", prompt="x", model="m" * 10_000).text) < 500


def test_answer_of_millions_of_log_probabilities(server: LiveServer) -> None:
    prompts = [[5] * 250] * 32
    for name, asked in (("prompt_logprobs", {"prompt_logprobs": 20}), ("logprobs", {"echo": True, "logprobs": 20})):
        answer = server.post("/v1/completions", prompt=prompts, n=19, max_tokens=1, **asked)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert "3192000 log-probabilities" in answer.json()["error"]["message"]
