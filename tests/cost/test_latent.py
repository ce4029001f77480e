"""Latent attention: both ways written out with torch give one result, and cost what the model says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headway.cost.attention import Chunk, attention
from headway.cost.layers import Latent
from headway.cost.memory import kv_cache_bytes
from headway.cost.precision import FP8, Precision
from headway.cost.shape import ModelShape
from headway.cost.work import Operation, step_work
from tests.cost.machines import LATENT

DEEPSEEK_V3 = Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


@dataclass
class Inputs:
    """Queries of `tokens` tokens, and latents of all `keys`."""

    nope: Tensor  # [heads, tokens, nope]
    rope: Tensor  # [heads, tokens, rope]
    latents: Tensor  # [keys, rank]
    positions: Tensor  # [keys, rope]
    to_keys: Tensor  # [heads, rank, nope]
    to_values: Tensor  # [heads, rank, value]

    @classmethod
    def random(cls, latent: Latent, heads: int, tokens: int, keys: int) -> Inputs:
        torch.manual_seed(0)
        return cls(
            torch.randn(heads, tokens, latent.nope_dim),
            torch.randn(heads, tokens, latent.rope_dim),
            torch.randn(keys, latent.kv_rank),
            torch.randn(keys, latent.rope_dim),
            torch.randn(heads, latent.kv_rank, latent.nope_dim),
            torch.randn(heads, latent.kv_rank, latent.value_dim),
        )

    def expanded(self) -> tuple[Tensor, int, int]:
        """The result, and FLOPs of making keys and values and of attention."""
        with FlopCounterMode(display=False) as making:
            keys = torch.einsum("sr,hrn->hsn", self.latents, self.to_keys)
            values = torch.einsum("sr,hrv->hsv", self.latents, self.to_values)
        keys = torch.cat([keys, self.positions.expand(len(keys), -1, -1)], dim=-1)
        with FlopCounterMode(display=False) as attending:
            scores = torch.einsum("htd,hsd->hts", torch.cat([self.nope, self.rope], dim=-1), keys)
            result = torch.einsum("hts,hsv->htv", scores.softmax(-1), values)
        return result, making.get_total_flops(), attending.get_total_flops()

    def absorbed(self) -> tuple[Tensor, int, int]:
        """The result, and FLOPs of turning queries and results, and of attention over latents."""
        with FlopCounterMode(display=False) as turning:
            queries = torch.einsum("htn,hrn->htr", self.nope, self.to_keys)
        queries = torch.cat([queries, self.rope], dim=-1)
        with FlopCounterMode(display=False) as attending:
            scores = torch.einsum("htd,sd->hts", queries, torch.cat([self.latents, self.positions], dim=-1))
            found = torch.einsum("hts,sr->htr", scores.softmax(-1), self.latents)
        with FlopCounterMode(display=False) as back:
            result = torch.einsum("htr,hrv->htv", found, self.to_values)
        return result, turning.get_total_flops() + back.get_total_flops(), attending.get_total_flops()


def shape_of(latent: Latent, heads: int) -> ModelShape:
    head_dim = latent.nope_dim + latent.rope_dim
    return ModelShape(layers=1, hidden=8, heads=heads, kv_heads=heads, head_dim=head_dim, ffn=8, vocab=8, latent=latent)


size = st.integers(2, 12)  # torch sums over a dimension of one without a product, which nobody counts


@given(
    latent=st.builds(Latent, st.none(), st.integers(2, 24), size, size, size),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 9),
    context=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_cheaper_way_is_taken_and_costs_what_torch_counts(latent, heads, tokens, context):
    inputs = Inputs.random(latent, heads, tokens, context + tokens)
    (result, *expanded), (same, *absorbed) = inputs.expanded(), inputs.absorbed()
    torch.testing.assert_close(result, same, rtol=1e-3, atol=1e-3)
    done = attention(shape_of(latent, heads), [Chunk(tokens, context)], flash=False)
    assert (done.latent_flops, done.score_flops + done.value_flops) in [tuple(expanded), tuple(absorbed)]
    assert done.latent_flops + done.score_flops + done.value_flops == min(sum(expanded), sum(absorbed))
    made = (context + tokens) * heads * (latent.nope_dim + latent.value_dim)
    if sum(absorbed) < sum(expanded):
        assert done.expanded_elements == 0
    if sum(expanded) < sum(absorbed):
        assert done.expanded_elements == made
    assert done.key_elements == (context + tokens) * (latent.kv_rank + latent.rope_dim) and done.value_elements == 0


@pytest.mark.parametrize(
    ("chunk", "expanded"), [(Chunk(1, 1000), False), (Chunk(1000), True), (Chunk(4, 1000), False), (Chunk(1), True)]
)
def test_deepseek_decodes_absorbed_and_expands_prompts(chunk, expanded):
    """DeepSeek-V3's sizes: 2 * 512 + 64 multiply-adds for each pair against 128 + 64 + 128."""
    done = attention(shape_of(DEEPSEEK_V3, 128), [chunk])
    assert (done.expanded_elements > 0) is expanded
    pairs = sum(chunk.context + i + 1 for i in range(chunk.tokens))
    each = 128 + 64 + 128 if expanded else 512 + 64 + 512
    assert done.score_flops + done.value_flops == 2 * 128 * pairs * each
    turned = chunk.context + chunk.tokens if expanded else chunk.tokens
    assert done.latent_flops == 2 * 128 * 512 * (128 + 128) * turned


def test_latents_are_cached_and_read_once():
    """512 + 64 elements a token and layer for DeepSeek-V3, however many heads read them: 70,272 B in bfloat16."""
    shape = replace(shape_of(DEEPSEEK_V3, 128), layers=61, sliding_windows=())
    assert kv_cache_bytes(shape, 1) == 61 * 576 * 2 == 70_272
    assert kv_cache_bytes(shape, 3, Precision(kv=FP8)) == 3 * 61 * 576
    work = step_work(shape, [Chunk(1, 99, sequences=3)])
    assert sum(part.kv_read_bytes for part in work.values()) == 3 * 100 * 70_272
    assert sum(part.kv_write_bytes for part in work.values()) == 3 * 70_272


@pytest.mark.parametrize("q_rank", [None, 1536])
def test_parameters_of_latent_attention_by_hand(q_rank):
    latent = replace(DEEPSEEK_V3, q_rank=q_rank)
    shape = replace(shape_of(latent, 128), hidden=7168)
    queries = 7168 * 128 * 192 if q_rank is None else 7168 * 1536 + 1536 * 128 * 192
    matrices = queries + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert shape.parameters()["attention"] == matrices
    assert shape.parameters()["norms"] == 3 * 7168 + 512 + (q_rank or 0)
    work = step_work(shape, [Chunk(1, 10)])
    read = sum(work[op].weight_bytes for op in (Operation.QKV, Operation.LATENT, Operation.OUTPUT))
    assert read == 2 * matrices
    assert work[Operation.QKV].flops == 2 * (queries + 7168 * 576)


def test_expanded_keys_and_values_are_written_and_read_again():
    prompt, decode = (step_work(LATENT, [chunk])[Operation.LATENT] for chunk in (Chunk(50), Chunk(1, 49)))
    assert prompt.activation_bytes == 2 * 2 * LATENT.layers * 50 * LATENT.heads * (16 + 16)
    assert decode.activation_bytes == 0
    assert prompt.weight_bytes == decode.weight_bytes == 2 * LATENT.layers * 40 * LATENT.heads * (16 + 16)


def test_activations_of_latent_attention_by_hand():
    """Compressed queries are written and read; scores read whole queries, values write results of their own size."""
    tokens, layers, heads = 5, LATENT.layers, LATENT.heads
    work = step_work(LATENT, [Chunk(tokens)])
    elements = {
        Operation.QKV: 64 + 2 * 32 + heads * (16 + 8) + 40 + 8,
        Operation.ROTARY: 2 * (heads * 8 + 8),
        Operation.KV_STORE: 40 + 8,
        Operation.SCORES: heads * (16 + 8),
        Operation.VALUES: heads * 16,
        Operation.OUTPUT: heads * 16 + 64,
    }
    assert {op: work[op].activation_bytes for op in elements} == {
        op: 2 * tokens * layers * n for op, n in elements.items()
    }
    norms = 2 * tokens * 64 + (2 * layers - 1) * 4 * tokens * 64 + 2 * layers * tokens * (32 + 40)
    assert work[Operation.NORMS].activation_bytes == 2 * norms
