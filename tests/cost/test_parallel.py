"""Models on several devices: together they hold and compute what one would, and what they send is counted by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.attention import Chunk
from headway.cost.hardware import Link
from headway.cost.layers import ShapeError
from headway.cost.memory import weight_bytes
from headway.cost.parallel import (
    Parallelism,
    Traffic,
    check,
    device_shape,
    device_weight_bytes,
    stage_layers,
    traffic,
)
from headway.cost.precision import FP8, FP32, Precision
from headway.cost.work import Operation, step_work
from tests.cost.machines import DENSE, LATENT, LINK, MACHINE, MIXTURE, SHAPES, deployment

STEP = [Chunk(7, 2), Chunk(1, 30, sequences=3), Chunk(5, logit_rows=0)]
UNSHARED = replace(MIXTURE, experts=replace(MIXTURE.experts, shared_width=0))
# All of them hold these in parts; routers, norms and what makes latents, each holds whole.
DIVIDED = (
    Operation.LATENT,
    Operation.SCORES,
    Operation.VALUES,
    Operation.OUTPUT,
    Operation.GATE_UP,
    Operation.DOWN,
    Operation.SHARED_EXPERTS,
    Operation.EXPERTS,
    Operation.HEAD,
)


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("name", ["dense", "mixture", "latent", "latent_mixture", "windowed", "parallel_blocks"])
def test_devices_together_compute_the_whole(name, tensor):
    shape = SHAPES[name]
    whole, part = (step_work(each, STEP) for each in (shape, device_shape(shape, Parallelism(tensor))))
    assert set(part) == set(whole)
    divided = DIVIDED if shape.latent else (*DIVIDED, Operation.QKV)
    for op in set(divided) & set(whole):
        assert tensor * part[op].flops == whole[op].flops, op
    for op in {Operation.OUTPUT, Operation.HEAD, Operation.SHARED_EXPERTS} & set(whole):
        assert tensor * part[op].weight_bytes == whole[op].weight_bytes, op
    if shape.latent is None:
        for op in (Operation.SCORES, Operation.VALUES, Operation.KV_STORE):
            assert tensor * part[op].kv_read_bytes == whole[op].kv_read_bytes
            assert tensor * part[op].kv_write_bytes == whole[op].kv_write_bytes
    assert part[Operation.FINAL_NORM] == whole[Operation.FINAL_NORM]
    assert part[Operation.NORMS].weight_bytes == whole[Operation.NORMS].weight_bytes
    assert part.get(Operation.ROUTER) == whole.get(Operation.ROUTER)


@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 1), (2, 2), (1, 8), (4, 2), (8, 1)])
def test_experts_dealt_out_compute_the_whole_of_all_groups(tensor, data):
    """Every group brings STEP; the experts' products on all devices are those of `data` such steps on one."""
    local = device_shape(MIXTURE, Parallelism(tensor, 1, data, experts=True))
    whole, part = step_work(MIXTURE, STEP * data), step_work(local, STEP)
    experts = Operation.EXPERTS
    devices = tensor * data
    assert local.experts.here * devices == MIXTURE.experts.count and local.experts.width == MIXTURE.experts.width
    assert devices * part[experts].flops == whole[experts].flops
    assert devices * part[experts].weight_bytes == pytest.approx(whole[experts].weight_bytes, abs=8 * devices)
    assert devices * part[experts].activation_bytes == pytest.approx(whole[experts].activation_bytes, abs=2 * devices)
    assert devices * part[Operation.SHARED_EXPERTS].flops == whole[Operation.SHARED_EXPERTS].flops


def test_key_value_heads_are_copied_where_there_are_fewer_than_devices():
    """4 key/value heads on 8 devices: one each, so every head is held twice."""
    local = device_shape(DENSE, Parallelism(8))
    assert (local.heads, local.kv_heads, local.qkv_rows) == (1, 1, 3 * 16)
    assert 8 * local.kv_elements_per_token == 2 * DENSE.kv_elements_per_token
    part, whole = step_work(local, STEP), step_work(DENSE, STEP)
    assert 8 * part[Operation.SCORES].flops == whole[Operation.SCORES].flops
    assert 8 * part[Operation.SCORES].kv_read_bytes == 2 * whole[Operation.SCORES].kv_read_bytes


def test_latents_are_held_by_every_device():
    local = device_shape(LATENT, Parallelism(4))
    assert local.heads == 2 and local.kv_elements_per_token == LATENT.kv_elements_per_token


def test_sizes_that_do_not_divide_are_rounded_up():
    odd = replace(DENSE, vocab=161, experts=replace(MIXTURE.experts, width=49, shared_width=33))
    local = device_shape(odd, Parallelism(2))
    assert (local.vocab, local.experts.width, local.experts.shared_width) == (81, 25, 17)


@pytest.mark.parametrize(
    ("shape", "parallelism", "link", "said"),
    [
        (DENSE, Parallelism(3), LINK, "tensor_parallel_size is 3, which does not divide both 8 query heads and"),
        (DENSE, Parallelism(16), LINK, "width of 96; use 1, 2, 4, 8."),
        (replace(DENSE, ffn=97), Parallelism(2), LINK, "feed-forward width of 97; use 1."),
        (
            replace(DENSE, heads=12, kv_heads=4),
            Parallelism(6),
            LINK,
            "tensor_parallel_size is 6, which neither divides 4 key/value heads nor is a multiple of them",
        ),
        (DENSE, Parallelism(1, 5), LINK, "pipeline_parallel_size is 5, but there are only 4 layers to divide"),
        (DENSE, Parallelism(2, experts=True), LINK, "expert parallelism was asked for, but the model has no experts"),
        (
            replace(MIXTURE, experts=replace(MIXTURE.experts, count=6)),
            Parallelism(2, 1, 2, experts=True),
            LINK,
            "6 experts can't be dealt out to 4 devices evenly",
        ),
        (DENSE, Parallelism(2), None, "2 devices were asked for, but the hardware has no link between devices"),
        (DENSE, Parallelism(1, 2), None, "2 devices were asked for, but the hardware has no link"),
    ],
)
def test_what_can_t_be_spread_is_refused_in_one_line(shape, parallelism, link, said):
    with pytest.raises(ShapeError) as error:
        check(shape, parallelism, link)
    assert said in f"{error.value}." and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor": 0}, "tensor_parallel_size is 0; it must be at least 1"),
        ({"pipeline": 0}, "pipeline_parallel_size is 0"),
        ({"data": -1}, "data_parallel_size is -1"),
        ({"data": 3}, "data_parallel_size is 3 without expert parallelism: that is 3 replicas"),
    ],
)
def test_impossible_sizes_are_refused(sizes, said):
    with pytest.raises(ShapeError, match=said):
        Parallelism(**sizes)


@pytest.mark.parametrize("parallelism", [Parallelism(), Parallelism(8), Parallelism(4, 4), Parallelism(1, 4)])
def test_what_can_be_spread_is_let_through(parallelism):
    check(DENSE, parallelism, LINK)
    assert parallelism.devices == parallelism.tensor * parallelism.pipeline
    check(DENSE, Parallelism(), None)
    check(MIXTURE, Parallelism(2, 2, 4, experts=True), LINK)
    assert Parallelism(2, 2, 4, experts=True).devices == 16


# A step of 6 tokens of which 2 want logits, in bfloat16; h 64, V 160, 4 layers: a tensor of 6 * 64 * 2 = 768 bytes.
@pytest.mark.parametrize(
    ("shape", "parallelism", "sent"),
    [
        (DENSE, Parallelism(), Traffic()),
        (DENSE, Parallelism(4), Traffic(9, 9 * 768, 2 * 160 * 2)),
        (SHAPES["parallel_blocks"], Parallelism(4), Traffic(5, 5 * 768, 2 * 160 * 2)),
        (DENSE, Parallelism(1, 4), Traffic(hops=3, hop_bytes=3 * 768)),
        (DENSE, Parallelism(2, 2), Traffic(9, 9 * 768, 640, hops=1, hop_bytes=768 // 2)),
        (MIXTURE, Parallelism(4), Traffic(9, 9 * 768, 640)),
        (MIXTURE, Parallelism(4, experts=True), Traffic(9, 9 * 768, 640)),
        # Experts' results come back whole, but half of a shared expert's has to be added to the other half.
        (MIXTURE, Parallelism(2, 1, 2, experts=True), Traffic(9, 9 * 768, 640, 6, 6 * (12 * 128 * 3 // 4 // 2))),
        (UNSHARED, Parallelism(2, 1, 2, experts=True), Traffic(6, 6 * 768, 640, 6, 6 * (12 * 128 * 3 // 4 // 2))),
        (UNSHARED, Parallelism(4, experts=True), Traffic(9, 9 * 768, 640)),
        # Each of 6 * 2 pairs goes to one of 4 devices, so 3 of 4 leave, in 3 layers, there and back.
        (MIXTURE, Parallelism(1, 1, 4, experts=True), Traffic(all_to_alls=6, all_to_all_bytes=6 * (12 * 128 * 3 // 4))),
    ],
    ids=str,
)
def test_what_is_sent_by_hand(shape, parallelism, sent):
    assert traffic(shape, parallelism, Precision(), 6, 2) == sent


def test_what_is_sent_has_the_activations_format():
    wide = traffic(DENSE, Parallelism(2, 2), Precision(activations=FP32), 6, 2)
    narrow = traffic(DENSE, Parallelism(2, 2), Precision(linear=FP8), 6, 2)
    assert (wide.all_reduce_bytes, wide.gather_bytes, wide.hop_bytes) == (2 * 9 * 768, 1280, 768)
    assert narrow == traffic(DENSE, Parallelism(2, 2), Precision(), 6, 2)


SPREADS = [
    Parallelism(tensor, pipeline, data, experts)
    for tensor, pipeline, data, experts in itertools.product((1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 4), (False, True))
    if experts or data == 1
]


@pytest.mark.parametrize("precision", [Precision(), Precision(linear=FP8, head=FP32), Precision(head=FP8, rest=FP32)])
@pytest.mark.parametrize("name", ["dense", "biased", "mixture", "latent_mixture", "parallel_blocks"])
def test_devices_together_hold_at_least_the_model(name, precision):
    shape = SHAPES[name]
    for spread in SPREADS:
        if spread.experts and (shape.experts is None or spread.tensor * spread.data > 8):
            continue
        held = device_weight_bytes(shape, precision, spread)
        assert spread.devices * held >= weight_bytes(shape, precision), spread
        assert held <= weight_bytes(shape, precision), spread
    assert device_weight_bytes(shape, precision, Parallelism()) == weight_bytes(shape, precision)


def test_weights_of_a_device_by_hand():
    """Half of every matrix, and the norms whole: 4 layers of 2 and the last one."""
    matrices = sum(DENSE.parameters().values()) - DENSE.parameters()["norms"]
    assert device_weight_bytes(DENSE, Precision(), Parallelism(2)) == 2 * (matrices // 2 + 9 * 64)
    of_layer = (DENSE.parameters()["attention"] + DENSE.parameters()["ffn"]) // 4 + 2 * 64
    last_stage = 2 * (2 * of_layer + 64 + 160 * 64)
    assert device_weight_bytes(DENSE, Precision(), Parallelism(1, 2)) == pytest.approx(last_stage, abs=2 * 64)


@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("name", ["dense", "biased", "mixture", "latent_mixture", "parallel_blocks"])
def test_the_fullest_stage_holds_what_its_layers_weigh(name, pipeline):
    """Layers without experts come first, so the last stages have nothing but layers with experts."""
    shape, layers = SHAPES[name], stage_layers(SHAPES[name].layers, pipeline)
    experts = shape.experts and replace(shape.experts, layers=min(layers, shape.experts.layers))
    stage = replace(shape, layers=layers, experts=experts, sliding_windows=(), tied_embeddings=True)
    at_least = weight_bytes(stage) - 2 * (stage.hidden * (1 + stage.norm_bias) + stage.vocab * stage.head_bias)
    assert device_weight_bytes(shape, Precision(), Parallelism(1, pipeline)) >= at_least


def test_experts_dealt_out_are_held_once_over_all_devices():
    """4 devices hold 2 of 8 experts each, and half of all else, as tensor parallelism has it over 2 of them."""
    parts = MIXTURE.parameters()
    spread = Parallelism(2, 1, 2, experts=True)
    whole = parts["norms"] + parts["router"] + 4 * 8 * MIXTURE.sinks // 2
    halves = parts["attention"] - 4 * 8 + parts["ffn"] + parts["shared_experts"] + parts["embedding"] + parts["head"]
    held = 2 * (parts["experts"] // 4 + halves // 2 + whole)
    assert device_weight_bytes(MIXTURE, Precision(), spread) == held


@given(layers=st.integers(1, 100), pipeline=st.integers(1, 100))
def test_stages_cover_all_layers(layers, pipeline):
    longest = stage_layers(layers, pipeline)
    assert longest * pipeline >= layers > (longest - 1) * pipeline


def test_tensor_parallelism_over_machines_takes_the_network_for_a_device_s_share():
    """Eight devices in two machines of four: 2 (4 - 1) / 4 of the tensor inside, 2 (2 - 1) / 2 of a quarter beyond."""
    inside, beyond = Link("wire", 1e9, 0.0, 4), Link("network", 1e8, 0.0, 100)
    machine = replace(MACHINE, link=inside, network=beyond)
    shape = replace(DENSE, kv_heads=8)
    run = deployment(shape, hardware=machine, parallelism=Parallelism(8))
    sent = traffic(shape, Parallelism(8), Precision(), 5, 2)
    moved = 2 * sent.all_reduce_bytes + sent.gather_bytes
    (part,) = (part for part in run.step([Chunk(3), Chunk(2)]).parts if part.name == "all_reduce")
    assert part.seconds == pytest.approx(moved * 3 / 4 / 1e9 + moved / 4 / 2 / 1e8)
    together = replace(run, hardware=replace(machine, link=replace(inside, max_devices=8)))
    (near,) = (part for part in together.step([Chunk(3), Chunk(2)]).parts if part.name == "all_reduce")
    assert near.seconds == pytest.approx(moved * 7 / 8 / 1e9)
