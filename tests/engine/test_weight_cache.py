"""Packed weights on disk: a second start has the same weights to the bit, and no file can break a start."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from headway.engine import weight_cache
from headway.engine.build import LoadedEngine
from headway.engine.config import EngineConfig
from headway.engine.messages import AddRequest
from headway.engine.start import start_engine
from headway.engine.weight_cache import WeightCache
from headway.policy.step.sampling_params import SamplingParams
from tests.models import tiny

WRITTEN_S = 30.0
DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the files go, which hold models of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_cache, "_LEAST_BYTES", 1)
    disk_with(monkeypatch, free=1 << 30)
    return tmp_path / "cache" / "headway" / "weights"


def disk_with(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A disk of 2 GiB: what the machine's own has left decides nothing."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(2 << 30, (2 << 30) - free, free))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each start has written a file; it is waited for."""
    found: list[bool] = []
    keep = WeightCache.keep

    def wait(cache: WeightCache, *arguments: object) -> None:
        thread = keep(cache, *arguments)  # type: ignore[arg-type]
        found.append(thread is not None)
        if thread is not None:
            thread.join(WRITTEN_S)

    monkeypatch.setattr(WeightCache, "keep", wait)
    return found


def saved(name: str, folder: Path) -> Path:
    tiny.save(name, folder)
    return folder


def answer(model: Path, **settings: object) -> tuple[list[float], bool]:
    """Log-probabilities of some tokens, and whether the weights came from the cache."""
    options = {"device": "cpu", "num_threads": 2, "kv_cache_memory": 1 << 22, "max_model_len": 64, **settings}
    engine = start_engine(EngineConfig(str(model), **options))
    return answer_of(engine), "weight_cache" in engine.ready.startup_ns


def answer_of(engine: LoadedEngine) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    engine.core.add(AddRequest("a", list(range(1, 20)), params, eos_token_ids=[]))
    found: list[float] = []
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            found += [each.logprob for each in output.logprobs or [] if each is not None]
    assert len(found) == 6
    return found


MODELS = ["qwen2", "qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2", "gemma3", "gpt_oss"]


@pytest.mark.parametrize("name", MODELS)
def test_a_second_start_has_the_same_weights(name: str, tmp_path: Path, written: list[bool]) -> None:
    model = saved(name, tmp_path / "model")
    first, second = answer(model), answer(model)
    assert (first[1], second[1]) == (False, True) and written == [True, False]
    assert first[0] == second[0]


@pytest.mark.slow
def test_ranks_that_have_the_whole_model_have_the_file_in_common(tmp_path: Path, written: list[bool]) -> None:
    model = saved("qwen2", tmp_path / "model")
    first, before = answer(model), psutil.Process().children()
    options = {"device": "cpu", "num_threads": 2, "kv_cache_memory": 1 << 22, "max_model_len": 64}
    engine = start_engine(EngineConfig(str(model), context_parallel_size=2, bind_ranks=False, **options))
    (rank,) = [each for each in psutil.Process().children() if each not in before]
    assert any(each.path.endswith(".weights") for each in rank.memory_maps())
    assert answer_of(engine) == first[0] and written == [True, False]


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "int4"])
def test_of_quantised_weights(quantization: str, tmp_path: Path, written: list[bool], folder: Path) -> None:
    model = saved("qwen2", tmp_path / "model")
    plain = answer(model)
    first, second = answer(model, quantization=quantization), answer(model, quantization=quantization)
    assert not first[1] and second[1] and first[0] == second[0] != plain[0]
    assert len(list(folder.iterdir())) == 2, "one for each way"


def test_a_changed_checkpoint_is_another_model(tmp_path: Path, written: list[bool]) -> None:
    model = saved("qwen2", tmp_path / "model")
    answer(model)
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert not answer(model)[1]


@pytest.mark.parametrize("harm", ["cut", "mark", "pickle", "empty", "foreign"])
def test_a_damaged_file_is_written_again(harm: str, tmp_path: Path, written: list[bool], folder: Path) -> None:
    model = saved("qwen2", tmp_path / "model")
    expected, _ = answer(model)
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    if harm == "cut":
        del content[-1:]
    elif harm == "mark":
        content[0] ^= 1
    elif harm == "pickle":
        content[-400:] = bytes(400)
    elif harm == "foreign":  # a class of no weights
        content = content.replace(b"headway.models.decoder", b"headway_models_decoder")
    file.write_bytes(b"" if harm == "empty" else bytes(content))
    assert answer(model) == (expected, False)
    assert written == [True, True] and answer(model) == (expected, True)


def test_it_can_be_left_out(tmp_path: Path, written: list[bool], folder: Path) -> None:
    model = saved("qwen2", tmp_path / "model")
    answer(model, weight_cache=False)
    assert not folder.exists() and written == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, written: list[bool], folder: Path) -> None:
    folder.parent.parent.mkdir()
    folder.parent.write_text("a file in the way")
    model = saved("qwen2", tmp_path / "model")
    assert answer(model) == answer(model)


def test_what_was_not_used_for_longest_goes(
    tmp_path: Path, written: list[bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved("qwen2", tmp_path / "model")
    answer(model)
    (first,) = folder.iterdir()
    os.utime(first, (1, 1))
    answer(model, quantization="int8")
    monkeypatch.setattr(weight_cache, "_MOST_BYTES", int(1.75 * first.stat().st_size))
    answer(model)  # used again
    os.utime(next(each for each in folder.iterdir() if each != first), (1, 1))
    answer(model, dtype="bfloat16")
    assert first in folder.iterdir() and len(list(folder.iterdir())) == 2
    monkeypatch.setattr(weight_cache, "_MOST_BYTES", 1)
    answer(model, quantization="int4")
    assert len(list(folder.iterdir())) == 2, "nothing is written that has no room"


def test_the_last_of_a_disk_stays_free(
    tmp_path: Path, written: list[bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved("qwen2", tmp_path / "model")
    disk_with(monkeypatch, free=100 << 20)  # of 2 GiB: under a twentieth
    assert answer(model) == answer(model)
    assert not folder.exists() and written == [False, False]


def test_what_a_killed_process_left_is_deleted(folder: Path, tmp_path: Path, written: list[bool]) -> None:
    folder.mkdir(parents=True)
    left, being_written = (folder / f".m-{number}.weights.1.ab" for number in range(2))
    for draft in (left, being_written):
        draft.write_bytes(b"half of it")
    os.utime(left, (0, 0))
    answer(saved("qwen2", tmp_path / "model"))
    assert written == [True]
    assert not left.exists() and being_written.exists()
