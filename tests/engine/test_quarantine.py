"""A request that makes steps fail is ended, and 32 others get the tokens that they get alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway import LLM, SamplingParams
from headway.engine import penalties, runner, tensor_sampling
from headway.engine.core import EngineCore
from headway.engine.executor import EngineFault, StepOutcome
from headway.engine.messages import AddRequest, SequenceOutput
from headway.engine.quarantine import Quarantine
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import ScheduledSequence, SequenceState, StepPlan
from headway.policy.step.request import Sequence
from tests.engine.models import write_config

POISON = "poison"
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1, "min_tokens": 6},
]


def request(name: str, number: int, max_tokens: int = 10, n: int = 1, **params: Any) -> AddRequest:
    prompt = [(7 * number + 3 * j) % 500 + 5 for j in range(5 + number)]
    return AddRequest(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n, **params), [])


def others() -> list[AddRequest]:
    return [request(str(number), number, **KINDS[number % 4]) for number in range(32)]


def poison(**params: Any) -> AddRequest:
    return request(POISON, 40, max_tokens=30, **{"temperature": 0.0, **params})


Choice = tuple[str, int]


class Answers:
    """What the engine said, by choice."""

    def __init__(self) -> None:
        self.tokens: dict[Choice, list[int]] = {}
        self.prompt_logprobs: dict[Choice, Any] = {}
        self.last: dict[Choice, SequenceOutput] = {}

    def take(self, output: SequenceOutput) -> None:
        choice = output.request_id, output.index
        self.tokens.setdefault(choice, []).extend(output.token_ids)
        if output.prompt_logprobs is not None:
            assert choice not in self.prompt_logprobs
            self.prompt_logprobs[choice] = [entry for part in output.prompt_logprobs for entry in part.unpack()]
        if output.finish_reason is not None:
            assert choice not in self.last
            self.last[choice] = output
            assert output.timings is not None
            lasted = output.timings.ended_ns - SENT_NS
            assert sum(output.timings.phases_ns.values()) == lasted


SENT_NS = time.monotonic_ns()


def serve(core: EngineCore, requests: list[AddRequest]) -> Answers:
    answers = Answers()
    for one in requests:
        one.sent_ns = SENT_NS
        core.add(one)
    while core.has_work:
        for output in core.step().outputs:
            answers.take(output)
    core.scheduler.check()
    assert core.scheduler.blocks.usage == 0.0
    return answers


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    folder = write_config(tmp_path_factory.mktemp("tiny"))
    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", load_format="dummy", device="cpu", num_threads=1,
        kv_cache_memory=8 << 20,
    )  # fmt: skip
    return llm.engine.core


@pytest.fixture(scope="module")
def alone(core: EngineCore) -> Answers:
    answers = Answers()
    for one in others():
        found = serve(core, [one])
        answers.tokens |= found.tokens
        answers.prompt_logprobs |= found.prompt_logprobs
    core.scheduler.blocks.reset_prefix_cache()
    return answers


Raise = Callable[[], None]


def patch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: Raise, after: Raise = lambda: None) -> None:
    """Call `before` and `after` around a method; either may raise."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        before()
        result = original(*arguments, **named)
        after()
        return result

    monkeypatch.setattr(owner, name, patched)


def nothing() -> None:
    pass


def fail_anew(monkeypatch: pytest.MonkeyPatch, core: EngineCore, owner: Any, name: str, fail: Raise) -> None:
    """Raise in the middle of what is recorded; nothing is repeated."""
    programs = core.executor.kernels._programs  # type: ignore[attr-defined]
    patch(monkeypatch, core.executor.kernels, "repeat", programs.clear)
    patch(monkeypatch, owner, name, nothing, fail)


def fail_half_counted(monkeypatch: pytest.MonkeyPatch, core: EngineCore, fail: Raise) -> None:
    """Raise in the penalties when a sequence's tokens are counted, and not yet noted as seen."""

    class History(penalties._History):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "seen" and hasattr(self, "seen"):
                fail()
            super().__setattr__(name, value)

    monkeypatch.setattr(penalties, "_History", History)


PLACES: dict[str, Callable[[pytest.MonkeyPatch, EngineCore, Raise], None]] = {
    "layout": lambda m, core, fail: patch(m, core.executor.layout, "_filled", nothing, fail),
    "tables": lambda m, core, fail: patch(m, core.executor.layout.tables, "row", nothing, fail),
    "recording": lambda m, core, fail: fail_anew(m, core, core.executor.kernels, "attention", fail),
    "arena": lambda m, core, fail: fail_anew(m, core, core.executor.kernels._team, "empty", fail),  # type: ignore
    "repeating": lambda m, core, fail: patch(m, core.executor.kernels, "repeat", nothing, fail),
    "forward": lambda m, core, fail: patch(m, core.executor.model, "forward", nothing, fail),
    "logits": lambda m, core, fail: patch(m, core.executor.model, "logits", fail),
    "penalties": fail_half_counted,
    "sampler": lambda m, core, fail: patch(m, core.executor.sampler, "sample", nothing, fail),
    "logprobs": lambda m, core, fail: patch(m, tensor_sampling, "logprob_table", nothing, fail),
    "prompt_logprobs": lambda m, core, fail: patch(m, runner, "logprobs_of_prompts", nothing, fail),
}


def watch(monkeypatch: pytest.MonkeyPatch, core: EngineCore, due: Callable[[Sequence], bool]) -> Raise:
    """What raises inside steps that have a sequence for which a fault is due."""
    run, plans = core.executor.run, [StepPlan()]

    def watched(plan: StepPlan) -> StepOutcome:
        plans[0] = plan
        return run(plan)

    def fail() -> None:
        if any(due(core.scheduler.sequences[item.seq_id]) for item in plans[0].scheduled):
            raise RuntimeError("injected")

    monkeypatch.setattr(core.executor, "run", watched)
    return fail


# Log-probabilities of a prompt are computed with it, so not beside later tokens.
CASES = [(place, at) for place in PLACES for at in (0, 3) if (place, at) != ("prompt_logprobs", 3)]


@pytest.mark.parametrize(("place", "at"), CASES)
def test_only_the_request_at_fault_is_ended(
    core: EngineCore, alone: Answers, monkeypatch: pytest.MonkeyPatch, place: str, at: int
) -> None:
    def due(sequence: Sequence) -> bool:
        return sequence.request_id == POISON and sequence.output_len >= at

    core.scheduler.blocks.reset_prefix_cache()
    with monkeypatch.context() as patches:
        PLACES[place](patches, core, watch(patches, core, due))
        crowd = others()
        # One that asks for all that can fail, in the middle of the others and with two choices.
        bad = poison(n=2, presence_penalty=0.5, seed=3, top_p=0.8, logprobs=1, prompt_logprobs=0)
        answers = serve(core, [*crowd[:16], bad, *crowd[16:]])
    for index in (0, 1):
        last = answers.last[POISON, index]
        assert last.finish_reason == "error"
        assert last.error is not None and "RuntimeError" in last.error and "injected" not in last.error
    found = {choice: tokens for choice, tokens in answers.tokens.items() if choice[0] != POISON}
    assert found == alone.tokens
    assert {c: p for c, p in answers.prompt_logprobs.items() if c[0] != POISON} == alone.prompt_logprobs
    assert "step_retry" in answers.last["0", 0].timings.phases_ns  # type: ignore[union-attr]
    assert core.scheduler.blocks.match(bad.prompt_token_ids, "") == []


def test_one_whose_logits_are_not_numbers(core: EngineCore, alone: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    core.scheduler.blocks.reset_prefix_cache()
    sample = core.executor.sampler.sample

    def spoilt(logits: torch.Tensor, sequences: list[SequenceState], *rest: Any) -> Any:
        logits = logits.clone()
        for row, state in enumerate(sequences):
            sequence = core.scheduler.sequences[state.seq_id]
            if sequence.request_id == POISON and sequence.output_len == 5:
                logits[row] = torch.nan
        return sample(logits, sequences, *rest)

    monkeypatch.setattr(core.executor.sampler, "sample", spoilt)
    bad = poison()
    answers = serve(core, [*others(), bad])
    last = answers.last[POISON, 0]
    assert last.finish_reason == "error" and last.error is not None and "not numbers" in last.error
    assert len(answers.tokens.pop((POISON, 0))) == 5
    assert answers.tokens == alone.tokens
    assert core.scheduler.blocks.match(bad.prompt_token_ids, "") == []


def test_a_fault_that_does_not_come_again_harms_nobody(
    core: EngineCore, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = [3]

    def sometimes() -> None:
        remaining[0] -= 1
        if remaining[0] in (0, -40):
            raise MemoryError

    patch(monkeypatch, core.executor.model, "forward", nothing, sometimes)
    assert serve(core, others()).tokens == alone.tokens
    remaining[0] = 2
    answers = serve(core, [request("1", 1, **KINDS[1])])
    assert answers.tokens == {("1", 0): alone.tokens["1", 0]}


def test_a_device_that_fails_is_nobody_s_fault(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patches:
        patches.setattr(core.executor.model, "forward", broken)
        for one in others()[:3]:
            core.add(one)
        with pytest.raises(EngineFault, match="the device failed: CUDA error"):
            core.step()
    abort_all(core)


@pytest.mark.parametrize("to", ["pool", "host"])
def test_blocks_that_cannot_be_copied_are_nobody_s_fault(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patches:
        patches.setattr(core.executor.kernels, "copy_blocks", broken)
        if to == "host":
            patches.setattr(core.executor, "host", SimpleNamespace(run=broken))
        core.add(request("two", 3, n=2, temperature=0.0))
        with pytest.raises(EngineFault, match="could not be copied"):
            run(core)
    abort_all(core)


@pytest.mark.parametrize("together", [True, False])
def test_three_requests_that_fail_one_after_the_other_are_the_engine_s_fault(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError

    with monkeypatch.context() as patches:
        patches.setattr(core.executor.model, "logits", broken)
        for number in range(2):
            core.add(request(str(number), number, temperature=0.0))
            if not together:
                assert [output.finish_reason for output in run(core)] == ["error"]
        core.add(request("2", 2, temperature=0.0))
        with pytest.raises(EngineFault, match="3 requests failed in a row"):
            run(core)
    abort_all(core)


def run(core: EngineCore) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while core.has_work:
        outputs += core.step().outputs
    return outputs


def abort_all(core: EngineCore) -> None:
    for request_id in list(core._live):
        core.abort(request_id)
    core.executor.recover()
    core._quarantine._at_fault.clear()
    core.scheduler.check()


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=6))
def test_those_at_fault_are_found_whoever_they_are(number: int, faulty: set[int]) -> None:
    runs: Counter[int] = Counter()

    class Runner:
        def run(self, plan: StepPlan) -> StepOutcome:
            result = StepOutcome(StepTimes(1, 2, 3))
            for item in plan.scheduled:
                runs[item.seq_id] += 1
                if item.seq_id in faulty:
                    raise ValueError
                result.tokens[item.seq_id] = [7]
            return result

        def recover(self) -> None:
            pass

    items = [ScheduledSequence(i, 0, [1, 2], False, 1) for i in range(number)]
    present = {i for i in faulty if i < number}
    runner = Runner()
    quarantine, plan = Quarantine(runner, lambda: 5, str), StepPlan(items)  # type: ignore[arg-type]
    try:
        result = runner.run(plan)
    except ValueError as error:
        if len(present) == number and number >= 3:
            with pytest.raises(EngineFault):
                quarantine.run_again(plan, error, 5, 0)
            return
        result = quarantine.run_again(plan, error, 5, 0)
    assert result.faults.keys() == present
    assert result.tokens.keys() == set(range(number)) - present
    assert max(runs.values()) <= 2 + number.bit_length()
