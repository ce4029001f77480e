"""The library: LLM in this process, AsyncLLM with the engine in another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, AsyncLLM, SamplingParams
from headway.policy.cache.preload import PreloadedPrompt
from tests.engine.models import TINY_LLAMA, write_config
from tests.text.tiny_tokenizers import save_chat_model

ENGINE: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_threads": 1, "kv_cache_memory": 4 << 20}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_chat_model(tmp_path_factory.mktemp("model"), temperature=0.5, top_k=7, max_new_tokens=9)
    write_config(folder, vocab_size=TINY_LLAMA["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **ENGINE)


def test_text_is_the_tokens_decoded(llm: LLM) -> None:
    prompts = ["Once upon a time", "The quick brown", {"prompt": "日本語"}, [5, 6, 7]]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["Once upon a time", "The quick brown", "日本語", None]
    assert llm.tokenizer is not None
    for output in outputs:
        (choice,) = output.outputs
        assert len(choice.token_ids) == 20 and choice.finish_reason == "length" and output.finished
        assert choice.text == llm.tokenizer.decode(choice.token_ids)


def test_a_single_prompt_needs_no_list(llm: LLM) -> None:
    assert len(llm.generate("Once", GREEDY)) == len(llm.generate([5, 6, 7], GREEDY)) == 1


def test_stop_strings_end_a_choice_and_free_its_blocks(llm: LLM) -> None:
    text = llm.generate("Once upon", GREEDY)[0].outputs[0].text
    middle = text[4:7]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=[middle])
    choice = llm.generate("Once upon", params)[0].outputs[0]
    assert choice.text == text[: text.index(middle)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", middle)
    llm.engine.core.scheduler.check()
    assert llm.engine.core.scheduler.blocks.usage == 0.0


def test_stop_token_ids_end_a_choice_and_are_not_part_of_its_text(llm: LLM) -> None:
    tokens = llm.generate("Once upon", GREEDY)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[tokens[3]], ignore_eos=True)
    choice = llm.generate("Once upon", params)[0].outputs[0]
    at = tokens.index(tokens[3])
    assert choice.token_ids == tokens[: at + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[3])
    assert llm.tokenizer is not None and choice.text == llm.tokenizer.decode(tokens[:at])


def test_logprobs_sum_up(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    output = llm.generate("Once upon a time", params)[0]
    choice = output.outputs[0]
    assert choice.logprobs is not None and choice.cumulative_logprob is not None
    assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in choice.logprobs))
    assert all(len(entry.top_ids) == 3 and entry.rank == 1 for entry in choice.logprobs)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_requests_are_of_the_class_that_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    add = llm.engine.core.add
    monkeypatch.setattr(llm.engine.core, "add", lambda request: (asked.append(request.service_class), add(request)))
    for name in ("", "batch"):
        assert llm.generate("Once", GREEDY, service_class=name)[0].finished
    assert llm.chat([{"role": "user", "content": "x"}], GREEDY, service_class="offline")[0].finished
    assert asked == ["", "batch", "offline"]
    with pytest.raises(ValueError, match="service class 'best' is unknown; there are interactive, batch, offline"):
        llm.generate("Once", GREEDY, service_class="best")


def test_parameters_go_with_their_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], params)] == [2, 5]
    with pytest.raises(ValueError, match="1 prompts, but 2 sampling_params"):
        llm.generate(["a"], params)


def test_the_checkpoints_sampling_defaults_are_used(llm: LLM) -> None:
    params = llm._front.default_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 9)
    assert 1 <= len(llm.generate("Once upon")[0].outputs[0].token_ids) <= 9


def test_without_a_tokenizer_the_checkpoints_eos_still_ends_a_choice(tmp_path: Path) -> None:
    free = LLM(write_config(tmp_path / "free"), skip_tokenizer_init=True, **ENGINE).generate([5, 6, 7], GREEDY)
    third = free[0].outputs[0].token_ids[2]
    llm = LLM(write_config(tmp_path / "ends", eos_token_id=third), skip_tokenizer_init=True, **ENGINE)
    choice = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20))[0].outputs[0]
    assert choice.finish_reason == "stop"
    assert choice.token_ids[-1] == third and len(choice.token_ids) <= 3


def test_chat_renders_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0]
    assert llm.tokenizer is not None
    shown = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert len(llm.chat([[{"role": "user", "content": w}] for w in ("a", "b")], GREEDY)) == 2
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    shown = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nHel\nlo<|im_end|>\n<|im_start|>assistant\n"
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    for messages in ([], [{"role": "user"}], [{"role": "user", "content": [image]}], ["Hello"]):
        with pytest.raises(ValueError, match="no message"):
            llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([5] * 300, "the prompt has 300 tokens"),
        ({"promt": "a"}, "give a text, token ids, or a dict with either"),
        ([5, 9999], "9999"),
        ([5, "six"], "the prompt has 'six' for a token id; token ids are integers from 0"),
        ([5, 6.5], "the prompt has 6.5 for a token id"),
        ([5, 2**70], "the prompt has 1180591620717411303424 for a token id"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt, "good"], GREEDY)
    assert not llm.engine.core.has_work
    assert llm.generate("good", GREEDY)[0].finished


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; it must be auto, cpu or cuda"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"max_model_len": 100_000}, "max_model_len is 100000; for this model it must be between 2 and 256"),
        ({"kv_cache_memory": 4096, "max_model_len": 128}, "raise --kv-cache-memory, or lower --max-model-len"),
        (
            {"kv_cache_memory": None, "gpu_memory_utilization": 0.01, "max_model_len": 128, "device": "cpu"},
            "raise --gpu-memory-utilization or --kv-cache-memory, or lower --max-model-len",
        ),
        ({"max_prefill_stall_ms": -5.0}, "max_prefill_stall_ms is -5; it must be 0 or more"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "less than max_num_seqs"),
        ({"load_format": "gguf"}, "load_format is 'gguf'"),
    ],
)
def test_bad_settings_are_one_line(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LLM(str(folder), **(ENGINE | settings))
    assert "\n" not in str(caught.value)


def test_preloaded_prompts_are_there_for_the_first_and_after_any_others(folder: Path, llm: LLM) -> None:
    long = [7 + at % 50 for at in range(200)]
    preloaded = [PreloadedPrompt("long", long), PreloadedPrompt("twice", long[:100]), PreloadedPrompt("b", long, "b")]
    kept = LLM(str(folder), **ENGINE, preloaded=preloaded)
    blocks = kept.engine.core.scheduler.blocks
    assert len(blocks.pinned) == 2 * (200 // 16) and blocks.usage == 0.0
    for turn in range(3):
        (output,) = kept.generate([[*long, 9]], GREEDY)
        assert output.num_cached_tokens == 192
        kept.generate([[number + turn] * 200 for number in range(10, 60)], SamplingParams(max_tokens=2))
    assert output.outputs[0].token_ids == llm.generate([[*long, 9]], GREEDY)[0].outputs[0].token_ids
    kept.engine.core.scheduler.check()


def test_prompts_that_can_not_be_preloaded_are_named(folder: Path) -> None:
    for preloaded, options, message in (
        ([PreloadedPrompt("p.toml, line 3: prompt 'a'", [5] * 300)], {}, "p.toml, line 3: prompt 'a'.*256"),
        ([PreloadedPrompt("p.toml, line 3", [99_999])], {}, "p.toml, line 3: the prompt cannot be computed: .*99999"),
        (
            [PreloadedPrompt("p.toml, line 3", [5])],
            {"enable_prefix_caching": False},
            "line 3: preloaded prompts need the",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(str(folder), **ENGINE, **options, preloaded=preloaded)


def test_prompts_of_a_batch_hold_up_as_they_like_unless_bounded(llm: LLM, folder: Path) -> None:
    assert llm.engine.core.scheduler.config.max_prefill_stall_ms == math.inf
    bounded = LLM(str(folder), **ENGINE, max_prefill_stall_ms=20.0)
    assert bounded.engine.core.scheduler.config.max_prefill_stall_ms == 20
    outputs = bounded.generate([[token] * 40 for token in range(5, 25)], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in llm.generate([[token] * 40 for token in range(5, 25)], GREEDY)
    ]


def test_the_context_shrinks_to_the_pool_when_none_was_asked_for(folder: Path) -> None:
    llm = LLM(str(folder), **(ENGINE | {"kv_cache_memory": 512 * 64}))
    assert llm.engine.ready.max_model_len == 64


async def test_async_llm_streams_and_stops(folder: Path, llm: LLM) -> None:
    expected = llm.generate("Once upon a time", GREEDY)[0].outputs[0]
    async with AsyncLLM(str(folder), **ENGINE) as served:
        lengths = []
        async for output in served.generate("Once upon a time", GREEDY):
            lengths.append(len(output.outputs[0].token_ids))
        assert lengths == sorted(lengths) and lengths[-1] == 20 and len(lengths) > 5
        assert output.finished and output.outputs[0].text == expected.text
        assert sum(output.timings_ns.values()) > 0
        stop = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=[expected.text[4:7]])
        going_on = served.generate([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(going_on)
        for wrong in (["five"], [5.5], [2**70], [-1]):
            with pytest.raises(ValueError, match="token id"):
                await anext(served.generate({"prompt_token_ids": wrong}, GREEDY))
        assert not (await anext(going_on)).finished  # the engine that they share has not noticed
        await going_on.aclose()
        assert not len(served.engine._requests), "it is still there when its stream has been closed"
        *_, output = [grown async for grown in served.generate("Once upon a time", stop)]
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].text == expected.text[: expected.text.index(expected.text[4:7])]
