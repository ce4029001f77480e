"""The `openai` client against the served bundled model."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.live.conftest import Served

MODEL = "headway/story"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0)
    assert len(answer.choices[0].text.split()) > 4
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 12 + answer.usage.prompt_tokens)


def test_streamed_text_is_the_whole_text(client: openai.OpenAI) -> None:
    question = {"model": MODEL, "prompt": "The old king said to his daughter", "max_tokens": 40, "seed": 7}
    whole = client.completions.create(**question).choices[0].text  # type: ignore[call-overload]
    streamed, usage = "", None
    for chunk in client.completions.create(**question, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        streamed += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert streamed == whole
    assert usage is not None and usage.completion_tokens == 40


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "The wolf came to the door of the little house."}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, seed=3)  # type: ignore[arg-type]
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert "<|im_" not in choice.message.content


def test_many_prompts_and_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One day", "In the forest"], n=3, max_tokens=8, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({choice.text for choice in answer.choices}) > 3


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Who goes there?"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 5
    for entry in logprobs.content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert len(entry.top_logprobs) == 3


def test_stop_string(client: openai.OpenAI) -> None:
    free = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=30, temperature=0)
    word = free.choices[0].text.split()[6]
    ended = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=30, temperature=0, stop=word)
    assert ended.choices[0].text == free.choices[0].text.split(word)[0]
    assert ended.choices[0].finish_reason == "stop"


def test_a_repeated_prompt_comes_from_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = "It was the custom of the country that every traveller should tell a tale. " * 6
    first, second = (client.completions.create(model=MODEL, prompt=prompt, max_tokens=2) for _ in range(2))
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    assert second.usage.prompt_tokens_details.cached_tokens == (second.usage.prompt_tokens - 1) // 16 * 16
    other = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, extra_body={"cache_salt": "other"})
    assert other.usage and other.usage.prompt_tokens_details
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="a")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=MODEL, prompt="word " * 3000, max_tokens=5)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model=MODEL, prompt=[5, 900_000], max_tokens=2)


def test_models_and_ledger(client: openai.OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 9, "ignore_eos": True, "include_timings": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    timings = answer.json()["timings"]
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
    assert timings["tokens"] == 9 and 0 < timings["ttft_ns"] < timings["e2e_ns"]
    assert {"receive", "tokenize", "transport", "prefill_compute", "decode_compute", "sampling"} <= set(
        timings["phases_ns"]
    )
    assert "decode_compute" in answer.headers["server-timing"]
