"""Which requests come in, what sequences they become, and how their end is named."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from headway.engine.messages import SequenceOutput
from headway.outputs.choices import Choice, TokenizedPrompt
from headway.policy.admission.intake import INTAKE_NS, taken_up
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.request import NEVER, FinishReason, Request, Resumed, check, sequences_of
from headway.policy.step.sampling_params import SamplingParams
from tests.policy.simulation import Simulation

EOS = [0, 2]


def request(prompt: list[int] | None = None, resumed: list[Resumed] | None = None, **params: object) -> Request:
    wanted = SamplingParams(**params)  # type: ignore[arg-type]
    return Request("r", [5, 6] if prompt is None else prompt, wanted, EOS, sent_ns=70, seed=40, resumed=resumed)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (request([]), "the prompt is empty"),
        (
            request([1] * 10),
            "the model's context is 10 tokens, so a prompt may have at most 9",
        ),
        (request(resumed=[Resumed(0, [7] * 8)]), "10 tokens are known, and the context is now 10"),
        (request([1, 50]), "prompt has token id 50; the model's vocabulary has ids 0 to 49"),
        (request(stop_token_ids=[60]), "stop_token_ids has token id 60"),
        (request(logit_bias={70: 1.0}), "logit_bias has token id 70"),
    ],
)
def test_what_would_break_a_step_is_refused(refused: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(refused, max_model_len=10, vocab_size=50)
    check(request(resumed=[Resumed(0, [7] * 7)], stop_token_ids=[49]), max_model_len=10, vocab_size=50)


def test_a_request_becomes_a_sequence_for_each_choice() -> None:
    sequences = sequences_of(request(n=3, max_tokens=4), max_model_len=100)
    assert [(s.index, s.seed, s.tokens, s.max_len) for s in sequences] == [(i, 40 + i, [5, 6], 6) for i in range(3)]
    assert [s.parent for s in sequences] == [None, sequences[0], sequences[0]]
    assert sequences[0].ledger.began_ns == sequences[0].ledger.last_ns == 70
    assert sequences_of(request(max_tokens=None), max_model_len=100)[0].max_len == 100


@pytest.mark.parametrize(("way_back_ms", "due_ms"), [(0, 360), (30, 330), (5000, 200)])
def test_the_first_token_is_due_in_the_engine_before_it_is_due_at_the_client(way_back_ms: int, due_ms: int) -> None:
    request = Request("0", [1, 2], SamplingParams(), [], arrival_ns=7, ttft_ms=400, way_back_ns=way_back_ms * 10**6)
    (sequence,) = sequences_of(request, 100)
    assert sequence.due_ns == 7 + due_ms * 10**6


@pytest.mark.parametrize(
    ("service", "max_tokens", "due_ms", "tpot_ms"),
    [
        (ServiceClass(name="c", e2e_ms=1000), 11, 450, 50),
        (ServiceClass(name="c", e2e_ms=1000), 1, 900, None),
        (ServiceClass(name="c", e2e_ms=1000), None, 450, None),  # nobody knows how many tokens they may be
        (ServiceClass(name="c", e2e_ms=1000, ttft_ms=200), 11, 180, 80),
        (ServiceClass(name="c", e2e_ms=1000, ttft_ms=900, tpot_ms=20), 11, 450, 20),
    ],
)
def test_an_objective_for_the_whole_is_kept_by_its_parts(
    service: ServiceClass, max_tokens: int | None, due_ms: int, tpot_ms: int | None
) -> None:
    asked = Request("0", [1, 2], SamplingParams(max_tokens=max_tokens), [], service_class="c")
    (sequence,) = sequences_of(asked, 100, ClassTable((service,)))
    assert sequence.due_ns == due_ms * 10**6
    assert sequence.tpot_ns == (NEVER if tpot_ms is None else tpot_ms * 10**6)
    if tpot_ms is not None and max_tokens is not None:
        assert sequence.due_ns / 0.9 + (max_tokens - 1) * sequence.tpot_ns <= service.e2e_ms * 1e6


def test_a_vector_has_all_of_the_time() -> None:
    asked = Request("0", [1, 2], SamplingParams(), [], service_class="c", pooling=PoolingParams("last"))
    (sequence,) = sequences_of(asked, 100, ClassTable((ServiceClass(name="c", e2e_ms=1000),)))
    assert (sequence.due_ns, sequence.tpot_ns) == (900 * 10**6, NEVER)


def test_a_resumed_request_goes_on_after_its_tokens() -> None:
    sent = msgspec.msgpack.encode(request(n=3, resumed=[Resumed(1, [8, 9], cached_tokens=2)], seed=7))
    (choice,) = sequences_of(msgspec.msgpack.decode(sent, type=Request), max_model_len=100)
    assert (choice.index, choice.tokens, choice.output_len) == (1, [5, 6, 8, 9], 2)
    assert (choice.seed, choice.cached_tokens) == (8, 2)


@pytest.mark.parametrize(
    ("params", "token", "ends", "said"),
    [
        ({}, 2, True, None),
        ({"ignore_eos": True}, 2, False, None),
        ({"stop_token_ids": [9]}, 9, True, 9),
        ({"stop_token_ids": [9]}, 8, False, None),
        ({"stop_token_ids": [2]}, 2, True, None),  # it was the eos, which comes first
        ({"stop_token_ids": [2], "ignore_eos": True}, 2, True, 2),
    ],
)
def test_a_stop_token_is_named_unless_it_is_the_models_eos(
    params: dict[str, object], token: int, ends: bool, said: int | None
) -> None:
    wanted = request(**params)
    (sequence,) = sequences_of(wanted, max_model_len=100)
    sequence.tokens.append(token)
    assert (token in sequence.stop_ids) == ends
    assert sequence.reason_to_end() is (FinishReason.STOP if ends else None)
    prompt = TokenizedPrompt(wanted.prompt_token_ids)
    choice = Choice(index=0, prompt=prompt, params=wanted.params, tokenizer=None, eos_token_ids=EOS)
    last = SequenceOutput("r", 0, [token], "stop" if ends else "length", token if ends else None)
    assert choice.accept(last).stop_reason == said


def test_what_is_there_is_taken_up_for_a_bounded_time() -> None:
    times = itertools.count(0, INTAKE_NS // 4)
    messages = iter(range(10))
    assert list(taken_up(messages, lambda: next(times))) == [0, 1, 2, 3]
    assert list(messages) == [4, 5, 6, 7, 8, 9], "the rest is still there"


def test_a_crowd_holds_up_no_step_longer_than_the_intake_may() -> None:
    sim = Simulation(max_num_seqs=8, message_ns=INTAKE_NS // 10)
    reader = sim.submit([1, 2, 3], 40)
    sim.step()
    sim.inbox += [([5, 6], 2)] * 200
    longest = 0
    while sim.inbox:
        before, tokens = sim.now, reader.output_len
        sim.step()
        longest = max(longest, sim.now - before)
        assert reader.output_len == tokens + 1
    assert INTAKE_NS < longest < 1.2 * INTAKE_NS + sim.longest_step_ns
    assert len(sim.sequences) == 201
    sim.run_until_done()
    sim.check_all_closed()
