"""The tokenizer against Hugging Face's, and what it says about broken folders."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError, stated_eos_ids
from tests.text.tiny_tokenizers import CORPUS, SPECIAL, byte_level, save

TEXTS = [*CORPUS, " leading", "trailing ", "two  spaces", "", "\n\n", "ẞæ𒀀 \u200d \u00a0", "<|im_start|>user"]


@pytest.mark.parametrize("folder", ["bytes_folder", "pieces_folder"])
def test_encode_and_decode_equal_hugging_face(folder: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)


def test_add_bos_token_wins_over_the_post_processor(tmp_path: Path, pieces_folder: Path) -> None:
    folder = tmp_path / "no_bos"
    shutil.copytree(pieces_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for wanted in (True, False):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": wanted}))
        ids = Tokenizer.load(folder).encode("Once upon")
        assert (ids[0] == 1) is wanted
        assert 1 not in ids[1:]
    bare = save(tmp_path / "bare", byte_level(), bos_token=SPECIAL[0], add_bos_token=True)
    assert Tokenizer.load(bare).encode("Once")[0] == 0


def test_eos_ids_come_from_every_file(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), eos_token=SPECIAL[2])
    assert Tokenizer.load(folder).eos_token_ids == [2]
    (folder / "config.json").write_text('{"eos_token_id": 0, "vocab_size": 1000}')
    assert Tokenizer.load(folder).eos_token_ids == [0, 2]
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')
    loaded = Tokenizer.load(folder)
    assert loaded.eos_token_ids == [1, 2]
    assert loaded.vocab_size == 1000
    (folder / "generation_config.json").write_text('{"eos_token_id": null, "temperature": 0.7}')
    assert stated_eos_ids(folder) == {0}
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(TextError, match=r"generation_config.json: eos_token_id is \['</s>'\]; it must be a token id"):
        Tokenizer.load(folder)


@given(st.data())
def test_bytes_of_tokens_join_to_the_text(by_bytes: Tokenizer, by_pieces: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
    ids = by_bytes.encode(text)
    assert b"".join(map(by_bytes.token_bytes, ids)) == text.encode()
    pieces = by_pieces.encode(text, add_special_tokens=False)
    spaced = text.replace("▁", " ").encode()  # SentencePiece has this character for a space
    assert b"".join(map(by_pieces.token_bytes, pieces)) in (b" " + spaced, spaced)


def test_part_of_a_character_is_named_by_its_bytes(by_bytes: Tokenizer) -> None:
    part = next(i for i in range(by_bytes.vocab_size) if by_bytes.token_bytes(i) == b"\xe2")
    assert by_bytes.token_text(part) == r"bytes:\xe2"
    assert by_bytes.token_text(1) == "<|im_start|>"
    assert by_bytes.token_bytes(10**9) == b""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "is missing"),
        ("tokenizer.json", "{", "cannot be read as JSON"),
        ("tokenizer.json", '{"model": {}}', "is not a tokenizer"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("config.json", b"\xff\xfe", "cannot be read as JSON"),
        ("generation_config.json", "null", "holds a NoneType"),
    ],
)
def test_broken_file_is_named_in_one_line(
    tmp_path: Path, bytes_folder: Path, name: str, content: str | bytes | None, says: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(bytes_folder, folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TextError) as caught:
        Tokenizer.load(folder)
    message = str(caught.value)
    assert name in message
    assert says in message
    assert "\n" not in message


def test_interpreter_lock_is_free_while_a_long_text_is_encoded(by_bytes: Tokenizer) -> None:
    """Else one long prompt would hold up every stream of the server."""
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    began = time.monotonic()
    by_bytes.encode(text)
    alone = time.monotonic() - began
    worker = threading.Thread(target=by_bytes.encode, args=(text,))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(alone / 100)
        turns += 1
    assert turns > 10
