"""Parts of a model on several ranks say together what the whole says, and hold and read no more than their share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.kernels import kernels_for
from headway.kernels.cpu.experts import PackedExperts
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.ranks import CpuRanks
from headway.kernels.ranks import Share
from headway.models.checkpoint import Checkpoint
from headway.models.config import ModelConfig, ModelError
from headway.models.decoder import Decoder
from headway.models.folder import resolve_model
from headway.models.loading import load_model
from headway.models.sharding import part_of
from tests.engine.models import write_config
from tests.kernels.test_cpu_linear import relative_error
from tests.models import gguf_files, tiny
from tests.models.paging import EXECUTIONS, whole
from tests.models.ranks import of_parts
from tests.models.test_gguf import ROUNDING, WIDE, mixed
from tests.models.test_grouped_checkpoints import FORMATS
from tests.models.test_grouped_checkpoints import save as save_packed
from tests.models.test_packed_checkpoints import save_mxfp4

# Partial sums are float32 and added in another order than the products of one rank add them.
TOLERANCE = 1e-4
PROMPTS = tiny.prompts([29, 1, 17])
# All but one that has three key heads in recurrent layers. One of each branch of this code is quick.
CASES = [case for case in tiny.CASES if case != "qwen3_next_other_sizes"]
QUICK = (
    "llama_attention_bias", "llama_mlp_bias", "llama_one_kv_head", "mistral_window", "qwen2_tied", "qwen3", "phi3",
    "gemma2", "qwen2_moe", "mixtral", "cohere2", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5", "lfm2_biases",
    "gemma4_shared", "olmo2_biases",
)  # fmt: skip


QUICK_FORMATS = ("awq", "packed_zeros", "int_rows", "fp8_blocks", "nf4", "gptq_ordered")


def marked(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Case name -> its folder on disk, made once."""

    @functools.cache
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        tiny.save(case, folder)
        return folder

    return make


def one_rank(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, torch.float32, kernels_for("cpu", torch.float32), **options)


def check_alike(ours: list[Tensor], theirs: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert theirs[0].std() > 0.3  # else the tolerance would say nothing
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=tolerance, rtol=0)
    assert torch.equal(torch.cat(ours).argmax(1), torch.cat(theirs).argmax(1))


def test_quick_cases_are_there() -> None:
    assert set(QUICK) <= set(CASES)


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_ranks_say_together_what_one_says(folder_of: Callable[[str], Path], case: str) -> None:
    folder = folder_of(case)
    expected = whole(one_rank(folder), PROMPTS)
    first, *_ = of_parts(folder, 2, lambda decoder: whole(decoder, PROMPTS))
    check_alike(first, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_four_ranks_of_which_two_have_the_same_key_head(
    folder_of: Callable[[str], Path], case: str, execution: str
) -> None:
    run, folder = EXECUTIONS[execution], folder_of(case)
    first, *_ = of_parts(folder, 4, lambda decoder: run(decoder, PROMPTS))
    check_alike(first, run(one_rank(folder), PROMPTS))


# What layers of a stage differ by: windows, RoPE, experts, norms before or behind; and heads that are the embedding.
STAGED = (
    "llama", "llama_tied", "gemma3", "smollm3", "olmo3", "cohere2", "deepseek_v3", "qwen2_moe_every_second", "gpt_oss",
    "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("case", marked(STAGED, ("llama", "gemma3", "qwen2_moe_every_second")))
def test_stages_say_together_what_one_rank_says(folder_of: Callable[[str], Path], case: str) -> None:
    """To the bit, as nothing is added in another order; the last of three layers is a stage of its own, too."""
    folder = folder_of(case)
    expected = whole(one_rank(folder), PROMPTS)
    for stages in (2, 3):
        first, *_ = of_parts(folder, 1, lambda decoder: whole(decoder, PROMPTS), stages=stages)
        check_alike(first, expected, tolerance=0)


def test_ranks_in_stages_have_their_experts(tmp_path: Path) -> None:
    tiny.save("qwen2_moe", tmp_path, {"num_experts": 6, "tie_word_embeddings": True})
    first, *_ = of_parts(tmp_path, 2, lambda decoder: whole(decoder, PROMPTS), whole_experts=True, stages=2)
    check_alike(first, whole(one_rank(tmp_path), PROMPTS))


def test_a_stage_holds_and_reads_nothing_of_the_others(folder_of: Callable[[str], Path]) -> None:
    def sizes(decoder: Decoder) -> tuple[int, int, bool]:
        return len(decoder.config.caches), len(decoder.weights.layers), decoder.weights.final_norm is None

    assert of_parts(folder_of("llama"), 1, sizes, stages=2) == [(2, 2, False), (1, 1, True)]


# Experts one by one and stacked, with and without a shared one, of unequal numbers of tokens; all are divisible by 2.
DEALT: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 6},
    "gpt_oss": {"num_local_experts": 4},
    "mixtral": {},
    "deepseek_v3": {},
    "olmoe": {"num_experts": 4},
}


@pytest.mark.parametrize("case", marked(DEALT, ("qwen2_moe", "gpt_oss")))
def test_experts_that_are_dealt_out_whole(tmp_path: Path, case: str) -> None:
    tiny.save(case, tmp_path, DEALT[case])
    expected = whole(one_rank(tmp_path), PROMPTS)
    first, *_ = of_parts(tmp_path, 2, lambda decoder: whole(decoder, PROMPTS), whole_experts=True)
    check_alike(first, expected)


def test_dealt_experts_that_are_packed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names have numbers, which begin with 0 in each rank; a rank has half of them, each whole."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 4}
    save_packed(tmp_path, FORMATS["awq"], "qwen3_moe", sizes)
    here, dealt = set(), CpuRanks.dealt

    def noting(self: CpuRanks, experts: PackedExperts, count: int) -> PackedExperts:
        dealt(self, experts, count)
        here.add((*experts.here, len(experts.down._row_scales) // experts.down.out_features))
        return experts

    monkeypatch.setattr(CpuRanks, "dealt", noting)
    first, *_ = of_parts(tmp_path, 2, lambda decoder: whole(decoder, PROMPTS), whole_experts=True)
    assert here == {(0, 2, 2), (2, 2, 2)}
    assert relative_error(torch.cat(first), torch.cat(whole(one_rank(tmp_path), PROMPTS))) < ROUNDING


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("gemma4_experts", "experts beside a feed-forward layer cannot be dealt out"),
        ("qwen2_moe", "2, which does not divide 5 experts; use 1$"),
        ("llama", "the model has no experts; leave it out$"),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_one_line(folder_of: Callable[[str], Path], case: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        part_of(ModelConfig.from_folder(folder_of(case)), Share(0, 2, whole_experts=True))


@pytest.mark.parametrize(
    ("case", "stages", "said"),
    [
        ("gemma4", 2, "pipeline_parallel_size is 2, but stages cannot share a model with layers of different sizes"),
        ("llama", 4, "pipeline_parallel_size is 4, but the model has 3 layers; give at most as many"),
    ],
)
def test_stages_that_cannot_be_are_one_line(
    folder_of: Callable[[str], Path], case: str, stages: int, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        part_of(ModelConfig.from_folder(folder_of(case)), Share(stages=stages))


@pytest.mark.parametrize("case", ["llama", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_who_joins_which_rows_changes_no_bit(
    folder_of: Callable[[str], Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, and however prompts are cut."""
    found = []
    for divided in (1, 8 * tiny.BASE["hidden_size"], 1 << 60):
        monkeypatch.setattr("headway.kernels.cpu.ranks._DIVIDED", divided)
        for run in EXECUTIONS.values():
            first, *_ = of_parts(
                folder_of(case), 2, lambda decoder, run=run: run(decoder, PROMPTS), dtype=torch.bfloat16
            )
            found.append(torch.cat(first))
    assert all(torch.equal(found[0], each) for each in found)


def test_what_cannot_be_shared_is_refused_in_one_line(folder_of: Callable[[str], Path]) -> None:
    config = replace(ModelConfig.from_folder(folder_of("qwen3_next")), heads_by_turns=True)
    with pytest.raises(ModelError, match=r"^tensor_parallel_size is 2, but ranks cannot share .* by turns, .*made of$"):
        part_of(config, Share(0, 2))


@pytest.mark.parametrize(
    ("changes", "count", "said"),
    [
        ({}, 3, "does not divide 4 query heads; use 1, 2, 4"),
        ({"intermediate_size": 102}, 4, "does not divide 102 of intermediate_size; use 1, 2"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96}, 2, "3 key/value heads"),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_named(
    tmp_path: Path, changes: dict[str, Any], count: int, said: str
) -> None:
    config = ModelConfig.from_folder(write_config(tmp_path, **changes))
    with pytest.raises(ModelError, match=re.escape(said)):
        part_of(config, Share(0, count))


# --- what a rank holds and reads --------------------------------------------------------------------


def test_a_rank_holds_its_share_of_weights_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All matrices are divided, the head with the embedding too, and so are keys and values."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    folder = Path(write_config(tmp_path, vocab_size=4096, tie_word_embeddings=True, **sizes))
    taken: dict[LargePages, int] = {}
    empty = LargePages.empty

    def counting(self: LargePages, size: int) -> Tensor:
        taken[self] = taken.get(self, 0) + size
        return empty(self, size)

    monkeypatch.setattr(LargePages, "empty", counting)
    whole_cache = one_rank(folder, load_format="dummy").config.caches
    (of_one,) = taken.values()
    taken.clear()
    caches = of_parts(folder, 4, lambda decoder: decoder.config.caches, load_format="dummy")
    assert list(taken.values()) == [pytest.approx(of_one / 4, rel=0.01)] * 4
    assert [[each.elements * 4 for each in part] for part in caches] == [[each.elements for each in whole_cache]] * 4


def test_a_rank_reads_only_its_part_of_a_file(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tensors that all ranks have whole are copied as they are."""
    copied: list[str] = []
    original = Checkpoint.copy_into

    def copy_into(self: Checkpoint, name: str, out: Tensor) -> None:
        copied.append(name)
        original(self, name, out)

    monkeypatch.setattr(Checkpoint, "copy_into", copy_into)
    of_parts(folder_of("llama_attention_bias"), 2, lambda decoder: None)
    assert copied and all(name.endswith(("norm.weight", "o_proj.bias")) for name in copied)


# --- other formats of weights -----------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "int4"])
def test_weights_that_are_rounded_while_loading(tmp_path: Path, quantization: str) -> None:
    """A rank rounds its own columns by themselves, which is as near to the plain model."""
    folder = Path(write_config(tmp_path, hidden_size=128, intermediate_size=256, head_dim=32))
    options: dict[str, Any] = {"load_format": "dummy", "quantization": quantization}
    plain = torch.cat(whole(one_rank(folder, load_format="dummy"), PROMPTS))
    expected = torch.cat(whole(one_rank(folder, **options), PROMPTS))
    first, *_ = of_parts(folder, 2, lambda decoder: whole(decoder, PROMPTS), **options)
    distance, own = ((torch.cat(each) - plain).norm() / plain.norm() for each in (first, [expected]))
    assert 0 < distance < 1.5 * own


@pytest.mark.parametrize("name", marked(FORMATS, QUICK_FORMATS))
def test_packed_matrices_are_cut_between_groups(name: str, tmp_path: Path) -> None:
    """In products, ranks round the activations of their own inputs."""
    save_packed(tmp_path, FORMATS[name], "qwen2", {"hidden_size": 64, "intermediate_size": 128})
    if "ordered" in name or name == "gptq_8_bits":
        with pytest.raises(ModelError, match=r"tensor_parallel_size is 2, but model\S+ has an order of its inputs"):
            of_parts(tmp_path, 2, lambda decoder: None)
        return
    first, *_ = of_parts(tmp_path, 2, lambda decoder: whole(decoder, PROMPTS))
    assert relative_error(torch.cat(first), torch.cat(whole(one_rank(tmp_path), PROMPTS))) < ROUNDING


def test_groups_that_parts_would_cut_are_refused(tmp_path: Path) -> None:
    save_packed(tmp_path, FORMATS["awq"], "qwen2")  # whose attention has 48 outputs
    with pytest.raises(ModelError, match=r"tensor_parallel_size is 4, but model\S+o_proj has groups of 16 inputs"):
        of_parts(tmp_path, 4, lambda decoder: None)


def test_groups_that_are_longer_than_a_part_are_cut(tmp_path: Path) -> None:
    save_packed(tmp_path, FORMATS["awq"], "qwen2")
    first, *_ = of_parts(tmp_path, 2, lambda decoder: whole(decoder, PROMPTS))
    assert relative_error(torch.cat(first), torch.cat(whole(one_rank(tmp_path), PROMPTS))) < ROUNDING


def test_experts_in_mxfp4_are_cut_between_groups(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, width=64)
    first, *_ = of_parts(tmp_path, 2, lambda decoder: whole(decoder, PROMPTS))
    assert relative_error(torch.cat(first), torch.cat(whole(one_rank(tmp_path), PROMPTS))) < ROUNDING
    with pytest.raises(ModelError, match=r"4, which does not divide 2 groups of 32 in the experts' width; use 1, 2$"):
        part_of(ModelConfig.from_folder(tmp_path), Share(0, 4))


@pytest.mark.slow
def test_matrices_of_single_heads_in_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names have the numbers of heads, which begin with 0 in each rank."""
    monkeypatch.setattr("headway.models.gguf.config.cache_folder", lambda: tmp_path / "cache")
    gguf_files.write(tmp_path / "model.gguf", tiny.build("deepseek_v2"), lambda name: "F32")
    folder = resolve_model(str(tmp_path / "model.gguf"))
    first, *_ = of_parts(folder, 2, lambda decoder: whole(decoder, PROMPTS))
    check_alike(first, whole(one_rank(folder), PROMPTS))


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks of 256 numbers have scales for 16 or 32, between which parts end."""
    monkeypatch.setattr("headway.models.gguf.config.cache_folder", lambda: tmp_path / "cache")
    gguf_files.write(tmp_path / "model.gguf", tiny.build("llama", **WIDE), mixed)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    first, *_ = of_parts(folder, 2, lambda decoder: whole(decoder, PROMPTS))
    assert relative_error(torch.cat(first), torch.cat(whole(one_rank(folder), PROMPTS))) < ROUNDING
