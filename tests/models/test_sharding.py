"""Parts of a model on several ranks say together what the whole says, and hold and read no more than their share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.kernels import kernels_for
from headway.kernels.cpu.memory import LargePages
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

# Partial sums are float32 and added in another order than the products of one rank add them.
TOLERANCE = 1e-4
PROMPTS = tiny.prompts([29, 1, 17])
# What ranks cannot share yet, by how the names of cases begin, and what the line says.
REFUSED = {
    "deepseek": "attention over latents",
    "glm4_moe_lite": "attention over latents",
    "gemma4": "layers of different sizes",
    "olmo": "norms over the queries of all heads together",
    "minimax": "norms over the queries of all heads together",
    "gpt_oss": "experts as this family has them",
    "qwen3_next": "recurrent layers",
    "qwen3_5": "recurrent layers",
    "lfm2": "recurrent layers",
}
# One of each branch of this code; others are slow.
QUICK = (
    "llama_attention_bias", "llama_mlp_bias", "llama_one_kv_head", "mistral_window", "qwen2_tied", "qwen3", "phi3",
    "gemma2", "qwen2_moe", "mixtral", "cohere2",
)  # fmt: skip


QUICK_FORMATS = ("awq", "packed_zeros", "int_rows", "fp8_blocks", "nf4", "gptq_ordered")


def refusal(case: str) -> str:
    return next((why for name, why in REFUSED.items() if case.startswith(name)), "")


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
    assert set(QUICK) <= set(tiny.CASES) and not any(map(refusal, QUICK))


@pytest.mark.parametrize("case", marked([case for case in tiny.CASES if not refusal(case)], QUICK))
def test_ranks_say_together_what_one_says(folder_of: Callable[[str], Path], case: str) -> None:
    folder = folder_of(case)
    expected = whole(one_rank(folder), PROMPTS)
    first, *_ = of_parts(folder, 2, lambda decoder: whole(decoder, PROMPTS))
    check_alike(first, expected)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_four_ranks_of_which_two_have_the_same_key_head(
    folder_of: Callable[[str], Path], case: str, execution: str
) -> None:
    run, folder = EXECUTIONS[execution], folder_of(case)
    first, *_ = of_parts(folder, 4, lambda decoder: run(decoder, PROMPTS))
    check_alike(first, run(one_rank(folder), PROMPTS))


@pytest.mark.parametrize("case", [case for case in tiny.CASES if refusal(case)])
def test_what_cannot_be_shared_is_refused_in_one_line(folder_of: Callable[[str], Path], case: str) -> None:
    config = ModelConfig.from_folder(folder_of(case))
    with pytest.raises(ModelError, match=f"^tensor_parallel_size is 2, but ranks cannot share .*{refusal(case)}.*$"):
        part_of(config, 0, 2)


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
        part_of(config, 0, count)


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


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks of 256 numbers have scales for 16 or 32, between which parts end."""
    monkeypatch.setattr("headway.models.gguf.config.cache_folder", lambda: tmp_path / "cache")
    gguf_files.write(tmp_path / "model.gguf", tiny.build("llama", **WIDE), mixed)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    first, *_ = of_parts(folder, 2, lambda decoder: whole(decoder, PROMPTS))
    assert relative_error(torch.cat(first), torch.cat(whole(one_rank(folder), PROMPTS))) < ROUNDING
