"""Every entry of the catalogue is whole, agrees with what is published, and can be deployed on everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from headway.cost import catalogue
from headway.cost.attention import Chunk
from headway.cost.catalogue import KnownModel, UnknownName
from headway.cost.config import read_shape
from headway.cost.efficiency import Efficiency
from headway.cost.memory import weight_bytes
from headway.cost.parallel import Parallelism
from headway.cost.precision import Precision
from headway.cost.timing import Deployment
from headway.cost.values import ModelError
from tests.cost import published
from tests.cost.machines import MACHINE

MODELS = catalogue.models()
HARDWARE = catalogue.hardware()
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": published.QWEN2_5_05B,
    "Qwen/Qwen2.5-7B": published.QWEN2_5_7B,
    "meta-llama/Llama-3.1-8B": published.LLAMA_3_1_8B,
    "Qwen/Qwen3-8B": published.QWEN3_8B,
    "mistralai/Mistral-7B-v0.1": published.MISTRAL_7B,
    "mistralai/Mixtral-8x7B-v0.1": published.MIXTRAL_8X7B,
    "Qwen/Qwen3-30B-A3B": published.QWEN3_30B_A3B,
    "deepseek-ai/DeepSeek-V2-Lite": published.DEEPSEEK_V2_LITE,
    "deepseek-ai/DeepSeek-V3": published.DEEPSEEK_V3,
    "openai/gpt-oss-20b": published.GPT_OSS_20B,
    "EleutherAI/gpt-j-6b": published.GPT_J_6B,
}


def precision_of(model: KnownModel) -> Precision:
    """As its checkpoint is published."""
    dtype = "float16" if model.weights == "fp16" else "bfloat16"
    precision = Precision.named(dtype, model.weights if model.weights in ("fp8-block", "mxfp4") else "none")
    return precision.for_experts_only() if model.weights == "mxfp4" else precision


@pytest.mark.parametrize("key", MODELS)
def test_a_model_has_as_many_parameters_as_published(key):
    """Exactly, where the tensors of the checkpoint were counted, and as rounded in its card or paper."""
    model = MODELS[key]
    assert model.parameters_exact is None or model.shape.num_parameters == model.parameters_exact
    assert model.shape.num_parameters == pytest.approx(1e9 * model.parameters_b, rel=0.01)


@pytest.mark.parametrize("key", MODELS)
def test_active_parameters_are_the_published_ones(key):
    """Ours leave out the table of an embedding that is not the head's; Mixtral's and Qwen's papers count it."""
    model = MODELS[key]
    shape = model.shape
    assert (model.active_parameters_b is None) == (shape.experts is None)
    if model.active_parameters_b is not None:
        counts = (shape.active_parameters, shape.active_parameters + shape.vocab * shape.hidden)
        assert min(abs(count / 1e9 / model.active_parameters_b - 1) for count in counts) < 0.025


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_those_of_a_config_written_down_elsewhere(name):
    """The longest context apart, in which models of one shape differ."""
    ours, theirs = catalogue.find_model(name).shape, read_shape(PUBLISHED[name])
    assert replace(ours, max_positions=0) == replace(theirs, max_positions=0)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("openai/gpt-oss-20b", 13.8),  # 12.8 GiB, by the model's card
        ("openai/gpt-oss-120b", 65.3),  # 60.8 GiB, likewise
        ("deepseek-ai/DeepSeek-V3", 671 + 1.9 + 1.9),  # fp8, embedding and head in bfloat16
        ("meta-llama/Llama-3.1-8B", 16.06),
    ],
)
def test_checkpoints_are_as_large_as_published(name, gigabytes):
    model = catalogue.find_model(name)
    assert weight_bytes(model.shape, precision_of(model)) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("entries", [MODELS, HARDWARE], ids=["models", "hardware"])
def test_names_are_those_of_one_entry_whatever_their_case(entries):
    spellings = Counter()
    for key, entry in entries.items():
        names = {key, *entry.aliases} | ({entry.name} if isinstance(entry, KnownModel) else set())
        assert len({each.lower() for each in entry.aliases}) == len(entry.aliases), key
        assert all(each == each.strip() and each for each in names)
        spellings.update({each.lower() for each in names})
    assert [name for name, count in spellings.items() if count > 1] == []


def test_models_and_hardware_are_found_by_every_name_in_any_case():
    for key, model in MODELS.items():
        owned = (model.name, *model.aliases)
        for name in (key, *owned, *(each.rpartition("/")[2] for each in owned)):
            assert catalogue.find_model(name) is catalogue.find_model(f" {name.upper()} ") is model
    for key, machine in HARDWARE.items():
        for name in (key, *machine.aliases):
            assert catalogue.find_hardware(name) is catalogue.find_hardware(name.swapcase()) is machine


@pytest.mark.parametrize("key", MODELS)
def test_a_misspelt_model_is_refused_with_the_nearest(key):
    middle = len(key) // 2
    wrong = f"{key[:middle]}x{key[middle:]}"
    with pytest.raises(UnknownName) as error:
        catalogue.find_model(wrong)
    assert str(error.value).startswith(f"model {wrong!r} is not known; did you mean ") and key in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", HARDWARE)
def test_misspelt_hardware_is_refused_with_the_nearest(key):
    wrong = f"{key}q"
    with pytest.raises(UnknownName) as error:
        catalogue.find_hardware(wrong)
    assert str(error.value).startswith(f"hardware {wrong!r} is not known; did you mean ") and key in str(error.value)


def test_what_is_like_nothing_is_refused_with_all_that_is_known():
    with pytest.raises(UnknownName) as error:
        catalogue.find_model("##########")
    assert all(key in str(error.value) for key in MODELS) and "known are" in str(error.value)


def test_calibrated_machines_are_found_before_others():
    mine = replace(MACHINE, key="mine", aliases=("here",))
    assert catalogue.find_hardware("MINE", [mine]) is catalogue.find_hardware("here", [mine]) is mine
    key = next(iter(HARDWARE))
    again = replace(MACHINE, key=key)
    assert catalogue.find_hardware(key, [again]) is again
    assert catalogue.find_hardware(key) is HARDWARE[key]
    borrowed = replace(MACHINE, key="borrowed", aliases=("twice",))
    owned = replace(MACHINE, key="owned", aliases=("twice",))
    assert catalogue.find_hardware("twice", [owned, borrowed]) is owned


@pytest.mark.parametrize("key", HARDWARE)
def test_hardware_is_whole(key):
    """Numbers of the right order, wider formats never faster, and a source for everything."""
    machine = HARDWARE[key]
    rates = machine.flops_per_s
    assert machine.key == key and machine.name and machine.architecture and machine.kind in ("gpu", "cpu")
    assert 1e9 <= machine.memory_bytes <= 1e13 and 1e10 <= machine.bytes_per_s <= 2e13
    assert set(rates) <= {"fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4", "int4", "mxfp4", "nvfp4"}
    assert all(1e10 <= rate <= 1e17 for rate in rates.values())
    assert machine.rate("fp32") <= machine.rate("bf16") <= machine.rate("fp8")
    assert machine.rate("bf16") <= machine.rate("int8") and machine.rate("fp8") <= machine.rate("fp4")
    if machine.link is not None:
        assert machine.link.kind and machine.link.max_devices >= 2
        assert 1e9 <= machine.link.bytes_per_s <= machine.bytes_per_s and 1e-7 <= machine.link.latency_s <= 1e-3
    if machine.price is not None:
        assert 0.01 <= machine.price.per_hour <= 100 and machine.price.source and machine.price.date
    assert machine.tdp_w is None or 5 <= machine.tdp_w <= 3000
    assert machine.host_bytes_per_s is None or 1e9 <= machine.host_bytes_per_s <= 1e12
    assert machine.sources and not machine.measured


@pytest.mark.parametrize("key", MODELS)
def test_models_have_sources(key):
    model = MODELS[key]
    assert model.sources and "/" in model.name and model.weights in ("bf16", "fp16", "fp8-block", "mxfp4")
    assert model.shape.max_positions >= 1024


@pytest.mark.covering(1)
@pytest.mark.parametrize("key", HARDWARE)
@pytest.mark.parametrize("first", range(4))
def test_every_model_runs_on_all_hardware_and_never_faster_than_physics(key, first):
    """Memory apart: on one device, and on two where they are joined. Each row has every fourth model."""
    machine = HARDWARE[key]
    for model in list(MODELS.values())[first::4]:
        for spread in [Parallelism(), Parallelism(2)] if machine.link else [Parallelism()]:
            ideally = Deployment(model.shape, precision_of(model), machine, Efficiency.ideal(), spread)
            for chunks in ([Chunk(512)], [Chunk(1, 1000, sequences=8)]):
                ideal, work = ideally.step(chunks).seconds, ideally.work(chunks).values()
                assert ideal >= sum(each.kept_bytes for each in work) / machine.bytes_per_s
                assert ideal >= sum(each.flops for each in work) / max(machine.flops_per_s.values())
                for engine in catalogue.engines():
                    on = replace(ideally, efficiency=catalogue.efficiency(machine, engine))
                    assert ideal < on.step(chunks).seconds < 300 * ideal, (model.key, engine)


def test_engines_are_known_by_name():
    assert catalogue.engines()[0] == "vllm"
    with pytest.raises(UnknownName, match=r"engine 'vlm' is not known; known are vllm"):
        catalogue.efficiency(next(iter(HARDWARE.values())), "vlm")


@pytest.mark.parametrize("metric", ["ttft", "tpot"])
def test_predictions_have_a_range_around_them(metric):
    """Wider on hardware of an architecture that nothing was fitted to."""
    unmeasured = catalogue.uncertainty(replace(MACHINE, architecture="paper"), metric)
    for machine in HARDWARE.values():
        low, high = catalogue.uncertainty(machine, metric)
        assert 0.1 < unmeasured[0] <= low < 1 < high <= unmeasured[1] < 10


def test_a_model_s_shape_names_the_catalogue_when_it_is_wrong():
    broken = replace(MODELS["llama-3.1-8b"], config={"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ModelError, match=r"the catalogue's llama-3.1-8b: num_attention_heads is missing"):
        _ = broken.shape
