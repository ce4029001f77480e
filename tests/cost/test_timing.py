"""Times of steps against the formulas written out again, and each loss by itself."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headway.cost.attention import Chunk
from headway.cost.efficiency import Efficiency
from headway.cost.layers import ShapeError
from headway.cost.parallel import Parallelism
from headway.cost.precision import FP8, FP16, FP32, QUANTIZATIONS, Precision
from headway.cost.roofline import Roofline
from headway.cost.timing import Deployment, PartTime, TimeBreakdown
from headway.cost.work import Operation, Work, step_work
from tests.cost.machines import DENSE, LATENT, MACHINE, MIXTURE, SHAPES, WINDOWED, deployment

PROMPT = [Chunk(512)]
DECODE = [Chunk(1, 700, sequences=3)]
MIXED = [Chunk(40, 8), Chunk(1, 90, sequences=5), Chunk(16, logit_rows=0)]
STEPS = {"prompt": PROMPT, "decode": DECODE, "mixed": MIXED}
PRODUCTS = {"qkv", "latent", "output", "gate_up", "down", "router", "shared_experts", "experts", "head"}
HEAVY_TRAFFIC = replace(MACHINE, flops_per_s={"fp32": 1e17, "bf16": 4e17, "fp8": 8e17})
HEAVY_ARITHMETIC = replace(MACHINE, bytes_per_s=1e16)


def parts(step: TimeBreakdown) -> dict[str, float]:
    return {part.name: part.seconds for part in step.parts}


def changed(before: TimeBreakdown, after: TimeBreakdown) -> dict[str, float]:
    """By how much each part takes longer, as far as it does."""
    old, new = parts(before), parts(after)
    assert set(old) == set(new)
    return {
        name: new[name] / old[name]
        for name in old
        if old[name] and not math.isclose(new[name], old[name], rel_tol=1e-9)
    }


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_ideal_time_is_the_sum_of_the_rooflines_of_all_operations(name, step):
    """Scores and values are one kernel; everything is multiplied in bfloat16."""
    shape, chunks = SHAPES[name], STEPS[step]
    work = step_work(shape, chunks)
    work[Operation.SCORES] += work.pop(Operation.VALUES)
    roofline = Roofline(4e11, 1e10)
    ideal = sum(roofline.least_seconds(part.flops, part.bytes) for part in work.values())
    assert deployment(shape).step(chunks).seconds == pytest.approx(ideal)
    lossy = deployment(shape, efficiency=Efficiency())
    assert lossy.ideal().step(chunks).seconds == pytest.approx(ideal)
    assert lossy.step(chunks).seconds > ideal


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_each_operation_is_multiplied_at_the_rate_of_its_format(quantization):
    """The machine has fp8 and bf16: int8, mxfp4 and weights alone fall back on bf16, as does all but matrices."""
    precision = Precision.named("bfloat16", quantization)
    step = deployment(MIXTURE, precision=precision, hardware=HEAVY_ARITHMETIC).step(PROMPT)
    for part in step.parts:
        narrow = {"qkv", "output", "gate_up", "down", "shared_experts", "experts"}
        rate = 8e11 if quantization in ("fp8", "fp8-block") and part.name in narrow else 4e11
        rate = HEAVY_ARITHMETIC.rate("fp32") if "norm" in part.name else rate
        assert part.compute_s == pytest.approx(part.work.flops / rate)
        assert part.memory_s == pytest.approx(part.work.bytes / 1e16)
        if part.work.flops:
            assert part.bound == "compute" and part.seconds == part.compute_s


def test_head_and_experts_have_rates_of_their_own():
    precision = Precision(experts=FP8, head=FP32, activations=FP16)
    machine = replace(MACHINE, flops_per_s={"fp32": 1e11, "bf16": 4e11, "fp16": 5e11, "fp8": 8e11})
    step = deployment(MIXTURE, precision=precision, hardware=machine).step(MIXED)
    rates = {"experts": 8e11, "head": 1e11, "attention": 5e11, "router": 5e11, "norms": 1e11, "final_norm": 1e11}
    for part in step.parts:
        assert part.compute_s == pytest.approx(part.work.flops / rates.get(part.name, 4e11)), part.name


@pytest.mark.parametrize(
    ("loss", "slower"),
    [
        ({"matmul_flops": {"other": 0.5}}, PRODUCTS),
        ({"matmul_flops": {"bf16": 0.5, "other": 0.1}}, PRODUCTS),
        ({"attention_flops": 0.5}, {"attention"}),
        ({"expert_flops": 0.5}, {"experts"}),
    ],
)
def test_shares_of_arithmetic_slow_down_their_operations(loss, slower):
    for shape in (MIXTURE, LATENT):
        ideal = deployment(shape, hardware=HEAVY_ARITHMETIC)
        lossy = replace(ideal, efficiency=replace(Efficiency.ideal(), **loss))
        ratios = changed(ideal.step(PROMPT), lossy.step(PROMPT))
        there = set(parts(ideal.step(PROMPT)))
        assert ratios == {name: pytest.approx(2.0, rel=1e-3) for name in slower & there}


def test_shares_of_the_bandwidth_slow_down_what_they_are_of():
    """A step's time by kind of byte: weights of products, cache, and all the rest."""
    for shape in (DENSE, MIXTURE, LATENT):
        ideal = deployment(shape, hardware=HEAVY_TRAFFIC)
        step = ideal.step(DECODE)
        weights = sum(part.work.weight_bytes for part in step.parts if part.name in PRODUCTS)
        experts = sum(part.work.weight_bytes for part in step.parts if part.name == "experts")
        others = sum(part.work.weight_bytes for part in step.parts) - weights
        cache = sum(part.work.kv_read_bytes + part.work.kv_write_bytes for part in step.parts)
        activations = sum(part.work.activation_bytes for part in step.parts)
        assert step.seconds == pytest.approx((weights + others + cache + activations) / 1e10)
        for loss, slowed in {
            "matmul_bytes": weights,
            "expert_bytes": experts,
            "kv_bytes": cache,
            "element_bytes": activations + others,
        }.items():
            lossy = replace(ideal, efficiency=replace(Efficiency.ideal(), **{loss: 0.25})).step(DECODE)
            assert lossy.seconds - step.seconds == pytest.approx(3 * slowed / 1e10), loss


def test_widening_costs_arithmetic_for_each_weight_and_tile_of_rows():
    """int4: 6 operations in fp32 for each weight, once for each 64 rows; the experts' rows are those of one expert."""
    precision = Precision.named("bfloat16", "int4")
    machine = replace(HEAVY_ARITHMETIC, flops_per_s={"fp32": 1e11, "bf16": 1e30})
    widening = replace(Efficiency.ideal(), widen_ops={"4": 6.0})
    unbiased = replace(MIXTURE, experts=replace(MIXTURE.experts, bias=False))
    lossy = deployment(unbiased, precision=precision, hardware=machine, efficiency=widening)
    for tokens, tiles, of_experts in ((1, 1, 1), (64, 1, 1), (65, 2, 1), (200, 4, 1), (260, 5, 2)):
        step = {part.name: part for part in lossy.step([Chunk(tokens)]).parts}
        touched = MIXTURE.experts.touched(tokens)
        weights = {"qkv": (4 * 64 * 256, tiles), "down": (64 * 96, tiles), "gate_up": (2 * 64 * 96, tiles)}
        assert step["experts"].compute_s == pytest.approx(6 * 3 * touched * 3 * 64 * 48 * of_experts / 1e11, rel=0.01)
        for name, (count, times) in weights.items():
            assert step[name].compute_s == pytest.approx(6 * count * times / 1e11, rel=0.01), (name, tokens)
        assert max(step[name].compute_s for name in ("head", "attention", "router")) < 1e-15


def test_widening_goes_on_beside_the_products():
    """Two kinds of units: with sharpness 2, 3 s of the one and 4 s of the other are 5 s."""
    precision = Precision.named("bfloat16", "int4")
    machine = replace(HEAVY_ARITHMETIC, flops_per_s={"fp32": 1e11, "bf16": 1e11 * 128 * 4 / (3 * 6.0)})
    efficiency = replace(Efficiency.ideal(), widen_ops={"4": 6.0}, sharpness=2.0)
    step = deployment(DENSE, precision=precision, hardware=machine, efficiency=efficiency).step([Chunk(64)])
    down = next(part for part in step.parts if part.name == "down")
    widened_s = 6 * down.work.flops / (2 * 64) / 1e11
    assert down.compute_s == pytest.approx(1.25 * widened_s)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        # Norms 2 a layer; qkv, rotary, store, attention, output, gate and up, activation, down; 6 of the step.
        ("dense", 4 * (2 + 8) + 6),
        ("windowed", 4 * (3 + 8) + 6),
        ("parallel_blocks", 4 * (1 + 8) + 6),
        # Three layers with router 2, shared 3, experts 4 in place of one layer's 3.
        ("mixture", 4 * (2 + 5) + 3 + 3 * 9 + 6),
        # Norms of queries and latents, and 2 to turn or expand.
        ("latent", 4 * (4 + 8 + 2) + 6),
    ],
)
def test_kernels_are_counted(name, kernels):
    ideal = deployment(SHAPES[name])
    lossy = replace(ideal, efficiency=replace(Efficiency.ideal(), kernel_s=1.0)).step(MIXED)
    assert sum(part.overhead_s for part in lossy.parts) == kernels
    assert lossy.seconds == pytest.approx(kernels + ideal.step(MIXED).seconds)
    assert lossy.bound == "overhead"


def test_the_host_takes_its_time_for_a_step_and_its_sequences():
    lossy = deployment(efficiency=replace(Efficiency.ideal(), step_s=0.5, sequence_s=0.25, token_s=9.0, request_s=9.0))
    step = lossy.step(MIXED)
    assert step.host_s == 0.5 + 7 * 0.25
    assert step.device_s == pytest.approx(deployment().step(MIXED).seconds)
    assert step.seconds == step.device_s + step.host_s and step.bound == "overhead"


@pytest.mark.parametrize(("tokens", "factor"), [(1, 3.0), (10, 2.0), (100, 1.0)])
def test_the_measured_factor_is_of_products_alone(tokens, factor):
    ideal = deployment(MIXTURE)
    lossy = replace(ideal, efficiency=replace(Efficiency.ideal(), linear=((1, 3.0), (100, 1.0))))
    chunks = [Chunk(tokens, 50)]
    ratios = changed(ideal.step(chunks), lossy.step(chunks))
    expected = {name: pytest.approx(factor) for name in PRODUCTS - {"latent", "head"} if factor != 1}
    assert ratios == {**expected, "head": pytest.approx(3.0)}  # of a chunk one row has logits
    ours, theirs = ({part.name: part for part in each.step(chunks).parts} for each in (lossy, ideal))
    assert ours["qkv"].memory_s == pytest.approx(factor * theirs["qkv"].memory_s)


def test_launches_count_where_the_device_is_faster():
    """Of steps with prompts: a captured graph has those of decodes alone."""
    plain, slow = (deployment(efficiency=replace(Efficiency.ideal(), launch_s=each)) for each in (0.0, 1e-2))
    counting = deployment(efficiency=replace(Efficiency.ideal(), kernel_s=1.0))
    prompt, decodes = [Chunk(64), Chunk(1, 9)], [Chunk(1, 9, sequences=3)]
    kernels = round(counting.step(prompt).seconds)
    assert slow.step(prompt).seconds == pytest.approx(kernels * 1e-2)
    assert slow.step(decodes) == plain.step(decodes)
    quick = deployment(efficiency=replace(Efficiency.ideal(), launch_s=plain.step(prompt).seconds / kernels / 2))
    assert quick.step(prompt) == plain.step(prompt)


def test_each_format_may_have_a_factor_of_its_own():
    losses = replace(Efficiency.ideal(), linear=((1, 3.0),), linear_of={"fp8": ((1, 2.0),)})
    for quantization, factor in (("none", 3.0), ("fp8", 2.0)):
        ideal = deployment(precision=Precision.named("bfloat16", quantization))
        ratios = changed(ideal.step(PROMPT), replace(ideal, efficiency=losses).step(PROMPT))
        assert (ratios["down"], ratios["head"]) == (pytest.approx(factor), pytest.approx(3.0))


def test_scores_take_time_besides_their_products():
    """DECODE: 3 queries of 8 heads see 701 keys in each of 4 layers."""
    ideal = deployment()
    lossy = replace(ideal, efficiency=replace(Efficiency.ideal(), score_s=1e-3))
    ours, theirs = ({part.name: part for part in each.step(DECODE).parts} for each in (lossy, ideal))
    more = ours["attention"].compute_s - theirs["attention"].compute_s
    assert more == pytest.approx(1e-3 * 3 * 8 * 701 * 4)
    assert changed(ideal.step(DECODE), lossy.step(DECODE)).keys() == {"attention"}


def test_arithmetic_and_traffic_overlap_as_sharply_as_said():
    ideal = deployment()
    for sharpness in (1.0, 2.0, 5.0):
        lossy = replace(ideal, efficiency=replace(Efficiency.ideal(), sharpness=sharpness)).step(MIXED)
        for part in lossy.parts:
            expected = (part.compute_s**sharpness + part.memory_s**sharpness) ** (1 / sharpness)
            assert part.seconds == pytest.approx(expected)


def network(on: Deployment, chunks: list[Chunk]) -> dict[str, float]:
    return {part.name: part.seconds for part in on.step(chunks).parts if part.network_s}


def test_time_on_the_wires_by_hand():
    """6 tokens, 2 of them with logits: tensors of 768 bytes; 1e9 B/s and 10 us a call."""
    chunks = [Chunk(5), Chunk(1, 3)]
    assert network(deployment(), chunks) == {}
    four = (2 * 9 * 768 + 640) * 3 / 4 / 1e9 + 10 * 1e-5
    assert network(deployment(parallelism=Parallelism(4)), chunks) == {"all_reduce": pytest.approx(four)}
    both = {
        "all_reduce": pytest.approx((2 * 9 * 768 + 640) / 2 / 1e9 + 10 * 1e-5),
        "pipeline": pytest.approx(3 * 384 / 1e9 + 3 * 1e-5),
    }
    assert network(deployment(parallelism=Parallelism(2, 4)), chunks) == both
    experts = deployment(MIXTURE, parallelism=Parallelism(1, 1, 4, experts=True))
    assert network(experts, chunks) == {"all_to_all": pytest.approx(6 * 1152 / 1e9 + 6 * 1e-5)}
    slow = replace(Efficiency.ideal(), link=0.5)
    twice = 2 * (2 * 9 * 768 + 640) * 3 / 4 / 1e9 + 10 * 1e-5
    lossy = deployment(parallelism=Parallelism(4), efficiency=slow)
    assert network(lossy, chunks) == {"all_reduce": pytest.approx(twice)}


def test_a_device_s_share_is_what_takes_time():
    """Half the heads, half the widths: two devices take half the time of products, and the norms' all of it."""
    one, two = (deployment(hardware=HEAVY_ARITHMETIC, parallelism=Parallelism(n)).step(PROMPT) for n in (1, 2))
    halves = {"qkv", "attention", "output", "gate_up", "down", "head"}
    assert {name: parts(one)[name] / parts(two)[name] for name in halves} == dict.fromkeys(halves, pytest.approx(2.0))
    assert parts(one)["norms"] == parts(two)["norms"]
    for name in ("norms", "final_norm"):
        split = deployment(hardware=HEAVY_ARITHMETIC, parallelism=Parallelism(2, sequence=True)).step(PROMPT)
        assert parts(split)[name] == pytest.approx(parts(one)[name] / 2)
    assert changed(two, split).keys() == {"norms", "final_norm"}


def test_what_takes_the_largest_share_is_the_bound():
    assert deployment(hardware=HEAVY_ARITHMETIC).step(PROMPT).bound == "compute"
    assert deployment().step(DECODE).bound == "memory"
    slow_wire = replace(MACHINE, link=replace(MACHINE.link, bytes_per_s=1e3))
    assert deployment(hardware=slow_wire, parallelism=Parallelism(2)).step(DECODE).bound == "network"
    by_share = TimeBreakdown(
        (PartTime("a", 3.0, compute_s=3.0), PartTime("b", 2.0, memory_s=2.0), PartTime("c", 2.0, 0.0, 2.0)), 3.5
    )
    assert by_share.bound == "memory" and by_share.seconds == 10.5
    assert PartTime("d", 1.0, 0.2, 0.3, 0.1, 0.5).bound == "overhead"


def test_small_models_are_read_from_caches():
    """As fast as measured for so many bytes of weights, of one device's."""
    weights = 2 * DENSE.num_parameters
    cached = replace(HEAVY_TRAFFIC, reads=((weights // 2, 4e10), (weights, 2e10)))
    plain = deployment(hardware=HEAVY_TRAFFIC).step(DECODE).seconds
    assert deployment(hardware=cached).step(DECODE).seconds == pytest.approx(plain / 2)
    assert deployment(hardware=cached).working_set == weights


@pytest.mark.parametrize("name", SHAPES)
def test_decoding_is_linear_in_its_context(name):
    """Bound by bytes, between two windows: each further token of context costs the same."""
    on = deployment(SHAPES[name], hardware=HEAVY_TRAFFIC)
    times = [on.step([Chunk(1, context, sequences=3)]).seconds for context in (100, 200, 300, 1300)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert times[3] - times[2] == pytest.approx(10 * (times[1] - times[0]))
    layers = sum(window is None for window in SHAPES[name].sliding_windows)
    bytes_a_token = 2 * layers * SHAPES[name].kv_elements_per_layer
    assert times[1] - times[0] == pytest.approx(3 * 100 * bytes_a_token / 1e10)


def test_steps_that_are_remembered_are_not_mixed_up():
    on = deployment(MIXTURE, efficiency=Efficiency())
    steps = [[Chunk(4)], [Chunk(4, logit_rows=0)], [Chunk(4, 9)], [Chunk(1, 3, sequences=4)], [Chunk(5)]]
    fresh = [deployment(MIXTURE, efficiency=Efficiency()).step(each) for each in steps]
    assert [on.step(each) for each in steps + steps] == fresh + fresh
    assert len({each.seconds for each in fresh}) == len(steps)


def test_formats_that_the_hardware_can_t_multiply_are_refused():
    no_floats = replace(MACHINE, flops_per_s={"bf16": 1e12})
    for field in ("linear", "experts", "head", "activations"):
        with pytest.raises(ValueError, match="round has no rate for products in fp32; it has bf16"):
            deployment(hardware=no_floats, precision=replace(Precision(), **{field: FP32}))
    assert deployment(hardware=no_floats, precision=Precision(rest=FP32, kv=FP32))
    with pytest.raises(ShapeError, match="tensor_parallel_size is 3"):
        deployment(parallelism=Parallelism(3))


shares = st.floats(0.01, 1.0)
losses = st.builds(
    Efficiency,
    matmul_flops=st.fixed_dictionaries({"bf16": shares, "other": shares}),
    matmul_bytes=shares,
    widen_ops=st.fixed_dictionaries({"8": st.floats(0, 20), "4": st.floats(0, 20)}),
    expert_flops=shares,
    expert_bytes=shares,
    attention_flops=shares,
    kv_bytes=shares,
    element_bytes=shares,
    link=shares,
    sharpness=st.floats(1, 50),
    kernel_s=st.floats(0, 1e-4),
    step_s=st.floats(0, 1e-2),
    sequence_s=st.floats(0, 1e-3),
)
chunks = st.lists(
    st.builds(
        lambda tokens, context, rows, sequences: Chunk(tokens, context, min(tokens, rows), sequences),
        st.integers(1, 300),
        st.integers(0, 500),
        st.integers(0, 2),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=4,
)
spreads = st.sampled_from([Parallelism(), Parallelism(2), Parallelism(4, 2, sequence=True), Parallelism(1, 4)])
MANY = settings(max_examples=150, deadline=None)


@given(
    name=st.sampled_from(list(SHAPES)),
    quantization=st.sampled_from(QUANTIZATIONS),
    efficiency=losses,
    spread=spreads,
    chunks=chunks,
    flash=st.booleans(),
)
@MANY
def test_no_program_beats_physics(name, quantization, efficiency, spread, chunks, flash):
    """Any losses on anything: every part is finite, not negative, and not faster than without losses."""
    precision = Precision.named("bfloat16", quantization)
    lossy = Deployment(SHAPES[name], precision, MACHINE, efficiency, spread, flash)
    ours, ideal = lossy.step(chunks), lossy.ideal().step(chunks)
    assert parts(ours).keys() == parts(ideal).keys()
    for part, least in zip(ours.parts, ideal.parts, strict=True):
        assert part.seconds >= least.seconds * (1 - 1e-9)
        alone = (part.compute_s, part.memory_s, part.network_s, part.overhead_s)
        assert all(0 <= each < math.inf for each in alone)
        assert max(alone) * (1 - 1e-9) <= part.seconds <= sum(alone) * (1 + 1e-9)
        assert part.work == least.work
    assert ours.bound in {"compute", "memory", "network", "overhead"}


@given(name=st.sampled_from(list(SHAPES)), efficiency=losses, chunks=chunks, more=st.integers(1, 50))
@MANY
def test_more_work_never_takes_less_time(name, efficiency, chunks, more):
    on = deployment(SHAPES[name], efficiency=efficiency)
    first, *others = chunks
    base = on.step(chunks).seconds
    growths = [structs.replace(first, sequences=first.sequences + more)]
    if on.shape.latent is None:  # else another way may be taken, with fewer FLOPs and more bytes
        growths += [structs.replace(first, context=first.context + more)]
        growths += [structs.replace(first, tokens=first.tokens + more)]
    for grown in growths:
        assert on.step([grown, *others]).seconds >= base * (1 - 1e-9)


def test_work_of_a_deployment_is_that_of_one_device():
    on = deployment(WINDOWED, parallelism=Parallelism(2), flash=False)
    assert on.work(MIXED) == step_work(on.device, MIXED, flash=False)
    timed = Counter()
    for part in on.step(MIXED).parts:
        timed[part.name] += part.work.flops
    whole = sum((each for each in on.work(MIXED).values()), Work())
    assert sum(timed.values()) == whole.flops
    assert sum((part.work for part in on.step(MIXED).parts), Work()) == whole
