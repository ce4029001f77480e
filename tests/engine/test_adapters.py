"""Adapters in the engine: tokens of the merged weights whatever else runs, slots, the prefix cache, and recordings."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from headway import LLM, AsyncLLM, LoRARequest, SamplingParams
from headway.engine.ranked import ContextExecutor
from headway.llm import BeamSearchParams
from headway.models.config import ModelError
from headway.simulator.recording import read_recordings
from headway.simulator.replay import replay
from tests.engine.test_context_ranks import Always
from tests.models import lora, tiny

PROMPTS = tiny.prompts([19, 7, 23, 11])
NUM_ADAPTERS = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = {"dtype": "float32", "num_threads": 2, "kv_cache_memory": 1 << 20, "max_model_len": 64}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and adapters 0, 1, ... beside it."""
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny.save("llama", folder / "base")
    for number in range(NUM_ADAPTERS):
        lora.save(folder / str(number), model, 2 + number, number)
    return folder


@pytest.fixture(scope="module")
def expected(home: Path) -> list[list[list[int]]]:
    """Hugging Face's tokens of each prompt, with each adapter merged; those of the base model are the last."""
    found = []
    for number in [*range(NUM_ADAPTERS), None]:
        model = tiny.build("llama")
        if number is not None:
            lora.merge(model, lora.save(home / "again", model, 2 + number, number))
        found.append([_continued(model, prompt) for prompt in PROMPTS])
    assert len({tuple(tokens[0]) for tokens in found}) == len(found)
    return found


def _continued(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(tiny.logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def make(home: Path) -> Iterator[Any]:
    made = []

    def llm(**options: Any) -> LLM:
        found = LLM(str(home / "base"), skip_tokenizer_init=True, **(OPTIONS | {"enable_lora": True} | options))
        made.append(found)
        return found

    yield llm
    for each in made:
        each.engine.core.check()


def asked(home: Path, number: int) -> LoRARequest | None:
    return None if number == NUM_ADAPTERS else LoRARequest(str(number), number + 1, str(home / str(number)))


def check(llm: LLM, home: Path, expected: list[list[list[int]]], numbers: list[int], params: Any = GREEDY) -> None:
    """Check the tokens of every prompt with each of these adapters, all at once."""
    pairs = [(number, at) for number in numbers for at in range(len(PROMPTS))]
    random.Random(0).shuffle(pairs)
    outputs = llm.generate([PROMPTS[at] for _, at in pairs], params, lora_request=[asked(home, n) for n, _ in pairs])
    for (number, at), output in zip(pairs, outputs, strict=True):
        assert output.outputs[0].token_ids == expected[number][at]
        assert output.timings_ns.get("queue_adapter", 0) >= 0


def test_tokens_are_those_of_the_merged_weights_with_fewer_slots_than_adapters(
    make: Any, home: Path, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    """Chunks, company and preemptions change nothing, and the recorded decisions are made again."""
    record = tmp_path / "steps"
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "kv_cache_memory": 60_000, "block_size": 4}
    llm = make(max_loras=2, max_cpu_loras=3, record_steps=str(record), **options)
    for _ in range(2):  # the second time many find their prefixes
        check(llm, home, expected, list(range(NUM_ADAPTERS + 1)))
    slots = llm.engine.core.scheduler.sequences.slots
    assert slots is not None and slots.counts[2] >= NUM_ADAPTERS and not slots.loading
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0
    assert [replay(recording) > 0 for recording in read_recordings(record)] == [True]


def test_requests_of_the_base_model_take_the_plain_path(make: Any, home: Path, expected: list[list[list[int]]]) -> None:
    llm = make(max_loras=2)
    check(llm, home, expected, [0, NUM_ADAPTERS])
    adapters = llm.engine.runner.adapters
    assert adapters is not None and not adapters.slots
    adapters.decoder_for = None  # type: ignore[assignment, method-assign]
    check(llm, home, expected, [NUM_ADAPTERS])


def test_drafts_beams_and_choices_are_of_the_adapter(make: Any, home: Path, expected: list[list[list[int]]]) -> None:
    llm = make(max_loras=2, speculative_config={"method": "ngram"})
    check(llm, home, expected, [0, 1, NUM_ADAPTERS])
    (searched,) = llm.beam_search(
        [PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=4), lora_request=asked(home, 1)
    )
    best = searched.outputs[0]
    plain = llm.generate(
        [PROMPTS[0] + best.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0), lora_request=asked(home, 1)
    )[0]
    assert plain.prompt_logprobs is not None
    found = sum(entry.logprob for entry in plain.prompt_logprobs[-4:] if entry is not None)
    assert found == pytest.approx(best.cumulative_logprob, abs=1e-4)
    two = llm.generate(
        [PROMPTS[2]], SamplingParams(temperature=0.0, n=2, max_tokens=8, ignore_eos=True), lora_request=asked(home, 0)
    )
    assert [each.token_ids for each in two[0].outputs] == [expected[0][2]] * 2


def test_a_prefix_is_shared_by_digest_alone(
    make: Any, home: Path, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    """Under one name or path, other weights find nothing; the same weights elsewhere do."""
    llm, model = make(block_size=4), tiny.build("llama")
    folder, twin = tmp_path / "a", tmp_path / "twin"
    cached = []
    for number, where in ((0, folder), (0, folder), (1, folder), (0, twin)):
        lora.save(where, model, 2 + number, number)
        request = LoRARequest("one name", 1, str(where))
        (output,) = llm.generate([PROMPTS[0]], GREEDY, lora_request=request)
        assert output.outputs[0].token_ids == expected[number][0]
        cached.append(output.num_cached_tokens)
    (plain,) = llm.generate([PROMPTS[0]], GREEDY)
    assert plain.outputs[0].token_ids == expected[-1][0] and plain.num_cached_tokens == 0
    assert cached[0] == cached[2] == 0 and cached[1] == cached[3] == 16


def test_a_folder_that_changed_before_its_slot_was_filled_ends_those_who_wait(
    make: Any, home: Path, tmp_path: Path
) -> None:
    llm, model = make(max_loras=1, max_cpu_loras=1), tiny.build("llama")
    lora.save(tmp_path / "a", model, 4, 1)
    adapters = llm.engine.core.adapters
    assert adapters is not None
    llm._digests[LoRARequest("a", 1, str(tmp_path / "a")).stamp] = adapters.find(str(tmp_path / "a")).result().digest
    llm.generate([PROMPTS[0]], GREEDY, lora_request=asked(home, 1))  # host memory forgets the first
    stamp = LoRARequest("a", 1, str(tmp_path / "a")).stamp
    lora.save(tmp_path / "a", model, 4, 2)
    llm._digests[LoRARequest("a", 1, str(tmp_path / "a")).stamp] = llm._digests[stamp]
    with pytest.raises(ValueError, match="the folder has changed since it was loaded; load it again"):
        llm.generate([PROMPTS[0]], GREEDY, lora_request=LoRARequest("a", 1, str(tmp_path / "a")))
    assert llm.generate([PROMPTS[0]], GREEDY)[0].finished


def test_many_calls_of_an_engine_in_a_process_of_its_own(home: Path, expected: list[list[list[int]]]) -> None:
    async def run() -> None:
        async with AsyncLLM(
            str(home / "base"), skip_tokenizer_init=True, enable_lora=True, max_loras=2, **OPTIONS
        ) as llm:

            async def tokens(number: int, at: int) -> list[int]:
                async for output in llm.generate(
                    {"prompt_token_ids": PROMPTS[at]}, GREEDY, lora_request=asked(home, number)
                ):
                    found = output.outputs[0].token_ids
                return found

            pairs = [(number, at) for number in (0, 1, NUM_ADAPTERS) for at in range(len(PROMPTS))]
            for (number, at), found in zip(
                pairs, await asyncio.gather(*(tokens(*pair) for pair in pairs)), strict=True
            ):
                assert found == expected[number][at]
            with pytest.raises(ValueError, match="there is no such folder"):
                async for _ in llm.generate(
                    {"prompt_token_ids": [5]}, GREEDY, lora_request=LoRARequest("x", 9, "/none")
                ):
                    pass

    asyncio.run(run())


@pytest.mark.slow
def test_all_ranks_fill_their_slots(make: Any, home: Path, expected: list[list[list[int]]], tmp_path: Path) -> None:
    """Where one reads another adapter than rank 0 did, those who have it end."""
    llm, model = make(max_loras=2, max_cpu_loras=3, tensor_parallel_size=2), tiny.build("llama")
    check(llm, home, expected, list(range(NUM_ADAPTERS + 1)))
    lora.save(tmp_path / "a", model, 4, 8)
    adapters = llm.engine.core.adapters
    assert adapters is not None
    digest = adapters.find(str(tmp_path / "a")).result().digest
    lora.save(tmp_path / "a", model, 4, 9)  # rank 0 has the first one in the host's memory
    request = LoRARequest("a", 1, str(tmp_path / "a"))
    llm._digests[request.stamp] = digest
    with pytest.raises(ValueError, match="the engine failed on this request"):
        llm.generate([PROMPTS[0]], GREEDY, lora_request=request)
    check(llm, home, expected, [0, NUM_ADAPTERS])


@pytest.mark.slow
def test_ranks_that_have_the_whole_model_fill_their_slots(
    make: Any, home: Path, expected: list[list[list[int]]]
) -> None:
    llm = make(max_loras=2, max_cpu_loras=3, block_size=4, context_parallel_size=2)
    executor, shares = llm.engine.core.executor, Always(2, 4)
    assert isinstance(executor, ContextExecutor)
    executor.shares = shares
    check(llm, home, expected, list(range(NUM_ADAPTERS + 1)))
    assert shares.steps >= NUM_ADAPTERS // 2, "as many adapters as there are slots come in a step"


@pytest.mark.parametrize("graphs", [pytest.param(graphs, marks=pytest.mark.gpu) for graphs in (True, False)])
def test_on_a_gpu(make: Any, home: Path, expected: list[list[list[int]]], graphs: bool) -> None:
    llm = make(max_loras=2, device="cuda", num_threads=None, enforce_eager=not graphs, gpu_memory_utilization=0.5)
    check(llm, home, expected, list(range(NUM_ADAPTERS + 1)))


def test_what_cannot_be_served_is_one_line(make: Any, home: Path) -> None:
    with pytest.raises(ModelError, match="rank 6, and --max-lora-rank is 4; raise that"):
        make(max_lora_rank=4).generate([PROMPTS[0]], GREEDY, lora_request=asked(home, 4))
    with pytest.raises(ValueError, match="needs an LLM that was made with enable_lora=True"):
        make(enable_lora=False).generate([PROMPTS[0]], GREEDY, lora_request=asked(home, 0))
    with pytest.raises(ValueError, match="x: adapter /none: there is no such folder"):
        make(lora_modules=["x=/none"])
    with pytest.raises(ValueError, match="'x' is given twice"):
        make(lora_modules=["x=/none", {"name": "x", "path": "/other"}])
    with pytest.raises(ValueError, match="max_cpu_loras is 1, less than max_loras"):
        make(max_cpu_loras=1)
