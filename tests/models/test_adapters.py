"""Adapters: the logits of the merged weights, for rows of several adapters and of none in one step; and bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.cost.memory import adapter_bytes
from headway.kernels import kernels_for
from headway.kernels.interface import Kernels, LayerCache, StepGeometry
from headway.kernels.reference import ReferenceKernels
from headway.models.adapted import AdaptedModel
from headway.models.adapters import WEIGHTS_FILE
from headway.models.config import ModelError
from headway.models.decoder import Decoder
from headway.models.folder import resolve_model
from headway.models.loading import load_model
from tests.kernels import operations
from tests.kernels.test_cpu_linear import relative_error
from tests.models import gguf_files, lora, test_grouped_checkpoints, tiny
from tests.models.paging import PagedModel, whole
from tests.models.ranks import of_parts
from tests.models.test_gguf import ROUNDING, WIDE, mixed, with_weights

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-4
PROMPTS = tiny.prompts([17, 1, 19, 9])
# The slot of each prompt: two adapters, and the base model.
SLOTS = [1, 0, -1, 1]
# Each way in which products differ from layers: stacked, fused, turned, centred, multiplied, with gates of their own,
# of latents, of recurrent layers, beside experts, under other names.
FEW = ["qwen2", "phi3", "glm4", "cohere", "granite_biases", "granite_4", "gemma4", "gemma4_experts", "gpt_oss"]
FEW += ["deepseek_v3", "qwen3_next", "lfm2_moe", "qwen2_moe"]


class Stepped:
    """A decoder for PagedModel whose sequences have slots."""

    def __init__(self, model: AdaptedModel, slots: list[int]) -> None:
        self._model, self.slots = model, slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.decoder, name)

    def forward(self, token_ids: Tensor, step: StepGeometry, caches: list[LayerCache]) -> Tensor:
        pairs = zip(self.slots, step.query_lens_host, strict=True)
        self._model.rows.fill([slot for slot, count in pairs for _ in range(count)], len(token_ids))
        return self._model.decoder.forward(token_ids, step, caches)


def together(model: AdaptedModel, prompts: list[list[int]], slots: list[int]) -> list[Tensor]:
    """All prompts in one step, and then a token of each."""
    stepped = Stepped(model, slots)
    paged = PagedModel(stepped, prompts)  # type: ignore[arg-type]
    with_two = [each for each in paged.sequences if each.remaining > 1]
    stepped.slots = [slot for slot, each in zip(slots, paged.sequences, strict=True) if each.remaining > 1]
    paged.step([(each, each.remaining - 1) for each in with_two])
    stepped.slots = slots
    paged.step([(each, 1) for each in paged.sequences])
    return paged.all_logits()


def adapted(decoder: Decoder, *folders: Path, rank: int = 16) -> AdaptedModel:
    """A decoder with adapters in slots 0 and on."""
    model = AdaptedModel(decoder, 2, rank, 64)
    for slot, folder in enumerate(folders):
        model.put(slot, model.places.read(folder, rank))
    return model


def check_parity(
    tmp_path: Path,
    case: str,
    kernels: Kernels,
    device: str = "cpu",
    sizes: Any = None,
    ranks: tuple[tuple[int, int], ...] = (),
    **settings: Any,
) -> None:
    """Check a step of two adapters and the base model beside Hugging Face's models, also in (ranks, stages)."""
    hugging_face = tiny.save(case, tmp_path / "base", sizes)
    deltas = [
        lora.save(tmp_path / "a", hugging_face, 3, 1, **settings),
        lora.save(tmp_path / "b", hugging_face, 8, 2, "self_attn", use_rslora=True),
    ]
    decoder = load_model(tmp_path / "base", torch.float32, kernels, device)
    model = adapted(decoder, tmp_path / "a", tmp_path / "b")
    expected: list[Tensor] = [torch.empty(0)] * len(PROMPTS)
    for slot, delta in ((-1, {}), (0, deltas[0]), (1, deltas[1])):
        lora.merge(hugging_face, delta)
        for at, prompt in enumerate(PROMPTS):
            if SLOTS[at] == slot:
                expected[at] = tiny.logits(hugging_face, prompt)
                if slot >= 0:  # else the tolerance would say nothing
                    assert (expected[at] - torch.cat(whole(decoder, [prompt]))).abs().max() > 0.1
        lora.merge(hugging_face, delta, -1.0)
    ours = together(model, PROMPTS, SLOTS)
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max().item() <= TOLERANCE
    for count in ranks:
        parts = of_parts(
            tmp_path / "base",
            count,
            lambda part: together(adapted(part, tmp_path / "a", tmp_path / "b"), PROMPTS, SLOTS),
        )
        for one, other in zip(parts[0], expected, strict=True):
            assert (one - other).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in tiny.CASES]
)
def test_logits_are_those_of_the_merged_weights(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, case, kernels_for("cpu", torch.float32))


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("qwen2", (2, 4)),
        ("qwen2_moe", (2,)),
        ("deepseek_v3", (2,)),
        pytest.param("qwen3_next", (2,), marks=pytest.mark.slow),
    ],
)
def test_ranks_have_their_parts_of_adapters_also_of_single_experts(
    case: str, ranks: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    check_parity(tmp_path, case, kernels_for("cpu", torch.float32), ranks=ranks, experts=True)


def test_settings_of_single_layers_and_the_reference_kernels(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"o_proj": 9}}
    check_parity(tmp_path, "llama", ReferenceKernels(), **patterns)


@pytest.mark.parametrize(("dtype", "scheme"), [(torch.bfloat16, "int8"), (torch.float16, "none")])
def test_rows_of_the_base_model_get_the_same_bits_beside_others(
    dtype: torch.dtype, scheme: str, tmp_path: Path
) -> None:
    kernels = kernels_for("cpu", dtype)
    hugging_face = tiny.save("llama", tmp_path / "base")
    lora.save(tmp_path / "a", hugging_face)
    decoder = load_model(tmp_path / "base", dtype, kernels, quantization=scheme)
    model = adapted(decoder, tmp_path / "a")
    beside = together(model, PROMPTS, [0, -1, -1, 0])
    alone = together(AdaptedModel(decoder, 2, 16, 64), PROMPTS, [-1] * 4)
    assert torch.equal(beside[1], alone[1]) and torch.equal(beside[2], alone[2])
    assert not torch.equal(beside[0], alone[0])


def test_an_adapter_takes_the_place_of_another_wholly(tmp_path: Path) -> None:
    """One of fewer layers and a lower rank leaves nothing of the one that was in its slot."""
    hugging_face = tiny.save("llama", tmp_path / "base")
    lora.save(tmp_path / "large", hugging_face, 16, 1)
    deltas = lora.save(tmp_path / "small", hugging_face, 2, 2, "q_proj")
    decoder = load_model(tmp_path / "base", torch.float32, kernels_for("cpu", torch.float32))
    model = adapted(decoder, tmp_path / "large")
    model.put(0, model.places.read(tmp_path / "small", 16))
    ours = together(model, PROMPTS[:1], [0])[0]
    expected = tiny.logits(lora.merge(hugging_face, deltas), PROMPTS[0])
    assert (ours - expected).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("form", ["awq", "gptq_ordered", "nf4", "gguf"])
def test_over_packed_weights(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "gguf":
        monkeypatch.setattr("headway.models.gguf.config.cache_folder", lambda: tmp_path / "cache")
        hugging_face = tiny.build("llama", **WIDE)
        with_weights(hugging_face, gguf_files.write(tmp_path / "base.gguf", hugging_face, mixed))
        folder = resolve_model(str(tmp_path / "base.gguf"))
    else:
        folder = tmp_path / "base"
        dense = test_grouped_checkpoints.save(folder, test_grouped_checkpoints.FORMATS[form])
        hugging_face = with_weights(tiny.build("qwen2"), dense)
    deltas = lora.save(tmp_path / "a", hugging_face)
    decoder = load_model(folder, torch.float32, kernels_for("cpu", torch.float32))
    ours = together(adapted(decoder, tmp_path / "a"), PROMPTS[:3], [0, 0, 0])
    lora.merge(hugging_face, deltas)
    expected = torch.cat([tiny.logits(hugging_face, prompt) for prompt in PROMPTS[:3]])
    assert relative_error(torch.cat(ours), expected) < ROUNDING


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_files_of_llama_cpps_converter(kind: str, tmp_path: Path) -> None:
    """Whose queries and keys have their rows in llama.cpp's order."""
    hugging_face = tiny.save("llama", tmp_path / "base", WIDE)
    lora.save(tmp_path / "a", hugging_face, 32, only="layers.1")
    deltas = lora.as_gguf(tmp_path / "a.gguf", tmp_path / "a", hugging_face, kind)
    decoder = load_model(tmp_path / "base", torch.float32, kernels_for("cpu", torch.float32))
    ours = together(adapted(decoder, tmp_path / "a.gguf", rank=32), PROMPTS[:1], [0])[0]
    expected = tiny.logits(lora.merge(hugging_face, deltas), PROMPTS[0])
    assert (ours - expected).abs().max().item() <= TOLERANCE


def test_a_gguf_file_has_experts_stacked(tmp_path: Path) -> None:
    tiny.save("qwen2_moe", tmp_path / "base")
    decoder = load_model(tmp_path / "base", torch.float32, kernels_for("cpu", torch.float32))
    places, name = AdaptedModel(decoder, 1, 16, 16).places, "model.layers.1.mlp.experts.{}.down_proj"
    experts = decoder.config.shape.experts
    assert experts is not None
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2moe")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    shapes = {"a": (experts.count, 4, experts.width), "b": (experts.count, decoder.config.shape.hidden, 4)}
    stacks = {matrix: np.random.default_rng(0).normal(size=size).astype("f4") for matrix, size in shapes.items()}
    for matrix, values in stacks.items():
        writer.add_tensor(f"blk.1.ffn_down_exps.weight.lora_{matrix}", values)
    lora.finish(writer)
    layers = places.read(tmp_path / "a.gguf", 16).layers
    assert set(layers) == {name.format(number) for number in range(experts.count)}
    for number in range(experts.count):
        assert torch.equal(layers[name.format(number)].down, torch.from_numpy(stacks["a"][number]))
        assert torch.equal(layers[name.format(number)].up, torch.from_numpy(stacks["b"][number]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.type": "model"}, "is of type 'model', 'lora'; only adapters of lora are supported"),
        ({"tensor": "blk.0.attn_norm.weight"}, "attn_norm.weight is no matrix of LoRA"),
        ({"tensor": "blk.9.attn_q.weight.lora_a"}, "layers.9.self_attn.q_proj has lora_A alone|is beyond the base"),
        ({"tensor": "output.weight.lora_a"}, "lm_head is an embedding or the head"),
        ({"tensor": "blk.0.attn_q.weight.lora_b"}, "q_proj has lora_B alone; A and B are needed"),
    ],
)
def test_a_bad_gguf_adapter_is_one_line(
    change: dict[str, str], message: str, tmp_path: Path, small: AdaptedModel
) -> None:
    path = tmp_path / "bad.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", change.get("general.type", "adapter"))
    writer.add_string("adapter.type", "lora")
    writer.add_tensor(change.get("tensor", "blk.0.attn_q.weight.lora_a"), np.ones((4, 48), np.float32))
    lora.finish(writer)
    with pytest.raises(ModelError, match=message) as caught:
        small.places.read(path, 64)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ModelError, match="truncated or damaged"):
        small.places.read(path, 64)
    with pytest.raises(ModelError, match="not found"):
        small.places.read(tmp_path / "none.gguf", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(2100, 70, 3), (64, 256, 40), (1038, 33, 256)])
def test_products_on_a_cpu_are_those_of_torch(dtype: torch.dtype, inputs: int, outputs: int, rank: int) -> None:
    """Inputs of several parts, outputs that are no whole vectors of one part, ranks beyond a strip; gated or not."""
    operations.check_adapters(kernels_for("cpu", dtype), dtype, inputs, outputs, rank)


def test_slots_take_what_a_plan_says(small: AdaptedModel) -> None:
    places, shape = small.places, small.decoder.config.shape
    specs = [places.spec(placed, 2, 8, torch.device("cpu")) for placed in places.placed]
    numbers = sum(8 * (spec.parts * spec.inputs + len(spec.part_of)) for spec in specs)
    assert adapter_bytes(shape, 2, 8) == 2 * 2 * numbers


# --- what is refused ----------------------------------------------------------------------------------


def _settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return apply


_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def _renamed(name: str) -> Callable[[Path], None]:
    return _tensors(
        lambda t: t.update({f"base_model.model.{name}.lora_{m}.weight": t.pop(f"{_Q}{m}.weight") for m in "AB"})
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_settings(peft_type="IA3"), "has peft_type 'IA3'; only LORA is supported"),
        (_settings(use_dora=True), "has use_dora true: DoRA are not supported"),
        (_settings(bias="all"), 'has bias "all": biases are not supported'),
        (_settings(modules_to_save=["lm_head"]), r"whole modules beside it \(modules_to_save\) are not supported"),
        (_settings(init_lora_weights="pissa_niter_4"), "which changes the base model too"),
        (_settings(r=300), "has r 300; it must be a whole number from 1 to 256"),
        (_settings(r=8), r"A and B of shapes \[4, 80\] and \[48, 4\], but .* says that its rank is 8"),
        (_settings(lora_alpha="much"), "has lora_alpha 'much'; it must be a number"),
        (_settings(rank_pattern={"(": 2}), "rank_pattern has '\\(', which is no pattern"),
        (_renamed("lm_head"), "lm_head is an embedding or the head"),
        (_renamed("model.layers.0.mlp.experts.3.up_proj"), "is of experts, whose adapters need a CPU"),
        (_renamed("model.layers.7.self_attn.q_proj"), "is beyond the base model's 3 layers"),
        (_renamed("model.layers.0.self_attn.w_proj"), "is no linear layer of the base model, which has down"),
        (_tensors(lambda t: t.update({f"{_Q}A.weight": torch.ones(4, 64)})), r"\[48, 64\], and .* is \[48, 48\]"),
        (_tensors(lambda t: t.pop(f"{_Q}B.weight")), "q_proj has lora_A alone"),
        (_tensors(lambda t: t.update({f"{_Q}A.weight": torch.full((4, 48), torch.nan)})), "that are not finite"),
        (_tensors(lambda t: t.update({"lora_magnitude_vector": torch.ones(4)})), "is of DoRA, which is not supported"),
        (_tensors(lambda t: t.update({f"{_Q}A.weight": torch.ones(4, 48).int()})), "is stored as I32; it must be"),
        (lambda f: (f / WEIGHTS_FILE).write_bytes(b"abc"), "is not a whole safetensors file"),
        (lambda f: (f / WEIGHTS_FILE).unlink(), "adapter_model.safetensors: "),
        (lambda f: (f / WEIGHTS_FILE).rename(f / "adapter_model.bin"), "its weights are a pickle"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json"),
    ],
)  # fmt: skip
def test_a_bad_adapter_is_one_line_that_names_it(
    change: Callable[[Path], None], message: str, tmp_path: Path, small: AdaptedModel
) -> None:
    lora.save(tmp_path / "bad", tiny.build("llama"))
    change(tmp_path / "bad")
    with pytest.raises(ModelError, match=message) as caught:
        small.places.read(tmp_path / "bad", 64)
    assert str(tmp_path / "bad") in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = tmp_path_factory.mktemp("base")
    tiny.save("llama", folder)
    return AdaptedModel(load_model(folder, torch.float32, ReferenceKernels()), 1, 16, 16)


def test_a_rank_above_the_limit_and_a_folder_that_is_none(tmp_path: Path, small: AdaptedModel) -> None:
    lora.save(tmp_path / "a", tiny.build("llama"), 32)
    with pytest.raises(ModelError, match="has rank 32, and --max-lora-rank is 16; raise that"):
        small.places.read(tmp_path / "a", 16)
    with pytest.raises(ModelError, match="there is no such folder"):
        small.places.read(tmp_path / "none", 16)


def test_the_digest_is_of_weights_and_settings(tmp_path: Path, small: AdaptedModel) -> None:
    model = tiny.build("llama")
    for name, more in (("a", {}), ("same", {}), ("alpha", {"lora_alpha": 7}), ("seed", {"seed": 5})):
        lora.save(tmp_path / name, model, **more)
    first, same, alpha, seed = (
        small.places.read(tmp_path / name, 16).digest for name in ("a", "same", "alpha", "seed")
    )
    assert first == same and len({first, alpha, seed}) == 3
