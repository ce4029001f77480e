"""What fits really fits, one more does not, and what is said to help does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.capacity import (
    CPU_WORKSPACE,
    GPU_WORKSPACE,
    MOST_CONTEXT,
    Capacity,
    Settings,
    capacity,
    remedies,
    sequence_bytes,
)
from headway.cost.catalogue import find_hardware, find_model
from headway.cost.layers import ShapeError
from headway.cost.memory import activation_bytes, weight_bytes
from headway.cost.parallel import Parallelism
from headway.cost.precision import FP8, Precision
from headway.cost.timing import Deployment
from tests.cost.machines import (
    DENSE,
    LATENT,
    LINK,
    MACHINE,
    MIXTURE,
    SHAPES,
    WINDOWED,
    deployment,
    shared_prefix_kv_bytes,
)

H100 = find_hardware("H100-SXM")
SMALL_STEP = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
ALL_OF_IT = Settings(utilization=1.0, **SMALL_STEP)

deployments = st.builds(
    lambda name, room, kv, experts, tensor, pipeline: deployment(
        SHAPES[name],
        precision=replace(Precision.named(kv_cache_dtype=kv), experts=experts),
        hardware=replace(MACHINE, memory_bytes=GPU_WORKSPACE + room),
        parallelism=Parallelism(tensor, pipeline),
    ),
    st.sampled_from(sorted(SHAPES)),
    st.integers(0, 10_000_000),
    st.sampled_from(["auto", "fp8"]),
    st.sampled_from([None, FP8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
)
lengths = st.integers(1, 3000)
blocks = st.sampled_from([1, 16, 64])


def cache_of(run: Deployment, tokens: int, block: int) -> int:
    """Bytes on the fullest device, layer by layer."""
    shape, tensor, stages = run.shape, run.parallelism.tensor, run.parallelism.pipeline
    elements = shape.kv_elements_per_layer if shape.latent else 2 * -(-shape.kv_heads // tensor) * shape.head_dim
    per_stage = -(-shape.layers // stages)
    sizes = [0] * stages
    for layer, window in enumerate(shape.sliding_windows):
        kept = -(-tokens // block) if window is None else min(-(-tokens // block), -(-(window - 1) // block) + 1)
        sizes[layer // per_stage] += kept * block * elements * run.precision.kv.bits // 8
    return max(sizes)


def fit(run: Deployment, prompt: int = 500, output: int = 100, **settings: float) -> Capacity:
    return capacity(run, prompt, output, Settings(**{**SMALL_STEP, "utilization": 1.0, **settings}))


@given(deployments, lengths, lengths, blocks, st.floats(0.3, 1.0))
def test_as_many_sequences_fit_as_is_said_and_not_one_more(run, prompt, output, block, utilization):
    held = fit(run, prompt, output, block_size=block, utilization=utilization)
    one = cache_of(run, prompt + output, block)
    rest = held.usable - held.weights - held.activations - held.workspace
    assert held.kv_pool == rest and held.usable == int(utilization * held.memory)
    assert one == sequence_bytes(run, prompt + output, block)
    assert held.max_batch * one <= max(0, rest) < (held.max_batch + 1) * one
    assert held.fits == (held.max_batch > 0)
    assert held.shortfall == (0 if held.fits else one - rest)


@given(deployments, blocks)
def test_the_longest_context_fits_and_a_longer_one_does_not(run, block):
    held = fit(run, block_size=block)
    assert cache_of(run, held.max_context, block) <= max(0, held.kv_pool)
    if held.max_context < MOST_CONTEXT:
        assert cache_of(run, held.max_context + 1, block) > max(0, held.kv_pool)
    assert held.pool_tokens % block == 0 and held.pool_tokens <= held.max_context
    assert held.pool_tokens * held.kv_per_token <= max(0, held.kv_pool)
    assert (held.pool_tokens + block) * held.kv_per_token > held.kv_pool
    if set(run.shape.sliding_windows) == {None}:
        assert held.max_context == held.pool_tokens


@given(deployments, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_more_of_the_memory_never_fits_less(run, one, other):
    less, more = (fit(run, utilization=share) for share in sorted((one, other)))
    assert less.max_batch <= more.max_batch and less.max_context <= more.max_context
    assert less.shortfall >= more.shortfall


@given(deployments, lengths)
def test_more_devices_a_narrower_cache_and_shorter_requests_never_fit_less(run, prompt):
    held = fit(run, prompt)
    spread = run.parallelism
    wider = replace(run, parallelism=replace(spread, tensor=2 * spread.tensor))
    longer = replace(run, parallelism=replace(spread, pipeline=spread.pipeline + 1))
    narrow = replace(run, precision=replace(run.precision, kv=FP8))
    for more in (fit(wider, prompt), fit(longer, prompt), fit(narrow, prompt), fit(run, max(1, prompt // 2))):
        assert more.max_batch >= held.max_batch and more.max_context >= held.max_context


@given(deployments, st.integers(1, 3000), st.integers(1, 200), blocks)
def test_sharing_a_prefix_never_fits_less(run, prefix, rest, block):
    settings = Settings(utilization=1.0, block_size=block, **SMALL_STEP)
    held = capacity(run, prefix, rest, settings)
    count = capacity(run, prefix, rest, settings, cached=prefix).max_batch
    assert count >= held.max_batch
    if set(run.shape.sliding_windows) == {None} and run.parallelism == Parallelism():
        taken = [shared_prefix_kv_bytes(run.shape, prefix, rest, n, run.precision, block) for n in (count, count + 1)]
        assert taken[0] <= max(0, held.kv_pool) < taken[1]


def test_a_prefix_of_windows_is_shared_where_that_is_cheaper():
    """A window of 24 tokens lies in four blocks, which all layers keep: the prefix's once, and each one's own."""
    run = deployment(replace(WINDOWED, sliding_windows=(24,) * 4), hardware=replace(MACHINE, memory_bytes=2 * 10**9))
    settings = Settings(block_size=8, **SMALL_STEP)
    held = capacity(run, 1000, 8, settings)
    token = held.kv_per_token
    assert held.max_batch == held.kv_pool // (32 * token)
    assert capacity(run, 1000, 8, settings, cached=1000).max_batch == (held.kv_pool - 32 * token) // (8 * token)
    one = (held.workspace + held.weights + held.activations + 32 * token) / 0.9 + 2
    tight = replace(run, hardware=replace(MACHINE, memory_bytes=int(one)))
    assert capacity(tight, 1000, 8, settings, cached=1000).max_batch == 1
    assert capacity(tight, 1000, 8, settings).max_batch == 1


def test_memory_is_divided_as_is_said():
    run = deployment(MIXTURE, hardware=replace(MACHINE, memory_bytes=2 * 10**9))
    held = capacity(run, 10, 10, Settings(max_num_batched_tokens=512, max_num_seqs=64))
    assert (held.memory, held.usable) == (2 * 10**9, 1_800_000_000)
    assert held.weights == weight_bytes(MIXTURE) and held.workspace == GPU_WORKSPACE
    assert held.activations == activation_bytes(MIXTURE, 512, 64)
    assert held.kv_per_token == 4 * 2 * 4 * 16 * 2


def test_the_number_of_sequences_is_only_the_size_of_the_logits():
    """Of a wide vocabulary in small steps; the largest batch is not cut off, and rows are no more than tokens."""
    run = deployment(replace(DENSE, vocab=5000), hardware=replace(MACHINE, memory_bytes=2 * 10**9))
    few, many, more = (capacity(run, 10, 10, Settings(max_num_batched_tokens=8, max_num_seqs=n)) for n in (1, 8, 1000))
    assert few.activations == activation_bytes(run.shape, 8, 1) < many.activations == more.activations
    assert few.max_batch > 1000


def test_scores_that_are_stored_take_room():
    run = deployment(hardware=replace(MACHINE, memory_bytes=2 * 10**9))
    tiled, stored = (fit(replace(run, flash=flash), max_num_batched_tokens=2048) for flash in (True, False))
    assert stored.activations == activation_bytes(run.shape, 2048, 16, flash=False) > 10 * tiled.activations
    assert stored.max_batch < tiled.max_batch


def test_a_cpu_has_a_smaller_workspace():
    machine = replace(MACHINE, memory_bytes=2 * 10**9)
    held = fit(deployment(hardware=replace(machine, kind="cpu")))
    assert held.workspace == CPU_WORKSPACE < GPU_WORKSPACE == fit(deployment(hardware=machine)).workspace


def test_each_device_of_a_stage_has_its_share_of_the_heads_and_all_of_a_latent():
    machine = replace(MACHINE, memory_bytes=2 * 10**9)
    for tensor, of_token in ((1, 1024), (2, 512), (4, 256), (8, 256)):
        assert fit(deployment(hardware=machine, parallelism=Parallelism(tensor))).kv_per_token == of_token
        latent = fit(deployment(LATENT, hardware=machine, parallelism=Parallelism(tensor)))
        assert latent.kv_per_token == 4 * (40 + 8) * 2


def test_the_fullest_stage_decides():
    """Windows in the first two layers and none in the last two: a device of the second stage keeps everything."""
    shape = replace(WINDOWED, sliding_windows=(24, 24, None, None))
    run = deployment(shape, hardware=replace(MACHINE, memory_bytes=2 * 10**9), parallelism=Parallelism(pipeline=2))
    assert sequence_bytes(run, 2400, 8) == 2 * 2400 * 256 == 75 * 2 * 32 * 256
    whole = replace(run, parallelism=Parallelism())
    assert sequence_bytes(whole, 2400, 8) == 2 * (2400 + 32) * 256
    assert fit(run).kv_per_token * 2 == fit(whole).kv_per_token


def test_each_data_parallel_group_holds_sequences_of_its_own():
    machine = replace(MACHINE, memory_bytes=2 * 10**9)
    alone, beside = (
        fit(deployment(MIXTURE, hardware=machine, parallelism=Parallelism(data=data, experts=True))) for data in (1, 4)
    )
    assert beside.kv_per_token == alone.kv_per_token and beside.weights < alone.weights
    assert alone.max_batch <= beside.max_batch < 1.01 * alone.max_batch


@pytest.mark.parametrize(
    ("name", "gib", "tokens", "measured"),
    [("llama-3.1-8b", 79.22, 8192, 53.29), ("llama-2-7b", 79.15, 4096, 7351 * 16 * 524_288 / 2**30)],
)
def test_the_pool_is_about_what_vllm_measured(name, gib, tokens, measured):
    """vLLM's pull requests 10511 (Llama-3-8B on 79.22 GiB, a pool of 53.29) and 2031 (A100-80GB, 7351 blocks of 16)."""
    card = replace(H100, memory_bytes=round(gib * 2**30))
    run = deployment(find_model(name).shape, hardware=card)
    held = capacity(run, 1000, 1000, Settings(max_num_batched_tokens=tokens))
    assert held.usable / 2**30 == pytest.approx(0.9 * gib)
    assert held.kv_pool / 2**30 == pytest.approx(measured, rel=0.02)


# What would help


def changed(run: Deployment, remedy: str) -> Deployment:
    """The deployment that a remedy's flags ask for."""
    flags = dict(re.findall(r"--(\S+) (\S+)", remedy))
    sizes = Parallelism(
        int(flags.get("tensor-parallel-size", run.parallelism.tensor)),
        int(flags.get("pipeline-parallel-size", run.parallelism.pipeline)),
    )
    precision = run.precision
    if "quantization" in flags:
        precision = replace(Precision.named("bf16", flags["quantization"]), kv=precision.kv)
    if "kv-cache-dtype" in flags:
        precision = replace(precision, kv=Precision.named(kv_cache_dtype=flags["kv-cache-dtype"]).kv)
    return replace(run, parallelism=sizes, precision=precision)


def at_most(remedy: str) -> int | None:
    found = re.match(r"at most ([\d,]+) tokens", remedy)
    return int(found[1].replace(",", "")) if found else None


def at_once(remedy: str) -> int:
    return int(re.search(r"\(([\d,]+) at once\)$", remedy)[1].replace(",", ""))


@st.composite
def lacking(draw: st.DrawFn) -> Deployment:
    """Some share of what one request of 600 tokens takes."""
    run = draw(deployments)
    held = fit(run)
    whole = held.weights + held.activations + sequence_bytes(run, 600)
    memory = held.workspace + int(draw(st.floats(0.05, 0.999)) * whole)
    return replace(run, hardware=replace(run.hardware, memory_bytes=memory))


@given(lacking())
def test_remedies_really_fit(run):
    held = fit(run)
    assert not held.fits
    found = remedies(run, 500, 100, ALL_OF_IT)
    for remedy in found:
        longest = at_most(remedy)
        then = fit(changed(run, remedy), *((longest - 1, 1) if longest else (500, 100)))
        assert then.fits and then.max_batch == at_once(remedy)
    assert [at_most(remedy) for remedy in found if at_most(remedy)] == [held.max_context] * (held.max_context > 1)
    assert held.max_context < 600


@given(lacking())
def test_fewer_devices_than_a_remedy_s_are_not_enough(run):
    spread = [each for each in remedies(run, 500, 100, ALL_OF_IT) if "tensor-parallel" in each]
    now = run.parallelism
    sizes = changed(run, spread[0]).parallelism if spread else Parallelism(8, run.shape.layers + 1)
    for tensor in range(now.tensor, sizes.tensor + 1):
        for pipeline in range(
            now.pipeline, sizes.pipeline + (tensor < sizes.tensor and sizes.pipeline == now.pipeline)
        ):
            try:
                fewer = replace(run, parallelism=Parallelism(tensor, pipeline))
            except ShapeError:
                continue
            assert not fit(fewer).fits


def test_whatever_fits_needs_no_remedy():
    run = deployment(hardware=replace(MACHINE, memory_bytes=2 * 10**9))
    assert fit(run).fits and remedies(run, 500, 100, ALL_OF_IT) == ()


def test_remedies_of_published_models():
    """A 70B model on one card, one of 405B on a machine, and DeepSeek-V3 in fp8, which 8 cards of 80 GB can't hold."""

    def of(name: str, quantization: str = "none", tensor: int = 1) -> list[str]:
        precision = Precision.named(quantization=quantization)
        run = deployment(find_model(name).shape, hardware=H100, precision=precision, parallelism=Parallelism(tensor))
        return [remedy.partition(" (")[0] for remedy in remedies(run, 1000, 200)]

    assert of("llama-3.1-70b") == ["--quantization fp8", "--tensor-parallel-size 2"]
    two_machines = "--tensor-parallel-size 8 --pipeline-parallel-size 2"
    assert of("llama-3.1-405b", tensor=8) == ["--quantization fp8", two_machines]
    assert of("deepseek-v3", "fp8", tensor=8) == ["--quantization int4", two_machines]
    assert of("llama-3.1-8b") == []


def test_experts_are_quantized_with_the_rest():
    """gpt-oss-20b with experts in fp8 on 24 GiB: only fewer bits of the experts too make it fit."""
    run = deployment(
        find_model("gpt-oss-20b").shape, hardware=find_hardware("RTX-4090"), precision=Precision(experts=FP8)
    )
    fewer = replace(run, precision=Precision.named(quantization="int4"))
    assert remedies(run, 1000, 200)[0] == f"--quantization int4 ({capacity(fewer, 1000, 200).max_batch:,} at once)"


def test_a_long_request_may_be_shortened_or_its_cache_narrowed():
    """Llama-3.1-8B has room for 430,000 tokens in bfloat16 on 80 GB, and for twice as many in fp8."""
    run = deployment(find_model("llama-3.1-8b").shape, hardware=H100)
    held = capacity(run, 600_000, 1000)
    found = remedies(run, 600_000, 1000)
    assert "--kv-cache-dtype fp8 (1 at once)" in found
    assert found[-1] == f"at most {held.max_context:,} tokens of prompt and output (1 at once)"
    assert 400_000 < held.max_context < 460_000
    assert held.shortfall == 601_008 * held.kv_per_token - held.kv_pool
    assert not any("kv-cache" in each for each in remedies(run, 2_000_000, 1000))


def test_hardware_without_fp8_is_offered_int8():
    card = find_hardware("A100-40GB-SXM")
    run = deployment(find_model("qwen2.5-32b").shape, hardware=card)
    assert "fp8" not in card.flops_per_s
    assert remedies(run, 1000, 200)[0].startswith("--quantization int8 (")


def test_nothing_helps_a_device_alone_that_is_far_too_small():
    machine = replace(MACHINE, link=None)
    assert remedies(deployment(hardware=machine), 100, 10, Settings(**SMALL_STEP)) == ()
    assert remedies(deployment(hardware=replace(machine, link=LINK)), 100, 10, Settings(**SMALL_STEP)) == ()
