"""GGUF files of families with traits of their own: the same logits as Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend

from headway.models.gguf.tokenizer import tokenizer_files
from headway.models.latent_attention import LatentWeights
from tests.kernels.test_cpu_linear import relative_error
from tests.models import gguf_files, tiny
from tests.models.paging import whole
from tests.models.test_gguf import PROMPTS, ROUNDING, load, with_weights

pytestmark = pytest.mark.timeout(600)

# What files cannot say otherwise: windows in five layers of six, and the theta of these.
GEMMA3 = {
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_hidden_layers": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    },
}
# Files have one number for both.
MSCALE = {"rope_parameters": tiny.LATENT_YARN["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 0.7}}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files and of packed weights; that of the kernels is the user's, or these tests would compile their own."""
    cache = tmp_path_factory.mktemp("cache")
    for module in ("models.gguf.config", "engine.weight_cache"):
        monkeypatch.setattr(f"headway.{module}.cache_folder", lambda: cache)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("phi3_long_window", {}),
        ("granite", {"attention_bias": False}),
        ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma3", GEMMA3),
        ("gemma4", {}),
        ("gemma4_shared", {}),
        ("gemma4_keys_are_values", {}),
        ("gemma4_experts", {}),
        ("glm4", {}),
        ("olmo2", {}),
        ("deepseek_v2", {}),
        ("deepseek_v2_lite", MSCALE | {"topk_method": "greedy"}),
        ("deepseek_v3", MSCALE),
        ("gemma", {}),
        ("glm4_moe", {"n_group": 1, "topk_group": 1}),
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 4}),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 4}),
        ("qwen3_5_moe", {"layer_types": None, "full_attention_interval": 4, "linear_num_value_heads": 6}),
        ("lfm2", {}),
        ("olmoe", {}),
        ("seed_oss", {}),
        ("lfm2_moe", {"tie_word_embeddings": True}),
        ("minimax_m2", {}),
        ("granite_moe", {"attention_bias": False}),
        ("ernie4_5", {}),
        ("ernie4_5_moe", {}),
    ],
)
def test_families_with_traits_of_their_own(case: str, changes: dict[str, object], tmp_path: Path) -> None:
    """Plain numbers, as their converters name and order them; the same logits and the same config."""
    model = tiny.build(case, **changes)
    gguf_files.write(tmp_path / "model.gguf", model, lambda name: "F32")
    ours = torch.cat(whole(load(tmp_path / "model.gguf"), PROMPTS))
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    assert (ours - expected).abs().max() < 1e-4 * max(1.0, expected.std().item())


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gates_and_what_they_let_through_may_be_one_tensor(kind: str, tmp_path: Path) -> None:
    """Newer converters write experts like this on request. The numbers are the same as apart."""
    model = tiny.build("qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
    for name, fused in (("apart", False), ("fused", True)):
        gguf_files.write(tmp_path / f"{name}.gguf", model, lambda _: kind, fused_experts=fused)
    apart, fused = (torch.cat(whole(load(tmp_path / f"{name}.gguf"), PROMPTS)) for name in ("apart", "fused"))
    assert torch.equal(apart, fused)


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "lfm2", "glm4_moe", "gemma4_experts"])
def test_packed_matrices_are_those_of_the_same_numbers(case: str, tmp_path: Path) -> None:
    """Also where their rows stand in another order, and there are heads by turns."""
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    if case.startswith("qwen3"):
        sizes |= {"layer_types": None, "full_attention_interval": 4, "shared_expert_intermediate_size": 32}
        sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    if case == "lfm2":
        sizes["block_auto_adjust_ff_dim"] = False
    model = tiny.build(case, **sizes)
    plain = gguf_files.write(tmp_path / "packed.gguf", model, lambda name: "Q8_0")
    gguf_files.write(tmp_path / "plain.gguf", model, lambda name: "F32", given=plain)
    ours, expected = (torch.cat(whole(load(tmp_path / f"{each}.gguf"), PROMPTS)) for each in ("packed", "plain"))
    assert relative_error(ours, expected.double()) < ROUNDING


def test_what_is_packed_of_latents_stays_so(tmp_path: Path) -> None:
    """The matrices of heads, which other checkpoints hold the other way round, too."""
    sizes = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "hidden_size": 64}
    model = tiny.build("deepseek_v3_dense", **sizes, **MSCALE, intermediate_size=64)
    plain = gguf_files.write(tmp_path / "model.gguf", model, lambda name: "Q8_0")
    decoder = load(tmp_path / "model.gguf")
    mixer = decoder.weights.layers[0].mixer
    assert isinstance(mixer, LatentWeights) and mixer.to_keys.linear._groups is not None
    for name in [f"model.layers.{layer}.self_attn" for layer in range(3)]:
        heads = [[plain.pop(f"{name}.heads.{h}.{x}_b_proj.weight") for x in "kv"] for h in range(4)]
        plain[f"{name}.kv_b_proj.weight"] = torch.cat([each for keys, values in heads for each in (keys.T, values)])
    ours = torch.cat(whole(decoder, PROMPTS))
    expected = torch.cat([tiny.logits(with_weights(model, plain), prompt) for prompt in PROMPTS])
    assert relative_error(ours, expected) < ROUNDING


def test_texts_are_cut_as_deepseek_v3_cuts_them() -> None:
    """The cuts are the three expressions of its tokenizer.json."""
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    cut = Backend.from_str(json.dumps(tokenizer_files(values, "model.gguf")["tokenizer.json"])).pre_tokenizer
    text = "x.foo 12345東京カナ y['ab\\n']\n\n  $5, été"
    found = [text[first:end] for _, (first, end) in cut.pre_tokenize_str(text)]
    assert found == [
        "x",
        ".foo",
        " ",
        "123",
        "45",
        "東京カナ",
        " y",
        "['",
        "ab",
        "\\n",
        "']\n\n",
        " ",
        " $",
        "5",
        ",",
        " été",
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("deepseek-llm", ["Hi", "\u00e9", "!", " Two", "\n", "\n", "1234", "\u6771\u4eac", " ", "\u30ab", " ;)"]),
        (
            "deepseek-coder",
            ["Hi\u00e9", "!", " Two", "\n", "\n", "1", "2", "3", "4", "\u6771\u4eac", " ", "\u30ab", " ;)"],
        ),
        ("qwen35", ["Hi\u00e9", "!", " Two", "\n\n", "1", "2", "3", "4", "\u6771\u4eac", " \u30ab", " ;)"]),
        ("kimi-k2", ["Hi\u00e9", "!", " Two", "\n\n", "123", "4", "\u6771\u4eac", " \u30ab", " ;)"]),
        ("seed-coder", ["Hi\u00e9", "!", " Two", "\n\n", "1", "2", "3", "4", "\u6771\u4eac", " \u30ab", " ;)"]),
    ],
)
def test_cuts_of_other_presets(name: str, found: list[str]) -> None:
    """DeepSeek-LLM and V2 cut letters with cases apart from others; Qwen3.5 keeps marks with their letters."""
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    cut = Backend.from_str(json.dumps(tokenizer_files(values, "model.gguf")["tokenizer.json"])).pre_tokenizer
    text = "Hi\u00e9! Two\n\n1234\u6771\u4eac \u30ab ;)"
    pieces = [text[first:end] for _, (first, end) in cut.pre_tokenize_str(text)]
    assert pieces == found
