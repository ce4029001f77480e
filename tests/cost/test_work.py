"""FLOPs agree with torch's own counter on the decoder; bytes and attention with counting one by one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headway.cost.attention import COMMON_PART, Chunk, attended_pairs, visible_keys
from headway.cost.config import read_shape
from headway.cost.precision import BF16, FP32, INT8, Format, Precision
from headway.cost.shape import ModelShape
from headway.cost.work import NORMALISATION, Operation, Work, step_work, total
from headway.engine.memory import zero_caches
from headway.kernels.cpu.attention_plan import SPLIT
from headway.kernels.families import LEAST_COMMON
from headway.kernels.reference import ReferenceKernels
from headway.models.loading import load_model
from tests.cost import published, tiny_families
from tests.models import tiny
from tests.models.paging import geometry

LINEARS = (Operation.QKV, Operation.OUTPUT, Operation.GATE_UP, Operation.DOWN, Operation.HEAD)
ATTENTION = (Operation.SCORES, Operation.VALUES)
STEPS = {
    "prompt": [Chunk(13)],
    "decode": [Chunk(1, 12)],
    "chunk in the middle": [Chunk(5, 8, logit_rows=0)],
    "mixed": [Chunk(7), Chunk(1, 20), Chunk(4, 3, logit_rows=0), Chunk(1, 1)],
    "all logits": [Chunk(6, 0, logit_rows=6)],
}


def counted(folder, chunks):
    """(ModelShape, FLOPs by torch operator) of one step of the decoder over these chunks."""
    decoder = load_model(folder, torch.float32, ReferenceKernels())
    block_size = 4
    tables, blocks = [], 0
    for chunk in chunks:
        needed = -(-(chunk.context + chunk.tokens) // block_size)
        tables.append(list(range(blocks, blocks + needed)))
        blocks += needed
    step = geometry(
        [(chunk.context, chunk.tokens, table) for chunk, table in zip(chunks, tables, strict=True)],
        block_size,
        decoder.device,
    )
    caches = zero_caches(decoder.config.caches, blocks, block_size, torch.float32, decoder.device)
    rows, start = [], 0
    for chunk in chunks:
        start += chunk.tokens
        rows += range(start - chunk.logit_rows, start)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        hidden = decoder.forward(torch.ones(start, dtype=torch.long), step, caches)
        if rows:
            decoder.logits(hidden[rows])
    flops = Counter({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})
    return read_shape(json.loads((folder / "config.json").read_text())), flops


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("case", ["llama", "llama_tied", "qwen2", "qwen3", "llama_mlp_bias", "mistral_window"])
def test_flops_are_those_that_torch_counts(case, name, tmp_path):
    """The plain kernels multiply the whole rectangle of queries and keys and mask it afterwards."""
    chunks = STEPS[name]
    tiny.save(case, tmp_path)
    shape, flops = counted(tmp_path, chunks)
    work = step_work(shape, chunks)
    assert sum(work[op].flops for op in LINEARS) == flops["aten.addmm"] + flops["aten.mm"]
    rectangle = sum(chunk.tokens * (chunk.context + chunk.tokens) for chunk in chunks)
    assert flops["aten.bmm"] == 4 * shape.layers * shape.heads * shape.head_dim * rectangle
    assert set(flops) <= {"aten.addmm", "aten.mm", "aten.bmm"}
    others = [op for op in work if op not in LINEARS + ATTENTION + NORMALISATION]
    assert sum(work[op].flops for op in others) == 0


def test_attention_of_a_prompt_is_what_torch_counts_token_by_token(tmp_path):
    """One query at a time there is nothing to mask, so the counter sees exactly the causal pairs."""
    tiny.save("llama", tmp_path)
    steps = [counted(tmp_path, [Chunk(1, context)]) for context in range(9)]
    shape = steps[0][0]
    ours = step_work(shape, [Chunk(9)])
    assert sum(flops["aten.bmm"] for _, flops in steps) == sum(ours[op].flops for op in ATTENTION)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (1, 9), (6, 0), (6, 3), (20, 5), (3, 30)])
def test_pairs_and_keys_equal_counting_one_by_one(tokens, context, window):
    seen = {
        (query, key)
        for query in range(context, context + tokens)
        for key in range(query + 1)
        if window is None or key > query - window
    }
    assert attended_pairs(tokens, context, window) == len(seen)
    assert visible_keys(tokens, context, window) == len({key for _, key in seen})


def test_chunks_add_up_to_the_whole_prompt():
    """FLOPs of a prompt do not depend on how it is cut; the weights are read once for each piece."""
    shape = read_shape(published.QWEN2_5_7B)
    whole = total(step_work(shape, [Chunk(1000)]).values())
    pieces = [Chunk(400, 0, logit_rows=0), Chunk(400, 400, logit_rows=0), Chunk(200, 800)]
    cut = total(work for piece in pieces for work in step_work(shape, [piece]).values())
    assert cut.flops == whole.flops
    assert cut.kv_write_bytes == whole.kv_write_bytes == 1000 * 57_344
    assert cut.weight_bytes > 2.9 * (whole.weight_bytes - 2 * shape.parameters()["head"])


@pytest.mark.parametrize("config", [published.QWEN2_5_7B, published.QWEN2_5_05B, published.QWEN3_8B])
def test_a_decode_step_reads_every_weight_once(config):
    """All parameters but the rows of an untied embedding that the step's tokens do not name."""
    shape = read_shape(config)
    work = step_work(shape, [Chunk(1, 99), Chunk(1, 399)])
    parameters = shape.parameters()
    read = shape.num_parameters + 2 * shape.hidden - (0 if shape.tied_embeddings else parameters["embedding"])
    assert total(work.values()).weight_bytes == 2 * read
    kv = shape.kv_elements_per_token * 2
    assert total(work.values()).kv_read_bytes == kv * (100 + 400)
    assert total(work.values()).kv_write_bytes == kv * 2


def test_flops_of_a_token_are_two_for_each_parameter_that_multiplies():
    """Documents 001 and 002 take 2 FLOPs for each parameter and token; norms and the embedding multiply nothing."""
    shape = read_shape(published.LLAMA_3_1_8B)
    work = step_work(shape, [Chunk(1)])
    p = shape.parameters()
    assert sum(work[op].flops for op in LINEARS) == 2 * (p["attention"] + p["ffn"] + p["head"])


def test_a_sliding_window_bounds_what_decode_reads():
    shape = read_shape(published.MISTRAL_7B)
    near, far = (total(step_work(shape, [Chunk(1, context)]).values()) for context in (4095, 30_000))
    assert near.kv_read_bytes == far.kv_read_bytes == 4096 * shape.kv_elements_per_token * 2
    assert near.flops == far.flops


def test_activations_of_a_tiny_step_counted_by_hand():
    """One layer, h 4, 2 heads, 1 KV head, D 2, F 6, V 10; 3 tokens, the logits of 1; float32 activations."""
    shape = ModelShape(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=6, vocab=10)
    work = step_work(shape, [Chunk(3)], Precision(activations=FP32))
    elements = {
        Operation.EMBEDDING: 3 * 4,
        Operation.NORMS: 3 * 4 * (1 + 1) + 3 * 4 * (2 + 2),
        Operation.QKV: 3 * (4 + 8),
        Operation.ROTARY: 3 * 6 * 2,
        Operation.KV_STORE: 3 * 4,
        Operation.SCORES: 3 * 4,
        Operation.VALUES: 3 * 4,
        Operation.OUTPUT: 3 * (4 + 4),
        Operation.GATE_UP: 3 * (4 + 12),
        Operation.ACTIVATION: 3 * (12 + 6),
        Operation.DOWN: 3 * (6 + 4),
        Operation.FINAL_NORM: 3 * 4 * (2 + 2),
        Operation.HEAD: 4 + 10,
        Operation.SAMPLING: 3 * 10,
    }
    assert {op: part.activation_bytes for op, part in work.items()} == {op: 4 * n for op, n in elements.items()}


def test_weights_and_cache_of_a_tiny_step_counted_by_hand():
    """The same with biases, norms of heads and 2 KV heads: what is not named reads no weights and no cache."""
    shape = ModelShape(
        layers=1, hidden=4, heads=2, kv_heads=2, head_dim=2, ffn=6, vocab=10,
        qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, norm_bias=True, head_bias=True,
    )  # fmt: skip
    work = step_work(shape, [Chunk(3, 5)])
    weights = {
        Operation.EMBEDDING: 3 * 4,
        Operation.NORMS: 2 * (4 + 4) + 2 * 2,
        Operation.QKV: 12 * 4 + 12,
        Operation.OUTPUT: 4 * 4 + 4,
        Operation.GATE_UP: 12 * 4 + 12,
        Operation.DOWN: 4 * 6 + 4,
        Operation.FINAL_NORM: 4 + 4,
        Operation.HEAD: 10 * 4 + 10,
    }
    assert {op: part.weight_bytes for op, part in work.items() if part.weight_bytes} == {
        op: 2 * n for op, n in weights.items()
    }
    cached = {op: part.kv_read_bytes for op, part in work.items() if part.kv_read_bytes}
    assert cached == dict.fromkeys(ATTENTION, 2 * 8 * 4)
    written = {op: part.kv_write_bytes for op, part in work.items() if part.kv_write_bytes}
    assert written == {Operation.KV_STORE: 2 * 3 * 8}
    assert work[Operation.NORMS].activation_bytes == 2 * (3 * 4 * (2 + 4) + 2 * 3 * (2 + 2) * 2)


def test_bytes_follow_the_precision():
    shape, int4 = read_shape(published.QWEN2_5_05B), Format("int4", 4, "bf16")
    wide, narrow = (
        total(step_work(shape, [Chunk(1, 63)], precision).values())
        for precision in (Precision.of("float32"), Precision(int4, None, int4, int4, BF16, INT8))
    )
    assert wide.flops == narrow.flops
    assert wide.weight_bytes == 8 * narrow.weight_bytes
    widened = 2 * 4 * shape.vocab  # the sampler's float32, whatever the precision
    assert wide.activation_bytes - widened == 2 * (narrow.activation_bytes - widened)
    assert wide.kv_read_bytes == 4 * narrow.kv_read_bytes
    assert Precision.of("bfloat16") == Precision() and Precision.of("float32").kv.bits == 32


def test_work_adds_up_and_knows_its_intensity():
    work = total([Work(flops=12, weight_bytes=3), Work(activation_bytes=1, kv_read_bytes=1, kv_write_bytes=1)])
    assert (work.bytes, work.kept_bytes, work.intensity) == (6, 5, 2.0)
    assert Work().intensity == 0.0
    assert step_work(read_shape(published.LLAMA_3_1_8B), []) == {}


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype is 'int3'; it must be float32, bfloat16 or float16"):
        Precision.of("int3")


# Which operation a module of Hugging Face's models is, by the end of its name.
MODULES = {
    "attn.q_proj": Operation.QKV,
    "attn.k_proj": Operation.QKV,
    "attn.v_proj": Operation.QKV,
    "attn.q_a_proj": Operation.QKV,
    "attn.q_b_proj": Operation.QKV,
    "attn.kv_a_proj_with_mqa": Operation.QKV,
    "attn.kv_b_proj": Operation.LATENT,
    "attn.o_proj": Operation.OUTPUT,
    "attn.out_proj": Operation.OUTPUT,
    "mlp.gate_proj": Operation.GATE_UP,
    "mlp.up_proj": Operation.GATE_UP,
    "mlp.fc_in": Operation.GATE_UP,
    "mlp.down_proj": Operation.DOWN,
    "mlp.fc_out": Operation.DOWN,
    "mlp.gate": Operation.ROUTER,
    "mlp.router": Operation.ROUTER,
    "mlp.shared_expert_gate": Operation.ROUTER,
    "mlp.shared_expert": Operation.SHARED_EXPERTS,
    "mlp.shared_experts": Operation.SHARED_EXPERTS,
    "mlp.experts": Operation.EXPERTS,
    "lm_head": Operation.HEAD,
}


def counted_by_module(case, tokens):
    """(ModelShape, FLOPs by operation; of attention those that no projection in it does) of a prompt."""
    model = tiny_families.build(case)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None] + 1)
    flops = Counter()
    for name, by_operator in counter.get_flop_counts().items():
        done = sum(by_operator.values())
        for end, operation in MODULES.items():
            if name.endswith((f".{end}", f"_{end}")):
                flops[operation] += done
                flops[Operation.SCORES] -= done if end.startswith("attn.") else 0
        if name.endswith("attn"):
            flops[Operation.SCORES] += done
    assert sum(flops.values()) == counter.get_total_flops()
    return read_shape(tiny_families.config_json(model)), flops


@pytest.mark.covering(1)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("case", tiny_families.CASES)
def test_flops_of_each_operation_are_those_that_torch_counts(case, tokens):
    """Eager attention multiplies the whole rectangle; a router of any kind gives each token its k experts."""
    shape, theirs = counted_by_module(case, tokens)
    ours = step_work(shape, [Chunk(tokens, logit_rows=tokens)], flash=False)
    ours[Operation.SCORES] += ours.pop(Operation.VALUES)
    multiplied = {op: part.flops for op, part in ours.items() if part.flops and op not in NORMALISATION}
    assert multiplied == {op: n for op, n in theirs.items() if n}


def test_scores_that_are_stored_go_through_memory_four_times():
    """Written, read and written by the softmax, and read: of the whole rectangle, in every layer and head."""
    shape = read_shape(published.QWEN2_5_05B)
    tiled, stored = (step_work(shape, [Chunk(5, 7, sequences=3)], flash=flash) for flash in (True, False))
    scores = 24 * 14 * 3 * 5 * 12
    extra = {op: stored[op].activation_bytes - tiled[op].activation_bytes for op in tiled}
    assert sum(extra.values()) == 4 * 2 * scores
    assert {op for op, n in extra.items() if n} == set(ATTENTION)
    assert [stored[op].flops for op in ATTENTION] == [2 * 64 * scores] * 2
    assert all(stored[op].kv_read_bytes == tiled[op].kv_read_bytes for op in tiled)


def test_sequences_that_are_alike_count_as_so_many():
    shape = read_shape(published.MISTRAL_7B)
    together = step_work(shape, [Chunk(3, 5000, 1, sequences=4), Chunk(2, 0, 0, sequences=2)])
    apart = step_work(shape, [Chunk(3, 5000)] * 4 + [Chunk(2, 0, 0)] * 2)
    assert together == apart


def test_what_sequences_have_in_common_is_read_once():
    """Layers that see all tokens read it once, those with a window each for itself; arithmetic and writes stay."""
    shape = read_shape(published.LLAMA_3_1_8B)
    apart, together = (step_work(shape, [Chunk(1, 4200, 1, 16, common)]) for common in (0, 4096))
    saved = {op: apart[op].kv_read_bytes - together[op].kv_read_bytes for op in apart}
    assert {op: each for op, each in saved.items() if each} == dict.fromkeys(ATTENTION, 15 * 4096 * 32 * 8 * 128 * 2)
    assert [together[op].flops for op in together] == [apart[op].flops for op in apart]
    windowed = read_shape(published.MISTRAL_7B)
    assert step_work(windowed, [Chunk(1, 4200, 1, 16, 4096)]) == step_work(windowed, [Chunk(1, 4200, 1, 16)])
    assert COMMON_PART == SPLIT == LEAST_COMMON  # as the engine does it


def test_sinks_are_read_with_the_scores():
    """gpt-oss: a number for each query head and layer, and nothing else of attention changes."""
    shape = ModelShape(layers=3, hidden=8, heads=4, kv_heads=2, head_dim=2, ffn=8, vocab=8)
    without, with_sinks = (step_work(replace(shape, sinks=sinks), [Chunk(3)]) for sinks in (False, True))
    assert with_sinks[Operation.SCORES].weight_bytes == 2 * 3 * 4
    assert without[Operation.SCORES].weight_bytes == 0
    assert all(without[op] == with_sinks[op] for op in without if op is not Operation.SCORES)


@pytest.mark.parametrize("case", tiny_families.CASES)
def test_a_large_step_reads_every_weight_once(case):
    """Enough tokens touch every expert and every row of the embedding."""
    shape = read_shape(tiny_families.config_json(tiny_families.build(case)))
    read = total(step_work(shape, [Chunk(2000, logit_rows=0), Chunk(1)]).values()).weight_bytes
    again = 2 * shape.vocab * shape.hidden if shape.tied_embeddings else 0  # as the head and as the embedding
    assert read == 2 * shape.num_parameters + again


def test_a_step_without_logits_does_nothing_for_the_head():
    work = step_work(read_shape(published.LLAMA_3_1_8B), [Chunk(8, 8, logit_rows=0)])
    assert work[Operation.HEAD] == work[Operation.SAMPLING] == Work()
