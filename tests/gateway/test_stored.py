"""Responses, files and batches: each is at one backend, and all requests for it go there."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.config_files.tenants import key_digest, parse_tenant_file
from tests.gateway.live_gateway import LiveGateway, file_text
from tests.server.conftest import model_folder, tokenizer  # noqa: F401
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually

ROW = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Say", "max_tokens": 5}}


def rows(count: int, **body: Any) -> bytes:
    each = [ROW | {"custom_id": f"r{at}", "body": {**ROW["body"], **body}} for at in range(count)]  # type: ignore[dict-item]
    return b"".join(json.dumps(row).encode() + b"\n" for row in each)


@pytest.fixture
def servers(tokenizer: Any, tmp_path: Path) -> Iterator[dict[str, LiveServer]]:  # noqa: F811
    found = {
        name: LiveServer(FakeEngine(tokenizer), tokenizer, data_dir=tmp_path / name, served_model_names=[MODEL, name])
        for name in ("a", "b")
    }
    for each in found.values():
        each.start()
    yield found
    for each in found.values():
        if each._thread.is_alive():
            each.stop()


def text_of(servers: dict[str, LiveServer], *names: str, **keys: Any) -> str:
    chosen = {name: servers[name].url for name in names or servers}
    return file_text(chosen, 'routing = "round-robin"', **{"kind": "headway", "batches": True, **keys})


def user(gateway: LiveGateway, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def upload(client: openai.OpenAI, content: bytes | None = None) -> Any:
    return client.files.create(file=("in.jsonl", io.BytesIO(content or rows(3))), purpose="batch")


def done(client: openai.OpenAI, batch: Any) -> Any:
    found = [batch]

    def is_over() -> bool:
        found[0] = client.batches.retrieve(batch.id)
        return found[0].status == "completed"

    eventually(is_over)
    return found[0]


def code_of(client: openai.OpenAI, path: str) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as caught:
        client.get(path, cast_to=object)
    return caught.value.status_code, str(caught.value.code)


def test_batches_run_at_the_backend_that_has_their_file(servers: dict[str, LiveServer]) -> None:
    with LiveGateway(text_of(servers)) as gateway, user(gateway) as client:
        files = [upload(client) for _ in range(4)]
        assert {len(servers[name].client.get("/v1/files").json()["data"]) for name in servers} == {2}
        batches = [
            client.batches.create(input_file_id=each.id, endpoint="/v1/completions", completion_window="24h")
            for each in files
        ]
        ended = [done(client, each) for each in batches]
        for each in ended:
            answers = [json.loads(line) for line in client.files.content(each.output_file_id).text.splitlines()]
            assert [answer["response"]["status_code"] for answer in answers] == [200] * 3
        assert client.files.retrieve(files[0].id).filename == "in.jsonl"
        assert len(client.files.list().data) == 8 and len(list(client.batches.list(limit=3))) == 4
        first = client.batches.list(limit=3)
        assert first.has_more and {each.id for each in first.data} < {each.id for each in batches}
        oldest = client.files.list(order="asc", limit=1, purpose="batch").data[0]
        assert oldest.id in (files[0].id, files[1].id)
        assert client.files.delete(files[0].id).deleted
        assert code_of(client, f"/files/{files[0].id}") == (404, "file_not_found")
        assert code_of(client, "/files/file-none") == (404, "file_not_found")
        assert code_of(client, "/batches/batch-none") == (404, "batch_not_found")
        assert code_of(client, "/files?limit=0")[0] == code_of(client, "/batches?after=none")[0] == 400
        with pytest.raises(openai.NotFoundError, match="no file"):
            client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")


def test_a_gateway_that_is_new_asks_who_has_it(servers: dict[str, LiveServer]) -> None:
    with LiveGateway(text_of(servers)) as before, user(before) as client:
        files = [upload(client) for _ in range(2)]
        responses = [client.responses.create(model=MODEL, input="hello", max_output_tokens=16) for _ in range(2)]
    with LiveGateway(text_of(servers)) as after, user(after) as client:
        for file in files:
            assert client.files.content(file.id).text
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            assert done(client, batch).request_counts.completed == 3
        for each in responses:
            assert client.responses.retrieve(each.id).id == each.id
            more = client.responses.create(model=MODEL, input="b", previous_response_id=each.id, max_output_tokens=16)
            assert more.previous_response_id == each.id


def test_a_file_goes_to_a_backend_that_has_the_model_of_its_first_line(servers: dict[str, LiveServer]) -> None:
    with LiveGateway(text_of(servers)) as gateway, user(gateway) as client:
        for _ in range(3):
            upload(client, rows(1, model="b"))
        assert len(servers["b"].client.get("/v1/files").json()["data"]) == 3
        with pytest.raises(openai.NotFoundError, match="'none' is not served"):
            upload(client, rows(1, model="none"))


def test_a_backend_that_is_gone_or_down_is_named(servers: dict[str, LiveServer], tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    with LiveGateway(text_of(servers), path) as gateway, user(gateway) as client:
        files = [upload(client) for _ in range(2)]
        at_b = next(each for each in files if servers["b"].client.get(f"/v1/files/{each.id}").status_code == 200)
        path.write_text(text_of(servers, "a"))
        gateway.call(gateway.gateway.reload_files)
        eventually(lambda: len(gateway.gateway.members) == 1)
        assert code_of(client, f"/files/{at_b.id}") == (410, "backend_gone")
        path.write_text(text_of(servers))
        gateway.call(gateway.gateway.reload_files)
        eventually(lambda: len(gateway.gateway.members) == 2)
        assert client.files.retrieve(at_b.id).id == at_b.id
        servers["b"].stop()
        eventually(lambda: gateway.gateway.members["b"].breaker.is_down)
        assert code_of(client, f"/files/{at_b.id}") == (503, "no_backend")
        assert code_of(client, "/files/file-unknown") == (503, "no_backend")
        assert code_of(client, "/files") == (503, "no_backend")


def test_tenants_see_their_own_files_and_those_with_limits_have_no_batches(servers: dict[str, LiveServer]) -> None:
    digests = {name: key_digest(name.encode()).hex() for name in ("acme", "blue", "few")}
    keys = "".join(f'[[key]]\ntenant = "{name}"\nsha256 = "{digest}"\n' for name, digest in digests.items())
    names = '[[tenant]]\nname = "acme"\n[[tenant]]\nname = "blue"\n[[tenant]]\nname = "few"\ntokens_per_minute = 9000\n'
    tenants = parse_tenant_file("", names + keys)
    with LiveGateway(text_of(servers), tenants=tenants) as gateway:
        acme, blue, few = (user(gateway, key) for key in ("acme", "blue", "few"))
        file = upload(acme)
        assert [each.id for each in acme.files.list()] == [file.id] and not blue.files.list().data
        assert code_of(blue, f"/files/{file.id}") == (404, "file_not_found")
        with pytest.raises(openai.PermissionDeniedError, match="not charged here"):
            few.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        stored = acme.responses.create(model=MODEL, input="hello", max_output_tokens=16)
        assert code_of(blue, f"/responses/{stored.id}") == (404, "response_not_found")
        for response_id in (stored.id, "resp_none", "a/b"):
            with pytest.raises(openai.BadRequestError) as caught:
                blue.responses.create(model=MODEL, input="b", previous_response_id=response_id)
            assert caught.value.code == "previous_response_not_found"
        for each in (acme, blue, few):
            each.close()


def test_without_a_backend_that_has_files_the_answer_says_so(servers: dict[str, LiveServer]) -> None:
    with LiveGateway(text_of(servers, batches=False)) as gateway, user(gateway) as client:
        for path in ("/files", "/batches"):
            assert code_of(client, path) == (404, "not_found")
        with pytest.raises(openai.NotFoundError, match="batches = true"):
            upload(client)
