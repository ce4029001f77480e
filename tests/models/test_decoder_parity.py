"""Logits equal Hugging Face's, whatever the family, the branch of its config and the way the work is cut."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headway.cost.layers import CacheSpec
from headway.kernels import kernels_for
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import Weight
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loading import load_model
from headway.models.rope import inverse_frequencies, rope_tables
from headway.models.rope_config import RopeConfig
from tests.models import tiny
from tests.models.paging import EXECUTIONS, PagedModel, geometry, whole

TOLERANCE = 1e-4
PROMPTS = tiny.prompts([29, 1, 17, 23])
HALF = [
    "llama_tied",
    "mistral_window",
    "qwen2",
    "qwen3",
    "qwen3_moe_all_of_few",
    "gemma2",
    "olmo3",
    "deepseek_v3_dense",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Case name -> (Hugging Face model, its folder on disk), made once."""

    @functools.cache
    def make(case: str) -> tuple[PreTrainedModel, Path]:
        folder = tmp_path_factory.mktemp(case)
        return tiny.save(case, folder), folder

    return make


@pytest.fixture(scope="module")
def expected(models):
    """Case name -> Hugging Face's logits of all PROMPTS, computed once."""
    return functools.cache(lambda case: [tiny.logits(models(case)[0], prompt) for prompt in PROMPTS])


def decoder(folder: Path, dtype: torch.dtype = torch.float32, max_model_len: int | None = None) -> Decoder:
    """On the reference kernels."""
    return load_model(folder, dtype, ReferenceKernels(), max_model_len=max_model_len)


def decoder_on(device: str, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """On the kernels that serve a device."""
    return load_model(folder, dtype, kernels_for(device, dtype), device)


def with_config(original: Decoder, **changes) -> Decoder:
    """The same weights under a changed config."""
    config = dataclasses.replace(original.config, **changes)
    return Decoder(config, original.kernels, original.dtype, original.device, original.weights, original.max_model_len)


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    return (torch.cat(ours) - torch.cat(theirs)).abs().max().item()  # NaN, if there is any


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "execution", ["whole", pytest.param("chunked", marks=pytest.mark.slow), "token_by_token", "mixed"]
)
@pytest.mark.parametrize("case", tiny.CASES)
def test_logits_equal_hugging_face(models, expected, case, execution):
    assert expected(case)[0].std() > 0.5  # else the tolerance would say nothing
    assert worst(EXECUTIONS[execution](decoder(models(case)[1]), PROMPTS), expected(case)) <= TOLERANCE


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", tiny.CASES)
def test_logits_of_the_kernels_that_serve_equal_hugging_face(models, expected, case, device):
    ours = decoder_on(device, models(case)[1])
    assert worst(EXECUTIONS["mixed"](ours, PROMPTS), expected(case)) <= TOLERANCE
    assert worst(EXECUTIONS["whole"](ours, PROMPTS), expected(case)) <= TOLERANCE


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_dynamic_rope_beyond_training_equals_a_whole_forward_of_the_served_length(models, execution):
    _, folder = models("llama_dynamic")
    prompts = tiny.prompts([50, 50])
    fresh = tiny.build("llama_dynamic")
    expected = [tiny.logits(fresh, prompt) for prompt in prompts]
    ours = EXECUTIONS[execution](decoder(folder, max_model_len=50), prompts)
    assert worst(ours, expected) <= TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        "llama_longrope_tuned",
        "llama_llama3",
        "llama_linear",
        "llama_yarn",
        "llama_yarn_tuned",
        "llama_yarn_mscale",
        "llama_longrope",
        "qwen2_yarn",
    ],
)
def test_rope_scaling_changes_the_logits(models, case):
    """The parity of a scaled case would prove nothing if its scaling did nothing."""
    scaled = decoder(models(case)[1])
    plain = with_config(scaled, rope=dataclasses.replace(scaled.config.rope, kind="default", attention_factor=1.0))
    assert worst(whole(scaled, PROMPTS), whole(plain, PROMPTS)) > 0.05


def test_longrope_has_other_factors_for_contexts_beyond_the_trained_one() -> None:
    rope = RopeConfig(
        "longrope", 1000.0, 4, original_max_position=16, short_factors=(1.0, 2.0), long_factors=(4.0, 8.0)
    )
    short, long = inverse_frequencies(rope, 16), inverse_frequencies(rope, 17)
    torch.testing.assert_close(short, torch.tensor([1.0, 1000**-0.5 / 2]))
    torch.testing.assert_close(long, short / 4)


@pytest.mark.parametrize(
    "case", ["mistral_window", "qwen2_window_from_layer_1", "qwen2_window_by_layer_types", "qwen3_tied_window"]
)
def test_sliding_windows_change_the_logits(models, case):
    windowed = decoder(models(case)[1])
    assert any(cache.window for cache in windowed.config.caches)
    for layer in windowed.weights.layers:
        layer.mixer.cache = dataclasses.replace(layer.mixer.cache, window=None)
    unlimited = whole(with_config(windowed), PROMPTS)
    assert worst(whole(decoder(models(case)[1]), PROMPTS), unlimited) > 0.05


@pytest.mark.parametrize("bent", ["attention", "logits"])
def test_soft_caps_change_the_logits(models, bent):
    capped = decoder(models("gemma2")[1])
    without = with_config(capped, softcaps=capped.config.softcaps._replace(**{bent: None}))
    assert worst(whole(capped, PROMPTS), whole(without, PROMPTS)) > 0.05


@pytest.mark.parametrize("on", ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_may_have_different_caches(models, expected, on):
    """A layer that has each key/value head twice, for half of its queries each, changes nothing."""
    folder = models("qwen2")[1]
    plain, ours = decoder(folder), decoder(folder) if on == "reference" else decoder_on(on, folder)
    cache = plain.config.caches[1]
    sizes = [plain.config.shape.heads * cache.key_dim, cache.elements // 2, cache.elements // 2]

    def doubled(rows: torch.Tensor) -> torch.Tensor:
        query, key, value = rows.split(sizes)
        twice = [part.unflatten(0, (cache.heads, -1)).repeat_interleave(2, 0).flatten(0, 1) for part in (key, value)]
        return torch.cat([query, *twice]).to(ours.device)

    qkv, mixer = plain.weights.layers[1].mixer.qkv, ours.weights.layers[1].mixer
    mixer.qkv = ours.kernels.linear(Weight(doubled(qkv.weight)), doubled(qkv.bias))
    mixer.cache = dataclasses.replace(cache, heads=2 * cache.heads)
    ours = with_config(ours, caches=tuple(each.mixer.cache for each in ours.weights.layers))
    assert worst(EXECUTIONS["mixed"](ours, PROMPTS), expected("qwen2")) <= TOLERANCE


def test_a_cache_that_the_decoder_cannot_attend_to_is_refused(models):
    ours = decoder(models("llama")[1])
    ours.weights.layers[2].mixer.cache = CacheSpec(heads=1, key_dim=20, value_dim=0)
    with pytest.raises(ValueError, match=r"4 query heads cannot attend to CacheSpec\(heads=1, key_dim=20, value_dim=0"):
        with_config(ours)


def test_partial_rotation_equals_a_model_whose_other_frequencies_are_zero(tmp_path):
    """Hugging Face's Llama turns whole heads, so the oracle is one with permuted head dimensions."""
    model, head_dim, rotated = tiny.save("llama_wide_head", tmp_path), 20, 12
    config = ModelConfig.from_folder(tmp_path)
    partial = dataclasses.replace(config.rope, dim=rotated)
    ours = whole(with_config(decoder(tmp_path), rope=partial), PROMPTS)

    half, still = rotated // 2, head_dim - rotated
    order = [*range(half), *range(rotated, rotated + still // 2)]
    order += [*range(half, rotated), *range(rotated + still // 2, head_dim)]
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            heads = projection.weight.data.view(-1, head_dim, tiny.BASE["hidden_size"])
            projection.weight.data = heads[:, order].reshape_as(projection.weight)
    frequencies = 1.0 / config.rope.theta ** (torch.arange(0, rotated, 2) / rotated)
    model.model.rotary_emb.inv_freq = torch.cat([frequencies, torch.zeros(still // 2)])
    assert worst(ours, [tiny.logits(model, prompt) for prompt in PROMPTS]) <= TOLERANCE


@pytest.mark.covering(1)
@pytest.mark.parametrize("on", ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", HALF)
def test_half_precision_is_as_close_to_float32_as_hugging_face(models, expected, case, dtype, on):
    folder, rounded = models(case)[1], tiny.build(case).to(dtype)
    exact, theirs = (torch.cat(each) for each in (expected(case), [tiny.logits(rounded, p) for p in PROMPTS]))
    served = decoder(folder, dtype) if on == "reference" else decoder_on(on, folder, dtype)
    ours = torch.cat(EXECUTIONS["mixed"](served, PROMPTS))
    error, allowed = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert error <= 1.25 * allowed
    assert error <= 0.05 * exact.std()


def test_tables_of_a_damaged_context_are_refused_before_they_are_made(models):
    rope = decoder(models("llama")[1]).config.rope
    with pytest.raises(ValueError, match=r"a context of 99,999,999 tokens takes 4\.8 GB .* more than 2\.1;"):
        rope_tables(rope, 99_999_999)


def test_logits_are_computed_for_chosen_rows_only(models):
    ours = decoder(models("qwen2")[1])
    model = PagedModel(ours, [PROMPTS[0]])
    length, table = len(PROMPTS[0]), model.sequences[0].block_table
    step = geometry([(0, length, table)], model.block_size, ours.device)
    hidden = ours.forward(torch.tensor(PROMPTS[0]), step, model.caches)
    assert hidden.shape == (length, tiny.BASE["hidden_size"])
    torch.testing.assert_close(ours.logits(hidden[[3, -1]]), ours.logits(hidden)[[3, -1]])


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_logits_are_the_float32_sums_of_their_inputs(models, case, dtype, on):
    """They are not rounded to the model's dtype, in which two tokens would often be equally likely."""
    ours = decoder(models(case)[1], dtype) if on == "reference" else decoder_on(on, models(case)[1], dtype)
    head, cap = ours.weights.lm_head, ours.config.softcaps.logits
    hidden = (3 * torch.randn(9, ours.config.shape.hidden, generator=torch.Generator().manual_seed(0))).to(dtype)
    weight = head.rows(torch.arange(ours.config.shape.vocab)).double()
    exact, scale = hidden.double() @ weight.T, hidden.double().abs() @ weight.T.abs()
    logits = ours.logits(hidden)
    if cap is not None:
        exact = cap * (exact / cap).tanh()
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 1e-6 * (1 + scale)).all()
    assert ((exact.to(dtype) - exact).abs() > 1e-6 * (1 + scale)).any(), "rounded ones would be told apart"
    if on == "cpu":
        assert torch.equal(logits[4:5], ours.logits(hidden[4:5]))


def test_a_shorter_served_context_leaves_positions_as_they_are(models):
    ours = decoder(models("llama_yarn")[1])
    long, short = rope_tables(ours.config.rope, 64), rope_tables(ours.config.rope, 10)
    for table, head in zip(long, short, strict=True):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table[:10], head, rtol=0, atol=0)
