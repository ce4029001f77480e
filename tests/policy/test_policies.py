"""Policies of a user's own: the page's example, live and simulated, and what is refused."""

from __future__ import annotations

import importlib
import math
import random
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.bench.results import load_json
from headway.engine.config import EngineConfig
from headway.policy.cache.swap import SwapSpace
from headway.policy.step.order import Orders
from headway.policy.step.plan import ScheduledSequence
from headway.policy.step.policies import POLICIES, policy_class
from headway.policy.step.request import FinishReason, Sequence
from headway.policy.step.scheduling_policy import SchedulingPolicy
from headway.policy.step.sequences import Step
from headway.policy.step.step_budget import StepBudget
from headway.policy.step.step_time import StepWork
from tests.policy.simulation import Simulation
from tests.simulator.test_run import MODEL, simulate

PAGE = Path(__file__).parents[2] / "docs" / "scheduling-policies.md"
NAME = "short_first:ShortFirst"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which Python finds modules, and forgets them afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def example(folder: Path) -> str:
    """The name of the policy that is the page's example."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 32
    (folder / "short_first.py").write_text(block)
    return NAME


def test_the_example_decides_live(example: str) -> None:
    llm = LLM("headway/story", scheduling_policy=example, max_num_seqs=4, kv_cache_memory=32 << 20, num_threads=1)
    prompts = [{"prompt_token_ids": [5 + number] * length} for number, length in enumerate([400, 300, 200, 20, 10, 30])]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 6
    lengths = {output.request_id: len(output.prompt_token_ids) for output in outputs}
    admitted = [lengths[name] for decision in llm.engine.core.scheduler.decisions for name in decision.admitted]
    assert admitted == [10, 20, 30, 200, 300, 400]


def test_the_example_leaves_half_of_the_seats_to_short_prompts(example: str) -> None:
    sim = Simulation(num_blocks=400, max_num_seqs=4, max_model_len=256, policy=example, longest_step_ns=1_000_000)
    long, short = list[Sequence](), list[Sequence]()
    for number in range(12):
        long.append(sim.submit([number] * 120, 12))
        if number % 3 == 0:
            short.append(sim.submit([50 + number] * 8, 3))
        sim.step()
        assert sum(sequence in long for sequence in sim.scheduler.running) <= 2
    sim.run_until_done()
    sim.check_all_closed()
    assert max(each.last_token_ns for each in short) < max(each.last_token_ns for each in long)


def test_the_example_decides_in_the_simulator(example: str, tmp_path: Path) -> None:
    """With few seats, short prompts wait less than with fcfs."""
    load = ["--num-prompts", "80", "--random-input-len", "200", "--random-range-ratio", "0.9", "--request-rate", "40"]
    load += ["--random-output-len", "100", "--max-num-seqs", "8"]
    load += ["--max-num-queued-reqs", "none", "--max-num-queued-tokens", "none", "--result-dir", str(tmp_path)]
    means = []
    for policy in ("fcfs", example):
        code, _ = simulate(*MODEL, *load, "--result-filename", "run.json", "--scheduling-policy", policy)
        records = load_json(tmp_path / "run.json").records
        assert code == 0 and len(records) == 80
        short = [each for each in records if each.planned_prompt_tokens < 100]
        means.append(statistics.fmean(each.chunk_ns[0] - each.sent_ns for each in short))
    assert means[1] < 0.5 * means[0]


class Whimsical(SchedulingPolicy):
    """Answers at random, but lets somebody run if nobody does."""

    orders = Orders.by(lambda sequence: (sequence.prompt_len % 3,))  # many are equal

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rng = random.Random(self.config.max_num_seqs)

    def prepare(self, step: Step) -> None:
        for sequence in list(step.sequences.running)[1:]:
            if self.rng.random() < 0.05:
                step.preempt(sequence)
        if self.rng.random() < 0.05 and len(step.sequences.waiting):
            step.end(self.rng.choice(list(step.sequences.waiting)), FinishReason.TIMEOUT)
        step.left_out = [sequence for sequence in step.decoding[1:] if self.rng.random() < 0.2]

    def make_room(self, decoding: list[Sequence], step: Step) -> list[Sequence]:
        return decoding[: max(1, len(decoding) - (self.rng.random() < 0.1))]

    def time_for(self, decodes: StepWork, running: Iterable[Sequence]) -> float:
        return self.rng.choice([math.inf, 1e9])

    def most_tokens(self, sequence: Sequence, budget: StepBudget) -> int:
        return self.rng.choice([1, 3, 1000])

    def may_start(self, sequence: Sequence, num_running: int) -> bool:
        return num_running == 0 or self.rng.random() < 0.7

    def spare_for(self, sequence: Sequence, spare: int) -> int:
        return spare + self.rng.randrange(3) if spare else 0

    def lets_past(self, blocked: Sequence) -> bool:
        return True

    def may_pass(self, sequence: Sequence) -> bool:
        return self.rng.random() < 0.5


class Lenient(Simulation):
    """Who gets a token, and how many, is the policy's affair; all else holds."""

    def check_plan(self, items: list[ScheduledSequence], ran_before: set[Sequence]) -> None:
        assert sum(item.num_tokens for item in items) <= self.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.max_num_seqs
        assert len({item.seq_id for item in items}) == len(items)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(each, marks=pytest.mark.slow) for each in range(10, 30))])
def test_whatever_a_policy_answers_the_books_are_straight(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "whimsical", Whimsical)
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.0} if seed % 2 else {}
    swap = SwapSpace(rng.choice([0, 20]), 1.0, 1.0)
    sim = Lenient(num_blocks=24, max_num_seqs=2 + seed % 9, policy="whimsical", weights=weights, swap=swap, rng=rng)
    for _ in range(30):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        sim.submit_choices(prompt, rng.randrange(1, 12), n=rng.choice([1, 1, 2]), tenant=rng.choice("ab"))
        for _ in range(rng.randrange(3)):
            sim.step()
    sim.run_until_done()
    sim.check_all_closed()


BAD = (
    "from headway.policy.step.order import Orders\nfrom headway.policy.step.scheduling_policy import SchedulingPolicy\n"
)


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("nowhere:Mine", "", "there is no module 'nowhere'; put the folder that it is in into PYTHONPATH"),
        ("bad.inner:Mine", "", "there is no module 'bad.inner'"),
        ("bad:Mine", "import nothing_like_this", "bad cannot be imported: No module named 'nothing_like_this'"),
        ("bad:Mine", "1 / 0", "bad cannot be imported: ZeroDivisionError: division by zero"),
        ("bad:Mine", "def a(:", "bad cannot be imported: SyntaxError"),
        ("bad:Mine", "", "module 'bad' has no class 'Mine'"),
        (
            "bad:Mine",
            "class Mine: pass",
            "is not a policy; derive the class from headway.policy.step.scheduling_policy.",
        ),
        ("bad:Mine", "Mine = 3", "is not a policy"),
        (
            "bad:Mine",
            BAD + "class Mine(SchedulingPolicy):\n    def may_start(self, sequence): return True",
            "may_start takes (self, sequence), not (self, sequence, num_running)",
        ),
        ("bad:Mine", BAD + "class Mine(SchedulingPolicy):\n    prepare = 3", "prepare is 3; it must be a method"),
        ("bad:Mine", BAD + "class Mine(SchedulingPolicy):\n    uses_priority = 'no'", "it must be of type bool"),
        (
            "bad:Mine",
            BAD + "class Mine(SchedulingPolicy):\n    orders = len",
            "it must be of type Orders",
        ),
        (
            "bad:Mine",
            BAD + "class Mine(SchedulingPolicy):\n    orders = Orders.by(lambda s: s.arrival_ns)",
            "orders.admission gives 0 for a sequence; it must give a tuple of numbers",
        ),
        (
            "bad:Mine",
            BAD + "class Mine(SchedulingPolicy):\n    orders = Orders.by(lambda s: (s.age,))",
            "orders.admission fails for a sequence: AttributeError: 'Sequence' object has no attribute 'age'",
        ),
        ("lifo", "", "scheduling policy 'lifo' is unknown; choose one of fcfs, priority, slo, or name a class as"),
        ("bad:", "", "is unknown"),
        (":Mine", "", "is unknown"),
        ("bad:Mine()", "", "is unknown"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(name: str, source: str, says: str, folder: Path) -> None:
    (folder / "bad.py").write_text(source)
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        EngineConfig(scheduling_policy=name)
    assert "\n" not in str(raised.value)


def test_names_stand_for_their_policies() -> None:
    assert [policy_class(name) for name in POLICIES] == list(POLICIES.values())
    assert [name for name in POLICIES if policy_class(name).uses_priority] == ["priority"]
