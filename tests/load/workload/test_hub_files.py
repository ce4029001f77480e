"""hf://OWNER/NAME/FILE as a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from headway.load.errors import BenchError
from headway.load.workload.files import is_of_hub, local_file
from headway.load.workload.mix import load_mix


def test_a_file_of_the_hub_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(*arguments: str, **more: str) -> str:
        asked.append((*arguments, more))
        return str(tmp_path / "there.jsonl")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert local_file(Path("hf://a/b/data/train.jsonl")) == tmp_path / "there.jsonl"
    assert asked == [("a/b", "data/train.jsonl", {"repo_type": "dataset"})]
    assert local_file(tmp_path) == tmp_path and not is_of_hub(tmp_path)
    (tmp_path / "mix.toml").write_text(
        '[[class]]\nname = "a"\nshare = 1\ndataset_name = "custom"\ndataset_path = "hf://a/b/c.jsonl"\n'
    )
    assert str(load_mix(tmp_path / "mix.toml").classes[0].options.dataset_path) == "hf:/a/b/c.jsonl"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("offline"), "is not in the local cache, and the Hugging Face hub cannot be reached"),
        (EntryNotFoundError("no"), "has no file c.jsonl"),
        (RepositoryNotFoundError("no", response=Mock()), "is not on the Hugging Face hub"),
        (OSError("disk full\nmore"), r"cannot be downloaded \(OSError: disk full\)"),
    ],
)
def test_what_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=error))
    with pytest.raises(BenchError, match=said) as raised:
        local_file(Path("hf://a/b/c.jsonl"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["hf://", "hf://a/b", "hf://a"])
def test_a_name_without_a_file_is_refused(path: str) -> None:
    with pytest.raises(BenchError, match="names no file"):
        local_file(Path(path))
