"""What the prefix cache gives up is found on disk or in Redis: the same tokens, whatever becomes of the store."""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import LLM
from headway.engine.build import EngineError
from headway.engine.messages import AddRequest
from headway.engine.offload import FolderStore, Offload, packed, unpacked
from headway.policy.cache.offload import LoadTime, page_names, root_name
from headway.policy.cache.swap import SwapSpace
from headway.policy.step.sampling_params import SamplingParams
from tests.engine.models import write_config

PROMPTS = [[(7 * i + 31 * j) % 500 + 5 for j in range(150 + 7 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def offload_of(llm: LLM) -> Offload:
    (offload,) = llm.engine.core.hooks
    assert isinstance(offload, Offload)
    return offload


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("tiny"))


def engine(folder: str, target: object, **settings: object) -> LLM:
    """An engine with room for 288 tokens, that takes loading to cost nothing."""
    options = {"kv_cache_memory": 288 * 512, "max_num_seqs": 4, "num_threads": 1, "max_model_len": 256} | settings
    where = None if target is None else str(target)
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        load_format="dummy",
        kv_offload=where,
        **options,
    )
    for offload in llm.engine.core.hooks:
        assert isinstance(offload, Offload)
        offload.policy.load_time = LoadTime(1e-6, 1e-6)
        host = llm.engine.core.scheduler.host
        host.space = SwapSpace(host.space.num_blocks)
        llm.engine.core.scheduler.accounting.step_time.prefill_ns = lambda tokens, start: 1e9  # type: ignore[method-assign]
    return llm


def ask(llm: LLM, number: int) -> tuple[list[int], int]:
    """The answer to a prompt, and how many tokens of it need not be computed."""
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[number]}], GREEDY)
    assert output.num_cached_tokens is not None
    return output.outputs[0].token_ids, output.num_cached_tokens


def settle(llm: LLM) -> None:
    """Wait until everything is written, and check the pool."""
    core, until = llm.engine.core, time.monotonic() + 20
    if (host := core.scheduler.host) is not None:
        while host.num_used and time.monotonic() < until:
            time.sleep(0.01)
        assert not host.num_used
    core.check()


@pytest.fixture(scope="module")
def answers(folder: str) -> list[list[int]]:
    llm = engine(folder, None, enable_prefix_caching=False)
    return [ask(llm, number)[0] for number in range(4)]


def asked_twice(llm: LLM, answers: list[list[int]]) -> list[int]:
    """Ask all, twice: each evicts the one before. Returns what was found of the second time's prompts."""
    found = []
    for number in (0, 1, 2, 3, 0, 1, 2, 3):
        tokens, cached = ask(llm, number)
        assert tokens == answers[number]
        found.append(cached)
        settle(llm)
    assert not any(found[:4])
    return found[4:]


def test_what_was_evicted_is_found_again_also_after_a_restart(
    folder: str, answers: list[list[int]], tmp_path: Path
) -> None:
    assert asked_twice(engine(folder, None), answers) == [0, 0, 0, 0]
    first = engine(folder, tmp_path)
    assert asked_twice(first, answers) == [len(prompt) // 16 * 16 for prompt in PROMPTS]
    counts = first.engine.core.scheduler.host.counts
    assert counts["load"] == 4 and counts["offload_in"] == sum(len(prompt) // 16 * 16 for prompt in PROMPTS)
    after = engine(folder, tmp_path)
    assert ask(after, 0) == (answers[0], 144)
    salted = AddRequest("salted", list(PROMPTS[0]), GREEDY, [], cache_salt="other")
    assert offload_of(after).awaited(salted) is None
    other = engine(folder, tmp_path, seed=1)  # other weights
    assert ask(other, 0)[1] == 0


def test_a_folder_takes_no_more_than_it_may(folder: str, answers: list[list[int]], tmp_path: Path) -> None:
    room = 100_000
    asked_last = engine(folder, tmp_path, kv_offload_size=room / 2**30)
    for number in range(4):
        assert ask(asked_last, number)[0] == answers[number]
        settle(asked_last)
    sizes = [page.stat().st_size for page in tmp_path.rglob("*.kv")]
    assert room / 2 < sum(sizes) <= room < sum(sizes) + max(sizes)


def test_what_is_damaged_is_computed_again_with_a_line(
    folder: str, answers: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that are cut, of other bytes, of another name or gone: what comes before them is of use."""
    llm = engine(folder, tmp_path)
    asked_twice(llm, answers)
    names = [list(page_names(root_name(""), prompt, 0, 16)) for prompt in PROMPTS]
    (pages,) = tmp_path.iterdir()
    paths = [[pages / f"{name.hex()}.kv" for name in of_prompt] for of_prompt in names]
    whole = paths[0][3].read_bytes()
    paths[0][3].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    paths[1][5].write_bytes(whole)
    paths[2][0].write_bytes(b"")
    paths[3][7].unlink()
    again = engine(folder, tmp_path)
    with caplog.at_level(logging.WARNING, "headway.engine"):
        for number, pages_left in enumerate((3, 5, 0, 7)):
            assert ask(again, number) == (answers[number], 16 * pages_left)
            settle(again)
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "a kept KV block was damaged, and is computed again"
    ] * 3
    assert ask(again, 0)[0] == answers[0]


def test_a_full_disk_ends_writing_with_one_line(
    folder: str, answers: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    llm = engine(folder, tmp_path)
    write = FolderStore.write

    def full(store: FolderStore, name: bytes, page: bytes) -> None:
        if sum(1 for _ in tmp_path.glob("*/*.kv")) >= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(store, name, page)

    monkeypatch.setattr(FolderStore, "write", full)
    with caplog.at_level(logging.WARNING, "headway.engine"):
        asked_twice(llm, answers)
    assert [r.message for r in caplog.records] == ["kv_offload: no more KV blocks are kept: No space left on device"]
    assert sum(1 for _ in tmp_path.glob("*/*")) == 5


def test_a_store_that_hangs_delays_nobody_for_long(
    folder: str, answers: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, held = engine(folder, tmp_path), threading.Event()
    asked_twice(llm, answers)
    monkeypatch.setattr("headway.policy.cache.offload.LEAST_WAIT_NS", 1e7)
    llm.engine.core.scheduler.accounting.step_time.prefill_ns = lambda tokens, start: 1e5  # type: ignore[method-assign]
    offload_of(llm).policy.load_time = LoadTime(1e-6, 1e-6)
    read = FolderStore.read

    def slow(store: FolderStore, name: bytes) -> bytes | None:
        held.wait(30)
        return read(store, name)

    monkeypatch.setattr(FolderStore, "read", slow)
    began = time.monotonic()
    assert ask(llm, 0) == (answers[0], 0)
    assert ask(llm, 1) == (answers[1], 0)  # which does not wait behind it
    assert time.monotonic() - began < 10
    held.set()
    assert llm.engine.core.scheduler.host.counts["late"] == 1
    settle(llm)


def test_what_computing_does_in_less_time_is_not_loaded(folder: str, answers: list[list[int]], tmp_path: Path) -> None:
    llm = engine(folder, tmp_path)
    asked_twice(llm, answers)
    offload_of(llm).policy.load_time = LoadTime(1e12, 0.0)
    assert ask(llm, 0) == (answers[0], 0)
    assert llm.engine.core.scheduler.host.counts["recompute_loadable"] == 1


def test_a_request_that_is_dropped_while_it_loads_leaves_nothing(
    folder: str, answers: list[list[int]], tmp_path: Path
) -> None:
    llm = engine(folder, tmp_path)
    asked_twice(llm, answers)
    core = llm.engine.core
    core.add(AddRequest("gone", list(PROMPTS[0]), GREEDY, []))
    assert "gone" in core.unready
    core.abort("gone")
    core.add(AddRequest("back", list(PROMPTS[0]), GREEDY, []))
    outputs = []
    while core.has_work:
        outputs += core.advance()
    assert sum((each.token_ids for each in outputs), []) == answers[0]
    settle(llm)


def test_a_folder_has_no_more_than_it_may(tmp_path: Path) -> None:
    page = packed(bytes(32), bytes(1000))
    names = [hashlib.sha256(bytes([number])).digest() for number in range(6)]
    for model, named in (("old", names[:2]), ("new", names[2:])):
        store = FolderStore(tmp_path, model, 4 * len(page))
        for name in named:
            store.write(name, page)
            time.sleep(0.002)
        store.read(named[0])
    kept = {path.name for path in tmp_path.glob("*/*.kv")}
    assert kept == {name.hex() + ".kv" for name in names[2:]}
    store.write(names[0], page)
    assert store.is_kept(names[2]) and not store.is_kept(names[3])
    assert store.read(names[3]) is None


def test_a_page_is_what_was_written_under_its_name() -> None:
    name, content = bytes(range(32)), b"keys and values"
    kept = packed(name, content)
    assert bytes(unpacked(name, kept, len(content)) or b"") == content
    assert unpacked(bytes(32), kept, len(content)) is None and unpacked(name, kept, 14) is None
    for at in range(len(kept)):
        assert unpacked(name, kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :], len(content)) is None


def test_names_stand_for_all_tokens_before() -> None:
    one, other = [1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 4, 5, 6, 7]
    names = list(page_names(root_name(""), one, 0, 3))
    assert len(names) == 2 and list(page_names(names[0], one, 3, 3)) == names[1:]
    assert not {*names} & {*page_names(root_name(""), other, 0, 3), *page_names(root_name("salt"), one, 0, 3)}


@pytest.mark.parametrize(
    ("target", "settings", "said"),
    [
        ("http://x", {}, "kv_offload is 'http://x'; it must be a folder or an address as redis://HOST:PORT"),
        ("/dev/null/x", {}, r"kv_offload: /dev/null/x cannot be used \(Not a directory\); name another folder"),
        ("x", {"enable_prefix_caching": False}, r"kv_offload: there is no prefix cache .*; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    folder: str, target: str, settings: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError, match=said):
        engine(folder, target, **settings)


@pytest.fixture
def redis_url() -> Iterator[str]:
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory", "50mb"]
    server = subprocess.Popen([*command, "--maxmemory-policy", "allkeys-lru"], stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_redis_keeps_pages_too(folder: str, answers: list[list[int]], redis_url: str) -> None:
    import redis

    assert asked_twice(engine(folder, redis_url), answers) == [len(prompt) // 16 * 16 for prompt in PROMPTS]
    after = engine(folder, redis_url)
    assert ask(after, 0) == (answers[0], 144)
    client = redis.Redis.from_url(redis_url)
    for key in client.scan_iter():
        client.set(key, b"damaged")
    settle(after)
    assert ask(after, 1) == (answers[1], 0)
    client.config_set("maxmemory-policy", "noeviction")
    with pytest.raises(EngineError, match="this Redis would keep all pages for ever"):
        engine(folder, redis_url)
    client.shutdown(nosave=True)
    assert ask(after, 2) == (answers[2], 0)
