"""A file of requests becomes a file of answers, by an engine of this process's own or by a server."""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headway.bench.client import asker
from headway.bench.client.failures import RequestFailed
from headway.bench.client.http_client import HttpClient
from headway.engine.client import EngineDead
from headway.engine.config import EngineConfig
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.server.app import create_app
from headway.server.batches import lines
from headway.server.batches.calls import Gate, InProcess, Post, Reply
from headway.server.batches.gaps import Gaps, batch_class
from headway.server.batches.objects import ENDPOINTS, Batch, BatchBody
from headway.server.batches.store import DiskFull, Store
from headway.server.batches.worker import Batches
from headway.server.classes import CLASS_HEADER
from headway.server.settings import ServerSettings
from headway.text.tokenizer import Tokenizer

OWNER = "default"
LOOK_EVERY_S = 0.1
TIMEOUT_S = 24 * 3600.0


class BatchFailed(Exception):
    """The file cannot be worked on; one line for the user."""


@dataclass(frozen=True, slots=True)
class Answerer:
    """The server or engine that answers requests.

    Args:
        gate: lets in as many requests at once as it can take.
        models: names of the models that it serves; None if it does not say.
    """

    post: Post
    gate: Gate
    models: Collection[str] | None


@contextlib.asynccontextmanager
async def own_engine(
    config: EngineConfig, name: str, on_progress: Callable[[str, int], None]
) -> AsyncIterator[Answerer]:
    """An engine in a process below this one, asked as the server asks it, without a port.

    Args:
        name: the name of the model, in requests.

    Raises:
        BatchFailed: it cannot start.
        TextError: the checkpoint's tokenizer, template or generation_config.json is broken.
    """
    from headway.engine.client import EngineClient

    engine = EngineClient(config, on_progress, replay=True)
    app = create_app(engine, Tokenizer.load(config.model), ServerSettings(served_model_names=[name]))
    service = app.state.service
    try:
        await engine.start()
        await engine.wait_ready()
        service.full_collections.start()
        post = InProcess(app, lambda: batch_class(service.classes.table)).post
        yield Answerer(post, Gaps(service), [name])
    except EngineDead as error:
        raise BatchFailed(str(error)) from None
    finally:
        await service.close()


class _Bound:
    """Lets a fixed number of requests in at once."""

    def __init__(self, most: int) -> None:
        self.inside = 0
        self._free = asyncio.Semaphore(most)

    async def enter(self) -> None:
        await self._free.acquire()
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        self._free.release()


@contextlib.asynccontextmanager
async def server_at(
    url: str, api_key: str | None, service_class: str | None, most: int, console: Console
) -> AsyncIterator[Answerer]:
    """An OpenAI-compatible server.

    Args:
        service_class: one of Headway's classes; None leaves that to the server.
        most: requests that it gets at once.

    Raises:
        BatchFailed: the address is none, or nobody answers there.
    """
    try:
        classes = {} if service_class is None else {CLASS_HEADER: service_class}
        endpoint = Endpoint(url, api_key=api_key, timeout_s=TIMEOUT_S, headers=classes)
        client = HttpClient.to(endpoint)
    except BenchError as error:
        raise BatchFailed(str(error).replace("--base-url", "--url")) from None
    said = ""

    async def ask(method: str, path: str, body: bytes) -> Reply:
        reply = asker.Reply()
        await client.exchange(client.head(method, path, endpoint.all_headers()), body, reply, TIMEOUT_S)
        return Reply(reply.status, _decoded(reply.response_headers), reply.raw)

    async def post(path: str, body: bytes, tenant: str) -> Reply:
        nonlocal said
        try:
            reply = await ask("POST", path, body)
        except RequestFailed as error:  # it may come back
            if said != error.failure.message:
                said = error.failure.message
                console.print(f"[dim]waiting for {url}: {said}")
            return Reply(503, {}, b"")
        return reply if _is_json(reply.body) else Reply(reply.status, reply.headers, _as_json(reply.body))

    try:
        listed = await ask("GET", "/v1/models", b"")
        if listed.status in (401, 403):
            raise BatchFailed(f"{url} does not accept the API key; give it with --api-key")
        yield Answerer(post, _Bound(most), _names(listed.body))
    except RequestFailed as error:
        raise BatchFailed(f"no server answers at {url}: {error.failure.message}") from None
    finally:
        client.close()


def _decoded(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return False
    return True


def _as_json(body: bytes) -> bytes:
    """A page of some proxy, as a JSON string."""
    return msgspec.json.encode(body.decode(errors="replace"))


def _names(body: bytes) -> list[str] | None:
    """The models of a list of models."""
    content = msgspec.json.decode(body) if _is_json(body) else None
    listed = content.get("data") if isinstance(content, dict) else None
    return [each["id"] for each in listed if isinstance(each, dict) and "id" in each] if listed else None


# --- the work ---------------------------------------------------------------------------------------


def check_files(source: Path, output: Path, models: Collection[str] | None) -> None:
    """Raises BatchFailed where the input cannot be worked on, before anything is started for it."""
    if not output.parent.is_dir():
        raise BatchFailed(f"{output} cannot be written: there is no folder {output.parent}")
    try:
        errors = lines.check(source, None, models, most=None).errors
    except OSError as error:
        raise BatchFailed(f"cannot read {source}: {error.strerror}") from None
    if errors:
        where = "" if errors[0].line is None else f", line {errors[0].line}"
        raise BatchFailed(f"{source}{where}: {errors[0].message}")


async def run_batch(source: Path, output: Path, by: Answerer, console: Console) -> Batch:
    """Answer the requests of `source` and write the answers to `output`, whole or not at all.

    What is answered meanwhile is kept in a folder beside the output, which is gone at the end. A run that is
    interrupted leaves it, and the same run goes on from there.

    Raises:
        BatchFailed, StoreError: a file or the folder cannot be used.
    """
    check_files(source, output, by.models)
    folder = output.with_name(f".{output.name}.batch")
    batches = Batches(Store(folder), by.post, by.gate, by.models, is_mixed=True)
    try:
        batch = await _begun(batches, source, folder)
        with _progress(console) as progress:
            task = progress.add_task("requests", total=None, tokens=0)
            while batch.is_open:
                await asyncio.sleep(LOOK_EVERY_S)
                seen = await batches.run(Store.batch, OWNER, batch.id)
                batch = batch if seen is None else seen
                counts = batch.request_counts
                done = counts.completed + counts.failed
                progress.update(task, total=counts.total or None, completed=done, tokens=batch.usage.output_tokens)
        if batch.status != "completed" or batch.output_file_id is None:
            raise BatchFailed(f"the batch {batch.status}; see the log, and delete {folder} to start again")
        os.replace(batches.path(batch.output_file_id), output)
    finally:
        await batches.stop()
    shutil.rmtree(folder)
    return batch


def first_failures(output: Path, most: int = 3) -> list[str]:
    """The first failed requests of a file of answers, and why they failed."""
    with output.open("rb") as answers:
        failures = (said for number, raw in enumerate(answers, 1) if (said := _failure(number, raw)))
        return list(itertools.islice(failures, most))


def _failure(number: int, raw: bytes) -> str:
    """The error in a line of answers; empty if there is none."""
    answer = msgspec.json.decode(raw)
    error, response = answer["error"], answer["response"]
    if response is not None and response["status_code"] != 200:
        body = response["body"]
        error = (isinstance(body, dict) and body.get("error")) or body
    elif error is None:
        return ""
    message = error.get("message") if isinstance(error, dict) else error
    return f"{answer['custom_id'] or f'request {number}'}: {str(message)[:300]}"


async def _begun(batches: Batches, source: Path, folder: Path) -> Batch:
    """The batch of the folder, or a new one."""
    try:
        found = await batches.run(Store.batches, OWNER, None, 1)
        for batch in found[0] if found is not None else []:
            if not filecmp.cmp(batches.path(batch.input_file_id), source, shallow=False):
                raise BatchFailed(
                    f"{folder} has answers to another input than {source}; continue with that one, or delete the folder"
                )
            await batches.start()
            return batch
        with open(source, "rb") as content:
            file = await batches.run(Store.add_file, OWNER, content, source.name, "batch")
        body = BatchBody(input_file_id=file.id, endpoint=ENDPOINTS[0], completion_window="999999d")
        made = await batches.create(OWNER, body)
    except OSError as error:
        raise BatchFailed(f"cannot read {source}: {error.strerror}") from None
    except DiskFull as error:
        raise BatchFailed(f"{folder}: {error}") from None
    assert made is not None
    return made


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    columns += [TimeRemainingColumn(), TextColumn("{task.fields[tokens]} tokens")]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
