"""What names and "auto" come to."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from headway.cost import catalogue
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware
from headway.planner import resolve as resolving
from headway.planner.make import make_plan
from headway.planner.models import find_model
from headway.planner.request import PlanError, PlanRequest
from headway.planner.resolve import find_hardware, resolve
from headway.quantize.schemes import Recipe

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


def folder(place: Path, **changes: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(QWEN | changes))
    return place


def test_a_folder_and_its_config_say_the_same_as_the_catalogue(tmp_path: Path) -> None:
    place = folder(tmp_path / "my-qwen")
    known = find_model("qwen2.5-0.5b")
    for name in (place, place / "config.json"):
        found = find_model(str(name))
        assert (found.name, found.shape, found.quantization) == ("my-qwen", known.shape, "none")


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8-weight-only"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {}}},
            },
            "int8-weight-only",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}}
                },
            },
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}},
            },
            "fp8-block",
        ),
        (Recipe.of("W4A8", "gptq", None).quantization_config(["lm_head"]), "w4a8"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8-weight-only"),
    ],
)
def test_how_a_checkpoint_is_published(tmp_path: Path, said: dict[str, Any], means: str) -> None:
    assert find_model(str(folder(tmp_path / "q", quantization_config=said))).quantization == means


def test_a_quantisation_that_is_not_known_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'hqq'; give --quantization"):
        find_model(str(folder(tmp_path / "q", quantization_config={"quant_method": "hqq"})))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/folder", "cannot be read"),
        ("llama-3.1-9b", "llama-3.1-8b"),
        ("./nothing-here", "cannot be read"),
    ],
)
def test_a_model_that_is_not_there(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_model(name)


def test_a_config_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        find_model(str(file))
    file.write_text("[]")
    with pytest.raises(PlanError, match="no JSON object"):
        find_model(str(tmp_path))
    file.write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        find_model(str(tmp_path))


def test_a_quantisation_that_is_given_goes_before_the_config(tmp_path: Path) -> None:
    place = folder(tmp_path / "q", quantization_config={"quant_method": "bitsandbytes"})
    assert resolve(PlanRequest(str(place), "H100-SXM", quantization="int4")).quantization == "int4"


@pytest.mark.parametrize("groups", [None, {}, {"group_0": 3}, {"group_0": {"weights": "x"}}])
def test_a_quantisation_that_says_nothing(tmp_path: Path, groups: Any) -> None:
    said = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(PlanError, match="give --quantization yourself"):
        find_model(str(folder(tmp_path / "q", quantization_config=said)))


def test_a_folder_without_a_config_is_no_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(PlanError, match=r"mine/config\.json cannot be read"):
        find_model("mine")


def test_a_config_of_too_many_layers(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="at most 10,000"):
        find_model(str(folder(tmp_path / "q", num_hidden_layers=10**30)))


def test_experts_are_not_dealt_out_to_one_device() -> None:
    with pytest.raises(PlanError, match="enable_expert_parallel divides"):
        resolve(PlanRequest("mixtral-8x7b", "H200", enable_expert_parallel=True))


def test_hardware_without_bfloat16_takes_float16() -> None:
    assert resolve(PlanRequest("qwen2.5-0.5b", "V100-SXM-32GB")).dtype == "float16"


def test_short_names_of_dtypes() -> None:
    assert resolve(PlanRequest("llama-3.1-8b", "H100-SXM", dtype="half")).dtype == "float16"


def test_unknown_hardware_and_engine() -> None:
    with pytest.raises(ValueError, match="H100-SXM"):
        find_hardware("H100-SMX")
    with pytest.raises(ValueError, match="vllm"):
        find_hardware("H100-SXM", "no-such-engine")


@pytest.mark.parametrize(
    ("model", "dtype", "quantization"),
    [
        ("llama-3.1-8b", "bfloat16", "none"),
        ("llama-2-7b", "float16", "none"),
        ("deepseek-v3", "bfloat16", "fp8-block"),
        ("gpt-oss-20b", "bfloat16", "mxfp4"),
    ],
)
def test_auto_is_as_published(model: str, dtype: str, quantization: str) -> None:
    found = resolve(PlanRequest(model, "H200", count=8))
    assert (found.dtype, found.quantization) == (dtype, quantization)
    assert found.kv_cache_dtype in ("bf16", "fp16")


def test_mxfp4_is_for_experts() -> None:
    precision = resolve(PlanRequest("gpt-oss-20b", "H100-SXM")).deployment.precision
    assert precision.of_experts.name == "mxfp4"
    assert precision.linear.name == precision.kv.name == "bf16"


def test_a_float32_checkpoint_runs_in_16_bit(tmp_path: Path) -> None:
    place = folder(tmp_path / "q", torch_dtype="float32")
    assert resolve(PlanRequest(str(place), "H100-SXM")).dtype == "bfloat16"
    assert resolve(PlanRequest(str(place), "H100-SXM", dtype="float32")).dtype == "float32"


@pytest.mark.parametrize(
    ("given", "tensor", "replicas"),
    [
        ({}, 1, 1),
        ({"count": 4}, 4, 1),
        ({"count": 6}, 1, 6),  # 32 heads cannot be divided by 6
        ({"count": 8, "tensor_parallel_size": 2}, 2, 4),
        ({"tensor_parallel_size": 4}, 4, 1),
        ({"count": 4, "pipeline_parallel_size": 2}, 2, 1),
    ],
)
def test_devices_become_replicas(given: dict[str, int], tensor: int, replicas: int) -> None:
    found = resolve(PlanRequest("llama-3.1-8b", "H100-SXM", **given))  # type: ignore[arg-type]
    assert (found.deployment.parallelism.tensor, found.replicas) == (tensor, replicas)
    assert found.devices == replicas * found.deployment.parallelism.devices


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"count": 3, "tensor_parallel_size": 2}, "a multiple of that"),
        ({"tensor_parallel_size": 3}, "use 1, 2, 4, 8"),
        ({"pipeline_parallel_size": 33}, "32 layers"),
        ({"data_parallel_size": 2}, "--enable-expert-parallel"),
        ({"sequence_parallel": True}, "among the devices of a layer, and there is 1"),
        ({"prompt_tokens": 100_000, "max_num_batched_tokens": 8, "max_num_seqs": 8}, "12,500 steps"),
        ({"enable_expert_parallel": True}, "no experts"),
        ({"dtype": "int3"}, "auto, bfloat16, float16 or float32"),
        ({"quantization": "q4"}, "must be one of auto, none, fp8"),
        ({"kv_cache_dtype": "fp2"}, "must be one of auto"),
        ({"prompt_tokens": 131072}, "max_position_embeddings, 131,072"),
        ({"prompt_tokens": 900, "output_tokens": 200, "max_model_len": 1000}, "max_model_len, 1,000"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 256}, "max_num_batched_tokens, 256"),
        ({"batch_size": 64, "max_num_seqs": 32}, "more than max_num_seqs, 32"),
    ],
)
def test_what_cannot_run(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        resolve(PlanRequest("llama-3.1-8b", "H100-SXM", **given))


def test_a_longer_context_than_the_config_says_can_be_asked_for() -> None:
    request = PlanRequest("llama-2-7b", "H100-SXM", prompt_tokens=5000, output_tokens=100, max_model_len=8192)
    assert resolve(request).deployment.shape.max_positions == 4096


@pytest.mark.parametrize(
    ("hardware", "engine", "expected"),
    [
        ("H100-SXM", "vllm", (8192, 1024, True)),
        ("A100-80GB-SXM", "vllm", (2048, 256, True)),
        ("L40S", "vllm", (2048, 256, True)),
        ("H200", "vllm-v0", (8192, 1024, False)),
        ("RTX-4090", "sglang", (2048, 2048, True)),
        ("L40S", "sglang", (4096, 2048, True)),
        ("H100-SXM", "sglang", (8192, 2048, True)),
        ("H100-SXM", "headway", (8192, 256, False)),
        ("B200", "sglang", (16384, 2048, True)),
        ("A10", "tensorrt-llm", (8192, 2048, True)),
    ],
)
def test_limits_are_those_of_the_engine(hardware: str, engine: str, expected: tuple[int, int, bool]) -> None:
    limits = resolve(PlanRequest("qwen2.5-0.5b", hardware, engine=engine)).limits
    assert (limits.batched_tokens, limits.sequences, limits.ahead) == expected


@pytest.mark.parametrize(
    ("model", "settings", "tensor", "devices"),
    [
        ("llama-3.1-8b", {}, 1, 1),
        ("llama-3.1-70b", {}, 2, 2),
        ("llama-3.1-70b", {"quantization": "fp8"}, 1, 1),
        ("llama-3.1-70b", {"tensor_parallel_size": 1}, 1, 1),  # does not fit, as it was asked for
        ("llama-3.1-70b", {"count": 1}, 1, 1),
        ("llama-3.1-70b", {"count": 4}, 4, 4),
        ("llama-3.1-70b", {"pipeline_parallel_size": 2}, 1, 2),
        ("llama-3.1-405b", {"quantization": "fp8"}, 8, 8),
        ("llama-3.1-405b", {"quantization": "fp8", "count": 16}, 8, 16),
        ("llama-3.1-405b", {"count": 16}, 16, 16),
    ],
)
def test_a_replica_has_as_many_devices_as_it_needs(
    model: str, settings: dict[str, Any], tensor: int, devices: int
) -> None:
    found = resolve(PlanRequest(model, "H100-SXM", **settings))
    assert (found.deployment.parallelism.tensor, found.devices) == (tensor, devices)


def test_the_link_to_the_host_can_be_given() -> None:
    """Document 000: an H100 behind PCIe 4.0, where its own link is 5.0."""
    asked, usual = (make_plan(PlanRequest("qwen2.5-7b", "H100-PCIe", host_link_gb_per_s=gb)) for gb in (31.5, None))
    assert asked.loading.transfer_s == pytest.approx(2 * usual.loading.transfer_s)
    with pytest.raises(PlanError, match="host_link_gb_per_s is 0;"):
        PlanRequest("qwen2.5-7b", "H100-PCIe", host_link_gb_per_s=0.0)


def test_a_batch_that_is_asked_for_raises_the_limit() -> None:
    assert resolve(PlanRequest("llama-2-7b", "A100-80GB-SXM", batch_size=384)).limits.sequences == 384


@dataclass(frozen=True)
class Measured:
    hardware: Hardware
    efficiency: Efficiency


def test_a_calibrated_machine_goes_before_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = catalogue.find_hardware("L40S")
    mine = Measured(replace(listed, key="my-machine", aliases=("this",), measured=True), Efficiency(kernel_s=1e-6))
    monkeypatch.setattr(resolving, "calibrated", lambda _: [mine])
    assert find_hardware("MY-machine") == (mine.hardware, mine.efficiency, mine)
    assert find_hardware("this") == (mine.hardware, mine.efficiency, mine)
    assert find_hardware("L40S")[0] == listed
    with pytest.raises(ValueError, match="my-machine"):
        find_hardware("my-machin")


def test_hardware_without_16_bit_products_takes_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Hardware("old-cpu", "Old", "cpu", "x86", 64 * 2**30, 50e9, {"fp32": 1e12}, measured=True)
    monkeypatch.setattr(resolving, "calibrated", lambda _: [Measured(processor, Efficiency())])
    found = resolve(PlanRequest("qwen2.5-0.5b", "old-cpu"))
    assert found.dtype == "float32" and found.deployment.precision.kv.bits == 32
    limits = found.limits
    assert (limits.batched_tokens, limits.sequences, limits.ahead) == (512, 256, False)  # of `headway serve` on a CPU
