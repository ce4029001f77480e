"""`headway quantize`: what it writes is loaded by Headway and by Hugging Face, and is the model that it was."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headway.cli import main
from headway.kernels import kernels_for
from headway.models.checkpoint import INDEX_FILE, SINGLE_FILE
from headway.models.folder import resolve_model
from headway.models.loading import load_model
from headway.quantize import folder as folders
from headway.quantize import run
from headway.quantize.calibration import Calibration
from headway.quantize.run import Result, quantize
from headway.quantize.schemes import SCHEMES, Recipe
from tests.kernels.test_cpu_linear import relative_error
from tests.models import gguf_files, tiny
from tests.models.paging import whole

pytestmark = pytest.mark.timeout(600)

PROMPTS = tiny.prompts([29, 1, 17])
# One of each kind of layer, norm, fusion, bias and order of rows.
CASES = [
    "llama", "llama_all_heads", "llama_mlp_bias", "qwen2_tied", "qwen3", "gemma3", "glm4", "granite_biases", "phi3",
    "mixtral", "qwen2_moe", "qwen3_moe_some_dense", "smollm3", "llama_wide_head", "gemma2", "olmo2", "deepseek_v2",
    "deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_next", "qwen3_5_moe", "lfm2", "lfm2_moe",
]  # fmt: skip
# Where scales are folded into something else: norms, other norms behind layers, gates, latents, states.
QUICK = [
    "llama_mlp_bias", "qwen2_tied", "gemma3", "glm4", "phi3", "qwen3_moe_some_dense", "olmo2", "deepseek_v3", "qwen3_5",
    "lfm2",
]  # fmt: skip
ONE_OF_A_KIND = ["llama", "mixtral", "deepseek_v3", "qwen3_next", "lfm2"]


class Windows(Calibration):
    """Random tokens in place of a text."""

    def windows(self, folder: Path, longest: int) -> list[list[int]]:
        return tiny.prompts([32] * 24)


def quantized(case: str, folder: Path, *recipe: object) -> tuple[Path, Path, Result]:
    source, target = folder / "plain", folder / "quantised"
    tiny.save(case, source, {"q_lora_rank": 24} if "deepseek" in case else None)  # a multiple of 8
    return source, target, quantize(source, target, Recipe.of(*recipe), Windows(), lambda done, what: None)


def logits(folder: Path) -> Tensor:
    return torch.cat(whole(load_model(folder, torch.float32, kernels_for("cpu", torch.float32)), PROMPTS))


@pytest.mark.parametrize(
    ("method", "case"),
    [
        *(pytest.param("awq", case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES),
        *(pytest.param("gptq", case, marks=() if case in ONE_OF_A_KIND else pytest.mark.slow) for case in CASES),
    ],
)
def test_eight_bits_of_every_family_are_nearly_the_model(case: str, method: str, tmp_path: Path) -> None:
    """So scales are folded into all and only that which makes the inputs, and every matrix is in its place."""
    source, target, _ = quantized(case, tmp_path, "W8A16", method, None)
    # The states of this one add errors up: rounded to the nearest it is off by 0.069, as the engine rounds by 0.050.
    assert of_tokens(logits(target), logits(source).double()) < (0.06 if case == "qwen3_5" else 0.05)
    written, read = load_file(target / SINGLE_FILE), load_file(source / SINGLE_FILE)
    kinds = ("layernorm.weight", "operator_norm.weight", "ffn_norm.weight")
    norms = [name for name in read if name.endswith(kinds)]
    changed = [name for name in norms if not torch.equal(written[name], read[name])]
    assert bool(changed) == (method == "awq" and case != "olmo2")  # which has no norms before its layers


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_calibration_is_better_than_rounding_to_the_nearest(scheme: str, tmp_path: Path) -> None:
    """On the tokens that it was calibrated with."""
    tiny.save("llama", tmp_path / "plain")
    prompts = Windows().windows(tmp_path, 64)
    load = lambda folder: load_model(folder, torch.float32, kernels_for("cpu", torch.float32))  # noqa: E731
    expected = torch.cat(whole(load(tmp_path / "plain"), prompts)).double()
    errors = {}
    for method in ("rtn", "awq", "gptq"):
        quantize(
            tmp_path / "plain", tmp_path / method, Recipe.of(scheme, method, 16), Windows(), lambda done, what: None
        )
        errors[method] = relative_error(torch.cat(whole(load(tmp_path / method), prompts)), expected)
    assert errors["gptq"] < 0.85 * errors["rtn"]
    assert errors["awq"] < errors["rtn"]


@pytest.mark.parametrize(
    ("case", "recipe"),
    [
        ("llama", ("W4A16", "gptq", 16)),
        ("qwen2", ("W4A16", "awq", 16)),
        ("qwen3_moe", ("W8A16", "rtn", None)),
        ("llama_tied", ("W8A16", "awq", None)),
        ("llama", ("FP8_DYNAMIC", "rtn", None)),
        ("llama", ("W8A8", "gptq", None)),
    ],
)
def test_hugging_face_loads_it(case: str, recipe: tuple[object, ...], tmp_path: Path) -> None:
    """And has the same logits but for what rounding activations adds."""
    pytest.importorskip("compressed_tensors")
    _, target, result = quantized(case, tmp_path, *recipe)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS]).double()
    of_activations = {"W8A8": 0.05, "FP8_DYNAMIC": 0.15}.get(str(recipe[0]), 0.0)
    assert relative_error(logits(target), expected) < 2e-3 + of_activations
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {file.name for file in target.iterdir()} >= {"config.json", "generation_config.json", SINGLE_FILE}
    assert result.after < 0.6 * result.before


def test_many_tensors_go_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, one, _ = quantized("qwen2_moe", tmp_path / "one", "W8A16", "rtn", None)
    monkeypatch.setattr(folders, "_SHARD_BYTES", 40_000)
    _, several, _ = quantized("qwen2_moe", tmp_path / "several", "W8A16", "rtn", None)
    files = {file.name for file in several.glob("*.safetensors")}
    index = json.loads((several / INDEX_FILE).read_text())
    assert len(files) > 2
    assert set(index["weight_map"].values()) == files
    assert torch.equal(logits(several), logits(one))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_interrupted_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) > 5:
            raise error

    monkeypatch.setattr(run, "gptq", lambda *given: fail() or run.nearest(*given[:1], *given[2:4]))
    with pytest.raises(error):
        quantized("llama", tmp_path, "W8A16", "gptq", None)
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A file may not become larger than a few blocks, which its library says as an error of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tiny.save("llama", tmp_path / "plain")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ValueError, match=r"--output .*quantised cannot be written: .*File too large"):
            quantize(tmp_path / "plain", tmp_path / "quantised", Recipe.of("W8A16", "rtn", None), Windows(), print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]


def of_tokens(got: Tensor, expected: Tensor) -> float:
    """The median over tokens of the relative error: a router may choose another expert for a few."""
    return ((got.double() - expected).norm(dim=1) / expected.norm(dim=1)).median().item()


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["headway", "quantize", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(str(ended.value.code)), captured.out + captured.err


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "plain")
    arguments = [tmp_path / "plain", "--output", tmp_path / "new", "--group-size", 16]
    code, out = said(monkeypatch, capsys, *arguments)
    assert code == 0
    assert out.startswith(f"{tmp_path / 'new'}: 21 matrices in W4A16 by rtn; 0.")
    assert logits(tmp_path / "new").isfinite().all()
    code, out = said(monkeypatch, capsys, *arguments)
    assert (code, out) == (
        2,
        f"headway: --output {tmp_path / 'new'} is there already; remove it, or name another folder\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model.layers.0.self_attn.q_proj has 48 inputs, which groups of 128 do not divide; use --group-size 16"),
        (
            ["--scheme", "int4"],
            f"--scheme is 'int4'; choose one of {', '.join(SCHEMES)}",
        ),
        (["--scheme", "W8A16", "--group-size", "64"], "--group-size 64: W8A16 has one scale for each row"),
        (["--scheme", "FP8_DYNAMIC", "--method", "awq"], "--method awq: FP8_DYNAMIC has only rtn"),
        (
            ["--group-size", "16", "--method", "gptq", "--calibration", "no.txt", "--sample-tokens", "32"],
            "--calibration no.txt cannot be read: No such file or directory",
        ),
        (["--calibration", "text.txt"], "--calibration changes nothing with --method rtn; it is for awq or gptq"),
        (["--method", "awq", "--no-act-order"], "--act-order changes nothing with --method awq; it is for gptq"),
        (["--group-size", "16", "--method", "awq", "--sample-tokens", "65"], "65 is more than the model takes, 64"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    tiny.save("llama", tmp_path / "plain")
    code, out = said(monkeypatch, capsys, tmp_path / "plain", "--output", tmp_path / "new", *arguments)
    assert code == 2
    assert out.startswith("headway: ") and message in out and out.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    _, target, _ = quantized("llama", tmp_path, "W8A16", "rtn", None)
    with pytest.raises(ValueError, match="is quantised already; take the unquantised checkpoint"):
        quantize(target, tmp_path / "again", Recipe.of("W8A8", "rtn", None), Windows(), lambda done, what: None)
    tiny.save("gpt_oss", tmp_path / "gpt_oss")
    with pytest.raises(ValueError, match=r"experts with outputs by turns \(gpt-oss\) are not written"):
        quantize(tmp_path / "gpt_oss", tmp_path / "o", Recipe.of("W8A8", "rtn", None), Windows(), lambda *_: None)
    config = tmp_path / "gpt_oss" / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    with pytest.raises(ValueError, match=r"its experts, .* are MXFP4 already; serve it as it is, and round its other"):
        quantize(tmp_path / "gpt_oss", tmp_path / "o", Recipe.of("W8A8", "rtn", None), Windows(), lambda *_: None)
    gguf_files.write(tmp_path / "model.gguf", tiny.build("llama"), lambda name: "F16")
    with pytest.raises(ValueError, match=r"model\.gguf: GGUF files are served as they are; take the checkpoint"):
        quantize(
            resolve_model(str(tmp_path / "model.gguf")),
            tmp_path / "o",
            Recipe.of("W8A8", "rtn", None),
            Windows(),
            print,
        )
    tiny.save("cohere", tmp_path / "cohere")
    with pytest.raises(ValueError, match=r"norms subtract the mean .* is served from unquantised weights alone"):
        quantize(tmp_path / "cohere", tmp_path / "o", Recipe.of("W8A8", "rtn", None), Windows(), lambda *_: None)


def test_stacked_experts_get_names_of_their_own_and_others_keep_theirs(tmp_path: Path) -> None:
    _, target, _ = quantized("qwen3_5_moe", tmp_path / "mixture", "W8A16", "rtn", None)
    names = load_file(target / SINGLE_FILE).keys()
    expert = "model.layers.0.mlp.experts.4"
    assert {f"{expert}.{part}_proj.weight_packed" for part in ("gate", "up", "down")} <= names
    assert not any(name.endswith("gate_up_proj") for name in names)
    kept = ("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight")
    assert {f"model.layers.0.linear_attn.{part}" for part in kept} <= names
    _, target, _ = quantized("lfm2", tmp_path / "lfm2", "W8A16", "rtn", None)
    names = load_file(target / SINGLE_FILE).keys()
    named = ("conv.in_proj.weight_packed", "conv.conv.weight", "feed_forward.w1.weight_packed", "operator_norm.weight")
    assert {f"model.layers.0.{part}" for part in named} | {"model.embedding_norm.weight"} <= names


def test_parts_that_read_images_are_left_as_they_are(tmp_path: Path) -> None:
    """Qwen3.5 is published like this, with its own names, and with a part of config.json for the text."""
    tiny.save("qwen3_5", plain := tmp_path / "plain")
    expected = logits(plain).double()
    read = load_file(plain / SINGLE_FILE)
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in read.items()}
    tensors["model.visual.blocks.0.mlp.fc.weight"] = torch.randn(8, 8)
    save_file(tensors, plain / SINGLE_FILE)
    config = json.loads((plain / "config.json").read_text())
    whole_config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config, "dtype": "float32"}
    (plain / "config.json").write_text(json.dumps(whole_config))
    target = tmp_path / "quantised"
    quantize(plain, target, Recipe.of("W8A16", "gptq", None), Windows(), lambda done, what: None)
    assert of_tokens(logits(target), expected) < 0.06
    written = load_file(target / SINGLE_FILE)
    name = "model.visual.blocks.0.mlp.fc.weight"
    assert torch.equal(written[name], tensors[name])
    assert "model.language_model.layers.0.linear_attn.out_proj.weight_packed" in written
    assert "re:.*visual.*" in json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]


def test_a_text_and_what_the_model_writes(tmp_path: Path) -> None:
    """Windows of a file, of one length; and texts of the bundled model, each its own."""
    from headway.bundled import STORY

    text = tmp_path / "text"
    text.write_text("The old house stood at the end of the lane, and nobody had lived in it for many years. " * 50)
    found = Calibration(text, samples=3, sample_tokens=50).windows(STORY, 1024)
    assert [len(each) for each in found] == [50] * 3
    with pytest.raises(ValueError, match="the text has"):
        Calibration(text, samples=30, sample_tokens=500).windows(STORY, 1024)
    written = Calibration(samples=3, sample_tokens=16).windows(STORY, 1024)
    assert [len(each) for each in written] == [16] * 3
    assert len({tuple(each) for each in written}) == 3
