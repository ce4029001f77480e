"""Mixtures of experts: who is touched, what is read and computed, and that devices together do what one would."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cost.attention import Chunk
from headway.cost.layers import Experts
from headway.cost.memory import activation_bytes
from headway.cost.precision import FP8, Format, Precision
from headway.cost.shape import ModelShape
from headway.cost.work import Operation, step_work
from tests.cost.machines import DENSE, MIXTURE

MANY = settings(max_examples=200, deadline=None)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
@pytest.mark.parametrize(("count", "per_token"), [(1, 1), (3, 1), (4, 2), (5, 3), (5, 5)])
def test_touched_is_the_mean_over_all_ways_to_route(count, per_token, tokens):
    """Every token takes one of the sets of k experts, each way of all tokens being as likely."""
    sets = list(itertools.combinations(range(count), per_token))
    ways = list(itertools.product(sets, repeat=tokens))
    mean = sum(len(set().union(*way)) for way in ways) / len(ways)
    assert Experts(count, per_token, 8, 1).touched(tokens) == pytest.approx(mean)


@pytest.mark.parametrize(("count", "per_token", "tokens"), [(128, 8, 1), (128, 8, 20), (60, 4, 7), (256, 8, 64)])
def test_touched_is_what_random_routers_touch(count, per_token, tokens):
    dice = random.Random(0)
    tries = 400
    met = sum(
        len({expert for _ in range(tokens) for expert in dice.sample(range(count), per_token)}) for _ in range(tries)
    )
    assert Experts(count, per_token, 8, 1).touched(tokens) == pytest.approx(met / tries, rel=0.02)


experts = st.builds(
    lambda count, share, width, layers: Experts(count, max(1, round(share * count)), width, layers),
    st.integers(1, 64),
    st.floats(0, 1),
    st.integers(1, 64),
    st.integers(1, 4),
)


@given(experts=experts, tokens=st.integers(1, 500))
@MANY
def test_touched_has_its_limits(experts, tokens):
    touched = experts.touched(tokens)
    assert experts.touched(1) == pytest.approx(experts.per_token)
    assert experts.per_token - 1e-9 <= touched <= min(experts.count, tokens * experts.per_token) + 1e-9
    assert touched <= experts.touched(tokens + 1) + 1e-9
    assert experts.routed(tokens) == pytest.approx(tokens * experts.per_token)


@given(
    held=st.integers(1, 8),
    devices=st.integers(1, 8),
    share=st.floats(0, 1),
    tokens=st.integers(1, 50),
    senders=st.integers(1, 8),
)
@MANY
def test_experts_dealt_out_do_together_what_one_device_does(held, devices, share, tokens, senders):
    """`senders` groups bring a batch each; whoever holds the experts, as many pairs and as many experts take part."""
    count = held * devices
    whole = Experts(count, max(1, round(share * count)), 8, 1)
    dealt = replace(whole, held=held, senders=senders)
    assert dealt.here == held and whole.here == count
    assert devices * dealt.routed(tokens) == pytest.approx(whole.routed(tokens * senders))
    assert devices * dealt.touched(tokens) == pytest.approx(whole.touched(tokens * senders))


def test_a_tiny_mixture_counted_by_hand():
    """h 4, F 3, 5 experts of which 2 per token with biases, in 2 of 3 layers; 2 shared channels; 1 token in bf16."""
    shape = ModelShape(
        layers=3, hidden=4, heads=2, kv_heads=2, head_dim=2, ffn=6, vocab=10,
        experts=Experts(5, 2, 3, 2, shared_width=2, bias=True, router_bias=True),
    )  # fmt: skip
    work = step_work(shape, [Chunk(1)])
    matrices = 3 * 4 * 3
    biases = 2 * 3 + 4
    assert work[Operation.EXPERTS].flops == 2 * 2 * 2 * matrices
    assert work[Operation.EXPERTS].weight_bytes == 2 * 2 * 2 * (matrices + biases)
    assert work[Operation.EXPERTS].activation_bytes == 2 * 2 * 2 * (4 + 2 * (2 * 3 + 3) + 4)
    assert work[Operation.ROUTER].flops == 2 * 2 * 4 * 5
    assert work[Operation.ROUTER].weight_bytes == 2 * 2 * 5 * (4 + 1)
    assert work[Operation.ROUTER].activation_bytes == 2 * 2 * (4 + 5)
    assert work[Operation.SHARED_EXPERTS].flops == 2 * 2 * 3 * 4 * 2
    assert work[Operation.SHARED_EXPERTS].weight_bytes == 2 * 2 * 3 * 4 * 2
    assert work[Operation.SHARED_EXPERTS].activation_bytes == 2 * 2 * ((4 + 4) + (4 + 2) + (2 + 4))
    assert work[Operation.GATE_UP].flops == 2 * 1 * 4 * 12 and work[Operation.DOWN].flops == 2 * 1 * 6 * 4
    parts = shape.parameters()
    assert parts["experts"] == 2 * 5 * (matrices + biases) and parts["router"] == 2 * 5 * 5
    assert parts["shared_experts"] == 2 * 3 * 4 * 2 and parts["ffn"] == 1 * 3 * 4 * 6
    assert shape.active_parameters == shape.num_parameters - 10 * 4 - 2 * 3 * (matrices + biases)


def test_a_step_reads_the_experts_that_it_touches_and_a_large_one_all():
    one, all_of_them = (step_work(MIXTURE, [Chunk(tokens)])[Operation.EXPERTS] for tokens in (1, 4096))
    whole = 2 * MIXTURE.parameters()["experts"]
    assert one.weight_bytes * 4 == whole
    assert all_of_them.weight_bytes == whole
    assert all_of_them.flops == 4096 * one.flops


def test_layers_that_are_all_experts_have_no_plain_feed_forward_layer():
    everywhere = replace(MIXTURE, experts=Experts(4, 1, 48, MIXTURE.layers))
    work = step_work(everywhere, [Chunk(3)])
    assert not {Operation.GATE_UP, Operation.ACTIVATION, Operation.DOWN, Operation.SHARED_EXPERTS} & set(work)
    assert not {Operation.ROUTER, Operation.SHARED_EXPERTS, Operation.EXPERTS} & set(step_work(DENSE, [Chunk(3)]))


def test_one_expert_that_everybody_takes_is_a_plain_layer():
    """With one expert of the feed-forward width the same products are done, and the same weights read."""
    one = replace(DENSE, experts=Experts(1, 1, DENSE.ffn, DENSE.layers))
    plain, mixed = (step_work(shape, [Chunk(7, 3)]) for shape in (DENSE, one))
    ops = (Operation.GATE_UP, Operation.ACTIVATION, Operation.DOWN)
    assert mixed[Operation.EXPERTS].flops == sum(plain[op].flops for op in ops)
    assert mixed[Operation.EXPERTS].weight_bytes == sum(plain[op].weight_bytes for op in ops)
    assert mixed[Operation.EXPERTS].activation_bytes == sum(plain[op].activation_bytes for op in ops)
    assert one.num_parameters == DENSE.num_parameters + DENSE.layers * DENSE.hidden


def test_experts_have_a_precision_of_their_own():
    """MXFP4 experts: 4.25 bits an element; biases and router stay as they are, and so do the other matrices."""
    mxfp4 = Format("mxfp4", 4, "bf16", 32, 8)
    plain = step_work(MIXTURE, [Chunk(4096)])
    packed = step_work(MIXTURE, [Chunk(4096)], Precision(experts=mxfp4))
    matrices = 3 * 8 * 3 * 64 * 48
    biases = 3 * 8 * (2 * 48 + 64)
    assert plain[Operation.EXPERTS].weight_bytes == 2 * (matrices + biases)
    assert packed[Operation.EXPERTS].weight_bytes == matrices * 4.25 / 8 + 2 * biases
    assert all(packed[op] == plain[op] for op in plain if op is not Operation.EXPERTS)
    narrow = step_work(MIXTURE, [Chunk(4096)], Precision(linear=FP8))
    assert narrow[Operation.EXPERTS].weight_bytes == matrices + 2 * biases
    assert narrow[Operation.ROUTER] == plain[Operation.ROUTER]


def test_activations_of_experts_live_for_every_pair():
    """The residual, the input, and gate, up and product: of each token's 2 experts of 48, and of 32 shared channels."""
    only_experts = replace(MIXTURE, ffn=1000, experts=replace(MIXTURE.experts, layers=4))
    assert activation_bytes(only_experts, 100) == 100 * (64 + 64 + 3 * (2 * 48 + 32)) * 2
    assert activation_bytes(replace(MIXTURE, ffn=1000), 100) == 100 * (64 + 64 + 3 * 1000) * 2
