"""A gateway has one server compute a prompt and another answer, where that pays; and the answer where that fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from headway.policy.admission.queue_bound import Place
from headway.policy.cache.handle import KEY_VARIABLE, Handle
from headway.policy.fleet.backend import LEARNT_ALL, Ask, Backend, alone
from headway.policy.fleet.handover import LEAST_TOKENS, HandoverRule
from headway.policy.step.step_time import StepWork
from tests.gateway.live_gateway import FAST, LiveGateway, events_of, file_text
from tests.server.conftest import model_folder, tokenizer  # noqa: F401
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually

LONG = "Once upon a time there was a fox. " * 20
HANDLE = Handle("127.0.0.1", 1, "a" * 32, 100, "b" * 32, "c" * 32, "d" * 64)
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def servers(tokenizer: Any) -> Iterator[dict[str, LiveServer]]:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, "a key that is long enough")
        found = {}
        for role in ("prefill", "decode"):
            engine = FakeEngine(tokenizer)
            engine.max_model_len, engine.config.role, engine.handle = 1024, role, HANDLE
            found[role] = LiveServer(engine, tokenizer).start()
        yield found
        for each in found.values():
            each.stop()


@pytest.fixture(autouse=True)
def forget(servers: dict[str, LiveServer]) -> None:
    for role, each in servers.items():
        each.engine.reset()
        each.engine.max_model_len, each.engine.config.role, each.engine.handle = 1024, role, HANDLE
        each.engine.finish_loading()


def gateway(servers: dict[str, LiveServer], when: str = "always") -> LiveGateway:
    entries = "".join(
        f'[[backend]]\nname = "{role}"\nrole = "{role}"\nkind = "headway"\nurl = "{each.url}"\nmodels = ["tiny"]\n'
        for role, each in servers.items()
    )
    return LiveGateway(f'handover = "{when}"\n{FAST}{entries}')


def ask(running: LiveGateway, path: str = PATHS[0], text: str = LONG, **fields: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return running.client.post(path, json={"model": "tiny", "max_tokens": 5, **asked, **fields})


def told(servers: dict[str, LiveServer]) -> tuple[list[Any], list[Any]]:
    return servers["prefill"].engine.requests, servers["decode"].engine.requests


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_is_computed_at_one_and_answered_at_the_other(servers: dict[str, LiveServer], path: str) -> None:
    """An answer that ends before the other server's last byte has come would end that as cancelled."""
    servers["decode"].engine.step_s = 0.05
    with gateway(servers) as running:
        answer = ask(running, path, include_timings=True, stop=["zzz"], logprobs=None)
        streamed = ask(
            running, path, "A crow sat in a tree. " * 20, stream=True, stream_options={"include_usage": True}
        )
        assert answer.status_code == 200, answer.text
        timings = answer.json()["timings"]
        assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
        # Both servers tell of theirs: the prompt was tokenized twice.
        assert timings["phases_ns"]["prefill_compute"] > 0 and "backend" not in timings["phases_ns"]
        assert "kv_transfer_params" not in answer.json()
        assert json.loads(events_of(streamed)[-2])["usage"]["completion_tokens"] == 5
        assert running.outcomes() == {"prefill": {"ok": 2}, "decode": {"ok": 2}}
        assert 'handovers_total{result="kept"} 2' in running.client.get("/metrics").text
    computed, answered = told(servers)
    assert [each.hands_over for each in computed] == [True, True]
    assert [each.params.max_tokens for each in computed] == [1, 1]
    assert [each.handle for each in answered] == [HANDLE, HANDLE]
    assert [each.prompt_token_ids for each in computed] == [each.prompt_token_ids for each in answered]


def test_the_second_is_asked_while_the_first_still_computes(servers: dict[str, LiveServer]) -> None:
    """What the gateway learns of the second is the time since the first had computed the prompt."""
    prefill, decode = servers["prefill"].engine, servers["decode"].engine
    prefill.chunks, prefill.holds, prefill.step_s, decode.open = 2, True, 0.02, False
    with gateway(servers) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, running, stream=True, include_timings=True)
        eventually(lambda: decode.requests)
        time.sleep(0.6)
        assert prefill.running and decode.requests[0].handle == HANDLE
        prefill.holds = False
        eventually(lambda: running.outcomes()["prefill"] == {"ok": 1})
        decode.open = True
        answer = asked.result()
        assert running.outcomes() == {"prefill": {"ok": 1}, "decode": {"ok": 1}}
        assert 0 < running.gateway.members["decode"].seen.received_ns < 0.5e9
        timings = json.loads(events_of(answer)[-2])["timings"]
        assert sum(timings["phases_ns"].values()) == timings["e2e_ns"] and "backend" not in timings["phases_ns"]


def test_a_client_that_goes_away_ends_both(servers: dict[str, LiveServer]) -> None:
    prefill, decode = servers["prefill"].engine, servers["decode"].engine
    prefill.chunks, prefill.holds, prefill.step_s, decode.open = 1, True, 0.02, False
    with gateway(servers) as running:
        with pytest.raises(httpx.ReadTimeout):
            running.client.post(PATHS[0], json={"model": "tiny", "prompt": LONG, "max_tokens": 5}, timeout=0.5)
        assert decode.requests
        eventually(lambda: not prefill.running and not decode.running)


def test_a_first_server_that_fails_midway_costs_no_request(servers: dict[str, LiveServer]) -> None:
    prefill, decode = servers["prefill"].engine, servers["decode"].engine
    prefill.chunks, prefill.holds, prefill.step_s, decode.open = 1, True, 0.02, False
    with gateway(servers) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, running)
        eventually(lambda: decode.requests)
        prefill.drops = "timeout"
        prefill.holds = False
        eventually(lambda: running.outcomes()["prefill"] == {"error_event": 1})
        decode.open = True
        assert asked.result().status_code == 200


def test_what_cannot_be_handed_over_is_computed_where_it_is_answered(servers: dict[str, LiveServer]) -> None:
    with gateway(servers) as running:
        for more in ({"n": 2}, {"prompt": [LONG, LONG]}, {"echo": True}, {"prompt_logprobs": 1}, {"prompt": "short"}):
            assert ask(running, **more).status_code == 200, more
        computed, answered = told(servers)
        assert not computed and not any(each.handle for each in answered) and len(answered) == 6
        servers["prefill"].engine.handle = None  # it has no room
        assert ask(running).status_code == 200 and told(servers)[1][-1].handle is None
    with gateway(servers, "never") as running:  # then both are servers like others
        answered.clear()
        assert all(ask(running, text=f"{at} {LONG}").status_code == 200 for at in range(4))
        assert not any(each.hands_over or each.handle for each in computed + answered)


def test_a_server_for_prompts_that_fails_costs_no_request_and_answers_where_it_is_alone(
    servers: dict[str, LiveServer],
) -> None:
    with gateway({**servers, "prefill": Gone()}) as running:  # type: ignore[dict-item]
        assert ask(running).status_code == 200 and told(servers)[1][-1].handle is None
    with gateway({**servers, "decode": Gone()}) as running:  # type: ignore[dict-item]
        assert ask(running).status_code == 200
        assert not told(servers)[0][-1].hands_over


class Gone:
    url = "http://127.0.0.1:1"


def test_a_client_cannot_make_a_server_of_another_role_hand_over(servers: dict[str, LiveServer]) -> None:
    params = {"do_remote_prefill": True, **msgspec.structs.asdict(HANDLE)}
    remote = {"do_remote_decode": True}
    cases = (
        ("prefill", params, {}, "needs a server with --role decode; this one has prefill"),
        ("decode", remote, {}, "needs a server with --role prefill; this one has decode"),
        ("prefill", remote, {}, "needs max_tokens 1 and n 1"),
        ("decode", {**params, **remote}, {}, "do_remote_decode and do_remote_prefill"),
        ("decode", {**params, "content": None}, {}, "has no content"),
        ("decode", params, {"prompt_logprobs": 1}, "without beam search and prompt_logprobs"),
    )
    for role, given, more, said in cases:
        body = {"prompt": LONG, "max_tokens": 5, "kv_transfer_params": given, **more}
        answer = servers[role].client.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"] and error["param"] == "kv_transfer_params"
    with LiveGateway(file_text({"a": servers["decode"].url}, kind="headway")) as running:
        assert running.client.post("/v1/completions", json={"prompt": LONG, "max_tokens": 2}).status_code == 200


# --- whether it pays ----------------------------------------------------------------------------------------


def learnt(name: str, token_ns: float) -> Backend:
    backend = alone(name)
    for tokens in range(LEARNT_ALL):
        backend.answered(
            StepWork(50 * (tokens % 40) + 10, tokens % 4), round(1e6 + (50 * (tokens % 40) + 10) * token_ns)
        )
    return backend


def test_a_prompt_goes_elsewhere_where_all_wait_less_for_it() -> None:
    prefill, decode = learnt("p", 1e4), learnt("d", 1e4)
    rule, ask_ = HandoverRule("auto"), Ask(list(range(1000)))
    decode.received_ns = 2e6  # what the transfer takes
    assert not rule.pays(ask_, prefill, decode)  # nobody decodes: the transfer alone decides
    streams = Place(decode.queues.of_all, next(iter(decode.queues.of_class.values())))
    streams.take(4, [0])
    assert rule.pays(ask_, prefill, decode)  # four would wait 10 ms each
    prompts = Place(prefill.queues.of_all, next(iter(prefill.queues.of_class.values())))
    prompts.take(9, [9000])
    assert not rule.pays(ask_, prefill, decode)  # it would wait behind nine long prompts there
    assert HandoverRule("always").pays(ask_, prefill, decode) and not HandoverRule("never").pays(ask_, prefill, decode)
    prompts.close(0)
    decode.sent(ask_)
    assert not rule.pays(ask_, prefill, decode)  # its keys and values are there
    assert not HandoverRule("always").pays(Ask(list(range(5000, 5000 + LEAST_TOKENS - 1))), prefill, decode)
