"""Blocks on the host: every byte comes back, whatever the cache is like, and requests go on without a difference."""

from __future__ import annotations

import pytest
import torch

from headway import LLM
from headway.cost.layers import CacheSpec
from headway.engine.memory import bytes_per_block, zero_caches
from headway.engine.messages import AddRequest
from headway.engine.prepare import EngineError
from headway.engine.swap import STAGED_BYTES, HostBlocks
from headway.policy.cache.swap import BlockSwap, SwapSpace
from headway.policy.step.request import Resumed
from headway.policy.step.sampling_params import SamplingParams
from tests.engine.models import write_config

SPECS = [CacheSpec(2, 16, 16), CacheSpec(1, 8, 24)]  # layers need not be alike
PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(20 + 9 * i)] for i in range(8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_byte_comes_back_in_the_order_of_the_plan(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.swap.STAGED_BYTES", 3 * bytes_per_block(SPECS, 16, dtype))
    caches = zero_caches(SPECS, 12, 16, dtype, torch.device(device))
    parts = [tensor for cache in caches for tensor in cache.tensors]
    for part in parts:
        part.copy_(torch.randint(-100, 100, part.shape))
    before = [part.clone() for part in parts]
    host = HostBlocks(caches, 9)
    out, back = [3, 0, 11, 5, 7], [5, 1, 2, 8, 3]
    reused = BlockSwap(True, [9], [4])  # what is copied back is copied before it is written again
    host.run([BlockSwap(True, out, [8, 0, 4, 2, 6]), BlockSwap(False, back, [8, 0, 4, 2, 6]), reused])
    host.run([BlockSwap(False, [10], [4])])
    expected = {at: at for at in range(12)} | dict(zip(back, out, strict=True)) | {10: 9}
    for part, was in zip(parts, before, strict=True):
        assert all(torch.equal(part[at], was[source]) for at, source in expected.items())


def test_measuring_leaves_the_pool_as_it_was_and_says_what_copies_take() -> None:
    caches = zero_caches(SPECS, 40, 16, torch.bfloat16, torch.device("cpu"))
    for cache in caches:
        cache.keys.copy_(torch.randn(cache.keys.shape))
    before = [cache.keys.clone() for cache in caches]
    space = HostBlocks(caches, 30).measured()
    assert space.num_blocks == 30 and 0 < space.copy_ns(30) < 1e9
    assert all(torch.equal(cache.keys, was) for cache, was in zip(caches, before, strict=True))
    assert bytes_per_block(SPECS, 16, torch.bfloat16) * 64 < STAGED_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("tiny"))


def engine(folder: str, **settings: object) -> LLM:
    """An engine with room for 288 tokens, and as many on the host; the eight prompts and their answers have 730."""
    memory = 288 * 512
    options = {"kv_cache_memory": memory, "max_num_seqs": 8, "num_threads": 1, "max_model_len": 256} | settings
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", device="cpu", load_format="dummy", **options)
    if (host := llm.engine.core.scheduler.host) is not None:
        host.space = SwapSpace(host.space.num_blocks)  # as if copies took no time
    return llm


@pytest.fixture(scope="module")
def alone(folder: str) -> list[list[int]]:
    llm = engine(folder, kv_cache_memory=4 << 20, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [llm.generate([{"prompt_token_ids": p}], params)[0].outputs[0].token_ids for p in PROMPTS]


def request(number: int, resumed: list[int] | None = None) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    going_on = None if resumed is None else [Resumed(0, resumed)]
    return AddRequest(str(number), list(PROMPTS[number]), params, [], seed=1, resumed=going_on)


def test_aborts_and_an_engine_that_takes_over_change_no_token(folder: str, alone: list[list[int]]) -> None:
    """Every other request goes away while some are on the host; then the engine is lost, and a new one goes on."""
    swap_space = 288 * 512 / 2**30
    core, successor = (engine(folder, swap_space=swap_space).engine.core for _ in range(2))
    said: dict[str, list[int]] = {str(number): [] for number in range(8)}
    for number in range(8):
        core.add(request(number))

    def step(which: object) -> None:
        for output in which.step().outputs:  # type: ignore[attr-defined]
            assert output.error is None
            said[output.request_id] += output.token_ids

    host = core.scheduler.host
    assert host is not None
    while not host.num_used:
        step(core)
    swapped = [s.request_id for s in core.scheduler.waiting if s.swapped is not None]
    gone = {swapped[0], "0", "2"}
    for name in gone:
        core.abort(name)
        core.scheduler.check()
    while not host.counts["in"]:
        step(core)
        core.scheduler.check()
    for number in range(8):
        if str(number) not in gone and len(said[str(number)]) < 40:
            successor.add(request(number, said[str(number)]))
    assert len(successor.scheduler.sequences) > 2
    while successor.has_work:
        step(successor)
    successor.scheduler.check()
    assert {name: said[name] for name in said.keys() - gone} == {
        str(number): tokens for number, tokens in enumerate(alone) if str(number) not in gone
    }


@pytest.mark.parametrize("swap_space", [1e-6, 1e6])
def test_a_swap_space_of_no_block_or_beyond_the_memory_is_refused(folder: str, swap_space: float) -> None:
    with pytest.raises(EngineError, match=r"swap_space is .* GiB; one block takes .* GiB of memory are free"):
        engine(folder, swap_space=swap_space)


def test_on_a_cpu_nothing_is_swapped_unless_it_is_asked_for(folder: str) -> None:
    core = engine(folder).engine.core
    assert core.scheduler.host is None and core.executor.host is None  # type: ignore[attr-defined]
