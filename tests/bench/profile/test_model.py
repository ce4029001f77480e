"""The model is known before a server is started, and a bad one is refused in one line."""

from __future__ import annotations

import json

import pytest

from headway.bench.profile.model import find_model
from headway.bundled import STORY
from headway.load.errors import BenchError
from tests.cost import published
from tests.models.test_packed_checkpoints import W8A8


def test_the_bundled_model():
    model = find_model(None)
    assert (model.name, model.folder, model.dtype) == ("headway/story", STORY, "bfloat16")
    assert model.weight_bytes == 2 * model.shape.num_parameters
    # The file holds the same weights and a header.
    assert 0 < model.checkpoint_bytes - model.weight_bytes < 20_000
    assert model.kv_bytes_per_token == 2 * 5 * 2 * 64 * 2
    narrow = find_model(None, kv_cache_dtype="int8")
    assert narrow.kv_bytes_per_token == 2 * 5 * 2 * (64 + 4)
    assert narrow.weight_bytes == model.weight_bytes
    assert find_model(None, "float32").weight_bytes == 2 * model.weight_bytes


@pytest.mark.parametrize(
    ("quantization", "bits", "products"),
    [("none", 16, "bfloat16"), ("int8", 8, "int8"), ("int8-weight-only", 8, "bfloat16"), ("int4", 4.25, "int8")],
)
def test_a_quantised_model(quantization: str, bits: float, products: str) -> None:
    """Matrices have that many bits a weight, an int4 model's tied head eight, and norms those of the dtype."""
    model = find_model(None, quantization=quantization)
    parameters = model.shape.parameters()
    head = parameters["embedding"]
    norms = sum(count for name, count in parameters.items() if "norm" in name)
    matrices = model.shape.num_parameters - head - norms
    assert model.weight_bytes == matrices * bits / 8 + head * (8 if quantization == "int4" else bits) / 8 + norms * 2
    assert model.products == products
    assert (model.kept_in == "bfloat16") == (quantization == "none")


def test_a_checkpoint_that_is_packed(tmp_path):
    """Its matrices have eight bits, and the head that it leaves out those of the dtype."""
    config = {**published.LLAMA_3_1_8B, "rms_norm_eps": 1e-6, "dtype": "bfloat16", "quantization_config": W8A8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find_model(str(tmp_path), load_format="dummy")
    assert (model.precision.linear.bits, model.precision.head.bits, model.products) == (8, 16, "int8")


def test_dummy_weights_need_no_checkpoint(tmp_path):
    config = {**published.QWEN2_5_05B, "rms_norm_eps": 1e-6, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BenchError, match=r"holds no \*.safetensors"):
        find_model(str(tmp_path))
    model = find_model(str(tmp_path), load_format="dummy")
    assert (model.name, model.dtype, model.checkpoint_bytes) == (str(tmp_path), "float16", 0)


def test_bad_models_are_refused(tmp_path):
    with pytest.raises(BenchError, match="'no such folder': no such folder; give a model folder"):
        find_model("no such folder")
    with pytest.raises(BenchError, match="not found"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["GPTJForCausalLM"]}')
    with pytest.raises(BenchError, match="GPTJForCausalLM"):
        find_model(str(tmp_path))
