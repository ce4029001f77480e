"""Damaged checkpoints: one clear line, whatever is changed in a file, and no memory for what it only claims."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, processors
from typer.testing import CliRunner

from headway.cli import app
from headway.kernels.reference import ReferenceKernels
from headway.models.checkpoint import INDEX_FILE, SINGLE_FILE
from headway.models.config import ModelError
from headway.models.folder import resolve_model
from headway.models.loading import load_model
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer as TextTokenizer
from headway.text.tokenizer_files import TextError, stated_eos_ids
from tests.models import gguf_files, tiny
from tests.models.test_grouped_checkpoints import FORMATS
from tests.models.test_grouped_checkpoints import read as read_packed_parts
from tests.models.test_grouped_checkpoints import save as save_packed

FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
# Numbers of a GGUF file by which something is made.
SIZES = ("block_count", "expert_count", "embedding_length", "attention.head_count", "attention.key_length")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save("llama_tied", folder)
    return folder


@pytest.fixture(scope="module")
def sound_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    wide = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    gguf_files.write(path, tiny.build("qwen3_moe", **wide), lambda name: "F32")
    return path.read_bytes()


def load(folder: Path) -> None:
    """Into kernels that take what they are given."""
    load_model(folder, torch.float32, ReferenceKernels())


def message_of(folder: Path) -> str:
    try:
        load(folder)
    except ModelError as error:
        return str(error)
    return ""


@FEW
@given(data=st.data())
def test_safetensors(folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut anywhere, or with bytes of its header changed."""
    sound = (folder / SINGLE_FILE).read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    damaged = tmp_path_factory.mktemp("damaged")
    content = bytearray(sound[: data.draw(st.integers(0, len(sound)) | st.just(len(sound)))])
    for at in data.draw(st.lists(st.integers(0, header - 1), max_size=4)):
        content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1)) if at < len(content) else b""
    (damaged / SINGLE_FILE).write_bytes(content)
    (damaged / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert "\n" not in message_of(damaged)


@FEW
@given(data=st.data())
def test_gguf(
    sound_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Bytes before the tensors are changed, sizes among them."""
    damaged = tmp_path_factory.mktemp("damaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(damaged))
    content = bytearray(sound_gguf)
    for at in data.draw(st.lists(st.integers(0, sound_gguf.index(b"output_norm.weight")), max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    for key in data.draw(st.sets(st.sampled_from(SIZES), max_size=2)):
        place = sound_gguf.index(f"qwen3moe.{key}".encode()) + len(f"qwen3moe.{key}") + 4
        content[place : place + 4] = data.draw(st.binary(min_size=4, max_size=4))
    (damaged / "model.gguf").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        message = message_of(resolve_model(str(damaged / "model.gguf")))
    except ModelError as error:
        message = str(error)
    assert "\n" not in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**9), ("max_position_embeddings", 1 << 40), ("num_local_experts", 10**7)]
)
def test_a_config_that_claims_too_much_is_refused(key: str, value: int, tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"{key} is {value}, which is more than any model has" in message_of(tmp_path)


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(tmp_path: Path) -> None:
    model = tiny.build("llama", vocab_size=100)
    gguf_files.write(tmp_path / "model.gguf", model, lambda name: "F32")
    with pytest.raises(ModelError, match="131 tokens, but the model has 100"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_inputs_of_layers_for_a_part_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """A token behind them would read what lies behind the table."""
    tiny.save("gemma4", tmp_path, {"vocab_size_per_layer_input": 64})
    assert "vocab_size_per_layer_input is 64, which is less than the vocabulary, 131" in message_of(tmp_path)


def test_a_link_to_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    """The cache of a hub has such a link if the download was broken off, or the file itself was removed."""
    tiny.save("llama", tmp_path)
    (file := tmp_path / SINGLE_FILE).rename(tmp_path / "away")
    names = load_file(tmp_path / "away")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, file.name)}))
    file.symlink_to(tmp_path / "gone")
    says = f"{file}: a link to {tmp_path / 'gone'}, which does not exist"
    assert f"{says}, but {INDEX_FILE} names it; download the missing shard" in message_of(tmp_path)
    with pytest.raises(ModelError, match=f"^{re.escape(says)}; a model folder needs the file itself$"):
        resolve_model(str(tmp_path))
    file.unlink()
    assert f"{file}: not found, but {INDEX_FILE} names it" in message_of(tmp_path)


@pytest.mark.parametrize("name", [SINGLE_FILE, "config.json", "model.gguf", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a socket", "a device", "a circle"])
def test_what_is_no_file_is_named_at_once(name: str, kind: str, tmp_path: Path) -> None:
    """Opening a pipe would wait for who writes into it."""
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listener:  # for a socket's name
        path = Path(short, name)
        if kind == "a named pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        elif kind == "a socket":
            listener.bind(str(path))
        else:
            path.symlink_to("/dev/zero" if kind == "a device" else path)
        says = f"^{re.escape(str(path))}: " + ("cannot be read" if kind == "a circle" else f"{kind}, not a file")
        with pytest.raises(ModelError, match=says):
            resolve_model(short)
        if path.suffix == ".gguf" and kind != "a folder":
            with pytest.raises(ModelError, match=says):
                resolve_model(str(path))


def test_a_command_line_of_weights_that_are_a_pipe_ends(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    os.mkfifo(tmp_path / SINGLE_FILE)
    ended = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0"])
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1 and f"{tmp_path / SINGLE_FILE}: a named pipe, not a file" in ended.stderr


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    ended = CliRunner().invoke(app, ["serve", str(path), "--port", "0"])
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1 and f"{path}: not a whole GGUF file" in ended.stderr


PACKED = ["awq", "gptq_ordered", "packed_zeros", "float_rows", "fp8_blocks", "nvfp4", "nvfp4_modelopt"]
LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_matrix_that_is_not_whole_is_named(name: str, tmp_path: Path) -> None:
    """Each of its tensors is missing, half missing, or of another type; or there is one too many."""
    save_packed(tmp_path, FORMATS[name])
    sound = load_file(tmp_path / SINGLE_FILE)
    parts = [f"{LAYER}.{each}" for each in read_packed_parts(FORMATS[name].said).parts if each != "weight_shape"]
    assert len(parts) >= 2

    def message(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / SINGLE_FILE)
        return message_of(tmp_path)

    for part in parts:
        said = message({key: each for key, each in sound.items() if key != part})
        assert f"tensor {part} is missing" in said and "\n" not in said
        if sound[part].dim() and len(sound[part]) > 1:
            said = message(sound | {part: sound[part][: len(sound[part]) // 2].contiguous()})
            assert f"tensor {part} has shape" in said and "\n" not in said
        said = message(sound | {part: torch.zeros(sound[part].shape, dtype=torch.int16)})
        assert f"tensor {part} is stored as I16" in said and "\n" not in said
    said = message(sound | {f"{LAYER}.weight_more": torch.ones(3)})
    assert f"tensor {LAYER}.weight_more has no place in the model" in said


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads"]
)
@pytest.mark.parametrize("value", [1 << 40, 10**18])
def test_sizes_that_files_do_not_have_take_no_memory(folder: Path, key: str, value: int, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).symlink_to(folder / SINGLE_FILE)
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = message_of(tmp_path)
    assert message and "\n" not in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_more_experts_than_any_model_has_are_refused_before_they_are_named(tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path)
    sizes = {"num_hidden_layers": 1000, "num_local_experts": 4096}
    config = json.loads((tmp_path / "config.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "num_local_experts is 4096, which is more than any model has in 1000 layers" in message_of(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Tokens that were added later may have no row in the embedding, as the one of images in Gemma 3 1B."""
    vocabulary = {f"t{number}": number for number in range(100)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    backend.add_special_tokens(["<image>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    loaded = TextTokenizer.load(tmp_path)
    assert loaded.vocab_size == 100 and loaded.left_out == ("<image>",)
    assert max(loaded.encode("t1 <image> t2")) < 100, "the engine would look behind the embedding"
    assert ChatTemplate.load(loaded, "{{ messages[0].content }}") is not None
    with pytest.raises(TextError, match="the chat template writes '<image>', a token that the model does not have"):
        ChatTemplate.load(loaded, "<image>{{ messages[0].content }}")
    for name in ("bos_token", "eos_token"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "<image>"}))
        with pytest.raises(TextError, match=rf"{name} '<image>' has the id 100, but the model has 100 tokens"):
            TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    around = processors.TemplateProcessing(single="<image> $A", special_tokens=[("<image>", 100)])
    backend.post_processor = around
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TextError, match="'<image>', which goes around each text, has the id 100"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 99}')
    with pytest.raises(TextError, match=r"has 100 tokens, but the model has 99; take the tokenizer of this model"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("size", ['"vocab_size": 100', '"text_config": {"vocab_size": 100}'])
def test_a_token_far_behind_the_others_is_refused(size: str, tmp_path: Path) -> None:
    """Their number alone would fit."""
    Tokenizer(models.WordLevel({"t0": 0, "t1": 100}, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{" + size + "}")
    with pytest.raises(TextError, match="has 101 tokens, but the model has 100"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("stated", [10**9, -1, [100, 10**9], [-1, -2]])
def test_ends_that_the_model_cannot_write_are_refused(name: str, stated: int | list[int], tmp_path: Path) -> None:
    """Answers would go on to the end of the context."""
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    content = json.loads((tmp_path / name).read_text()) if name == "config.json" else {}
    (tmp_path / name).write_text(json.dumps(content | {"eos_token_id": stated}))
    with pytest.raises(TextError) as refused:
        stated_eos_ids(tmp_path)
    says = f"{tmp_path / name}: eos_token_id is {stated}, but the model has the ids 0 to 99; answers would not end"
    assert str(refused.value) == says
    (tmp_path / name).write_text(json.dumps(content | {"eos_token_id": [2, 10**9, -1]}))
    assert stated_eos_ids(tmp_path) == {2}, "as an answer can end"


def test_a_tokenizer_of_another_form_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"")
    with pytest.raises(TextError, match=r"tiktoken.model cannot be read; convert the tokenizer to tokenizer.json"):
        TextTokenizer.load(tmp_path)
