"""An engine of several ranks says what one of one rank says, and goes on when a rank dies, hangs or fails."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway import LLM, RequestOutput, SamplingParams
from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from headway.engine.host import Core
from headway.engine.local_ranks import claim
from headway.engine.messages import AddRequest, SequenceOutput
from headway.engine.ranked import RankedExecutor, StagedExecutor
from headway.policy.step.micro_batches import divided
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.policy.step.step_time import StepWork
from tests.engine.clients import has_ended, started
from tests.engine.eager import Foreseeing, try_all_drafts
from tests.engine.grammar_models import save_grammar_model
from tests.engine.models import TINY_GEMMA, TINY_GEMMA4, TINY_LATENT, TINY_MIXTURE, TINY_OLMO

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-4  # of log-probabilities in float32: sums of ranks are added in another order
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads, 16 elements, of all ranks together
PROMPTS = [[(7 * i + 3 * j) % 250 + 5 for j in range(9 + 5 * i)] for i in range(16)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "deep": {"num_hidden_layers": 4},
    "mixture": TINY_MIXTURE,
    "gemma": TINY_GEMMA,
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "latent": TINY_LATENT,
    "gemma4": TINY_GEMMA4,
    "olmo": TINY_OLMO,
    "delta": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(
        lambda family: save_grammar_model(tmp_path_factory.mktemp(family) / "model", **FAMILIES[family])
    )


STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "num_threads": 2}
Build = Callable[..., LLM]


@pytest.fixture(scope="module")
def build(folders: Callable[[str], Path]) -> Build:
    """An engine with so many ranks; the same one for the same settings."""

    @functools.cache
    def make(ranks: int, family: str = "llama", **settings: Any) -> LLM:
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory": 4 << 20}
        options |= {"num_threads": ranks, "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 16}
        return LLM(str(folders(family)), tensor_parallel_size=ranks, **(options | settings))

    return make


def ask(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[RequestOutput]:
    wanted = SamplingParams(**(GREEDY | params))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted)
    llm.engine.core.scheduler.check()
    return outputs


def advanced(llm: LLM, prompts: list[list[int]]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The tokens of each prompt, by its number, and the errors of those that have one."""
    core, found, errors = llm.engine.core, dict[str, list[int]](), dict[str, str]()
    for number, prompt in enumerate(prompts):
        core.add(AddRequest(str(number), prompt, SamplingParams(**GREEDY), []))
    while core.has_work:
        for output in core.advance():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            errors |= {output.request_id: output.error} if output.error else {}
    return found, errors


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    found = []
    for output in outputs:
        of_prompt, of_answer = output.prompt_logprobs or [], output.outputs[0].logprobs or []
        for entry in [*of_prompt[1:], *of_answer]:
            assert entry is not None
            found += [entry.logprob, *entry.top_logprobs]
    return found


@pytest.mark.parametrize(
    ("ranks", "family", "settings"),
    [
        (2, "llama", {}),
        (2, "mixture", {"enable_expert_parallel": True}),
        (2, "delta", {}),
        (1, "gemma", STAGES),
        pytest.param(2, "llama", STAGES | {"num_threads": 4}, marks=pytest.mark.slow),
        *(
            pytest.param(4, family, {}, marks=pytest.mark.slow)
            for family in FAMILIES
            if family not in ("delta", "deep")
        ),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    build: Build, ranks: int, family: str, settings: dict[str, Any]
) -> None:
    """In chunks, since a step has 64 tokens. Two ranks of four have the same key/value head."""
    wanted = {"logprobs": 3, "prompt_logprobs": 2}
    expected, found = ask(build(1, family), **wanted), ask(build(ranks, family, **settings), **wanted)
    assert tokens_of(found) == tokens_of(expected)
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=TOLERANCE)
    assert len({tuple(tokens) for tokens in tokens_of(expected)}) > 8, "it says the same to everything"


class _InParts:
    """Divides each step into four, as far as it has so many tokens."""

    def __init__(self) -> None:
        self.most = self.followed = 0

    def divide(self, plan: StepPlan, is_followed: bool = False) -> list[StepPlan]:
        """See MicroBatches."""
        parts = divided(plan, 4)
        self.most = max(self.most, len(parts))
        return parts

    def observe(self, work: StepWork, count: int, turns: int, duration_ns: int) -> None:
        """See MicroBatches. Count the steps that stages began while they worked on the one before."""
        self.followed += count > 1 and turns == count


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], _InParts]:
    """Has an engine of stages divide its steps."""
    monkeypatch.setattr("headway.policy.step.micro_batches.ROWS", 3)

    def divide(llm: LLM) -> _InParts:
        executor, divides = llm.engine.core.executor, _InParts()
        assert isinstance(executor, StagedExecutor)
        monkeypatch.setattr(executor, "micro_batches", divides)
        return divides

    return divide


@pytest.mark.parametrize(
    ("family", "stages"), [("gemma", 2), ("delta", 2), pytest.param("deep", 4, marks=pytest.mark.slow)]
)
def test_micro_batches_change_nothing(
    build: Build, in_parts: Callable[[LLM], _InParts], family: str, stages: int
) -> None:
    """Prompts are cut in them, with their log-probabilities or the states that are kept; draws and grammars go on."""
    llm = build(1, family, pipeline_parallel_size=stages, num_threads=stages)
    divides = in_parts(llm)
    grammar = {"structured_outputs": {"regex": "[0-9]{3}(-[a-f]{4})+"}, "temperature": 1.0, "seed": 3}
    texts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    wanted: list[dict[str, Any]] = [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 1},
        grammar | {"ignore_eos": False},
    ]
    for each in wanted:
        expected, found = ask(build(1, family), **each), ask(llm, **each)
        assert tokens_of(found) == tokens_of(expected) and logprobs_of(found) == logprobs_of(expected)
    assert divides.most == 4 and (divides.followed > 10) is (family != "delta")
    vectors = ([each.outputs.embedding for each in engine.embed(texts)] for engine in (llm, build(1, family)))
    assert next(vectors) == next(vectors)


def test_sequences_end_while_stages_work_on_their_next_step(build: Build, in_parts: Callable[[LLM], _InParts]) -> None:
    """By a token, by their length, by an abort, and all of them at once; nothing of them is left."""
    one, llm = build(1, "gemma"), build(1, "gemma", **STAGES)
    answers = tokens_of(ask(one))
    stops = [answer[7 + n % 5] for n, answer in enumerate(answers)]
    divides = in_parts(llm)
    for ends in ({"stop_token_ids": stops}, {"max_tokens": 9}):
        assert tokens_of(ask(llm, **ends)) == tokens_of(ask(one, **ends))
    together = ask(llm, PROMPTS[:1] * 16, stop_token_ids=[answers[0][8]])
    assert tokens_of(together) == [answers[0][: answers[0].index(answers[0][8]) + 1]] * 16
    core, found = llm.engine.core, dict[str, list[int]]()
    for number, prompt in enumerate(PROMPTS):
        core.add(AddRequest(str(number), prompt, SamplingParams(**GREEDY), []))
    while core.has_work:
        for output in core.advance():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        for number in range(0, 16, 3):
            if len(found.get(str(number), ())) == 12:
                core.abort(str(number))
    assert [found[str(n)] for n in range(16)] == [
        answer[: 12 if n % 3 == 0 else 24] for n, answer in enumerate(answers)
    ]
    core.scheduler.check()
    assert divides.followed > 20
    assert tokens_of(ask(llm)) == answers
    assert not llm.engine.runner._known


def test_prefixes_are_found_in_the_caches_of_all_ranks(build: Build) -> None:
    expected = tokens_of(ask(build(1)))
    llm = build(2)
    ask(llm)
    again = ask(llm)
    assert tokens_of(again) == expected
    assert sum(output.num_cached_tokens or 0 for output in again) > 200


@pytest.mark.parametrize("swaps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_preempted_sequences_go_on_in_all_ranks(build: Build, swaps: bool) -> None:
    room = 240 * TOKEN_BYTES
    llm = build(2, kv_cache_memory=room, swap_space=room / 2**30 if swaps else 0)
    assert tokens_of(ask(llm)) == tokens_of(ask(build(1)))
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0


def test_drafts_are_tried_in_all_ranks(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(ask(build(1)))
    llm = build(2)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    counts = try_all_drafts(monkeypatch, llm, Foreseeing(texts))
    assert tokens_of(ask(llm)) == expected
    assert 0 < counts["accepted"] < counts["tried"]


def test_grammars_and_seeds_draw_the_same(build: Build) -> None:
    wanted = {
        "structured_outputs": {"regex": "[0-9]{3}(-[a-f]{4})+"},
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": False,
    }
    expected, found = (tokens_of(ask(build(ranks), PROMPTS[:4], **wanted)) for ranks in (1, 2))
    assert found == expected


def test_vectors_are_those_of_one_rank(build: Build) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]
    one, two = (build(ranks).embed(prompts) for ranks in (1, 2))
    for expected, found in zip(one, two, strict=True):
        assert found.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=TOLERANCE)


@pytest.mark.parametrize(("taken", "quota"), [(False, 2), (True, 2), pytest.param(False, 1, marks=pytest.mark.slow)])
def test_ranks_are_bound_to_cores_that_no_other_engine_has(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, taken: bool, quota: int
) -> None:
    """In a thread, as that is bound. A claim that another engine holds cannot be had; with a quota there are none."""
    cores = [Core(number, f"of a test, {os.getpid()} {number}", "") for number in sorted(os.sched_getaffinity(0))[:2]]
    monkeypatch.setattr("headway.engine.local_ranks.physical_cores", lambda: cores)
    monkeypatch.setattr("headway.engine.local_ranks.usable_threads", lambda: quota)
    held, is_bound = [claim(core) for core in cores[: int(taken)]], not taken and quota == 2

    def bound() -> list[set[int]]:
        options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "kv_cache_memory": 4 << 20}
        llm = LLM(str(folders("llama")), tensor_parallel_size=2, num_threads=2, bind_ranks=True, **options)
        found = [os.sched_getaffinity(pid) for pid in (0, *(each.pid for each in psutil.Process().children()))]
        assert not is_bound or claim(cores[0]) is None
        assert isinstance(llm.engine.core.executor, RankedExecutor)
        llm.engine.core.executor._followers.end()
        return found

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(bound).result()
    everyone = os.sched_getaffinity(0)
    assert found[0] == ({cores[0].processor} if is_bound else everyone)
    assert ({cores[1].processor} if is_bound else everyone) in found[1:]
    held.append(claim(cores[1]))
    assert None not in held, "the claims of an engine that has ended are free"
    for taken_core in held:
        assert taken_core is not None
        taken_core.close()


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "delta", "gemma"])
def test_a_request_that_fails_in_rank_0_ends_alone(
    build: Build, family: str, in_parts: Callable[[LLM], _InParts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the others are in the middle of its step then, and have states that rank 0 does not have.

    Of stages, those before may have begun with the next micro-batches, and with the next step.
    """
    llm, fails_after = build(2, family), 0
    if family == "gemma":
        llm, fails_after = build(1, family, **STAGES), 9
        in_parts(llm)
    expected = tokens_of(ask(llm))
    forward = llm.engine.runner._forward

    def failing(step: Any, scheduled: Any, sequences: Any) -> Any:
        prompt = PROMPTS[5]
        if any(s.tokens[: len(prompt)] == prompt and len(s.tokens) >= len(prompt) + fails_after for s in sequences):
            raise ValueError("no")
        return forward(step, scheduled, sequences)

    monkeypatch.setattr(llm.engine.runner, "_forward", failing)
    found, errors = advanced(llm, PROMPTS)
    assert errors == {"5": "the engine failed on this request (ValueError); see the server's log"}
    assert [found[str(n)] for n in range(16) if n != 5] == [*expected[:5], *expected[6:]]
    monkeypatch.undo()
    assert tokens_of(ask(llm)) == expected


def test_a_rank_that_raises_holds_up_nobody(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(2)
    expected = tokens_of(ask(llm))
    executor = llm.engine.core.executor
    assert isinstance(executor, RankedExecutor)
    monkeypatch.setattr(llm.engine.runner, "run", lambda plan: time.sleep(0.5))
    with pytest.raises(RuntimeError, match="rank 1 raised"):
        executor.run(StepPlan([ScheduledSequence(10**6, 0, [1], True, 1)]))
    monkeypatch.undo()
    assert tokens_of(ask(llm)) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, and this process may use"),
        ({"tensor_parallel_size": 99}, "tensor_parallel_size is 99, and this process may use"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel is set, but no layer is shared"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0, and this process may use"),
        ({"tensor_parallel_size": 2, "num_threads": 1}, "num_threads is 1, which cannot be divided among 2 ranks"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig("model", **settings)


def test_a_model_that_ranks_cannot_share_starts_no_process(tmp_path: Path) -> None:
    folder = save_grammar_model(tmp_path / "model", num_attention_heads=3, num_key_value_heads=3)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2, which does not divide 3 query heads; use 1$"):
        LLM(str(folder), tensor_parallel_size=2, load_format="dummy", device="cpu")
    assert psutil.Process().children(recursive=True) == before


def test_more_ranks_than_there_can_be_are_one_line(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.ranks.MOST_RANKS", 1)
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size times pipeline_parallel_size is 2; there can be 1 ranks$"
    ):
        LLM(str(folders("llama")), tensor_parallel_size=2, load_format="dummy", device="cpu")


def test_a_rank_that_dies_while_it_loads_is_one_line(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.ranks.Followers.assign", lambda self, length: self._here._processes[1].kill())
    with pytest.raises(ValueError, match=r"rank 1 \(pid \d+\) died: SIGKILL, while it loaded its part of the model"):
        LLM(str(folders("llama")), tensor_parallel_size=2, load_format="dummy", device="cpu")


# --- processes --------------------------------------------------------------------------------------


def running(folder: Path, **changes: Any) -> AbstractAsyncContextManager[EngineClient]:
    settings = {"dtype": "float32", "load_format": "dummy", "num_threads": 2, "kv_cache_memory": 8 << 20}
    return started(EngineClient(EngineConfig(str(folder), **({"tensor_parallel_size": 2} | settings | changes))))


def followers(client: EngineClient) -> list[psutil.Process]:
    assert client.pid is not None
    return psutil.Process(client.pid).children()


async def tokens_from(client: EngineClient, name: str, prompt: list[int], max_tokens: int = 40) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = AddRequest(name, prompt, params, [0], sent_ns=time.monotonic_ns())
    outputs: list[SequenceOutput] = [output async for output in client.generate(request)]
    assert outputs[-1].finish_reason == "length", outputs[-1].error
    return [token for output in outputs for token in output.token_ids]


async def asked_until_restarted(client: EngineClient, name: str, prompt: list[int]) -> list[list[int]]:
    """What it says, once and again until the engine is another: however fast it is, it has work when a rank is gone."""
    restarts, found = client.restarts, list[list[int]]()
    while client.restarts == restarts:
        found.append(await tokens_from(client, f"{name}-{len(found)}", prompt))
    return found


@pytest.mark.slow
async def test_a_stage_that_is_stopped_is_named(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing to do with meetings: rank 0 waits for what it hands on."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "rank_timeout": 1.0}
    async with running(folders("llama"), **stages) as client:
        expected = await tokens_from(client, "alone", PROMPTS[0])
        (follower,) = followers(client)
        answers = asyncio.create_task(asked_until_restarted(client, "again", PROMPTS[0]))
        await until(lambda: client.stats is not None and client.stats.num_running == 1)
        os.kill(follower.pid, signal.SIGSTOP)
        await until(lambda: client.restarts == 1)
        assert f"rank 1 (pid {follower.pid}) is stopped and did not end its part" in client.last_error
        assert all(answer == expected for answer in await answers)


async def until(check: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


async def test_requests_go_on_when_a_rank_is_killed_stopped_or_dies_idle(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the reason names the rank, all ranks are replaced, and nobody is left at the end."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    everyone, before = list[psutil.Process](), psutil.Process().children(recursive=True)
    async with running(folders("llama"), rank_timeout=1.0, max_model_len=256) as client:
        expected = [await tokens_from(client, f"alone{n}", PROMPTS[n]) for n in range(4)]
        for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            (follower,) = followers(client)
            everyone.append(follower)
            answers = [asyncio.create_task(asked_until_restarted(client, f"{sent}{n}", PROMPTS[n])) for n in range(4)]
            await until(lambda: client.stats is not None and client.stats.num_running == 4)
            began = time.monotonic()
            os.kill(follower.pid, sent)
            await until(lambda count=number: client.restarts == count + 1)  # type: ignore[misc]
            assert time.monotonic() - began < (5.0 if sent is signal.SIGSTOP else 2.0)
            how = "is stopped and did not end its part" if sent is signal.SIGSTOP else "died: SIGKILL"
            assert f"rank 1 (pid {follower.pid}) {how}" in client.last_error
            for alone, found in zip(expected, await asyncio.gather(*answers), strict=True):
                assert all(answer == alone for answer in found)
            assert has_ended(follower)
        (follower,) = followers(client)
        everyone.append(follower)
        os.kill(follower.pid, signal.SIGKILL)
        await until(lambda: client.restarts == 3)
        assert f"rank 1 (pid {follower.pid}) died: SIGKILL" in client.last_error
        await client.wait_ready()
        assert await tokens_from(client, "after", PROMPTS[0]) == expected[0]
        # An engine that dies takes its ranks along, even one that is stopped.
        (follower,) = followers(client)
        everyone.append(follower)
        os.kill(follower.pid, signal.SIGSTOP)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: has_ended(follower))
        await until(lambda: client.restarts == 4)
    await until(lambda: not set(psutil.Process().children(recursive=True)) - set(before))
    assert all(map(has_ended, everyone))
    assert not [name for name in os.listdir("/dev/shm") if "headway" in name]
