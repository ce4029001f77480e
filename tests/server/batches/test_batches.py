"""Files and batches, as the `openai` client uses them."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headway.config_files.tenants import Access, TenantFile, key_digest
from headway.server.batches import lines, worker
from headway.server.batches.store import Store
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually

UPLOAD: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"x" * 100}}
DONE = ("completed", "failed", "expired", "cancelled")
DAY_S = 24 * 3600
CHAT = "/v1/chat/completions"
StartServer = Callable[..., LiveServer]


def asked(number: int, **body: Any) -> dict[str, Any]:
    content = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 5, **body}
    return {"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": content}


def jsonl(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


class User:
    """Somebody with the `openai` client."""

    def __init__(self, server: LiveServer, key: str = "none") -> None:
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)

    def upload(self, content: bytes, **further: Any) -> Any:
        return self.openai.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch", **further)

    def begin(self, *rows: Any, window: str = "24h", endpoint: str = CHAT, **further: Any) -> Any:
        file = self.upload(jsonl(*rows))
        create: Any = self.openai.batches.create
        return create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **further)

    def until(self, batch: Any, *statuses: str) -> Any:
        found = [batch]

        def is_there() -> bool:
            found[0] = self.openai.batches.retrieve(batch.id)
            return found[0].status in (statuses or DONE)

        eventually(is_there)
        return found[0]

    def rows(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self.openai.files.content(file_id).text.splitlines()]


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("data")
    server = LiveServer(FakeEngine(tokenizer), tokenizer, data_dir=folder, max_file_size=2**20).start()
    yield server
    server.stop()


@pytest.fixture
def user(served: LiveServer) -> Iterator[User]:
    served.engine.reset()
    user = User(served)
    yield user
    served.engine.open = True
    eventually(lambda: not served.engine.running)
    user.openai.close()


# --- files ------------------------------------------------------------------------------------------


def test_a_file_is_kept_listed_and_deleted(user: User) -> None:
    content = jsonl(asked(1)) + "ünïcode".encode()
    file = user.upload(content)
    assert (file.object, file.purpose, file.filename, file.bytes) == ("file", "batch", "in.jsonl", len(content))
    assert file.expires_at == file.created_at + 30 * DAY_S, "as OpenAI keeps files of batches"
    assert user.openai.files.retrieve(file.id) == file
    assert user.openai.files.content(file.id).read() == content
    assert user.openai.files.delete(file.id).deleted
    for gone in (user.openai.files.retrieve, user.openai.files.content, user.openai.files.delete):
        with pytest.raises(openai.NotFoundError) as error:
            gone(file.id)
        assert error.value.code == "file_not_found"


def test_lists_come_in_pages(user: User) -> None:
    mine = [user.upload(b"{}").id for _ in range(5)]
    found = [file.id for file in user.openai.files.list(limit=2)]  # the client follows the pages
    assert found[:5] == mine[::-1]
    assert [file.id for file in user.openai.files.list(order="asc", after=mine[1])][:3] == mine[2:]
    assert [file.id for file in user.openai.files.list(purpose="batch_output")].count(mine[0]) == 0
    page = user.openai.files.list(limit=2)
    assert page.has_more and len(page.data) == 2
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"after": "file-gone"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            user.openai.files.list(**wrong)


def test_a_file_can_expire(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    file = user.upload(b"{}", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    now = time.time()
    monkeypatch.setattr("headway.server.batches.store.time.time", lambda: now + 3599)
    assert user.openai.files.retrieve(file.id) == file
    monkeypatch.setattr("headway.server.batches.store.time.time", lambda: now + 3601)
    with pytest.raises(openai.NotFoundError):
        user.openai.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        ({"files": {"purpose": (None, b"batch")}}, 400, "file"),
        ({"data": {"purpose": "batch", "file": "text"}, "files": {"other": b"x"}}, 400, "other"),
        ({"data": {}, "files": {"file": b"x"}}, 400, "purpose"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400, "purpose"),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "5"}, "files": {"file": b"x"}}, 400, "anchor"),
        (
            {
                "data": {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "5",
                },
                "files": {"file": b"x"},
            },
            400,
            "seconds",
        ),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * (2**20 + 1)}}, 413, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * 2**22}}, 413, "file"),
        ({"json": {"purpose": "batch"}}, 400, None),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=y"}}, 400, None),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
    ],
)
def test_bad_uploads(served: LiveServer, form: dict[str, Any], status: int, param: str | None) -> None:
    answer = httpx.post(f"{served.url}/v1/files", **form)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    if status == 413:
        assert answer.json()["error"]["code"] == "file_too_large"


def test_without_a_data_folder_the_answer_says_how_to_have_one(server: LiveServer) -> None:
    for asked_for in ("GET /v1/files", "POST /v1/files", "POST /v1/batches", "GET /v1/batches/x"):
        answer = server.client.request(*asked_for.split(), json={})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_data_dir"
        assert "--data-dir" in answer.json()["error"]["message"]


# --- batches ----------------------------------------------------------------------------------------


def test_a_batch_is_answered_in_order(user: User, served: LiveServer) -> None:
    rows = [asked(number) for number in range(20)]
    batch = user.begin(*rows, metadata={"what": "test"})
    assert batch.metadata == {"what": "test"}
    batch = user.until(batch)
    assert (batch.status, batch.error_file_id, batch.model, batch.errors) == ("completed", None, MODEL, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.expires_at == batch.created_at + 24 * 3600
    answers = user.rows(batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [row["custom_id"] for row in rows]
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
        assert answer["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert len({answer["id"] for answer in answers}) == 20
    assert batch.usage.output_tokens == 20 * 5
    assert batch.usage.total_tokens == sum(answer["response"]["body"]["usage"]["total_tokens"] for answer in answers)
    assert {request.service_class for request in served.engine.requests} == {"offline"}
    assert user.openai.files.retrieve(batch.output_file_id).purpose == "batch_output"
    user.openai.files.delete(batch.output_file_id)


def test_completions_can_be_asked_for(user: User) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 3}}
    batch = user.until(user.begin(row, endpoint="/v1/completions"))
    assert user.rows(batch.output_file_id)[0]["response"]["body"]["object"] == "text_completion"


def test_malformed_lines_are_in_the_error_file_and_the_rest_runs(user: User) -> None:
    body = asked(0)["body"]
    bad: list[tuple[Any, str]] = [
        (b"{not json", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        ([1], "invalid_json_line"),
        ({"custom_id": "no-body", "method": "POST", "url": CHAT}, "invalid_json_line"),
        ({"custom_id": 5, "method": "POST", "url": CHAT, "body": body}, "invalid_json_line"),
        ({"custom_id": "get", "method": "GET", "url": CHAT, "body": body}, "invalid_method"),
        ({"custom_id": "list", "method": "POST", "url": CHAT, "body": []}, "invalid_body"),
        (asked(90, stream=True), "invalid_body"),
        (asked(91, service_class="interactive"), "invalid_body"),
        (asked(92, service_tier="priority"), "invalid_body"),
    ]
    refused = [asked(93, temperature=-1), asked(94, max_tokens="5"), asked(95, no_such_field=1)]
    rows = [asked(1), *(row for row, _ in bad), b"", *refused, asked(2)]
    batch = user.until(user.begin(*rows))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (15, 2, 13)
    assert [row["custom_id"] for row in user.rows(batch.output_file_id)] == ["request-1", "request-2"]
    errors = user.rows(batch.error_file_id)
    assert [row["error"]["code"] for row in errors[:10]] == [code for _, code in bad]
    assert [row["custom_id"] for row in errors[3:8]] == ["no-body", None, "get", "list", "request-90"]
    for row, param in zip(errors[10:], ("temperature", "max_tokens", "no_such_field"), strict=True):
        assert row["response"]["status_code"] == 400
        assert row["response"]["body"]["error"]["param"] == param


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        ([], "empty_file", None),
        ([asked(1), asked(2), asked(1)], "duplicate_custom_id", 3),
        ([asked(1), {**asked(2), "url": "/v1/images/generations"}], "invalid_url", 2),
        ([{**asked(1), "url": "/v1/completions"}], "invalid_url", 1),
        ([asked(1, model="gpt-17")], "model_not_found", 1),
    ],
)
def test_a_batch_that_cannot_run_fails_and_says_why(user: User, rows: list[Any], code: str, line: int | None) -> None:
    batch = user.until(user.begin(*rows))
    assert batch.status == "failed" and batch.failed_at is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, line)]
    assert batch.output_file_id is None and batch.error_file_id is None
    assert batch.request_counts.completed == 0


def test_too_many_requests(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_REQUESTS", 3)
    batch = user.until(user.begin(*(asked(number) for number in range(4))))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "too_many_requests")


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"input_file_id": "file-gone"}, 404, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"model": MODEL}, 400, "model"),
    ],
)
def test_bad_batches(user: User, served: LiveServer, changes: dict[str, Any], status: int, param: str) -> None:
    file = user.upload(jsonl(asked(1)))
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **changes}
    answer = served.post("/v1/batches", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_bug_ends_a_batch_with_what_it_has(user: User, served: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    post = served.app.state.batches._post

    async def fail_on_the_last(path: str, body: bytes, tenant: str) -> Any:
        if b"Say 19" in body:
            raise ZeroDivisionError
        return await post(path, body, tenant)

    monkeypatch.setattr(served.app.state.batches, "_post", fail_on_the_last)
    batch = user.until(user.begin(*(asked(number) for number in range(20))))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "internal_error")
    assert len(user.rows(batch.output_file_id)) == batch.request_counts.completed


def test_output_is_no_input(user: User, served: LiveServer) -> None:
    batch = user.until(user.begin(asked(1)))
    body = {"input_file_id": batch.output_file_id, "endpoint": CHAT, "completion_window": "24h"}
    assert served.post("/v1/batches", **body).json()["error"]["param"] == "input_file_id"


def test_batches_are_listed_in_pages(user: User) -> None:
    begun = [user.begin(asked(number)).id for number in range(3)]
    assert [batch.id for batch in user.openai.batches.list(limit=1)][:3] == begun[::-1]
    with pytest.raises(openai.BadRequestError):
        user.openai.batches.list(limit=101)
    with pytest.raises(openai.NotFoundError):
        user.openai.batches.retrieve("batch_gone")
    with pytest.raises(openai.NotFoundError):
        user.openai.batches.cancel("batch_gone")


def test_progress_can_be_seen_and_a_batch_cancelled(user: User, served: LiveServer) -> None:
    served.engine.step_s = 0.005
    batch = user.begin(*(asked(number) for number in range(300)))
    eventually(lambda: user.openai.batches.retrieve(batch.id).request_counts.completed >= 5)
    served.engine.open = False
    eventually(lambda: len(served.engine.running) >= 4)
    text = served.client.get("/metrics").text
    found = re.search(r'^headway:batches{.*status="in_progress"} (\S+)', text, re.MULTILINE)
    assert found is not None and float(found[1]) >= 1
    left = re.search(r"^headway:batch_requests_waiting{.*} (\S+)", text, re.MULTILINE)
    assert left is not None and 0 < float(left[1]) < 300
    with pytest.raises(openai.ConflictError) as error:
        user.openai.files.delete(batch.input_file_id)
    assert error.value.code == "file_in_use"
    assert user.openai.batches.cancel(batch.id).status == "cancelling"
    batch = user.until(batch)
    eventually(lambda: not served.engine.running)  # what was in the engine is dropped there
    assert (batch.status, batch.cancelled_at is not None) == ("cancelled", True)
    counts = batch.request_counts
    assert counts.completed >= 5 and counts.completed + counts.failed == 300
    answers, errors = user.rows(batch.output_file_id), user.rows(batch.error_file_id)
    assert (len(answers), len(errors)) == (counts.completed, counts.failed)
    assert {row["error"]["code"] for row in errors} == {"batch_cancelled"}
    assert {row["custom_id"] for row in answers + errors} == {f"request-{number}" for number in range(300)}
    assert user.openai.batches.cancel(batch.id).status == "cancelled"
    served.engine.open = True
    finished = user.until(user.begin(asked(1)))
    with pytest.raises(openai.ConflictError) as error:
        user.openai.batches.cancel(finished.id)
    assert error.value.code == "batch_not_cancellable"


def test_a_batch_expires_with_what_it_has(user: User, served: LiveServer) -> None:
    served.engine.step_s = 0.005
    batch = user.begin(*(asked(number) for number in range(300)), window="2s")
    eventually(lambda: user.openai.batches.retrieve(batch.id).request_counts.completed > 0)
    served.engine.open = False
    batch = user.until(batch)
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    errors = user.rows(batch.error_file_id)
    assert errors and {row["error"]["code"] for row in errors} == {"batch_expired"}
    assert batch.request_counts.completed == len(user.rows(batch.output_file_id)) > 0


def test_a_server_that_refuses_is_asked_again(start_server: StartServer, engine: FakeEngine, tmp_path: Path) -> None:
    server = start_server(data_dir=tmp_path / "data", max_num_queued_reqs=2)
    user = User(server)
    batch = user.until(user.begin(*(asked(number) for number in range(5))))
    assert (batch.status, batch.request_counts.completed) == ("completed", 5)


def test_what_the_server_refuses_is_no_answer(user: User, served: LiveServer) -> None:
    served.engine.drops = "timeout"
    batch = user.begin(asked(1), asked(2))
    eventually(lambda: len(served.engine.requests) >= 2)
    assert user.openai.batches.retrieve(batch.id).status == "in_progress"  # 503 is no answer to keep
    served.engine.drops = ""
    assert user.until(batch).request_counts.completed == 2


def test_only_as_much_as_the_engine_takes_is_in_it(user: User, served: LiveServer) -> None:
    served.engine.open = False
    batches = [user.begin(*(asked(number) for number in range(80))) for _ in range(2)]
    eventually(lambda: len(served.engine.running) >= 4)
    time.sleep(0.2)
    assert len(served.engine.running) <= 256 // 8
    half = len(served.engine.running) // 2
    served.engine.open = True
    done = [user.until(batch) for batch in batches]
    assert [batch.status for batch in done] == ["completed", "completed"] and half > 0
    assert served.service.admission.queues.of_all.choices == 0


def test_each_tenant_sees_its_own_and_is_charged_for_it(
    start_server: StartServer, engine: FakeEngine, tmp_path: Path
) -> None:
    keys = {key_digest(name.encode()): Access(name) for name in ("one", "two")}
    server = start_server(data_dir=tmp_path / "data", tenants=TenantFile(keys=keys), quota_journal="none")
    one, two = User(server, "one"), User(server, "two")
    batch = one.until(one.begin(asked(1)))
    assert batch.status == "completed"
    assert len(list(one.openai.files.list())) == 2
    assert list(two.openai.files.list()) == [] and list(two.openai.batches.list()) == []
    for hidden in (
        lambda: two.openai.batches.retrieve(batch.id),
        lambda: two.openai.files.content(batch.output_file_id),
        lambda: two.openai.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            hidden()
    assert {request.tenant for request in engine.requests} == {"one"}


# --- restarts and full disks ------------------------------------------------------------------------


def test_a_batch_goes_on_where_it_was(
    start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    engine.step_s = 0.002
    server = LiveServer(engine, tokenizer, data_dir=tmp_path / "data", shutdown_timeout=0.0).start()
    user = User(server)
    batch = user.begin(b"broken", *(asked(number) for number in range(150)))
    eventually(lambda: user.openai.batches.retrieve(batch.id).request_counts.completed >= 20)
    server.stop()
    before = len(engine.requests)
    engine.finish_loading()
    again = start_server(data_dir=tmp_path / "data")
    user = User(again)
    batch = user.until(batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 150, 1)
    assert len(engine.requests) - before <= 130
    assert [row["custom_id"] for row in user.rows(batch.output_file_id)] == [f"request-{n}" for n in range(150)]
    assert len(user.rows(batch.error_file_id)) == 1


def test_a_full_disk_loses_nothing(
    start_server: StartServer, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "FULL_DISK_PAUSE_S", 0.02)
    server = start_server(data_dir=tmp_path / "data")
    user = User(server)
    batches = server.app.state.batches

    def pages(most: int) -> None:
        def limit(store: Store) -> None:
            used = store._db.execute("PRAGMA page_count").fetchone()[0]
            store._db.execute(f"PRAGMA max_page_count = {used + most}")

        import asyncio

        asyncio.run_coroutine_threadsafe(batches.run(limit), server.loop).result(10)

    rows = [asked(number, max_tokens=200, ignore_eos=True) for number in range(60)]
    engine.open = False
    batch = user.begin(*rows)
    eventually(lambda: len(engine.running) > 4)
    pages(1)
    engine.open = True
    time.sleep(0.5)
    assert user.openai.batches.retrieve(batch.id).status == "in_progress"
    answers = [httpx.post(f"{server.url}/v1/files", **UPLOAD) for _ in range(50)]
    assert [answer.json()["error"]["code"] for answer in answers if answer.status_code == 507].count("disk_full") > 0
    pages(10_000)
    batch = user.until(batch)
    assert (batch.status, batch.request_counts.completed) == ("completed", 60)
    assert [row["custom_id"] for row in user.rows(batch.output_file_id)] == [row["custom_id"] for row in rows]


def test_lines_may_ask_for_responses(start_server: StartServer, tmp_path: Path) -> None:
    user = User(start_server(data_dir=tmp_path))
    row = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, "input": "Hello"}}
    batch = user.until(user.begin(row, endpoint="/v1/responses"))
    (answer,) = user.openai.files.content(batch.output_file_id).text.splitlines()
    body = json.loads(answer)["response"]["body"]
    assert body["object"] == "response" and body["output"][0]["content"][0]["text"]
    assert batch.usage.model_dump() == body["usage"] and batch.usage.input_tokens > 0


def test_lines_have_tools_and_reasoning(start_server: StartServer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tests.server import test_tools

    server = start_server(
        template=ChatTemplate(test_tools.TEMPLATE, {}), reasoning_parser="qwen3", data_dir=tmp_path / "data"
    )
    engine: FakeEngine = server.engine
    engine.max_model_len = 4096
    engine.finish_loading()
    engine.reply = lambda request, index: tokenizer.encode(test_tools.ANSWER)
    user = User(server)
    rows = [asked(number, tools=[test_tools.WEATHER], max_tokens=500) for number in range(3)]
    done = user.until(user.begin(*rows))
    answers = [row["response"]["body"] for row in user.rows(done.output_file_id)]
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning"] == "The user wants weather."
        assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [test_tools.ARGUMENTS] * 2
    thought = [answer["usage"]["completion_tokens_details"]["reasoning_tokens"] for answer in answers]
    assert done.usage.output_tokens_details.reasoning_tokens == sum(thought) > 0
