"""Every operation but attention and linear, on kernels under test, against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.engine.sampler import BAD_TOKEN, Sampler
from headway.kernels.adapters import AdapterRows, AdapterSpec
from headway.kernels.interface import Kernels, LayerCache, SinkQueries
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import CLAMPED, GELU_TANH, SILU, Groups, Product, Scores, Weight
from tests.engine.sampling_oracle import make_sequence
from tests.kernels.steps import assert_close, cache_of, on, random, step_of

REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Keys and values of normal numbers in 255 steps: half a step, uniform, of the largest of a head; and rounding.
INT8_CACHE_ERROR = 0.012
# Numbers in e4m3fn: up to a sixteenth of each, and a third of that on average.
CACHE_ERRORS = {torch.int8: INT8_CACHE_ERROR, torch.float8_e4m3fn: 0.045}
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def check_norms(kernels: Kernels, device: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    x, residual, weight = (random(seed, dtype, *shape) for seed, shape in enumerate([(tokens, width)] * 2 + [(width,)]))
    expected = REFERENCE.rms_norm(x, weight, 1e-6)
    assert_close(kernels.rms_norm(x.to(device), weight.to(device), 1e-6), expected, dtype)
    expected, expected_sum = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    got, got_sum = kernels.add_rms_norm(x.clone().to(device), residual.clone().to(device), weight.to(device), 1e-6)
    assert_close(got_sum, expected_sum, dtype)
    assert_close(got, expected, dtype)


def check_norm_of_heads(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    """Check the norm on heads that are a slice of a wider projection, like Qwen3's query and key norm."""
    fused = random(0, dtype, 5, 6 * 24)
    heads = fused[:, 24 : 5 * 24].view(5, 4, 24)
    weight = random(1, dtype, 24)
    got = kernels.rms_norm(fused.to(device)[:, 24 : 5 * 24].view(5, 4, 24), weight.to(device), 1e-5)
    assert_close(got, REFERENCE.rms_norm(heads, weight, 1e-5), dtype)


def check_take(kernels: Kernels, device: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    table = random(0, dtype, 50, width)
    rows = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1))
    taken = kernels.take(table.to(device), rows.to(device))
    assert torch.equal(taken.cpu(), table[rows])
    taken.zero_()
    assert torch.equal(kernels.take(table.to(device), rows.to(device)).cpu(), table[rows])


def check_gate(kernels: Kernels, device: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    """Check gates by a weight that hands its input on, so that nothing but the gate rounds."""
    gate_up = random(0, dtype, tokens, 2 * width) * 8
    gate_up[0, :4] = torch.tensor([-300.0, -88.0, 300.0, 0.0]).to(dtype)
    for gate in (SILU, GELU_TANH, CLAMPED):
        gated = kernels.gated_linear(Weight(torch.eye(2 * width, dtype=dtype, device=device)), None, gate)
        assert_close(gated(gate_up.to(device)), REFERENCE.apply_gate(gate_up, gate), dtype)


def check_rotate(kernels: Kernels, device: str, dtype: torch.dtype, tokens: int, width: int, half: int) -> None:
    angles = random(0, torch.float32, 61, half)  # behind which positions count as the last
    positions = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(1))
    fused = random(2, dtype, tokens, 7 * width)
    ours = fused.clone().to(device)
    for kernel, x, to in ((REFERENCE, fused, "cpu"), (kernels, ours, device)):
        query, key = x[:, : 4 * width].view(tokens, 4, width), x[:, 4 * width : 6 * width].view(tokens, 2, width)
        kernel.rotate(query, key, angles.cos().to(to), angles.sin().to(to), positions.to(to))
    assert_close(ours, fused, dtype)


def check_store(kernels: Kernels, device: str, dtype: torch.dtype, block_size: int, width: int) -> None:
    """For kernels whose blocks are plainly [head, token, element]."""
    step, num_blocks = step_of([3, 1, 20], [3, 40, 25], block_size)
    cache, ours = (cache_of(num_blocks, 3, block_size, width, dtype, 0) for _ in range(2))
    ours.keys, ours.values = ours.keys.to(device), ours.values.to(device)
    fused = random(9, dtype, 24, 9 * width)
    for kernel, target, x, slots in (
        (REFERENCE, cache, fused, step.slots),
        (kernels, ours, fused.to(device), step.slots.to(device)),
    ):
        key, value = (x[:, at * width : (at + 3) * width].view(24, 3, width) for at in (3, 6))
        kernel.store(key, value, target, slots)
    assert torch.equal(ours.keys.cpu(), cache.keys)
    assert torch.equal(ours.values.cpu(), cache.values)


def check_store_of_latents(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    step, num_blocks = step_of([3, 20], [3, 25], 16)
    fused = random(9, dtype, 23, 1, 60)
    keys = []
    for kernel, to in ((REFERENCE, "cpu"), (kernels, device)):
        cache, there = latent_cache(num_blocks, 16, 44, 36, dtype, to), fused.to(to)[..., 8:52]
        kernel.store(there, there[..., :36], cache, step.slots.to(to))
        keys.append(cache.keys.cpu())
    torch.testing.assert_close(*keys, rtol=0, atol=0, equal_nan=True)


def store_history(kernels: Kernels, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """What check_store shows that CUDA's kernels store; Triton's interpreter takes longer for it than for attention."""
    plain = cache.keys.dtype == key.dtype
    (REFERENCE if kernels.name == "cuda" and plain else kernels).store(key, value, cache, slots)


def check_draw(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    """The sampler's tokens with the kernel that draws are those without; NaN and infinities are named."""
    inf, size = math.inf, 20_001
    ways: list[dict[str, object]] = [
        {"temperature": 0.0}, {}, {"min_p": 0.05}, {"top_k": 50}, {"top_k": 300, "top_p": 0.9}, {"top_p": 0.6},
        {"top_p": 0.999, "temperature": 2.0}, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_p": 0.8},
        {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": {7: 3.0, 8: -100.0}, "min_tokens": 9},
    ]  # fmt: skip
    sequences = [
        make_sequence([1, 2, 8191], [3, 2, 2], seed=row, stop_ids=(4, 99_999), **way)
        for row, way in enumerate([*ways * 4, *[{"temperature": 0.0}] * 6])
    ]
    logits = (2 * random(0, torch.float32, len(sequences), size)).to(dtype)
    logits[-6:] = -1.0
    logits[-6, [8191, 8192, 20_000]] = 2.0
    logits[-5, [16_384, 20_000]] = 2.0
    logits[-4] = -inf
    logits[-3, 20_000], logits[-2, 5], logits[-1, [3, 20_000]] = math.nan, inf, torch.tensor([-0.0, 0.0], dtype=dtype)
    logits = logits.to(device)
    drawn = Sampler(size, logits.device, kernels.draw).sample(logits, sequences).token_ids
    assert drawn[-6:] == [8191, 16_384, BAD_TOKEN, BAD_TOKEN, BAD_TOKEN, 3]
    assert drawn == Sampler(size, logits.device).sample(logits, sequences).token_ids
    for row, sequence in enumerate(sequences):
        alone = Sampler(size, logits.device, kernels.draw).sample(logits[row : row + 1], [sequence])
        assert alone.token_ids == [drawn[row]]


def check_forbid(kernels: Kernels, device: str, tokens: int) -> None:
    """Marked rows keep the tokens whose bits are set, other rows all."""
    chance = np.random.default_rng(tokens)
    x = torch.randn(5, tokens, generator=torch.Generator().manual_seed(1)).to(device)
    rows, kept = [3, 0, 4], chance.integers(0, 2, (3, tokens)).astype(bool)
    kept[0] = [token in (0, 31, 32, tokens - 1) for token in range(tokens)]
    words = np.packbits(kept, axis=1, bitorder="little").view(np.int32)
    marked = torch.from_numpy(np.column_stack((np.array(rows, np.int32), words))).to(device)
    expected = x.clone()
    for row, bits in zip(rows, kept, strict=True):
        expected[row, torch.from_numpy(~bits).to(device)] = -torch.inf
    kernels.forbid(x, marked)
    assert torch.equal(x, expected)
    kernels.forbid(x, marked[:0])
    assert torch.equal(x, expected)


def check_add_and_soft_cap(kernels: Kernels, device: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    """Caps of numbers from next to nothing to far above the cap; what is not a number stays so."""
    x, residual = random(0, dtype, tokens, width), random(1, dtype, tokens, width)
    assert_close(kernels.add(x.to(device), residual.clone().to(device)), REFERENCE.add(x, residual), dtype)
    x = x * 10.0 ** torch.arange(-4, 4).repeat(width)[:width].to(dtype)
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    capped = kernels.soft_cap(x.clone().to(device), 30.0)
    assert capped[0, :2].tolist() == [30.0, -30.0] and capped[0, 2].isnan()
    torch.testing.assert_close(
        capped.cpu().double(), 30 * (x.double() / 30).tanh(), atol=30 * ROUNDING[dtype], rtol=1e-5, equal_nan=True
    )


def check_route(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    """The greatest first, of equals the first; each row by itself; of a NaN, NaN."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -80.0, 0.5], [2.0, -math.inf, 2.0, 2.0, -0.5]]).to(dtype).to(device)
    chosen, weights = kernels.route(logits, 3, normalized=False, shared=False)
    assert (chosen.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert chosen.tolist() == [[1, 2, 0], [0, 2, 3]]
    expected = logits.float().softmax(1).gather(1, chosen).cpu()
    torch.testing.assert_close(weights.cpu(), expected)
    normalized = kernels.route(logits, 3, normalized=True, shared=False)[1].cpu()
    torch.testing.assert_close(normalized, expected / expected.sum(1, keepdim=True))
    chosen, weights = kernels.route(logits, 2, normalized=True, shared=True)
    assert chosen.tolist() == [[1, 2, 4], [0, 2, 4]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.5, 0.5, 0.6224593], [0.5, 0.5, 0.3775407]]))

    logits = random(0, dtype, 300, 61).to(device) * 3
    chosen, weights = kernels.route(logits, 4, normalized=False, shared=True)
    theirs = REFERENCE.route(logits.cpu(), 4, normalized=False, shared=True)
    assert torch.equal(chosen.cpu(), theirs[0])
    torch.testing.assert_close(weights.cpu(), theirs[1])
    for row in (0, 150, 299):
        alone = kernels.route(logits[row : row + 1], 4, normalized=False, shared=True)
        assert torch.equal(alone[0], chosen[row : row + 1]) and torch.equal(alone[1], weights[row : row + 1])
    for bad in (math.nan, math.inf):
        logits[7, 5] = bad
        chosen, weights = kernels.route(logits, 4, normalized=True, shared=True)
        assert weights[7, :4].isnan().all() and weights.isnan().sum() == 4
        assert chosen[7, :4].unique().tolist() == sorted(chosen[7, :4].tolist())  # whatever they are, they are experts
        assert chosen[7].min() >= 0 and chosen[7, :4].max() < 60


def check_scores(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    """Groups, sigmoids, biases and factors; a shared expert of weight 1; each row by itself; of a NaN, NaN."""
    logits = random(0, dtype, 70, 24) * 2
    bias = random(1, torch.float32, 24).to(device)
    for scores in (
        Scores(factor=1.5, gated=False),
        Scores(groups=6, best_groups=2, factor=16.0, gated=False),
        Scores(sigmoid=True, bias=bias, groups=4, best_groups=2, factor=2.5, gated=False),
        Scores(sigmoid=True, bias=bias, gated=False),
        Scores(gated=False),
    ):
        plain = replace(scores, bias=None if scores.bias is None else scores.bias.cpu())
        for normalized, shared in ((True, False), (False, True)):
            options = {"per_token": 5, "normalized": normalized, "shared": shared}
            expected = REFERENCE.route(logits, **options, scores=plain)
            chosen, weights = kernels.route(logits.to(device), **options, scores=scores)
            assert torch.equal(chosen.cpu(), expected[0])
            torch.testing.assert_close(weights.cpu(), expected[1], rtol=1e-5, atol=1e-6)
            one = kernels.route(logits[9:10].to(device), **options, scores=scores)
            assert torch.equal(one[0], chosen[9:10]) and torch.equal(one[1], weights[9:10])
        if shared:
            assert chosen[:, 5].unique().tolist() == [24] and weights[:, 5].unique().tolist() == [1.0]
        bad = logits.clone()
        bad[3, 7] = math.nan
        chosen, weights = kernels.route(bad.to(device), 5, True, False, scores)
        assert weights[3].isnan().all() and weights.isnan().sum() == 5 and 0 <= chosen.min() <= chosen.max() < 24


def check_heads(kernels: Kernels, device: str, dtype: torch.dtype, tokens: int, scheme: str = "none") -> None:
    """A matrix for each head, of inputs that are a slice of a wider product; side by side with another slice."""
    wide, matrices = random(0, dtype, tokens, 7 * 30 + 5), random(1, dtype, 7, 70, 24) / 24**0.5
    linear = kernels.head_linear((Weight(matrix.clone().to(device), scheme) for matrix in matrices), 7)
    x = wide.to(device)[:, : 7 * 30].view(tokens, 7, 30)[..., 6:]
    other = wide.to(device)[:, 5 : 5 + 7 * 4].view(tokens, 7, 4)
    got = linear(x)
    assert got.shape == (tokens, 7, 70)
    expected = torch.einsum("thi,hoi->tho", wide[:, : 7 * 30].view(tokens, 7, 30)[..., 6:].float(), matrices.float())
    if scheme == "none":
        assert_close(got, expected.to(dtype), dtype)
    else:
        assert (got.cpu().float() - expected).norm() < 0.02 * expected.norm()
    both = kernels.join(got, other)
    assert both.is_contiguous() and torch.equal(both, torch.cat([got, other], 2))
    assert torch.equal(kernels.join(got), got) and kernels.join(got).is_contiguous()
    if kernels.name == "cpu":
        for row in {0, tokens // 2, tokens - 1}:
            assert torch.equal(linear(x[row : row + 1])[0], got[row])


def check_attention_over_latents(
    kernels: Kernels, device: str, dtype: torch.dtype, queries: list[int], contexts: list[int], heads: int, rank: int,
    rotated: int, block_size: int, window: int | None = None, first_keys: int = 0,
) -> None:  # fmt: skip
    """All heads over one latent, whose first elements are the values too; it is kept once."""
    step, num_blocks = step_of(queries, contexts, block_size)
    before, _ = step_of(contexts, contexts, block_size)
    width = rank + rotated
    key, query, of_first = (random(seed, dtype, *shape, width) for seed, shape in enumerate(
        [(sum(contexts), 1), (sum(queries), heads), (sum(queries), heads)], 1
    ))  # fmt: skip
    results = []
    for each, to in ((REFERENCE, "cpu"), (kernels, device)):
        cache = latent_cache(num_blocks, block_size, width, rank, dtype, to)
        assert len(cache.tensors) == 1
        there = key.to(to)
        store_history(each, there, there[..., :rank], cache, before.slots.to(to))
        first = SinkQueries(of_first.to(to), first_keys) if first_keys else None
        results.append(each.attention(query.to(to), cache, on(to, step), width**-0.5, window, first=first))
    assert results[1].shape == (sum(queries), heads, rank)
    assert_close(results[1], results[0], dtype)


def random_experts(dtype: torch.dtype, count: int, hidden: int, width: int) -> tuple[list[Product], list[Product]]:
    """Gated layers and those behind them, with biases."""
    gate_up, down = random(0, dtype, count, 2 * width, hidden) / hidden**0.5, random(1, dtype, count, hidden, width)
    biases = random(2, dtype, count, 2 * width), random(3, dtype, count, hidden)
    return tuple(  # type: ignore[return-value]
        [(Weight(matrix), bias) for matrix, bias in zip(*each, strict=True)]
        for each in ((gate_up, biases[0]), (down / width**0.5, biases[1]))
    )


def products_on(device: str, products: list[Product], scheme: str = "none") -> Iterator[Product]:
    """The same products on another device, to be rounded as the scheme says."""
    return ((Weight(w.parts[0].clone().to(device), scheme), None if b is None else b.to(device)) for w, b in products)


def check_mixture(kernels: Kernels, device: str, dtype: torch.dtype, tokens: int, scheme: str = "none") -> None:
    """Each token through its experts alone, and a shared one; alone a token gets the same. What is done is counted."""
    gate_up, down = random_experts(dtype, 6, 40, 21)
    there = partial(products_on, device, scheme=scheme)
    x, shared = random(4, dtype, tokens, 40), random(5, dtype, tokens, 40)
    shares = random(6, torch.float32, tokens, 3).softmax(1)
    order = torch.rand(tokens, 5, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :2]
    chosen = torch.cat([order, torch.full((tokens, 1), 6)], 1)  # the last for the shared one; nobody chooses number 5
    before, mixture = kernels.routing_counts(), kernels.mixture(there(gate_up), there(down), 6, CLAMPED)
    inputs = [each.to(device) for each in (x, chosen, shares, shared)]
    got, counts = mixture(*inputs), kernels.routing_counts()
    of_experts = order.flatten().bincount(minlength=6)
    assert (counts.mixtures - before.mixtures, counts.pairs - before.pairs) == (1, 2 * tokens)
    assert counts.touched - before.touched == int((of_experts > 0).sum())
    assert counts.busiest - before.busiest == int(of_experts.max())

    one = [
        (kernels.gated_linear(*first, CLAMPED), kernels.linear(*second))
        for first, second in zip(there(gate_up), there(down), strict=True)
    ]
    for given in (None, inputs[3]):
        columns = slice(2 if given is None else 3)
        parts = [inputs[0], *(each[:, columns].contiguous() for each in inputs[1:3])]
        got = mixture(*parts, given)
        total = torch.zeros(tokens, 40, dtype=torch.float64) if given is None else shares[:, 2:] * shared.double()
        for token, place in ((token, place) for token in range(tokens) for place in range(2)):
            first, second = one[order[token, place]]
            result = second(first(inputs[0][token : token + 1]))[0]
            total[token] += shares[token, place].double() * result.double().cpu()
        assert_close(got, total.to(dtype), dtype)
        for row in {0, tokens // 2, tokens - 1}:
            alone = mixture(*(each[row : row + 1] for each in parts), None if given is None else given[row : row + 1])
            if device == "cpu" and kernels.name == "cpu":
                assert torch.equal(alone[0], got[row])
            else:
                assert_close(alone[0], got[row].cpu(), dtype)


def check_copy_blocks(kernels: Kernels, device: str) -> None:
    caches = [cache_of(6, 2, 8, 16, torch.float32, seed) for seed in (0, 10)]
    before = [cache.keys.clone() for cache in caches], [cache.values.clone() for cache in caches]
    for cache in caches:
        cache.keys, cache.values = cache.keys.to(device), cache.values.to(device)
    kernels.copy_blocks(caches, [0, 3, 1], [3, 5, 4])
    for cache, keys, values in zip(caches, *before, strict=True):
        for target, source in enumerate([0, 1, 2, 0, 1, 3]):
            assert torch.equal(cache.keys[target].cpu(), keys[source])
            assert torch.equal(cache.values[target].cpu(), values[source])


def check_attention(
    kernels: Kernels, device: str, dtype: torch.dtype, queries: list[int], contexts: list[int], heads: int,
    kv_heads: int, width: int, block_size: int, window: int | None, seed: int = 0,
    cache_dtype: torch.dtype | None = None, has_sinks: bool = False, softcap: float | None = None, first_keys: int = 0,
) -> None:  # fmt: skip
    """Attention of queries that are a slice of a wider projection, over what was stored in shuffled blocks before.

    What is stored is a slice too, and what no token was stored in holds no numbers. Blocks that the window has passed
    are another's, and their places in the tables are taken by a block of zeros.
    """
    step, num_blocks = step_of(queries, contexts, block_size, seed)
    before, _ = step_of(contexts, contexts, block_size, seed)
    shape = (num_blocks + 1, kv_heads, block_size, width)
    cache, ours = (empty_cache(shape, each, to) for each, to in ((dtype, "cpu"), (cache_dtype or dtype, device)))
    history = random(seed + 1, dtype, sum(contexts), 3 * kv_heads * width)
    keys, values = (
        history[:, at : at + kv_heads * width].view(-1, kv_heads, width)
        for at in (kv_heads * width, 2 * kv_heads * width)
    )
    for each, to, target in ((REFERENCE, "cpu", cache), (kernels, device, ours)):
        store_history(each, keys.to(to), values.to(to), target, before.slots.to(to))
    fused = random(seed + 3, dtype, sum(queries), (heads + 2) * width)
    sinks = random(seed + 4, torch.float32, heads) * 4 if has_sinks else None  # from negligible to most of the weight
    first = SinkQueries(random(seed + 5, dtype, sum(queries), heads, width) * 2, first_keys) if first_keys else None
    expected = REFERENCE.attention(
        fused[:, : heads * width].view(-1, heads, width), cache, step, width**-0.5, window, sinks, softcap, first
    )
    if window is not None:
        for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
            kept = first_keys // block_size
            passed = step.block_tables[row, kept : max(kept, (context - count - window + 1) // block_size)]
            for tensor in ours.tensors:
                is_float8 = tensor.dtype == torch.float8_e4m3fn
                numbers = tensor.view(torch.uint8) if is_float8 else tensor
                numbers[passed.long().to(device)] = torch.nan if numbers.is_floating_point() else 0x7F
                numbers[num_blocks] = 0
            passed[:] = num_blocks
    query = fused.to(device)[:, : heads * width].view(-1, heads, width)
    of_device = sinks if sinks is None else sinks.to(device)
    if first is not None:
        first = SinkQueries(first.rows.to(device), first.num_keys)
    got = kernels.attention(query, ours, on(device, step), width**-0.5, window, of_device, softcap, first)
    assert got.shape == (sum(queries), heads, width)
    if cache_dtype is None:
        assert_close(got, expected, dtype)
    else:
        error = (got.double().cpu() - expected.double()).norm() / expected.double().norm()
        assert error < CACHE_ERRORS[cache_dtype] + ROUNDING[dtype]


def check_float8_store(kernels: Kernels, device: str) -> None:
    """Every number of e4m3fn, those between two of them, and what it has no number for."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[codes.isfinite()].sort().values
    between = [exact[:-1] + (exact[1:] - exact[:-1]) * part for part in (0.25, 0.5, 0.75)]
    further = torch.tensor([449.0, -500.0, math.inf, -math.inf, math.nan, 2.0**-10, 1.01 * 2.0**-10])
    numbers = torch.cat([exact, *between, further])
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 32)]).view(-1, 1, 32)
    cache = empty_cache((-(-len(numbers) // 16), 1, 16, 32), torch.float8_e4m3fn, device)
    slots = torch.arange(len(numbers))
    kernels.store(numbers.to(device), numbers.to(device), cache, slots.to(device))
    kept = sorted(cache.keys.view(torch.uint8).flatten().tolist()[: 256 * 32])
    expected = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).flatten().tolist()
    expected += [0x7F] * (len(kept) - len(expected))  # where nothing was stored
    assert [code & 0x7F if code & 0x7F == 0x7F else code for code in kept] == sorted(
        code & 0x7F if code & 0x7F == 0x7F else code for code in expected
    )


def check_packed_weights_are_refused(kernels: Kernels) -> None:
    whole, scales = torch.ones(4, 128, dtype=torch.int8), torch.ones(4, 1)
    for weight, named in (
        (Weight(torch.ones(4, 128), "int8"), "int8"),
        (Weight(whole, "int8", scales), "int8 packed in rows"),
        (Weight(whole, "int4", groups=Groups(128, whole[:, :1], whole[:, :1], scales)), "int4 packed in groups"),
    ):
        for lay_out in (kernels.linear, kernels.gated_linear):
            with pytest.raises(ValueError, match=f"the {kernels.name} kernels do not support weights in {named}"):
                lay_out(weight, None)


def check_int8_cache_is_refused(kernels: Kernels) -> None:
    cache, key = empty_cache((2, 1, 16, 8), torch.int8, "cpu"), torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match=f"the KV cache is int8, which the {kernels.name} kernels do not support"):
        kernels.store(key, key, cache, torch.zeros(1, dtype=torch.int64))


def latent_cache(blocks: int, block_size: int, width: int, rank: int, dtype: torch.dtype, device: str) -> LayerCache:
    keys = torch.full((blocks, 1, block_size, width), math.nan, dtype=dtype, device=device)
    return LayerCache(keys, keys[..., :rank])


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> LayerCache:
    if dtype == torch.float8_e4m3fn:
        return LayerCache(*(torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype) for _ in range(2)))
    if dtype == torch.int8:
        keys, values = (torch.full(shape, 99, dtype=dtype, device=device) for _ in range(2))
        return LayerCache(keys, values, *(torch.full(shape[:3], math.nan, device=device) for _ in range(2)))
    return LayerCache(*(torch.full(shape, math.nan, dtype=dtype, device=device) for _ in range(2)))


def check_adapters(kernels: Kernels, dtype: torch.dtype, inputs: int, outputs: int, rank: int) -> None:
    """Products of two parts, plain and gated, with adapters in two of three slots, and rows without."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    weight, x = random(2 * outputs, inputs), random(37, inputs)
    part_of = torch.arange(2 * outputs) // outputs
    spec = AdapterSpec(inputs, part_of, dtype, torch.device("cpu"), 3, rank)
    rows = AdapterRows(64, 3, torch.device("cpu"))
    rows.fill([[-1, 2, 2, 0][at % 4] for at in range(37)], 37)
    found = []
    for each in (kernels, REFERENCE):
        for product in (each.linear(Weight(weight), None), each.gated_linear(Weight(weight), None)):
            made = each.adapted(product, spec, rows)
            generator.manual_seed(1)
            for slot in (0, 2):
                made.write(slot, random(2, rank, inputs), random(rank, 2 * outputs))
            found.append(made(x).float())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
