"""Weights on disk become the same model, at no more memory than the model; damaged ones are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.kernels import kernels_for
from headway.kernels.reference import ReferenceKernels
from headway.models import ModelConfig, ModelError
from headway.models.checkpoint import DUMMY_POOL, INDEX_FILE, SINGLE_FILE, RandomWeights, StageClock
from headway.models.decoder import Decoder
from headway.models.loading import load_model, resolve_dtype, resolve_model
from headway.models.tensors import expected_tensors
from tests.models import tiny
from tests.models.paging import whole

PROMPT = tiny.prompts([11])


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> Decoder:
    return load_model(folder, dtype, ReferenceKernels(), **options)


@pytest.fixture
def single(tmp_path) -> Path:
    tiny.save("qwen2", tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> Path:
    tiny.save("qwen2", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def rewrite(folder: Path, change) -> Path:
    """Apply a change to the tensors of a single-file checkpoint and write it back."""
    path = folder / SINGLE_FILE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def test_shards_load_as_one_model(sharded, tmp_path_factory):
    one = tmp_path_factory.mktemp("one")
    tiny.save("qwen2", one)
    torch.testing.assert_close(whole(load(sharded), PROMPT), whole(load(one), PROMPT), rtol=0, atol=0)


def test_of_a_checkpoint_that_reads_images_the_text_part_is_loaded(tmp_path):
    tiny.save("qwen3_5", tmp_path)
    expected = whole(load(tmp_path), PROMPT)

    def name_as_a_part(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors.update({name: torch.ones(3) for name in ("model.visual.patch_embed.weight", "mtp.norm.weight")})

    rewrite(tmp_path, name_as_a_part)
    text = json.loads((tmp_path / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    raw = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.testing.assert_close(whole(load(tmp_path), PROMPT), expected, rtol=0, atol=0)


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_dtype_asked_for(single, stored):
    expected = load(single).weights.layers[1].mixer.qkv.weight.to(stored).float()

    def cast(tensors):
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})

    rewrite(single, cast)
    decoder = load(single)
    assert decoder.weights.embedding(torch.tensor([3])).dtype == torch.float32
    torch.testing.assert_close(decoder.weights.layers[1].mixer.qkv.weight, expected, rtol=0, atol=0)


def test_tied_embeddings_are_one_tensor(tmp_path):
    tiny.save("qwen2_tied", tmp_path)
    weights = load(tmp_path).weights
    assert torch.equal(weights.embedding(torch.arange(131)), weights.lm_head.weight)
    assert weights.embedding == weights.lm_head.rows


def test_the_files_may_change_after_loading(single):
    """Nothing in the decoder is a view of the mapped file."""
    decoder = load(single)
    before = whole(decoder, PROMPT)
    with open(single / SINGLE_FILE, "r+b") as file:
        file.seek(0, 2)
        size = file.tell()
        file.seek(size // 4)
        file.write(b"\x7f" * (size // 2))
    torch.testing.assert_close(whole(decoder, PROMPT), before, rtol=0, atol=0)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_stages_are_reported_once_each(single, load_format):
    stages: list[tuple[str, int]] = []
    load(single, load_format=load_format, on_stage=lambda stage, ns: stages.append((stage, ns)))
    assert [name for name, _ in stages] == ["storage_read", "convert", "layout"]
    spent = dict(stages)
    assert all(isinstance(ns, int) for ns in spent.values())
    assert spent["convert"] > 0
    assert (spent["storage_read"] > 0) == (load_format == "auto")


def test_known_leftovers_are_ignored(single):
    rewrite(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(single)


def test_a_tied_checkpoint_may_hold_an_lm_head(tmp_path):
    model = tiny.save("qwen2_tied", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(131, 48)}))
    torch.testing.assert_close(whole(load(tmp_path), PROMPT)[0], tiny.logits(model, PROMPT[0]), rtol=0, atol=1e-4)


EXPERT_CASES = ["mixtral", "qwen2_moe", "qwen3_moe_some_dense", "deepseek_v3"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", EXPERT_CASES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_stacked_experts_are_the_same_model(tmp_path, case, stored):
    """Experts are stored in the model's dtype, which is lent, or in another, which is converted."""
    folders = [tmp_path / "one_each", tmp_path / "stacked"]
    for folder, original in zip(folders, (True, False), strict=True):
        tiny.save(case, folder, save_original_format=original)
        assert any("experts.gate_up_proj" in name for name in load_file(folder / SINGLE_FILE)) != original
        rewrite(folder, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    assert_same(*folders)


@pytest.mark.parametrize("original", [True, False])
def test_experts_in_shards(tmp_path, original):
    folders = [tmp_path / "one", tmp_path / "shards"]
    for folder, size in zip(folders, ("1GB", "60KB"), strict=True):
        tiny.save("qwen2_moe", folder, save_original_format=original, max_shard_size=size)
    assert (folders[1] / INDEX_FILE).is_file()
    assert_same(*folders)


def assert_same(one: Path, other: Path) -> None:
    """Compare two models, also by the CPU's kernels, which read what is lent."""
    for kernels in (ReferenceKernels(), kernels_for("cpu", torch.float32)):
        ours, theirs = (whole(load_model(folder, torch.float32, kernels), PROMPT) for folder in (one, other))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# --- refused ----------------------------------------------------------------------------------------

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

DAMAGED_TENSORS = [
    (lambda t: t.pop(Q_PROJ), Q_PROJ, "missing"),
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight", "missing"),
    (lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), "model.layers.0.self_attn.k_proj.bias", "missing"),
    (lambda t: t.update({Q_PROJ: t[Q_PROJ].T.contiguous()[:-1]}), Q_PROJ, "[47, 48]"),
    (lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.int8)}), Q_PROJ, "I8"),
    (lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)}), Q_PROJ, "F8_E4M3"),
    (
        lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(48)}),
        "model.layers.0.self_attn.o_proj.bias",
        "no place",
    ),
]


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("damage", "tensor", "problem"), DAMAGED_TENSORS)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(single, damage, tensor, problem):
    path = rewrite(single, damage)
    message = refused(single)
    assert message.startswith(f"{path}: tensor {tensor} ")
    assert problem in message


DAMAGED_EXPERTS = [
    ("mixtral", True, "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
    ("mixtral", False, "model.layers.1.mlp.experts.down_proj"),
    ("mixtral", True, "model.layers.0.block_sparse_moe.gate.weight"),
    ("qwen2_moe", True, "model.layers.2.mlp.experts.4.down_proj.weight"),
    ("qwen2_moe", True, "model.layers.0.mlp.shared_expert_gate.weight"),
    ("qwen2_moe", False, "model.layers.0.mlp.shared_expert.up_proj.weight"),
    ("qwen3_moe_some_dense", True, "model.layers.0.mlp.up_proj.weight"),
    ("deepseek_v3", True, "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("deepseek_v3", True, "model.layers.0.self_attn.kv_b_proj.weight"),
]


@pytest.mark.parametrize(("case", "original", "tensor"), DAMAGED_EXPERTS)
def test_a_tensor_of_experts_that_does_not_fit_is_named(tmp_path, case, original, tensor):
    tiny.save(case, tmp_path, save_original_format=original)
    path = rewrite(tmp_path, lambda tensors: tensors.update({tensor: tensors[tensor][:-1].clone()}))
    assert refused(tmp_path).startswith(f"{path}: tensor {tensor} has shape ")
    rewrite(tmp_path, lambda tensors: tensors.pop(tensor))
    assert refused(tmp_path) == f"{path}: tensor {tensor} is missing; the checkpoint does not fit config.json"


def test_an_expert_too_many_is_named(tmp_path):
    tiny.save("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    rewrite(tmp_path, lambda tensors: tensors.update({n: t[:4].clone() for n, t in tensors.items() if ".gate." in n}))
    assert "tensor model.layers.0.mlp.experts.4.down_proj.weight has no place in the model" in refused(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(single, kept):
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:kept])
    assert refused(single).startswith(f"{path}: not a whole safetensors file")


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    message = refused(sharded)
    assert message.startswith(f"{shard}: not found")
    assert INDEX_FILE in message


def test_a_truncated_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert refused(sharded).startswith(f"{shard}: not a whole safetensors file")


def change_index(folder: Path, change) -> None:
    path = folder / INDEX_FILE
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


INDEX_DAMAGE = [
    (lambda index: index.pop("weight_map"), "weight_map is missing"),
    (lambda index: index["weight_map"].pop(Q_PROJ), f"tensor {Q_PROJ} is missing"),
    (lambda index: index["weight_map"].update({Q_PROJ: "../other.safetensors"}), "not a file name"),
    (lambda index: index["weight_map"].update({Q_PROJ: 3}), f"tensor {Q_PROJ} is missing"),
]


@pytest.mark.parametrize(("damage", "problem"), INDEX_DAMAGE)
def test_a_damaged_index_is_named(sharded, damage, problem):
    change_index(sharded, damage)
    message = refused(sharded)
    assert message.startswith(f"{sharded / INDEX_FILE}: ")
    assert problem in message


def test_an_index_that_is_not_json(sharded):
    (sharded / INDEX_FILE).write_text("<html>")
    assert "not valid JSON" in refused(sharded)


def test_an_index_that_points_to_the_wrong_shard(sharded):
    shards = {path.name for path in sharded.glob("*.safetensors")}
    index = json.loads((sharded / INDEX_FILE).read_text())
    wrong = min(shards - {index["weight_map"][Q_PROJ]})
    change_index(sharded, lambda index: index["weight_map"].update({Q_PROJ: wrong}))
    assert refused(sharded).startswith(f"{sharded / wrong}: tensor {Q_PROJ} is missing")


def test_a_folder_without_weights(single):
    (single / SINGLE_FILE).unlink()
    assert "--load-format dummy" in refused(single)
    (single / "pytorch_model.bin").write_bytes(b"")
    assert "convert" in refused(single)


def test_an_unknown_load_format(single):
    with pytest.raises(ModelError, match=r"'gguf'.*auto, safetensors, dummy"):
        load(single, load_format="gguf")


# --- names and dtypes -------------------------------------------------------------------------------


def test_a_local_folder_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", ""])
def test_a_folder_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(path))


def test_a_hub_id_without_a_network(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nobody/nothing: no such folder, and the Hugging Face hub cannot be reached"):
        resolve_model("nobody/nothing")


def hub_failures() -> list[tuple[Exception, str]]:
    import httpx
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
    return [
        (RepositoryNotFoundError("no\nsuch", response=response), "no such model"),
        (GatedRepoError("gated", response=response), "HF_TOKEN"),
        (OSError("disk full\nreally"), r"OSError: disk full\)"),
    ]


@pytest.mark.parametrize(("failure", "problem"), hub_failures())
def test_what_the_hub_refuses_is_one_line(monkeypatch, failure, problem):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=problem) as caught:
        resolve_model("some/model")
    assert "\n" not in str(caught.value)


def test_a_hub_snapshot_is_asked_for_what_serving_needs(monkeypatch, tmp_path):
    asked: dict = {}

    def snapshot(model_id, **options):
        asked.update(options, model_id=model_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model("some/model") == tmp_path
    assert asked["model_id"] == "some/model"
    assert {"*.json", "*.safetensors"} <= set(asked["allow_patterns"])


def test_dtype_names(single):
    config = ModelConfig.from_folder(single)
    assert resolve_dtype("auto", config) == torch.float32
    assert resolve_dtype("bfloat16", config) == torch.bfloat16
    with pytest.raises(ModelError, match="'int8'"):
        resolve_dtype("int8", config)


# --- dummy weights ----------------------------------------------------------------------------------


def test_dummy_weights_need_the_config_alone(tmp_path):
    tiny.build("qwen3").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    first = whole(load(tmp_path, load_format="dummy", seed=1), PROMPT)[0]
    again = whole(load(tmp_path, load_format="dummy", seed=1), PROMPT)[0]
    other = whole(load(tmp_path, load_format="dummy", seed=2), PROMPT)[0]
    assert first.isfinite().all()
    assert first.std() > 0
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)


def test_dummy_matrices_have_no_equal_rows_and_the_stated_spread(single):
    weights = load(single, load_format="dummy").weights
    embeddings = weights.embedding(torch.arange(131))
    assert embeddings.unique(dim=0).shape == embeddings.shape
    assert weights.layers[0].mixer.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(weights.layers[0].mlp.down.weight, weights.layers[1].mlp.down.weight)


def test_dummy_tensors_larger_than_the_pool_use_all_of_it():
    source = RandomWeights(0, StageClock())
    pool, large = torch.empty(DUMMY_POOL), torch.empty(2 * DUMMY_POOL + 5)
    source.copy_into("a", pool)
    source.copy_into("model.layers.0.mlp.up_proj.weight", large)
    torch.testing.assert_close(large[:DUMMY_POOL].sort().values, pool.sort().values, rtol=0, atol=0)
    torch.testing.assert_close(large[DUMMY_POOL:], large[: DUMMY_POOL + 5], rtol=0, atol=0)


# --- memory -----------------------------------------------------------------------------------------

MEASURE = """
import sys, threading
import torch
from headway.kernels.reference import ReferenceKernels
from headway.models.loading import load_model

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def sample():
    while not done.wait(0.0005):
        peak.append(max(peak.pop(), anonymous()))

torch.zeros(1000, 1000).sum()
before, done = anonymous(), threading.Event()
peak = [before]
sampler = threading.Thread(target=sample)
sampler.start()
decoder = load_model(sys.argv[1], torch.bfloat16, ReferenceKernels())
done.set()
sampler.join()
print(peak[0] - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory use from /proc")
def test_weights_are_never_held_twice(tmp_path):
    """Memory that is not pages of the file peaks at the size of the model."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shapes = expected_tensors(ModelConfig.from_folder(tmp_path))
    save_file({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, tmp_path / SINGLE_FILE)
    size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    assert size > 200_000_000
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert 0.95 * size < int(run.stdout) < 1.1 * size
