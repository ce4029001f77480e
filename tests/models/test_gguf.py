"""GGUF files: the same numbers as the package gguf reads, the same logits, tokens and configs as Hugging Face."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import PreTrainedModel

from headway import LLM, SamplingParams
from headway.cost.values import ModelError
from headway.kernels import kernels_for
from headway.kernels.cpu.kernels import CpuKernels
from headway.models.decoder import Decoder
from headway.models.folder import resolve_model
from headway.models.gguf.blocks import BLOCKS, packed_blocks
from headway.models.gguf.config import folder_of
from headway.models.gguf.files import read_gguf
from headway.models.gguf.tokenizer import tokenizer_files
from headway.models.grouped import expanded
from headway.models.loading import load_model
from headway.text.tokenizer import Tokenizer
from tests.kernels.test_cpu_linear import relative_error
from tests.models import gguf_files, tiny
from tests.models.paging import whole

pytestmark = pytest.mark.timeout(600)

PROMPTS = tiny.prompts([29, 1, 17])
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
# What rounding activations to 16 bits adds to logits, of their norm.
ROUNDING = 1e-3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files and of packed weights; that of the kernels is the user's, or these tests would compile their own."""
    cache = tmp_path_factory.mktemp("cache")
    for module in ("models.gguf.config", "engine.weight_cache"):
        monkeypatch.setattr(f"headway.{module}.cache_folder", lambda: cache)


def mixed(name: str) -> str:
    """The type of a tensor: like llama.cpp's Q4_K_M, but matrices that are fused have different types."""
    part = name.split(".")[-2]
    return {"v_proj": "Q6_K", "down_proj": "Q6_K", "up_proj": "Q5_K", "k_proj": "Q8_0"}.get(part, "Q4_K")


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(resolve_model(str(path)), dtype, kernels_for("cpu", dtype))


def with_weights(model: PreTrainedModel, plain: dict[str, Tensor]) -> PreTrainedModel:
    """The model with these in place of its own, experts one by one."""
    state = model.state_dict()
    for name, tensor in plain.items():
        if name in state:
            state[name].copy_(tensor)
            continue
        block, number, part, ending = name.rsplit(".", 3)
        if ".mlp.gate." in name:
            state[name.replace("mlp.gate", "mlp.router")].copy_(tensor)
            continue
        stack = f"{block}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
        if f"{stack}_bias" in state:  # gpt-oss: inputs before outputs, by turns
            parts = gguf_files.turns(stack)
            target = state[stack if ending == "weight" else f"{stack}_bias"][int(number)]
            target[..., parts.index(part) :: len(parts)].copy_(tensor.T if ending == "weight" else tensor)
            continue
        target = state[f"{block}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(number)]
        target = target if part == "down_proj" else target.chunk(2)[part == "up_proj"]
        target.copy_(tensor)
    return model


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_those_of_the_reference_to_the_bit(kind: str) -> None:
    blocks = gguf_files.random_blocks(kind, 70, 512, seed=0)
    weight = packed_blocks(kind, torch.from_numpy(blocks), torch.float32)
    expected = gguf_files.dequantized(kind, blocks)
    assert torch.equal(expanded(weight), expected)
    assert torch.equal(CpuKernels().linear(weight, None).rows(torch.arange(70)), expected)


@pytest.mark.parametrize(
    ("case", "kind_of"),
    [
        ("llama", lambda name: "F32"),
        ("llama", lambda name: "F16"),
        ("llama", mixed),
        ("qwen2_tied", lambda name: "Q4_0"),
        ("qwen2", lambda name: "IQ4_NL"),
        ("qwen2", lambda name: "BF16" if "v_proj" in name else "Q6_K"),
        ("qwen3", mixed),
        ("qwen3_moe", mixed),
        ("gpt_oss_scaled", lambda name: "MXFP4" if "experts" in name else "Q8_0"),
    ],
)
def test_logits_are_those_of_the_dequantised_model(case: str, kind_of: Callable[[str], str], tmp_path: Path) -> None:
    wide = WIDE | ({"moe_intermediate_size": 256} if "moe" in case else {})
    if case == "gpt_oss_scaled":  # as all of its files have it
        wide |= {
            "layer_types": None,
            "head_dim": 8,
            "rope_parameters": tiny.YARN["rope_parameters"] | {"truncate": False},
        }
    model = tiny.build(case, **wide)
    plain = gguf_files.write(tmp_path / "model.gguf", model, kind_of)
    ours = torch.cat(whole(load(tmp_path / "model.gguf"), PROMPTS))
    expected = torch.cat([tiny.logits(with_weights(model, plain), prompt) for prompt in PROMPTS])
    assert relative_error(ours, expected) < ROUNDING


def test_several_files_are_one_model(tmp_path: Path) -> None:
    model = tiny.build("llama", **WIDE)
    gguf_files.write(tmp_path / "model.gguf", model, mixed, split_max_tensors=5)
    gguf_files.write(tmp_path / "whole.gguf", model, mixed)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) > 2
    expected = torch.cat(whole(load(tmp_path / "whole.gguf"), PROMPTS))
    for part in (parts[0], parts[2]):
        assert torch.equal(torch.cat(whole(load(part), PROMPTS)), expected)
    parts[1].unlink()
    with pytest.raises(ModelError, match=rf"{parts[1].name}: not found, but .* is one of {len(parts)} parts"):
        resolve_model(str(parts[0]))


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ModelError, match=r"models/none\.gguf: not found"):
        resolve_model("models/none.gguf")


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.write(path, tiny.build("llama", **WIDE), mixed)
    assert resolve_model(str(tmp_path)) == resolve_model(str(path)) == folder_of(path)
    (tmp_path / "config.json").write_text("{}")  # as they are published, beside the file
    assert resolve_model(str(tmp_path)) == folder_of(path)
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"holds several models, model\.gguf, other\.gguf; give the file of one"):
        resolve_model(str(tmp_path))


def test_one_of_several_models_is_named_by_a_part_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are in a folder, or in a repository of the hub, of which nothing else is downloaded."""
    path = tmp_path / "tiny-Q4_K_M.gguf"
    gguf_files.write(path, tiny.build("llama", **WIDE), mixed)
    other = tmp_path / "below" / "tiny-q8_0.gguf"
    other.parent.mkdir()
    shutil.copy(path, other)
    asked: list[list[str]] = []

    def snapshot(model_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model(f"{tmp_path}:q4_k_m") == resolve_model("owner/tiny-GGUF:Q4_K_M") == folder_of(path)
    assert resolve_model(f"{tmp_path}:Q8_0") == folder_of(other)
    assert asked == [["*Q4_K_M*.gguf", "*q4_k_m*.gguf"]]
    for tag, said in (("Q4_K", "no models have Q4_K in their name; there is tiny-Q4_K_M.gguf, tiny-q8_0.gguf"),):
        with pytest.raises(ModelError, match=said):
            resolve_model(f"{tmp_path}:{tag}")


def test_safetensors_go_first(tmp_path: Path) -> None:
    """A GGUF file beside them is another form of the same model."""
    model = tiny.save("llama", tmp_path)
    gguf_files.write(tmp_path / "model.gguf", tiny.build("llama", **WIDE), mixed)
    assert resolve_model(str(tmp_path)) == tmp_path
    ours = whole(load(tmp_path), PROMPTS)[0]
    assert relative_error(ours, tiny.logits(model, PROMPTS[0])) < 1e-5


def test_llama_3_1_s_positions(tmp_path: Path) -> None:
    """The scaling of positions is in a tensor, and the same as that of transformers."""
    model = tiny.build("llama_llama3", **WIDE | {"head_dim": 16})
    rope = model.model.rotary_emb.inv_freq
    plain = 1000.0 ** (-torch.arange(0, 16, 2) / 16)

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        gguf_files.byte_tokenizer(writer)
        writer.add_tensor("rope_freqs.weight", (plain / rope).numpy())

    gguf_files.write(tmp_path / "model.gguf", model, lambda name: "F32", tokenizer)
    ours = torch.cat(whole(load(tmp_path / "model.gguf"), PROMPTS))
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    assert (ours - expected).abs().max() < 1e-4 * expected.std()


def test_it_is_served_as_any_model(tmp_path: Path) -> None:
    """It is named by its file, and has its tokenizer, its chat template, and the dtype of its kind."""
    path = tmp_path / "model.gguf"
    gguf_files.write(path, tiny.build("qwen2", **WIDE), mixed)
    llm = LLM(str(path), max_num_seqs=2)
    results = llm.generate(["hello", "he"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert [len(result.outputs[0].token_ids) for result in results] == [4, 4]
    assert [len(result.prompt_token_ids) for result in results] == [3, 1]  # hel, l, o
    assert llm.chat([{"role": "user", "content": "he"}], SamplingParams(max_tokens=2))
    tokenizer = Tokenizer.load(folder_of(path))
    assert tokenizer.eos_token_ids == [1] and tokenizer.special_tokens["bos_token"] == "<|begin|>"
    assert tokenizer.config["chat_template"] == gguf_files.CHAT
    config = json.loads((folder_of(path) / "config.json").read_text())
    assert (config["dtype"], config["quantization_config"]) == ("bfloat16", {"quant_method": "gguf"})


TEXTS = ["Hello, world!", "it's 12345 o'clock\n\n  twice  ", "naïve 東京 🙂", "", " a", "<s>x</s> y"]
CORPUS = ["the cat sat on the mat, it's 1234 o'clock", "naïve cafés in 東京; twice\n\n\nthe same"] * 3


def test_byte_level_tokens_are_those_of_hugging_face() -> None:
    """The tokenizer has the cuts of Qwen2."""
    trained = Backend(models.BPE())
    cut = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    trained.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(cut), "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }
    ours = Backend.from_str(json.dumps(tokenizer_files(values, "model.gguf")["tokenizer.json"]))
    for text in TEXTS:
        assert ours.encode(text).ids == trained.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def sentence_pieces() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types: bytes, letters, and pieces of which longer ones are better."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    pieces = [
        "▁t",
        "he",
        "▁the",
        "▁c",
        "at",
        "▁cat",
        "▁",
        "ll",
        "o",
        "▁he",
        "llo",
        "▁hello",
        "▁▁",
        "t",
        "h",
        "e",
        "c",
        "a",
        "l",
    ]
    scores = [0.0] * 259 + [-float(number) for number in range(len(pieces))]
    return ["<unk>", "<s>", "</s>", *bytes_, *pieces], scores, [2, 3, 3, *[6] * 256, *[1] * len(pieces)]


def merged_by_score(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's way: of all neighbours, the pair of the best score first, the leftmost of equals."""
    pieces, known = list("▁" + text.replace(" ", "▁")), dict(zip(tokens, scores, strict=True))
    while True:
        pairs = [(-known[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in known]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        each for piece in pieces for each in ([piece] if piece in known else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@pytest.mark.parametrize("text", ["the cat", "hello the  cat ", "tea é 東", "a", "cello"])
def test_sentence_pieces_are_merged_by_their_scores(text: str) -> None:
    tokens, scores, types = sentence_pieces()
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0xFFFFFFFF,
    }
    files = tokenizer_files(values, "model.gguf")
    ours = Backend.from_str(json.dumps(files["tokenizer.json"]))
    assert ours.encode(text).tokens == merged_by_score(text, tokens, scores)
    assert ours.decode(ours.encode(text).ids) == text
    assert files["tokenizer_config.json"]["add_bos_token"] is True
    assert files["generation_config.json"] == {"eos_token_id": [2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert', which is not supported"),
        ({"tokenizer.ggml.pre": "new"}, "tokenizer.ggml.pre is 'new', which is not supported"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type is not one for each of 2 tokens"),
        ({"tokenizer.ggml.merges": None}, "merges is not a list of merges"),
        ({"tokenizer.ggml.tokens": []}, "tokens is not a list of tokens"),
        ({"tokenizer.ggml.eos_token_id": 7}, "eos_token_id is 7, but there are 2 tokens"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(ModelError, match=message):
        tokenizer_files(values | changes, "model.gguf")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    gguf_files.write(path, tiny.build("llama", **WIDE | {"num_hidden_layers": 1}), mixed)
    return path.read_bytes()


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def test_files_that_are_not_whole_are_refused(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    header = sound.index(b"token_embd.weight")
    assert "is empty" in refused(path, b"")
    assert "is not a GGUF file" in refused(path, b"PK\3\4" + sound[4:])
    assert "is of version 1" in refused(path, sound[:4] + struct.pack("<I", 1) + sound[8:])
    assert "is big-endian" in refused(path, sound[:4] + struct.pack(">I", 3) + sound[8:])
    assert "of tensors do not fit into it" in refused(path, sound[:8] + struct.pack("<Q", 1 << 60) + sound[16:])
    for size in (5, 20, 100, header, header + 20):
        assert "it is truncated or damaged, download it again" in refused(path, sound[:size])
    assert "lies outside the file" in refused(path, sound[:-100])
    place = header + len("token_embd.weight")
    assert "has 9 dimensions" in refused(path, sound[:place] + struct.pack("<I", 9) + sound[place + 4 :])
    many = struct.pack("<I2Q", 2, 256, 1 << 62) + sound[place + 20 :]
    assert "lies outside the file" in refused(path, sound[:place] + many)
    odd = struct.pack("<I2QI", 2, 250, 131, 12) + sound[place + 24 :]
    assert "rows of 250 in Q4_K, which must be a multiple of 256" in refused(path, sound[:place] + odd)
    unknown = struct.pack("<I", 16) + sound[place + 24 :]
    assert "is of type IQ2_XXS, which is not supported" in refused(path, sound[: place + 20] + unknown)


@given(st.data())
def test_no_damage_crashes_the_reader_or_makes_it_take_memory(
    sound: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut anywhere, or with any bytes of its beginning changed."""
    end = sound.index(b"output_norm.weight") + 100
    content = bytearray(sound[: data.draw(st.integers(0, len(sound)))])
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, end))
        change = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(change)] = change[: max(0, len(content) - at)]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(ModelError):
            read_gguf(path)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 20 * len(sound[:end]) + (1 << 20)


def test_tensors_must_be_those_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny.build("llama", **WIDE)

    def extra(writer: gguf.GGUFWriter) -> None:
        gguf_files.byte_tokenizer(writer)
        writer.add_tensor("blk.0.attn_gate.weight", torch.zeros(4, 4).numpy())

    gguf_files.write(path, model, mixed, extra)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_gate\.weight has no place in the model"):
        load(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_up\.weight is missing"):
        load(path)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("a", torch.zeros(4).numpy())
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(
        ModelError, match=r"general\.architecture is 'mamba', which is not supported; it must be one of llama"
    ):
        resolve_model(str(tmp_path / "model.gguf"))
