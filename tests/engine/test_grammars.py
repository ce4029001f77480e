"""Answers of a random model are what was asked for, the same alone and among others, and delay nobody."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import LLM, RequestOutput, SamplingParams
from headway.engine import grammars as engine_grammars
from headway.engine.executor import StepOutcome
from headway.engine.messages import AddRequest
from headway.engine.sampler import Sampler
from headway.grammars.compile import translated
from headway.policy.step.plan import SequenceState, StepPlan
from headway.policy.step.structured_outputs import StructuredOutputs
from tests.engine.grammar_models import EOS, VOCAB, save_grammar_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"json": PERSON},
    {"regex": "[0-9]{3}(-[a-f]+)?"},
    {"choice": ["yes", "no", "perhaps not"]},
    {"grammar": 'root ::= "(" root ")" | [0-9]'},
]
PROMPT = [10, 20, 30, 40]


def load(folder: Path, **options: Any) -> LLM:
    given = {"load_format": "dummy", "dtype": "float32", "num_threads": 1, "kv_cache_memory": 4 << 20} | options
    return LLM(str(save_grammar_model(folder)), **given)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tmp_path_factory.mktemp("model"), max_num_seqs=16)


def ask(llm: LLM, params: list[SamplingParams], prompts: list[list[int]] | None = None) -> list[RequestOutput]:
    prompts = prompts or [PROMPT] * len(params)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


def wanted(number: int, **more: Any) -> SamplingParams:
    given = {"max_tokens": 60, "temperature": 1.0, "seed": number, "structured_outputs": ASKED[number % 4]} | more
    return SamplingParams(**given)


def satisfies(text: str, asked: dict[str, Any]) -> bool:
    if "json" in asked:
        return bool(jsonschema_rs.is_valid(asked["json"], json.loads(text)))
    if "choice" in asked:
        return text in asked["choice"]
    return re.fullmatch(asked.get("regex", r"\(*[0-9]\)*"), text) is not None


# --- what comes is what was asked for ---------------------------------------------------------------


@pytest.mark.parametrize("number", range(24))
def test_answers_that_end_satisfy_what_was_asked(llm: LLM, number: int) -> None:
    asked = ASKED[number % 4]
    (output,) = ask(llm, [wanted(number, max_tokens=200, temperature=[0.0, 1.0, 3.0][number % 3])])
    answer = output.outputs[0]
    assert answer.finish_reason in ("stop", "length") and answer.stop_reason is None
    if answer.finish_reason == "stop":
        assert satisfies(answer.text, asked)
        assert answer.token_ids[-1] == EOS and EOS not in answer.token_ids[:-1]


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"enum": ["x", 1, None, True]},
        {"const": {"k": [1, 2]}},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        {"type": "string", "format": "date"},
    ]
)


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)
    )
    fixed = st.lists(inner, min_size=1, max_size=2).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    objects = st.builds(
        lambda properties, required: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "ab", 'q"', "\n", "ü"]), inner, max_size=3),
        st.sets(st.sampled_from(["a", "ab", 'q"', "\n", "ü"])),
    )
    return arrays | fixed | objects | st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})


@settings(max_examples=40, deadline=None)
@given(schema=st.recursive(LEAVES, compound, max_leaves=5), seed=st.integers(0, 2**32))
def test_documents_of_random_schemas_are_valid(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    params = SamplingParams(max_tokens=150, seed=seed, temperature=1.0, structured_outputs={"json": schema})
    answer = ask(llm, [params])[0].outputs[0]
    if answer.finish_reason == "stop":
        assert jsonschema_rs.is_valid(schema, json.loads(answer.text)), answer.text


def test_max_tokens_in_the_middle_is_a_length(llm: LLM) -> None:
    answer = ask(llm, [wanted(0, max_tokens=4)])[0].outputs[0]
    assert answer.finish_reason == "length" and len(answer.token_ids) == 4


def test_end_is_put_off_only_while_something_else_is_allowed(llm: LLM) -> None:
    asked = {"structured_outputs": {"regex": "[ab]{1,8}"}}
    for seed in range(4):
        late = ask(llm, [wanted(seed, **asked, min_tokens=5)])[0].outputs[0]
        assert 5 <= len(late.token_ids) <= 9 and re.fullmatch("[ab]{4,8}", late.text) and late.finish_reason == "stop"
        never = ask(llm, [wanted(seed, **asked, ignore_eos=True)])[0].outputs[0]
        assert re.fullmatch("[ab]{8}", never.text) and (never.finish_reason, never.stop_reason) == ("stop", None)
        short = ask(llm, [wanted(2, min_tokens=40)])[0].outputs[0]
        assert short.text in ASKED[2]["choice"] and short.finish_reason == "stop"


def test_stop_strings_and_stop_tokens_end_it_before_it_is_complete(llm: LLM) -> None:
    digits = {"structured_outputs": {"regex": "[0-9]{30}"}}
    stopped = ask(llm, [wanted(1, **digits, stop=["7"])])[0].outputs[0]
    assert stopped.stop_reason == "7" and re.fullmatch("[0-9]*", stopped.text)
    token = 2 + ord("7")
    stopped = ask(llm, [wanted(1, **digits, stop_token_ids=[token])])[0].outputs[0]
    assert stopped.stop_reason == token and stopped.token_ids[-1] == token


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.5}, {"logit_bias": {EOS: 100.0, 1: 100.0, 40: 50.0}}])
def test_penalties_and_biases_choose_among_what_is_allowed(llm: LLM, more: dict[str, Any]) -> None:
    for number in range(8):
        answer = ask(llm, [wanted(number, **more)])[0].outputs[0]
        assert answer.finish_reason == "length" or satisfies(answer.text, ASKED[number % 4])
        assert 1 not in answer.token_ids  # a special token


def test_logprobs_are_of_the_models_own_distribution(llm: LLM) -> None:
    free = ask(llm, [SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)])[0].outputs[0]
    held = ask(llm, [wanted(1, max_tokens=1, temperature=0.0, logprobs=5)])[0].outputs[0]
    assert free.logprobs is not None and held.logprobs is not None
    assert held.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert held.logprobs[0].rank > 1 and chr(held.token_ids[0] - 2) in "0123456789"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json": {"not": {}}}, "schema keyword not is not supported"),
        ({"regex": "(?=a)a"}, "look-around"),
        ({"grammar": "((("}, "neither Lark nor GBNF"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "Unsatisfiable"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(llm: LLM, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        ask(llm, [SamplingParams(structured_outputs=asked)])
    assert "\n" not in str(error.value)
    assert ask(llm, [wanted(2)])[0].outputs[0].finish_reason == "stop"


def test_only_allowed_tokens_come_beside_grammars(llm: LLM) -> None:
    """The same alone and among others; the end token comes only where it is allowed."""
    allowed = [40, 41, 99, 255]
    only = SamplingParams(max_tokens=12, seed=3, allowed_token_ids=allowed)
    ending = SamplingParams(max_tokens=200, seed=3, allowed_token_ids=[*allowed, EOS])
    batch = [only, wanted(1), ending, SamplingParams(max_tokens=8, seed=1)]
    outputs = [output.outputs[0] for output in ask(llm, batch)]
    assert set(outputs[0].token_ids) <= set(allowed) and outputs[0].finish_reason == "length"
    assert set(outputs[2].token_ids) <= {*allowed, EOS} and outputs[2].finish_reason == "stop"
    assert satisfies(outputs[1].text, ASKED[1])
    assert [ask(llm, [each])[0].outputs[0].token_ids for each in batch] == [each.token_ids for each in outputs]


# --- the same answer, however it comes about --------------------------------------------------------


def mixed() -> tuple[list[SamplingParams], list[list[int]]]:
    params = [wanted(i, n=1 + i % 2, **({"structured_outputs": None} if i % 5 == 4 else {})) for i in range(15)]
    return params, [[(7 * i + 3 * j) % 250 + 5 for j in range(4 + 3 * i)] for i in range(15)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_answers_are_the_same_alone_in_a_batch_and_after_preemptions(llm: LLM, tmp_path: Path) -> None:
    params, prompts = mixed()
    alone = [tokens_of(ask(llm, [p], [prompt]))[0] for p, prompt in zip(params, prompts, strict=True)]
    assert tokens_of(ask(llm, params, prompts)) == alone
    tight = load(tmp_path / "tight", kv_cache_memory=80_000, max_model_len=128, max_num_seqs=16, swap_space=0)
    assert tokens_of(ask(tight, params, prompts)) == alone
    assert tight.engine.core.scheduler.sequences.num_preemptions > 0


def test_answers_are_the_same_with_drafts_right_and_wrong(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params, prompts = mixed()
    expected = ask(llm, params, prompts)
    core, chance, accepted = llm.engine.core, random.Random(1), 0
    answers = {(i, c.index): [*prompts[i], *c.token_ids] for i, o in enumerate(expected) for c in o.outputs}
    first, run = int(expected[-1].request_id) + 1, core.executor.run

    def drafting(plan: StepPlan) -> StepOutcome:
        nonlocal accepted
        outcome = run(plan)
        for item in plan.scheduled:
            sequence, new = core._sequences[item.seq_id], outcome.tokens.get(item.seq_id) or []
            known = len(sequence.tokens) + len(new)
            follows = answers[int(sequence.request_id) - first, sequence.index][known : known + chance.randrange(5)]
            outcome.drafts[item.seq_id] = [token if chance.random() < 0.8 else 11 for token in follows]
            accepted += len(new) > 1
        return outcome

    monkeypatch.setattr(core.executor, "run", drafting)
    assert tokens_of(ask(llm, params, prompts)) == tokens_of(expected)
    assert accepted > 20


def test_a_step_that_fails_changes_no_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params, prompts = mixed()
    expected, steps = tokens_of(ask(llm, params, prompts)), 0
    forward = llm.engine.runner._forward

    def failing(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % 9 == 5:
            raise RuntimeError("a fault that does not happen again")
        return forward(*args)

    monkeypatch.setattr(llm.engine.runner, "_forward", failing)
    assert tokens_of(ask(llm, params, prompts)) == expected


def test_a_grammar_that_was_dropped_meanwhile_is_compiled_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(ask(llm, [wanted(i) for i in range(8)]))
    monkeypatch.setattr(engine_grammars, "KEPT", 1)
    assert tokens_of(ask(llm, [wanted(i) for i in range(8)])) == expected


def test_a_grammar_that_many_ask_for_at_once_is_compiled_for_two_at_most(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two threads that compile; who comes later finds it."""
    compiled, compile_it = [], engine_grammars.matcher
    monkeypatch.setattr(engine_grammars, "matcher", lambda *given: compiled.append(given) or compile_it(*given))
    ask(llm, [wanted(i, structured_outputs={"regex": "[0-9]{2}(x|y)z?"}) for i in range(8)])
    assert 1 <= len(compiled) <= engine_grammars.COMPILERS


def test_kernel_and_tensors_draw_alike_from_a_mask(llm: LLM) -> None:
    chance = np.random.default_rng(5)
    logits = torch.from_numpy(chance.normal(size=(6, VOCAB)).astype(np.float32))
    masks = [
        chance.integers(-(2**31), 2**31, 12).astype(np.int32) & chance.integers(-(2**31), 2**31, 12) for _ in range(6)
    ]
    masks = [mask.astype(np.int32) if row % 3 else None for row, mask in enumerate(masks)]
    params = [
        SamplingParams(temperature=t, top_k=k, seed=1, logit_bias={3: 2.0})
        for t, k in [(0.0, 0), (1.0, 0), (1.0, 9)] * 2
    ]
    sequences = [SequenceState(i, p, 7 + i, frozenset(), 1, [1, 2, 3], [0]) for i, p in enumerate(params)]
    by_kernel = Sampler(VOCAB, torch.device("cpu"), llm.engine.runner.kernels.draw)
    by_tensors = Sampler(VOCAB, torch.device("cpu"))
    drawn = by_kernel.sample(logits, sequences, None, masks).token_ids
    assert by_tensors.sample(logits, sequences, None, masks).token_ids == drawn
    for row, mask in enumerate(masks):
        single = by_kernel.sample(logits[row : row + 1], sequences[row : row + 1], None, [mask]).token_ids
        assert single == drawn[row : row + 1]
        assert by_tensors.sample(logits[row : row + 1], sequences[row : row + 1], None, [mask]).token_ids == single
        assert mask is None or mask[drawn[row] // 32] >> (drawn[row] % 32) & 1


def test_forced_tokens_cost_no_steps_and_change_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a_long_name_of_a_property_{i}" for i in range(4)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    held = [wanted(seed, structured_outputs={"json": schema}, max_tokens=200) for seed in range(3)]
    free = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
    steps, run = 0, llm.engine.core.executor.run

    def counting(plan: StepPlan) -> StepOutcome:
        nonlocal steps
        steps += 1
        return run(plan)

    def answer(params: list[SamplingParams]) -> tuple[int, list[list[list[int]]]]:
        nonlocal steps
        steps = 0
        return (tokens := tokens_of(ask(llm, params))) and steps, tokens

    monkeypatch.setattr(engine_grammars, "FORESEEN_S", 10.0)
    monkeypatch.setattr(llm.engine.core.executor, "run", counting)
    with_drafts, expected = answer(held)
    beside_others, tokens = answer([*held, free])
    assert tokens[:3] == expected
    monkeypatch.setattr(engine_grammars, "MOST_FORCED", 0)
    without, tokens = answer(held)
    assert tokens == expected
    assert without == max(len(each[0]) for each in expected) and with_drafts < without / 4
    assert beside_others >= 200  # the other's steps are as short as ever


# --- nobody else waits ------------------------------------------------------------------------------


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Masks of the grammar of digits wait until the event is set."""
    allowed, find = threading.Event(), engine_grammars.Grammars._find

    def slow(self: Any, state: Any, *rest: Any) -> Any:
        if "[0-9]{3}" in state.grammar:
            allowed.wait(20)
        return find(self, state, *rest)

    monkeypatch.setattr(engine_grammars.Grammars, "_find", slow)
    yield allowed
    allowed.set()


def test_a_slow_mask_delays_only_its_own_answer(llm: LLM, slow_masks: threading.Event) -> None:
    core, params = llm.engine.core, [SamplingParams(max_tokens=30, ignore_eos=True, seed=1), wanted(2), wanted(1)]
    slow_masks.set()
    expected = tokens_of(ask(llm, params))
    slow_masks.clear()
    for name, each in zip("abc", params, strict=True):
        asked = each.structured_outputs
        compiled = None if asked is None else translated(asked)[0]
        request = AddRequest(name, PROMPT, SamplingParams(max_tokens=each.max_tokens, ignore_eos=each.ignore_eos,
            temperature=each.temperature, seed=each.seed, structured_outputs=compiled), [EOS])  # fmt: skip
        core.add(request)
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    ended, began = set[str](), time.monotonic()
    while len(ended) < 3 and time.monotonic() - began < 15:
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.finish_reason in ("stop", "length"), output.error
                ended.add(output.request_id)
        if ended == {"a", "b"} and not slow_masks.is_set():
            assert tokens["c"] == []  # and the others have ended
            slow_masks.set()
    assert [tokens[name] for name in "abc"] == [choices[0] for choices in expected]


def test_masks_that_are_late_now_and_then_change_no_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params, prompts = mixed()
    expected = tokens_of(ask(llm, params, prompts))
    find, chance = engine_grammars.Grammars._find, random.Random(3)

    def sometimes_slow(self: Any, *rest: Any) -> Any:
        if chance.random() < 0.1:
            time.sleep(0.03)
        return find(self, *rest)

    monkeypatch.setattr(engine_grammars.Grammars, "_find", sometimes_slow)
    monkeypatch.setattr(engine_grammars, "LATE_ALONE_S", 0.01)
    assert tokens_of(ask(llm, params, prompts)) == expected


def test_a_mask_that_never_comes_ends_its_answer(
    llm: LLM, slow_masks: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_grammars, "MOST_S", 0.2)
    with pytest.raises(ValueError, match=r"takes more than 0\.2 s to decide"):
        ask(llm, [wanted(1)])
    slow_masks.set()
    assert ask(llm, [wanted(2)])[0].outputs[0].finish_reason == "stop"


def test_a_request_that_waits_for_its_grammar_holds_up_no_other_and_can_be_aborted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, allowed = llm.engine.core, threading.Event()
    compile_ = engine_grammars.Grammars._compile

    def slow(self: Any, grammar: str, ends: frozenset[int]) -> None:
        allowed.wait(20)
        compile_(self, grammar, ends)

    monkeypatch.setattr(engine_grammars.Grammars, "_compile", slow)
    for name in "abc":
        asked = translated(StructuredOutputs("regex", f"{name}[x-z]{{4}}"))[0]
        core.add(AddRequest(name, PROMPT, SamplingParams(n=2, structured_outputs=asked), [EOS]))
    core.add(AddRequest("free", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True), [EOS]))
    outputs = []
    while core.scheduler.has_work:
        outputs += core.step().outputs
    assert {output.request_id for output in outputs} == {"free"}
    assert core.has_work and core.waits_ms > 0  # nothing runs, and it looks again soon
    core.abort("a")
    core.abort("b", 1)
    (aborted,) = core.step().outputs
    assert (aborted.request_id, aborted.index, aborted.finish_reason) == ("b", 1, "abort")
    assert aborted.timings is not None and set(aborted.timings.phases_ns) <= {"transport", "grammar"}
    allowed.set()
    ended = []
    while core.has_work:
        ended += [output for output in core.step().outputs if output.finish_reason is not None]
    assert sorted((each.request_id, each.index) for each in ended) == [("b", 0), ("c", 0), ("c", 1)]
    for each in ended:
        assert each.timings is not None and each.timings.phases_ns["grammar"] > 0
