"""An endpoint that has been looked at: what a run keeps beside its requests, and what it asks for."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from headway.bench import session as session_module
from headway.bench.client.asker import Asker, Reply
from headway.bench.client.load import LoadMode, Pace
from headway.bench.options import Target
from headway.bench.session import Session
from headway.load.errors import BenchError
from headway.load.record import RunResult
from headway.load.workload.build import Workload, build_workload
from headway.load.workload.spec import WorkloadSpec
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer


class CountingMeter:
    """Ten joules each time it is read."""

    def __init__(self) -> None:
        self.joules = 0.0

    def read(self) -> float:
        self.joules += 10
        return self.joules


@pytest.fixture(autouse=True)
def meters(monkeypatch: pytest.MonkeyPatch) -> list[CountingMeter]:
    made: list[CountingMeter] = []

    def make() -> CountingMeter:
        made.append(CountingMeter())
        return made[-1]

    monkeypatch.setattr(session_module, "energy_meter", make)
    monkeypatch.setattr(session_module, "EVERY_S", 0.05)
    return made


def workload_of(session: Session, count: int = 4, **options: int) -> Workload:
    spec = WorkloadSpec(random_input_len=4, random_output_len=3, num_prompts=count, users=1, **options)
    return build_workload(spec, session.source, chat=False)


async def measured(session: Session, workload: Workload, *, keep_text: bool = False) -> RunResult:
    return await session.measure(workload, Pace(LoadMode.CLOSED, 2), settings={"label": "a"}, keep_text=keep_text)


async def test_what_a_run_keeps(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await Session.open(Target(scripted.url))
    texts = iter(
        f"# TYPE vllm:x gauge\nvllm:num_requests_running 1\nvllm:generation_tokens_total {n}.0\n"
        for n in range(0, 900, 9)
    )
    seen: list[tuple[str, str, list[float]]] = []

    async def look(asker: Asker, method: str, route: str) -> Reply:
        assert (method, route) == ("GET", "/metrics")
        reply = Reply()
        reply.status = 200
        reply.body(next(texts).encode(), 1)
        return reply

    def metrics(before: str, after: str, gauges: list[tuple[float, object]]) -> dict[str, int]:
        seen.append((before, after, [at_s for at_s, _ in gauges]))
        return {"tokens": 9}

    monkeypatch.setattr(Asker, "look", look)
    monkeypatch.setattr(session_module, "server_metrics", metrics)
    result = await measured(session, workload_of(session, 40))
    assert len(result.records) == 40 and all(record.ok and record.text is None for record in result.records)
    assert result.settings == {"label": "a"}
    about = {"name": "vLLM", "version": "0.32.0", "model": "scripted", "max_model_len": 4096}
    about |= {"on_this_machine": True, "metrics": {"tokens": 9}}
    assert result.server == about
    assert result.energy_joules is not None and result.energy_joules > 0
    ((before, after, gauges),) = seen
    assert before != after and all(at_s >= 0 for at_s in gauges) and gauges == sorted(gauges)


async def test_text_is_kept_on_demand(scripted: ScriptedServer) -> None:
    session = await Session.open(Target(scripted.url))
    result = await measured(session, workload_of(session), keep_text=True)
    assert {record.text for record in result.records} == {"tok tok tok "}


async def test_a_server_elsewhere_has_its_own_energy(
    scripted: ScriptedServer, meters: list[CountingMeter], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await Session.open(Target(scripted.url))
    seen = iter([False])
    monkeypatch.setattr(session_module, "runs_here", lambda host, port: next(seen))
    result = await measured(session, workload_of(session))
    assert result.energy_joules is None and result.server["on_this_machine"] is False and not meters


async def test_a_proxy_that_is_seen_only_after_the_run_has_no_energy(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await Session.open(Target(scripted.url))
    seen = iter([True, False])
    monkeypatch.setattr(session_module, "runs_here", lambda host, port: next(seen))
    result = await measured(session, workload_of(session))
    assert result.energy_joules is None and result.server["on_this_machine"] is False


async def test_all_warm_ups_failed(scripted: ScriptedServer) -> None:
    session = await Session.open(Target(scripted.url))
    cut = dataclasses.replace(session.server.endpoint, extra_body={"script": {"fail": "cut"}})
    session = dataclasses.replace(session, server=dataclasses.replace(session.server, endpoint=cut))
    workload = workload_of(session)
    with pytest.raises(BenchError, match=f"^{scripted.url}: all 2 warm-up requests failed"):
        await session.measure(workload, Pace(LoadMode.CLOSED, 1), settings={}, warm_ups=workload.requests[:2])


async def test_stopped(scripted: ScriptedServer) -> None:
    session = await Session.open(Target(scripted.url))
    stop = asyncio.Event()
    stop.set()
    result = await session.measure(workload_of(session, 50), Pace(LoadMode.CLOSED, 1), settings={}, stop=stop)
    assert result.interrupted and result.settings["never_due"] > 0


async def test_two_sessions_do_not_disturb_each_other(scripted: ScriptedServer) -> None:
    sessions = [await Session.open(Target(scripted.url)) for _ in range(2)]
    results = await asyncio.gather(*(measured(each, workload_of(each)) for each in sessions))
    assert all(len(result.records) == 4 and all(each.ok for each in result.records) for result in results)


@pytest.mark.parametrize(
    ("wish", "made_up", "asks"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
async def test_the_end_token(scripted: ScriptedServer, wish: bool | None, made_up: bool, asks: bool) -> None:
    session = await Session.open(Target(scripted.url, ignore_eos=wish), made_up=made_up)
    assert session.server.endpoint.ignore_eos is asks


async def test_a_server_of_which_nobody_knows(scripted: ScriptedServer) -> None:
    """It may ignore the wish: it is not asked for what was not wished."""
    with ScriptedServer(script=script()) as server:
        assert (await Session.open(Target(server.url))).server.endpoint.ignore_eos is False


def test_how_a_target_is_asked() -> None:
    endpoint = Target(
        "http://here:1/v1", backend="openai-chat", path="/v9/chat", model="m", api_key="k", headers={"x": "y"},
        insecure=True, request_timeout_s=9, ignore_eos=True, top_k=3, temperature=0.5, extra_body={"a": 1, "top_k": 4},
    ).endpoint()  # fmt: skip
    assert endpoint.api == "chat" and endpoint.route == "/v9/chat" and endpoint.model == "m"
    assert endpoint.api_key == "k" and endpoint.headers == {"x": "y"} and endpoint.insecure
    assert endpoint.timeout_s == 9 and endpoint.ignore_eos
    assert endpoint.extra_body == {"a": 1, "temperature": 0.5, "top_k": 4}
    endpoint = Target(host="here", port=1, backend="vllm", model="folder", served_model_name="m").endpoint()
    assert (endpoint.base_url, endpoint.route, endpoint.model) == ("http://here:1", "/v1/completions", "m")
