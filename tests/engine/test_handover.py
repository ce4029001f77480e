"""Prompts that one engine computes and another goes on with: the same tokens, whatever happens between the two."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway import LLM
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.handover import _END, _HEAD, _KEPT, _PART, Handovers
from headway.engine.messages import AddRequest, SequenceOutput
from headway.engine.prepare import EngineError
from headway.policy.cache.handle import KEY_VARIABLE, Handle
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.sampling_params import SamplingParams
from tests.engine.models import TINY_GPT_OSS, TINY_LATENT, write_config
from tests.models import tiny

PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(3 + 29 * i)] for i in range(5)]  # some end with a block
DRAWN = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=7)
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"dtype": "float32"}),
    "int8": ({}, {"dtype": "float32", "kv_cache_dtype": "int8"}),
    "windows": (TINY_GPT_OSS, {"dtype": "bfloat16"}),
    "latent": (TINY_LATENT, {"dtype": "float32"}),
    "ranks": ({}, {"dtype": "float32", "context_parallel_size": 2, "num_threads": 2}),
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a key that is long enough")


@functools.lru_cache(maxsize=8)
def engine(folder: str, **settings: Any) -> EngineCore:
    options = {"kv_cache_memory": 4 << 20, "num_threads": 1, "max_model_len": 256, "swap_space": 0.01} | settings
    if options.get("role") == "prefill":  # in chunks
        options |= {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    return LLM(folder, skip_tokenizer_init=True, device="cpu", load_format="dummy", **options).engine.core


def ended(core: EngineCore) -> dict[str, tuple[list[int], SequenceOutput]]:
    """All further tokens and the last output of each request that an engine has."""
    said: dict[str, list[int]] = {}
    last: dict[str, SequenceOutput] = {}
    until = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < until
        time.sleep(core.waits_ms / 1e3)
        for output in core.step().outputs:
            assert output.error is None
            said.setdefault(output.request_id, []).extend(output.token_ids)
            last[output.request_id] = output
    core.check()
    return {name: (said[name], last[name]) for name in said}


def run(core: EngineCore, **requests: AddRequest) -> dict[str, tuple[list[int], SequenceOutput]]:
    """Do as ended() does with these requests."""
    for request in requests.values():
        core.add(request)
    return ended(core)


def asked(name: str, prompt: list[int], params: SamplingParams = DRAWN, **more: Any) -> AddRequest:
    return AddRequest(name, list(prompt), params, [], sent_ns=time.monotonic_ns(), **more)


def handles(core: EngineCore, **prompts: list[int]) -> dict[str, Handle]:
    """The handles of prompts that an engine has computed."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    found = run(core, **{name: asked(name, prompt, params, hands_over=True) for name, prompt in prompts.items()})
    made = {name: last.handle for name, (_, last) in found.items()}
    assert all(each is not None for each in made.values())
    return made  # type: ignore[return-value]


def begun(giver: EngineCore, prompt: list[int]) -> Handle:
    """The handle of a prompt of which the first chunk is computed, and some more are to come."""
    giver.scheduler.blocks.reset_prefix_cache()
    giver.add(asked("one", prompt, SamplingParams(max_tokens=1, ignore_eos=True), hands_over=True))
    (output,) = giver.step().outputs
    assert output.handle is not None and output.finish_reason is None and output.timings is not None
    return output.handle


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] * (family == "ranks")) for family in FAMILIES]
)
def test_two_engines_say_what_one_says(tmp_path: Path, family: str) -> None:
    changes, settings = FAMILIES[family]
    folder = write_config(tmp_path / family, **changes)
    one, giver, taker = (engine(folder, role=role, **settings) for role in ("both", "prefill", "decode"))
    prompts = {str(number): prompt for number, prompt in enumerate(PROMPTS)}
    alone = run(one, **{name: asked(name, prompt) for name, prompt in prompts.items()})
    for attempt in ("cold", "in the prefix cache"):
        given = handles(giver, **prompts)
        named = {f"{name} {attempt}": asked(f"{name} {attempt}", prompts[name], handle=given[name]) for name in given}
        told = run(taker, **named)
        for name in prompts:
            tokens, last = told[f"{name} {attempt}"]
            assert tokens == alone[name][0]
            assert last.timings is not None
            assert last.timings.phases_ns[Phase.KV_TRANSFER] > 0 and last.cached_tokens == len(prompts[name]) - 1
            assert sum(last.timings.phases_ns.values()) == last.timings.ended_ns - named[f"{name} {attempt}"].sent_ns
        host = taker.scheduler.host
        assert host is not None and not host.lent
    assert host.counts["taken"] == 2 * len(PROMPTS)
    time.sleep(0.05)
    run(giver, last=asked("last", PROMPTS[0]))
    assert giver.scheduler.host is not None and giver.scheduler.host.num_used == 0
    assert giver.scheduler.host.counts["fetched"] == 2 * len(PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def of(core: EngineCore) -> Handovers:
    return next(hook for hook in core.hooks if isinstance(hook, Handovers))


def signed(core: EngineCore, handle: Handle, **changes: Any) -> Handle:
    return of(core)._signed(msgspec.structs.replace(handle, **changes))


# What becomes of a handle before it is used, how the taker counts that, and what its log says.
STALE: dict[str, tuple[Callable[[EngineCore, Handle], Handle], str, str]] = {
    "of another prompt": (lambda giver, handle: handles(giver, other=PROMPTS[2])["other"], "refused", "another prompt"),
    "of another model": (lambda giver, handle: signed(giver, handle, layout="0" * 32), "refused", "another model"),
    "of a stranger": (lambda giver, handle: msgspec.structs.replace(handle, remote_port=1), "refused", "not signed"),
    "given up": (lambda giver, handle: expired(giver, handle), "lost", "does not have it any more"),
    "used for another prompt there": (lambda giver, handle: reused(giver, handle), "lost", "under its name"),
    "of an engine that is gone": (lambda giver, handle: signed(giver, handle, remote_port=closed()), "lost", "is gone"),
}


def expired(giver: EngineCore, handle: Handle) -> Handle:
    assert giver.scheduler.host is not None
    of(giver)._kept[handle.remote_request_id].until_ns = 0
    of(giver).sweep()
    assert handle.remote_request_id not in giver.scheduler.host.lent and giver.scheduler.host.counts["expired"]
    return handle


def reused(giver: EngineCore, handle: Handle) -> Handle:
    """The name now has what was computed of another prompt: its keys and values must not answer this one."""
    other = handles(giver, other=PROMPTS[2])["other"]
    of(giver)._kept[handle.remote_request_id] = of(giver)._kept.pop(other.remote_request_id)
    return handle


def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("case", STALE)
def test_a_prompt_whose_handle_is_no_good_is_computed_again(
    folder: str, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    giver, taker = engine(folder, role="prefill", dtype="float32"), engine(folder, role="decode", dtype="float32")
    alone = run(engine(folder, dtype="float32"), one=asked("one", PROMPTS[3]))["one"][0]
    spoil, outcome, said = STALE[case]
    host = taker.scheduler.host
    assert host is not None
    before = host.counts[outcome]
    handle = spoil(giver, handles(giver, one=PROMPTS[3])["one"])
    assert run(taker, one=asked("one", PROMPTS[3], handle=handle))["one"][0] == alone
    assert host.counts[outcome] == before + 1 and said in caplog.text and host.num_used == 0
    of(giver)._kept.clear()
    assert giver.scheduler.host is not None
    while giver.scheduler.host.lent:
        giver.scheduler.host.free(giver.scheduler.host.lent.popitem()[1])


# --- while the prompt is being computed ---------------------------------------------------------------------


def test_parts_come_while_the_next_ones_are_computed(folder: str) -> None:
    """The time that is left for the transfer is that since the prompt was computed."""
    giver, taker = engine(folder, role="prefill", dtype="float32"), engine(folder, role="decode", dtype="float32")
    alone = run(engine(folder, dtype="float32"), one=asked("one", PROMPTS[4]))["one"][0]
    handle = begun(giver, PROMPTS[4])
    request, rows = asked("one", PROMPTS[4], handle=handle), of(taker)._blocks.rows
    rows[:] = 0
    taker.add(request)
    until = time.monotonic() + 10
    while not rows.any():
        assert time.monotonic() < until
        taker.step()
    time.sleep(0.6)  # the giver is busy with others
    assert taker.unready
    ended(giver)
    said, last = ended(taker)["one"]
    assert said == alone and last.timings is not None
    phases = last.timings.phases_ns
    assert 0 < phases[Phase.KV_TRANSFER] < 0.5e9 and sum(phases.values()) == last.timings.ended_ns - request.sent_ns
    time.sleep(0.05)
    of(giver).sweep()
    assert giver.scheduler.host is not None and giver.scheduler.host.num_used == 0


def preempted(giver: EngineCore) -> None:
    (sequence,) = giver.scheduler.running
    giver.scheduler.sequences.preempt(sequence, StepPlan(), time.monotonic_ns())
    giver._drop(sequence.seq_id)
    ended(giver)


# What becomes of a prompt after its first chunk, what the taker counts, and what its log says.
MIDWAY: dict[str, tuple[Callable[[EngineCore], None], str, str]] = {
    "preempted, and computed later": (preempted, "taken", ""),
    "dropped": (lambda giver: giver.abort("one"), "lost", "is gone"),
    "not gone on with": (lambda giver: None, "lost", "did not come within 1 s"),
}


@pytest.mark.parametrize("case", MIDWAY)
def test_a_prompt_that_is_fetched_in_parts_comes_whole_or_is_computed_again(
    folder: str, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    giver = engine(folder, role="prefill", dtype="float32")
    taker = engine(folder, role="decode", dtype="float32", kv_transfer_timeout=1.0)
    alone = run(engine(folder, dtype="float32"), one=asked("one", PROMPTS[4]))["one"][0]
    goes_on, outcome, said = MIDWAY[case]
    host, handle = taker.scheduler.host, begun(giver, PROMPTS[4])
    assert host is not None and giver.scheduler.host is not None
    before = host.counts[outcome]
    taker.add(asked("one", PROMPTS[4], handle=handle))
    time.sleep(0.05)
    goes_on(giver)
    assert ended(taker)["one"][0] == alone
    assert host.counts[outcome] == before + 1 and said in caplog.text and host.num_used == 0
    giver.abort("one")
    time.sleep(0.05)
    of(giver).sweep()
    assert giver.scheduler.host.num_used == 0


# What an engine sends of a prompt of so many blocks of so many bytes, and what the taker's log says.
PARTS: dict[str, tuple[Callable[[Handle, int, int], bytes], str]] = {
    "ends after a part": (lambda handle, blocks, size: _PART.pack(1) + bytes(size), "is gone"),
    "has too many blocks": (lambda handle, blocks, size: _PART.pack(blocks + 1), "came 9"),
    "has an empty part": (lambda handle, blocks, size: _PART.pack(0), "came 0"),
    "has an early part of another prompt": (
        lambda handle, blocks, size: _PART.pack(blocks) + bytes(blocks * size) + _END.pack(b"0" * 32, 0, 0),
        "ended as another prompt",
    ),
    "has no ledger at its end": (
        lambda handle, blocks, size: (
            _PART.pack(blocks) + bytes(blocks * size) + _END.pack(handle.content.encode(), 0, 1) + b"!"
        ),
        "no ledger",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_are_wrong_are_not_used(
    folder: str, case: str, silent: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    giver, taker = engine(folder, role="prefill", dtype="float32"), engine(folder, role="decode", dtype="float32")
    alone = run(engine(folder, dtype="float32"), one=asked("one", PROMPTS[4]))["one"][0]
    sends, said = PARTS[case]
    handle = signed(giver, handles(giver, one=PROMPTS[4])["one"], remote_port=silent.getsockname()[1])
    taker.add(asked("one", PROMPTS[4], handle=handle))
    assert taker.scheduler.host is not None
    blocks, size = len(taker.scheduler.host.lent[handle.remote_request_id].host_blocks), of(taker)._blocks.block_bytes
    with silent.accept()[0] as connection:
        head = _HEAD.pack(_KEPT, handle.content.encode(), handle.num_tokens, blocks, size)
        connection.sendall(head + sends(handle, blocks, size))
    assert ended(taker)["one"][0] == alone and said in caplog.text and taker.scheduler.host.num_used == 0
    expired(giver, handle)


def test_an_engine_that_says_nothing_is_waited_for_no_longer_than_the_limit(folder: str, silent: socket.socket) -> None:
    """Others go on meanwhile, and a request that is dropped leaves no block behind."""
    giver = engine(folder, role="prefill", dtype="float32")
    taker = engine(folder, role="decode", dtype="float32", kv_transfer_timeout=0.3)
    handle = handles(giver, one=PROMPTS[3])["one"]
    nowhere = [
        signed(giver, handle, remote_port=silent.getsockname()[1], remote_request_id=f"{at:032}") for at in (1, 2)
    ]
    alone = run(engine(folder, dtype="float32"), one=asked("one", PROMPTS[3]))["one"][0]
    taker.add(asked("dropped", PROMPTS[3], handle=nowhere[1]))
    taker.abort("dropped")
    began = time.monotonic()
    found = run(taker, one=asked("one", PROMPTS[3], handle=nowhere[0]), other=asked("other", PROMPTS[1]))
    assert found["one"][0] == alone
    assert 0.3 <= time.monotonic() - began < 5
    one, other = (found[name][1].timings for name in ("one", "other"))
    assert one is not None and other is not None and other.ended_ns < one.ended_ns
    assert taker.scheduler.host is not None
    time.sleep(0.05)
    of(taker).sweep()
    assert taker.scheduler.host.num_used == 0


def test_handles_have_the_port_that_was_asked_for(folder: str) -> None:
    port = closed()
    giver = engine(folder, role="prefill", kv_transfer_port=port)
    assert handles(giver, one=PROMPTS[3])["one"].remote_port == port


def test_an_engine_without_room_keeps_nothing_and_says_so(folder: str) -> None:
    giver = engine(folder, role="prefill", dtype="float32", swap_space=3 * 8192 / 2**30)  # three blocks
    params = SamplingParams(max_tokens=1)
    found = run(giver, one=asked("one", PROMPTS[4], params, hands_over=True))
    assert found["one"][1].handle is None
    assert giver.scheduler.host is not None and giver.scheduler.host.counts["not_kept"] == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 2, "num_threads": 2}, "several ranks are not handed over"),
        ({"record_steps": "/dev/null"}, "leave record_steps out"),
        ({"swap_space": 0.0}, "has no room"),
        ({"kv_transfer_host": "192.0.2.1"}, "where this server cannot listen"),
        ({"model": "hybrid"}, "states of recurrent layers are not handed over"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_at_the_start(
    tmp_path: Path, folder: str, settings: dict[str, Any], said: str
) -> None:
    if "model" in settings:
        folder, settings = str(tmp_path), {}
        tiny.save("lfm2", tmp_path, {"max_position_embeddings": 256, "eos_token_id": 0})
    with pytest.raises((ValueError, EngineError), match=said):
        engine.__wrapped__(folder, role="prefill", **settings)


def test_a_role_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ValueError, match=f"needs a key of 16 characters or more .* set {KEY_VARIABLE}"):
        EngineConfig(role="decode")
