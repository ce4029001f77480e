"""What recurrent layers keep, read and compute, in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cost.attention import Chunk
from headway.cost.capacity import sequence_bytes
from headway.cost.config import read_shape
from headway.cost.layers import ShapeError
from headway.cost.memory import kv_cache_bytes, weight_bytes
from headway.cost.parallel import Parallelism, device_shape, device_weight_bytes, stages
from headway.cost.parallel import check as check_parallel
from headway.cost.precision import Precision
from headway.cost.values import ModelError
from headway.cost.work import Operation, step_work
from tests.cost.machines import deployment

QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "hidden_size": 2048,
    "block_ff_dim": 12288,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
STATE = 24 * 4 * (3 * 8192 + 32 * 128 * 128)  # three inputs of the convolution, and a matrix for each head
BLOCK = 16 * 8 * 2 * 4 * 256 * 2  # keys and values in the layers with attention


def test_the_cache_of_a_sequence_is_its_blocks_and_a_state() -> None:
    shape = read_shape(QWEN3_5)
    assert shape.state_bytes == STATE
    assert kv_cache_bytes(shape, 33, block_size=16, sequences=2) == 2 * (3 * BLOCK + STATE)
    assert read_shape(LFM2).state_bytes == 10 * 4 * 2 * 2048
    assert read_shape(LFM2).num_parameters == 1_170_340_608


def test_a_step_reads_and_writes_the_state_of_each_sequence_once() -> None:
    shape = read_shape(QWEN3_5)
    work = step_work(shape, [Chunk(100, 0), Chunk(1, 50, sequences=2)])[Operation.RECURRENT]
    assert work.kv_read_bytes == work.kv_write_bytes == 3 * STATE
    assert work.flops == 102 * 24 * 2 * (4 * 8192 + 3 * 32 * 128 * 128)
    inputs = step_work(shape, [Chunk(1)])[Operation.RECURRENT_IN]
    assert inputs.flops == 24 * 2 * 4096 * (8192 + 4096 + 64)


def test_devices_share_heads() -> None:
    shape = read_shape(QWEN3_5)
    assert device_shape(shape, Parallelism(tensor=2)).state_bytes == STATE // 2
    with pytest.raises(ShapeError, match="does not divide the heads or channels"):
        check_parallel(replace(shape, heads=96, kv_heads=96), Parallelism(tensor=3), None)


def test_stages_have_their_part_of_both_kinds_of_layers() -> None:
    """Of LFM2's layers 2, 5, 8, 10, 12 and 14 have attention: two of the first half, and four of the second."""
    shape = read_shape(LFM2)
    first, second = stages(shape, 2)
    assert (first.attention_layers, first.recurrent) == (2, (0, 1, 3, 4, 6, 7))
    assert (second.attention_layers, second.recurrent) == (4, (1, 3, 5, 7))
    run = deployment(shape, parallelism=Parallelism(pipeline=2))
    token = 2 * 2 * 8 * 64  # bytes of a key and a value
    assert sequence_bytes(run, 160) == 4 * 160 * token + 4 * 4 * 2 * 2048
    assert sequence_bytes(run, 1, 1) == max(2 * token + 6 * 4 * 2 * 2048, 4 * token + 4 * 4 * 2 * 2048)
    tables = 2 * (65536 * 2048 + 2048)
    parts = [weight_bytes(stage) - tables for stage in (first, second)]
    assert sum(parts) == weight_bytes(shape) - tables
    assert device_weight_bytes(shape, Precision(), run.parallelism) == max(parts) + tables
    assert len(stages(read_shape(QWEN3_5), 8)) == 1


def test_the_pace_of_stages_is_that_of_the_kinds_of_their_layers() -> None:
    run = deployment(read_shape(LFM2), parallelism=Parallelism(pipeline=2))
    step = run.step([Chunk(1, 30_000, sequences=64)])
    seconds = {part.name: part.seconds for part in step.parts}
    assert run.pace(step) >= seconds["attention"] * 4 / 6 > step.seconds / 2


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (QWEN3_5, {"layer_types": ["linear_attention"] * 32}, "no layer has full_attention"),
        (QWEN3_5, {"layer_types": ["mamba"] * 32}, "'mamba'; only full_attention and linear_attention are supported"),
        (QWEN3_5, {"linear_num_value_heads": 24}, "linear_num_value_heads is 24, which is not a multiple of"),
        (QWEN3_5, {"full_attention_interval": 0}, "full_attention_interval is 0, which is not a whole number"),
        (LFM2, {"full_attn_idxs": 3}, "full_attn_idxs is 3, which is not a list of layers"),
        (LFM2, {"conv_L_cache": None, "conv_bias": "no"}, "conv_L_cache is missing"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(raw: dict[str, object], changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_shape(raw | changes)
