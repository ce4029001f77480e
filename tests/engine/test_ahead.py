"""Steps that are submitted while the one before runs: tokens, ends and ledgers are those of steps in order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway import LLM
from headway.bundled import STORY
from headway.engine import build
from headway.engine.ahead import StepsAhead
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.draws import UNDECIDED
from headway.engine.launched import ComputedStep
from headway.engine.messages import AddRequest, SequenceOutput
from headway.engine.runner import Runner
from headway.engine.sampler import Sampler
from headway.policy.step.plan import UNKNOWN, StepPlan
from headway.policy.step.sampling_params import SamplingParams
from tests.engine.eager import check_same_texts
from tests.engine.models import TINY_GEMMA2, write_config

SENT_NS = 1
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.9, "top_k": 5, "seed": 4, "min_tokens": 1},
    {"temperature": 1.2, "top_p": 0.9, "seed": 5},
    {"temperature": 0.8, "min_p": 0.05, "seed": 6, "logit_bias": {7: 5.0}},
    {"temperature": 0.0, "allowed_token_ids": list(range(20, 90))},
]


class Device:
    """Lets an engine submit its steps ahead to a CPU, and notes what is submitted, collected and run in order."""

    def __init__(self, core: EngineCore, patch: pytest.MonkeyPatch) -> None:
        self.core, self.calls = core, list[str]()
        self.runner: Any = core.executor
        self.steps: list[list[int]] = []  # of each submitted one, the tokens that the plan had
        for name in ("submit", "collect", "run"):
            patch.setattr(self.runner, name, self._noted(name, getattr(self.runner, name)))
        patch.setattr(core, "steps", StepsAhead(core.scheduler, self.runner))

    def _noted(self, name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(given: StepPlan | ComputedStep) -> Any:
            self.calls.append(name)
            if name == "submit":
                self.steps.append([token for item in given.scheduled for token in item.token_ids])
            return call(given)

        return noted


@pytest.fixture(scope="module", params=["kernel", "tensors", "windows"])
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    """An engine on a CPU. With `tensors` it draws as on a GPU."""
    config = TINY_GEMMA2 if request.param == "windows" else {}
    folder = write_config(tmp_path_factory.mktemp("tiny"), **config)
    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", load_format="dummy", device="cpu", num_threads=1,
        kv_cache_memory=8 << 20, max_num_seqs=8,
    )  # fmt: skip
    runner = llm.engine.runner
    if request.param == "tensors":
        runner.sampler = Sampler(runner.vocab_size, torch.device("cpu"))
    return llm.engine.core


def requests(stops: dict[str, int], seed: int = 0) -> list[tuple[int, AddRequest]]:
    """Requests with the step before which each comes. `stops` has a stop token for some."""
    draw, found = random.Random(seed), []
    for number in range(14):
        name, kind = str(number), KINDS[number % len(KINDS)]
        stop = [stops[name]] if name in stops else []
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 9, 30, 60]), stop_token_ids=stop, n=1 + (number % 7 == 0), **kind
        )
        prompt = [draw.randrange(5, 500) for _ in range(draw.choice([3, 16, 40]))]
        at = draw.choice([0, 0, 0, 12, 45, 46, 90])
        found.append((at, AddRequest(name, prompt, params, [], sent_ns=SENT_NS, seed=number)))
    return found


Answers = dict[tuple[str, int], tuple[list[int], str | None, int | None, str | None]]


def serve(
    core: EngineCore, wanted: list[tuple[int, AddRequest]], aborts: dict[int, tuple[str, int]] | None = None
) -> Answers:
    """What an engine answers: tokens, finish reason, stop token and error of each choice. Nothing comes after the end.

    Args:
        aborts: choices that are dropped before these steps.
    """
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], SequenceOutput] = {}
    waiting, step = sorted(wanted, key=lambda each: each[0]), 0
    core.scheduler.blocks.reset_prefix_cache()
    while core.has_work or waiting:
        while waiting and waiting[0][0] <= step:
            core.add(waiting.pop(0)[1])
        if aborts and step in aborts:
            core.abort(*aborts[step])
        for output in core.step().outputs:
            choice = output.request_id, output.index
            assert choice not in ends, "an output after the last one"
            tokens.setdefault(choice, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[choice] = output
                timings = output.timings
                assert timings is not None and sum(timings.phases_ns.values()) == timings.ended_ns - SENT_NS
        step += 1
    core.check()
    assert core.scheduler.blocks.usage == 0.0 and not core._sequences and not core.executor._known  # type: ignore
    return {name: (tokens[name], str(end.finish_reason), end.stop_token_id, end.error) for name, end in ends.items()}


def stop_tokens(answers: Answers) -> dict[str, int]:
    """For every second request, a token of its answer that comes in its middle."""
    return {name: ids[len(ids) // 2] for (name, index), (ids, *_) in answers.items() if not index and int(name) % 2}


def test_answers_are_those_of_steps_in_order(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = stop_tokens(serve(core, requests({})))
    expected = serve(core, requests(stops))
    assert {reason for _, reason, *_ in expected.values()} == {"stop", "length"}
    steps = core._steps
    device = Device(core, monkeypatch)
    assert serve(core, requests(stops)) == expected
    most = core._steps - steps
    assert len(device.steps) > most / 2, "many steps are submitted, also while others wait for a seat"
    ahead = [tokens for tokens in device.steps if UNKNOWN in tokens]
    assert len(ahead) > 0.8 * len(device.steps) and all(set(tokens) == {UNKNOWN} for tokens in ahead)
    first = device.calls.index("submit")
    assert device.calls[first : first + 5] == ["submit", "submit", "collect", "submit", "collect"]
    assert device.calls.count("submit") - device.calls.count("collect") < most / 4, "few computed for nothing"


def test_a_choice_that_is_dropped_hears_no_more(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stop string ends it: the others go on."""
    wanted, aborts = requests({}, seed=1), {20: ("0", 1), 25: ("3", 0), 30: ("5", 0)}
    expected = serve(core, wanted, aborts)
    Device(core, monkeypatch)
    found = serve(core, requests({}, seed=1), aborts)
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        assert answer == expected[name] or answer[1] == "abort"


def test_stop_strings_end_answers_where_they_end_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(STORY), device="cpu", kv_cache_memory=16 << 20, num_threads=1, max_num_seqs=8)
    params = SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=60, stop=["the", ". ", "was"])
    prompts = ["The old house stood", "Once upon a time", "Tell me about the sea."]
    plain = llm.generate(prompts, params)
    device = Device(llm.engine.core, monkeypatch)
    ahead = llm.generate(prompts, params)
    check_same_texts(plain, ahead)
    tokens = [[choice.token_ids for output in outputs for choice in output.outputs] for outputs in (plain, ahead)]
    assert tokens[0] == tokens[1]
    assert any(UNKNOWN in step for step in device.steps)


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_step_that_fails_changes_no_answer(core: EngineCore, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected = serve(core, requests({}))
    device = Device(core, monkeypatch)
    call, count = getattr(device.runner, where), Counter[str]()

    def failing(given: Any) -> Any:
        count["all"] += 1
        if count["all"] % 9 == 7:
            raise RuntimeError("injected")
        return call(given)

    monkeypatch.setattr(device.runner, where, failing)
    assert serve(core, requests({})) == expected
    assert count["all"] > 20


def test_a_request_that_always_fails_ends_alone(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serve(core, requests({}))
    device = Device(core, monkeypatch)
    compute, culprit = device.runner._compute, core.scheduler.sequences._next_seq_id + 3

    def failing(plan: StepPlan, *drawn: Any) -> ComputedStep:
        if any(item.seq_id == culprit and item.start > 20 for item in plan.scheduled):
            raise RuntimeError("injected")
        return compute(plan, *drawn)

    monkeypatch.setattr(device.runner, "_compute", failing)
    found = serve(core, requests({}))
    failed = {name for name, (_, reason, *_) in found.items() if reason == "error"}
    assert len({name for name, _ in failed}) == 1
    assert all(found[name] == answer for name, answer in expected.items() if name not in failed)


def test_logits_that_are_not_numbers_end_one_sequence(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serve(core, requests({}))
    device = Device(core, monkeypatch)
    begin, spoilt = device.runner.sampler.begin, list[int]()

    def spoil(logits: Tensor, sequences: list[Any]) -> Tensor:
        if not spoilt and len(sequences) > 2:
            spoilt.append(sequences[1].seq_id)
        bad = [each.seq_id in spoilt for each in sequences]
        return begin(logits.masked_fill(torch.tensor(bad).unsqueeze(1), torch.nan), sequences)

    monkeypatch.setattr(device.runner.sampler, "begin", spoil)
    found = serve(core, requests({}))
    (failed,) = [name for name, (_, reason, *_) in found.items() if reason == "error"]
    assert all(found[name] == answer for name, answer in expected.items() if name != failed)
    assert found[failed][0] == expected[failed][0][: len(found[failed][0])]


def test_a_draw_that_needs_more_candidates_is_run_again(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serve(core, requests({}))
    device = Device(core, monkeypatch)
    begin, count = device.runner.sampler.begin, Counter[str]()

    def undecided(logits: Tensor, sequences: list[Any]) -> Tensor:
        ids, count["all"] = begin(logits, sequences), count["all"] + 1
        return ids.masked_fill(torch.arange(len(ids)) == 0, UNDECIDED) if count["all"] % 7 == 3 else ids

    monkeypatch.setattr(device.runner.sampler, "begin", undecided)
    assert serve(core, requests({})) == expected
    assert count["all"] > 7


@pytest.mark.parametrize(
    "params", [{"logprobs": 2}, {"repetition_penalty": 1.2}, {"use_beam_search": True, "best_of": 2}], ids=str
)
def test_what_the_host_must_know_first_is_run_in_order(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    device = Device(core, monkeypatch)
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **params)
    serve(core, [(0, AddRequest("a", [5, 6, 7], wanted, [], sent_ns=SENT_NS))])
    assert set(device.calls) == {"run"}


@pytest.mark.parametrize("wanted", [True, False])
def test_who_submits_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """A device that need not wait for the host, unless --no-async-scheduling says otherwise; no CPU."""

    class Early(Runner):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            assert not self.runs_ahead, "nothing is won on a CPU"
            self.runs_ahead = True

    monkeypatch.setattr(build, "Runner", Early)
    engine = build.build_engine(
        EngineConfig(
            model=write_config(tmp_path), load_format="dummy", device="cpu", async_scheduling=wanted,
            kv_cache_memory=1 << 20, max_model_len=64, num_threads=1,
        )
    )  # fmt: skip
    assert isinstance(engine.core.steps, StepsAhead) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_on_a_gpu_answers_are_those_of_steps_in_order(tmp_path: Path, eager: bool) -> None:
    folder, answers, stops = write_config(tmp_path), list[Answers](), dict[str, int]()
    for ahead in (False, False, True):
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype="float32", load_format="dummy", device="cuda", max_num_seqs=8,
            kv_cache_memory=8 << 20, enforce_eager=eager, async_scheduling=ahead,
        )  # fmt: skip
        assert isinstance(llm.engine.core.steps, StepsAhead) == ahead
        answers.append(serve(llm.engine.core, requests(stops)))
        stops = stops or stop_tokens(answers[0])
    assert answers[2] == answers[1]
