"""Document 002, "LLM Inference System Characteristics": its tables and figures, as the cost model has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cost.attention import Chunk, attended_pairs
from headway.cost.capacity import Settings, capacity
from headway.cost.catalogue import find_hardware, find_model
from headway.cost.memory import kv_cache_bytes, weight_bytes
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.work import Operation, Work, step_work, total
from tests.cost.machines import LINK, MACHINE, deployment

LLAMA_8B = find_model("llama-3.1-8b").shape
MIXTRAL = find_model("mixtral-8x7b").shape
MISTRAL = find_model("mistral-7b").shape
DEEPSEEK_V2 = find_model("deepseek-v2").shape
# "A100 GPU: 312 TFLOPS / 2 TB/s", of 80 GB.
A100 = replace(MACHINE, memory_bytes=80 * 2**30, bytes_per_s=2e12, flops_per_s={"bf16": 312e12}, link=LINK)
ON_A100 = deployment(LLAMA_8B, hardware=A100)
ATTENTION = (Operation.SCORES, Operation.VALUES)
LINEAR = (Operation.QKV, Operation.OUTPUT, Operation.GATE_UP, Operation.DOWN, Operation.HEAD)


def attention(chunk: Chunk, shape: ModelShape = LLAMA_8B, flash: bool = True) -> Work:
    work = step_work(shape, [chunk], flash=flash)
    return total(work[op] for op in ATTENTION)


# Running Example and Model Architecture


def test_the_running_example():
    """Running Example: 32 layers, d 4,096, 32 query and 8 KV heads of 128, FFN 14,336, 128,256 tokens: ~8 billion."""
    s = LLAMA_8B
    assert (s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.ffn, s.vocab) == (
        32, 4096, 32, 8, 128, 14_336, 128_256,
    )  # fmt: skip
    assert s.num_parameters / 1e9 == pytest.approx(8, abs=0.05)


@pytest.mark.parametrize(("kv_heads", "share"), [(32, 1), (1, 1 / 32), (8, 1 / 4)])
def test_attention_variants(kv_heads, share):
    """Multi-Head Attention Variants: a cache of 1x, 1/32x and 1/4x of MHA's for 32, 1 and 8 KV heads."""
    shape = replace(LLAMA_8B, kv_heads=kv_heads)
    assert kv_cache_bytes(shape, 4096) == share * kv_cache_bytes(replace(LLAMA_8B, kv_heads=32), 4096)


def test_swiglu_has_three_matrices():
    """Feed-Forward Network (SwiGLU): gate and up 4096 -> 14336, down 14336 -> 4096; 2 FLOPs for each weight."""
    assert LLAMA_8B.ffn_parameters(LLAMA_8B.ffn) == 3 * 4096 * 14_336
    work = step_work(LLAMA_8B, [Chunk(1)])
    assert work[Operation.GATE_UP].flops == 2 * 32 * 2 * 4096 * 14_336
    assert work[Operation.DOWN].flops == 2 * 32 * 14_336 * 4096


def test_only_attention_is_global():
    """Local vs. Global Operations: attention is the only operation whose work depends on other tokens."""
    alone, after = (step_work(LLAMA_8B, [Chunk(1, context)]) for context in (0, 1000))
    assert {op for op in alone if alone[op] != after[op]} == set(ATTENTION)


# KV Cache, Prefill, and Decode


def test_128_kb_of_cache_for_a_token():
    """KV Cache Memory Requirements: 2 x 32 x 8 x 128 x 2 = 128 KB in FP16."""
    assert kv_cache_bytes(LLAMA_8B, 1, Precision.of("float16")) == 2 * 32 * 8 * 128 * 2 == 128 * 1024


@pytest.mark.parametrize(("context", "gib"), [(4, 0.5), (8, 1), (32, 4), (128, 16)])
def test_cache_by_context(context, gib):
    """KV Cache Memory Requirements: 0.5, 1, 4 and 16 GB for 4K, 8K, 32K and 128K tokens, in units of 1024."""
    assert kv_cache_bytes(LLAMA_8B, context * 1024) == gib * 2**30


def test_at_128k_the_cache_is_as_large_as_the_weights():
    """KV Cache Memory Requirements: "At 128K context, KV cache equals model weight size!": 17.2 GB and 16.1 GB."""
    assert kv_cache_bytes(LLAMA_8B, 2**17) == pytest.approx(weight_bytes(LLAMA_8B), rel=0.07)


def test_causal_mask():
    """Causal Masking in Prefill: token i attends to 1..i, so 15 of the 25 scores of five tokens are kept."""
    assert attended_pairs(5, 0) == 15
    whole, kept = (attention(Chunk(5), flash=flash).flops for flash in (False, True))
    assert kept / whole == 15 / 25


# Arithmetic Intensity Analysis


def test_ridge_of_an_a100():
    """Recap: 312 TFLOPS / 2 TB/s = 156 FLOP/byte; the catalogue's A100s, by their data sheets, lie around it."""
    assert A100.roofline().ridge == 156
    for key in ("A100-80GB-PCIe", "A100-80GB-SXM"):
        assert find_hardware(key).roofline().ridge == pytest.approx(156, rel=0.04)


@pytest.mark.parametrize("tokens", [1, 2, 1000])
def test_linear_layers(tokens):
    """Linear Layers: 2 p d_in d_out FLOPs by 2 d_in d_out bytes of weights: p in prefill, and 1 in decode."""
    work = step_work(LLAMA_8B, [Chunk(tokens, logit_rows=tokens)])
    for op in LINEAR:
        assert work[op].flops / work[op].weight_bytes == tokens
    qkv = work[Operation.QKV]
    assert qkv.flops == 32 * 2 * tokens * 4096 * 6144 and qkv.weight_bytes == 32 * 2 * 4096 * 6144


def test_decode_uses_less_than_1_percent_of_the_arithmetic():
    """Decode is Memory-Bound: "<1% GPU utilization for linear layers": an intensity of 1 of 156."""
    machine, work = A100.roofline(), step_work(LLAMA_8B, [Chunk(1, 4095)])
    for op in LINEAR:
        used = machine.attainable(work[op].intensity) / machine.flops_per_s
        assert used == pytest.approx(1 / 156, rel=0.002) and used < 0.01


@pytest.mark.parametrize("tokens", [100, 1000, 8000])
def test_intensity_of_prefill_attention(tokens):
    """Attention Arithmetic Intensity: p d / (d + d_kv), 0.8 p: of the whole square of scores, kept on the chip."""
    flops = attention(Chunk(tokens), flash=False).flops
    assert flops / attention(Chunk(tokens)).bytes == pytest.approx(0.8 * tokens)
    assert tokens * 4096 / (4096 + 1024) == 0.8 * tokens


def test_contradiction_prefill_attention_does_not_compute_what_is_masked():
    """Attention Arithmetic Intensity: 0.8 p; by the document's own causal mask token i sees 1..i: 0.4 (p + 1)."""
    for tokens in (100, 1000, 8000):
        assert attention(Chunk(tokens)).intensity == pytest.approx(0.4 * (tokens + 1))


@pytest.mark.parametrize(("kv_heads", "intensity"), [(8, 4), (32, 1), (1, 32)])
def test_intensity_of_decode_attention(kv_heads, intensity):
    """Attention Arithmetic Intensity: n_q / n_kv = 32 / 8 = 4; with MHA it would be 1."""
    work = attention(Chunk(1, 4095), replace(LLAMA_8B, kv_heads=kv_heads))
    assert work.flops / work.kv_read_bytes == intensity
    assert work.intensity == pytest.approx(intensity, rel=0.01)  # with the query and the result


def test_contradiction_normalization_has_an_intensity_of_1():
    """Summary: Decode is the Bottleneck: about 4 FLOPs a byte for normalization.

    A norm reads and writes each element once, 4 bytes in bfloat16, and does 4 FLOPs to it (square, sum, scale, weight):
    1, and 4 only if an element took a byte. It is memory-bound either way.
    """
    one_norm = replace(LLAMA_8B, layers=1, layer_norms=1, sliding_windows=())
    work = step_work(one_norm, [Chunk(1000)])[Operation.NORMS]
    of_an_element = work.activation_bytes / (1000 * 4096)
    assert of_an_element == 4 and work.flops == 4 * 1000 * 4096
    assert work.flops / work.activation_bytes == 1
    assert A100.roofline().ridge > 30 * 4


def test_prefill_of_1000_is_compute_bound_and_all_of_decode_memory_bound():
    """Summary: Decode is the Bottleneck: "With prompt length p = 1000"."""
    ridge = A100.roofline().ridge
    prefill, decode = (step_work(LLAMA_8B, [chunk]) for chunk in (Chunk(1000), Chunk(1, 1000)))
    of_prompt = [op for op in LINEAR if op is not Operation.HEAD]  # whose last token alone wants logits
    assert all(prefill[op].intensity > ridge for op in (*of_prompt, *ATTENTION))
    assert all(work.intensity < ridge for work in decode.values())
    assert ON_A100.step([Chunk(1000)]).bound == "compute" and ON_A100.step([Chunk(1, 1000)]).bound == "memory"


def test_a_token_loads_all_weights():
    """Summary: "Loading 16 GB of weights for one token's computation": all of them but the embedding's table."""
    read = total(step_work(LLAMA_8B, [Chunk(1, 1000)]).values()).weight_bytes
    assert weight_bytes(LLAMA_8B) / 1e9 == pytest.approx(16, abs=0.1)
    assert read == weight_bytes(LLAMA_8B) - 2 * (LLAMA_8B.vocab - 1) * LLAMA_8B.hidden
    whole = total(step_work(LLAMA_8B, [Chunk(1)]).values())
    assert whole.intensity == pytest.approx(1, abs=0.01)  # Two Phases of Inference: "Low (~1)"


# Batching


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_batching_reuses_weights(batch):
    """Why Batching Works: B 2 d_in d_out FLOPs by 2 d_in d_out bytes: an intensity of B."""
    work = step_work(LLAMA_8B, [Chunk(1, 500, sequences=batch)])
    for op in LINEAR:
        assert work[op].flops / work[op].weight_bytes == batch


def test_compute_bound_at_a_batch_of_156():
    """Why Batching Works: on the A100 products with weights turn compute-bound at B of about 156."""
    machine = A100.roofline()

    def bound_by_arithmetic(batch: int) -> bool:
        work = step_work(LLAMA_8B, [Chunk(1, sequences=batch)])[Operation.GATE_UP]
        return machine.flops_per_s * work.weight_bytes <= machine.bytes_per_s * work.flops

    assert not bound_by_arithmetic(155) and bound_by_arithmetic(156)


def test_activations_move_the_batch_of_156_up():
    """Why Batching Works: B counts weights only; with what goes in and comes out it takes up to 169."""
    ridge = A100.roofline().ridge

    def turns(operation: Operation) -> int:
        intensities = (step_work(LLAMA_8B, [Chunk(1, sequences=n)])[operation].intensity for n in range(1, 400))
        return next(n for n, each in enumerate(intensities, 1) if each >= ridge)

    assert [turns(op) for op in LINEAR[:4]] == [167, 169, 164, 165]


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_attention_does_not_batch(batch):
    """Attention Doesn't Batch Well: B 4 s d FLOPs by B 4 s n_kv d_h bytes in each layer: n_q / n_kv at any batch."""
    work = attention(Chunk(1, 4095, sequences=batch))
    assert work.flops == 32 * batch * 4 * 4096 * 4096
    assert work.kv_read_bytes == 32 * batch * 4 * 4096 * 8 * 128
    assert work.flops / work.kv_read_bytes == 32 / 8


def test_a_shared_prefix_is_held_once():
    """Attention Doesn't Batch Well: "prefix sharing (shared system prompts) does help": here in memory."""
    assert kv_cache_bytes(LLAMA_8B, 4000 + 32 * 96) < kv_cache_bytes(LLAMA_8B, 4096, sequences=32) / 18
    fits = capacity(ON_A100, 4000, 96).max_batch
    assert capacity(ON_A100, 4000, 96, cached=4000).max_batch > 35 * fits


def test_small_batches_are_free():
    """The Batching Trade-off: throughput improves with the batch, and latency barely rises while it is small."""
    one, eight, many = (ON_A100.step([Chunk(1, 500, sequences=batch)]).seconds for batch in (1, 8, 128))
    assert eight < 1.1 * one
    assert 1 / one < 8 / eight < 128 / many


def test_about_128_sequences_on_80_gb():
    """Memory Limits Batch Size: 16 GB of weights and 0.5 GB a sequence of 4K leave room for ~128 on 80 GB."""
    assert kv_cache_bytes(LLAMA_8B, 4096) / 2**30 == 0.5
    assert (A100.memory_bytes - weight_bytes(LLAMA_8B)) // kv_cache_bytes(LLAMA_8B, 4096) == pytest.approx(128, abs=2)
    assert capacity(ON_A100, 3072, 1024, Settings(utilization=1.0)).max_batch == pytest.approx(128, abs=4)


def test_contradiction_no_engine_has_all_of_80_gb():
    """Memory Limits Batch Size: ~128; at the usual share of 0.9 and with room for activations it is 109."""
    assert capacity(ON_A100, 3072, 1024).max_batch == 109


# Mixture of Experts


@pytest.mark.parametrize(
    ("name", "in_all", "active", "experts", "per_token"),
    [("llama-3.1-8b", 8, 8, 1, 1), ("mixtral-8x7b", 47, 13, 8, 2), ("deepseek-v2", 236, 21, 160, 6)],
)
def test_total_and_active_parameters(name, in_all, active, experts, per_token):
    """Mixture of Experts, table: 8B and 8B; 47B, 13B, 8 experts, top 2; 236B, 21B, 160 experts, top 6.

    Active are all but the experts that are not chosen and the embedding's table: 7.5B of Llama-3.1-8B.
    """
    shape = find_model(name).shape
    assert round(shape.num_parameters / 1e9) == in_all
    assert round(shape.active_parameters / 1e9) == active
    found = shape.experts
    assert ((1, 1) if found is None else (found.count, found.per_token)) == (experts, per_token)


def test_8_times_the_parameters_at_twice_the_compute():
    """MoE Trade-offs: "8x parameters, 2x compute (top-2)", of the feed-forward layers."""
    dense = replace(MIXTRAL, experts=None)
    assert MIXTRAL.parameters()["experts"] == 8 * dense.parameters()["ffn"]
    ours, theirs = (step_work(shape, [Chunk(1)]) for shape in (MIXTRAL, dense))
    assert ours[Operation.EXPERTS].flops == 2 * (theirs[Operation.GATE_UP].flops + theirs[Operation.DOWN].flops)


def test_contradiction_8_times_the_parameters_is_not_the_whole_model():
    """MoE Trade-offs: 8x, and 47B in the table above it; 8 times the 7.2B that are left without experts are 58B."""
    dense = replace(MIXTRAL, experts=None)
    assert dense.num_parameters / 1e9 == pytest.approx(7.2, abs=0.05)
    assert MIXTRAL.num_parameters / dense.num_parameters == pytest.approx(6.4, abs=0.1)
    assert MIXTRAL.active_parameters / dense.active_parameters == pytest.approx(1.8, abs=0.05)


def test_a_token_computes_as_in_a_smaller_dense_model():
    """MoE Trade-offs: the compute of a token is that of its active parameters, 2 FLOPs each."""
    flops = total(step_work(MIXTRAL, [Chunk(1)]).values()).flops
    assert flops == pytest.approx(2 * MIXTRAL.active_parameters, rel=0.001)


def test_all_experts_must_fit():
    """MoE Trade-offs: "All expert weights must fit in memory": 93 GB for Mixtral, which 80 GB do not hold."""
    assert weight_bytes(MIXTRAL) == 2 * MIXTRAL.num_parameters
    held = capacity(deployment(MIXTRAL, hardware=A100), 1000, 100)
    assert not held.fits and held.weights == weight_bytes(MIXTRAL)


def test_a_large_batch_reads_all_experts():
    """MoE Trade-offs: at batch 1 a token reads k experts, but a batch reads all of them: bytes are not decoupled."""
    assert MIXTRAL.experts is not None and MIXTRAL.experts.touched(1) == pytest.approx(2)
    one, many = (step_work(MIXTRAL, [Chunk(1, sequences=batch)])[Operation.EXPERTS] for batch in (1, 64))
    assert many.weight_bytes == pytest.approx(4 * one.weight_bytes, rel=1e-6)


# Sliding Window Attention


def test_a_window_bounds_the_cache():
    """Sliding Window Attention: Mistral 7B, w = 4096, bounds the KV cache whatever the length of the sequence."""
    assert set(MISTRAL.sliding_windows) == {4096}
    at_window = kv_cache_bytes(MISTRAL, 4096, rolling=True)
    assert kv_cache_bytes(MISTRAL, 32_768, rolling=True) == kv_cache_bytes(MISTRAL, 10**6, rolling=True) == at_window
    assert kv_cache_bytes(MISTRAL, 2048, rolling=True) == at_window / 2
    assert kv_cache_bytes(MISTRAL, 32_768) == 8 * at_window  # of an engine that keeps everything


def test_a_window_bounds_the_capacity():
    """Sliding Window Attention: as many sequences of 32K fit as of 4K, and as long as one likes."""
    on_a100 = deployment(MISTRAL, hardware=A100)
    short, long = capacity(on_a100, 4000, 96), capacity(on_a100, 32_000, 768)
    assert short.max_batch == long.max_batch > 100
    assert long.max_context > 2**30 > capacity(ON_A100, 32_000, 768).max_context


def test_a_window_bounds_compute():
    """Sliding Window Attention: O(n^2) without, O(n w) with it; a token costs the same at any length above w."""
    everything = replace(MISTRAL, sliding_windows=())
    assert attention(Chunk(80_000), everything).flops == pytest.approx(
        4 * attention(Chunk(40_000), everything).flops, rel=0.001
    )
    assert attention(Chunk(80_000), MISTRAL).flops == pytest.approx(
        2 * attention(Chunk(40_000), MISTRAL).flops, rel=0.06
    )
    assert attention(Chunk(1, 4095), MISTRAL) == attention(Chunk(1, 100_000), MISTRAL)


# Multi-head Latent Attention


def test_cache_by_method():
    """Multi-head Latent Attention, table: 2 n_h d_h for MHA, 2 n_kv d_h for GQA (4x less), d_c for MLA, in a layer."""
    mha = replace(LLAMA_8B, kv_heads=32)
    assert mha.kv_elements_per_layer == 2 * 32 * 128 == 4 * LLAMA_8B.kv_elements_per_layer
    assert LLAMA_8B.kv_elements_per_layer == 2 * 8 * 128
    assert DEEPSEEK_V2.latent is not None
    assert DEEPSEEK_V2.latent.kv_rank == 512


def test_contradiction_mla_is_not_5_times_less():
    """Multi-head Latent Attention, table: d_c, ~5x less; the cache also has a key with positions, 64 beside 512.

    Against MHA with the 128 heads of 128 that DeepSeek-V2 has it is 57x less (64x for d_c alone), and against the
    document's GQA of 8 KV heads 3.6x (4x): neither is 5.
    """
    assert DEEPSEEK_V2.latent is not None
    cached = DEEPSEEK_V2.kv_elements_per_layer
    assert cached == DEEPSEEK_V2.latent.kv_rank + DEEPSEEK_V2.latent.rope_dim == 576
    mha = replace(DEEPSEEK_V2, latent=None, head_dim=128)
    assert mha.kv_elements_per_layer / cached == pytest.approx(57, abs=0.5)
    assert mha.kv_elements_per_layer / DEEPSEEK_V2.latent.kv_rank == 64
    assert LLAMA_8B.kv_elements_per_layer / cached == pytest.approx(3.6, abs=0.05)
    assert LLAMA_8B.kv_elements_per_layer / DEEPSEEK_V2.latent.kv_rank == 4


def test_mla_takes_extra_compute():
    """Multi-head Latent Attention: "Extra compute to decompress during attention", in prefill and in decode."""
    for chunk in (Chunk(1000), Chunk(1, 1000)):
        assert step_work(DEEPSEEK_V2, [chunk])[Operation.LATENT].flops > 0
        assert Operation.LATENT not in step_work(LLAMA_8B, [chunk])


# Key Takeaways


def test_the_cache_trades_memory_for_compute():
    """Key Takeaways 4: a token with a cache of 4,095 others does 1/4000 of the work of computing all again."""
    again, cached = (total(step_work(LLAMA_8B, [chunk]).values()).flops for chunk in (Chunk(4096), Chunk(1, 4095)))
    assert again / cached > 3000
