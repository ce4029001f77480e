"""Runs batches: what is asked in a file is answered in a file, in the gaps that other requests leave."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from prometheus_client.core import Metric

from headway.server.batches import lines
from headway.server.batches.calls import Gate, Post, Reply
from headway.server.batches.lines import RequestLine
from headway.server.batches.objects import KEPT_S, OPEN, Batch, BatchBody, BatchError, BatchErrors, RequestCounts
from headway.server.batches.store import DiskFull, Store
from headway.server.metrics.families import Families

P = ParamSpec("P")
T = TypeVar("T")
# Statuses that say that the same request may be answered otherwise later.
REFUSALS = (429, 503)
MOST_PAUSE_S = 60.0
FULL_DISK_PAUSE_S = 5.0
CHUNK_BYTES = 2**18
_WHY_UNANSWERED = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed before the batch was cancelled.",
}
logger = logging.getLogger("headway.server")


class Run:
    """A batch that is not finished.

    Attributes:
        batch: the batch as it was last changed, but for its counts.
        left: requests without an answer.
    """

    def __init__(self, owner: str, batch: Batch) -> None:
        self.owner, self.batch = owner, batch
        self.left = 0
        self.inside = 0
        self.cancelled = asyncio.Event()
        self.refused: deque[tuple[int, RequestLine]] = deque()  # requests to send again
        self.changed = asyncio.Event()
        self._waits_until = 0.0  # on the clock of time.monotonic()

    def refuse(self, number: int, line: RequestLine, reply: Reply) -> None:
        """Take back a request that was not let in, and send nothing before the time that the answer gives."""
        self.refused.append((number, line))
        given = reply.headers.get("retry-after", "")
        seconds = min(max(1.0, float(given)), MOST_PAUSE_S) if given.isdecimal() else 1.0
        self._waits_until = time.monotonic() + seconds

    async def wait(self) -> None:
        while (left := self._waits_until - time.monotonic()) > 0:
            await asyncio.sleep(left)


class Batches:
    """Files and batches, and the work on them.

    Args:
        store: only a thread of this object touches it.
        models: names that are served; None where they are not known.
        is_mixed: each line chooses its endpoint, any number of lines may come, and errors stand among the answers.

    Attributes:
        runs: batches that are not finished, by id.
        results: how many requests were answered, as `completed` and `failed`, and how often one was `refused`.
    """

    def __init__(
        self, store: Store, post: Post, gate: Gate, models: Collection[str] | None, is_mixed: bool = False
    ) -> None:
        self.gate = gate
        self.runs: dict[str, Run] = {}
        self.results: Counter[str] = Counter()
        self._store, self._post, self._models, self._is_mixed = store, post, models, is_mixed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Go on with the batches that are not finished."""
        for owner, batch in await self.run(Store.open_batches):
            self._launch(owner, batch)

    async def stop(self) -> None:
        """Stop in the middle of whatever it is; the next start goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.run(Store.close)
        self._thread.shutdown()

    async def run(self, method: Callable[Concatenate[Store, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Have a method of the store run in its thread."""
        call = partial(method, self._store, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def path(self, file_id: str) -> Path:
        """Where the content of a file is; the file must exist."""
        return self._store.path(file_id)

    def collect(self, families: Families) -> Iterator[Metric]:
        """Metrics, read when they are scraped."""
        runs, running = self.runs.values(), self.gate.inside
        statuses = Counter(run.batch.status for run in runs)
        by_status = {(status,): statuses[status] for status in OPEN}
        yield families.gauge("batches", "Batches that are not finished, by status.", by_status, "status")
        yield families.gauge("batch_requests_running", "Requests of batches in the server.", running)
        waiting = max(0, sum(run.left for run in runs) - running)
        text = "Requests of batches in progress that are still to be sent."
        yield families.gauge("batch_requests_waiting", text, waiting)
        results = {(result,): self.results[result] for result in ("completed", "failed", "refused")}
        text = "Requests of batches, by result; refused ones are sent again."
        yield families.counter("batch_requests", text, results, "result")

    # --- what is asked for --------------------------------------------------------------------------

    async def create(self, owner: str, body: BatchBody) -> Batch | None:
        """Begin a batch. None where there is no such input file. Raises DiskFull."""
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + body.window_s,
            metadata=body.metadata,
        )
        expiry_s = KEPT_S if body.output_expires_after is None else body.output_expires_after.seconds
        if not await self.run(Store.add_batch, owner, batch, expiry_s):
            return None
        self._launch(owner, batch)
        return batch

    async def cancel(self, owner: str, batch_id: str) -> Batch | None:
        """Cancel a batch where it can be. Returns the batch as it then is, or None without one. Raises DiskFull."""
        if await self.run(Store.batch, owner, batch_id) is None:
            return None
        now = int(time.time())
        changes = {"status": "cancelling", "cancelling_at": now}
        batch = await self.run(Store.move, batch_id, ("validating", "in_progress"), changes)
        if batch.status == "cancelling" and batch_id in self.runs:
            self.runs[batch_id].cancelled.set()
        return batch

    # --- the work -----------------------------------------------------------------------------------

    def _launch(self, owner: str, batch: Batch) -> None:
        run = self.runs[batch.id] = Run(owner, batch)
        task = asyncio.create_task(self._carry_out(run), name=batch.id)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            del self.runs[batch.id]

        task.add_done_callback(ended)

    async def _persist(self, method: Callable[Concatenate[Store, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What run() does, for what must not be lost: while the disk is full it waits for room."""
        while True:
            try:
                return await self.run(method, *args, **kwargs)
            except DiskFull as error:
                logger.error("batches wait: %s", error)
                await asyncio.sleep(FULL_DISK_PAUSE_S)

    async def _carry_out(self, run: Run) -> None:
        try:
            if run.batch.status == "validating":
                run.batch = await self._check(run.batch)
            if run.batch.status == "in_progress":
                await self._answer_in_time(run)
            if run.batch.is_open:
                await self._finish(run)
        except Exception:
            logger.exception("batch %s failed", run.batch.id)
            error = BatchError(code="internal_error", message="the server failed on this batch; see its log")
            await self._fail(run.batch, [error])

    async def _fail(self, batch: Batch, errors: list[BatchError], total: int | None = None) -> Batch:
        """End a batch that can't go on, with what it has."""
        changes = {"status": "failed", "failed_at": int(time.time()), "errors": BatchErrors(data=errors)}
        if total is not None:
            changes["request_counts"] = RequestCounts(total=total)
        return await self._persist(Store.finish, batch.id, [], changes, self._is_mixed)

    async def _check(self, batch: Batch) -> Batch:
        endpoint, most = (None, None) if self._is_mixed else (batch.endpoint, lines.MOST_REQUESTS)
        path = self._store.path(batch.input_file_id)
        checked = await asyncio.to_thread(lines.check, path, endpoint, self._models, most)
        if checked.errors:
            return await self._fail(batch, checked.errors, checked.total)
        self.results["failed"] += len(checked.malformed)
        changes = {
            "status": "in_progress",
            "in_progress_at": int(time.time()),
            "model": checked.model,
            "request_counts": RequestCounts(total=checked.total),
        }
        return await self._persist(Store.move, batch.id, ("validating",), changes, checked.malformed)

    async def _answer_in_time(self, run: Run) -> None:
        """Answer all requests, until the batch is cancelled or its time is up."""
        working = asyncio.create_task(self._answer_all(run))
        cancelled = asyncio.create_task(run.cancelled.wait())
        try:
            left_s = max(0.0, run.batch.expires_at - time.time())
            await asyncio.wait({working, cancelled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)

    async def _answer_all(self, run: Run) -> None:
        async with aclosing(self._unanswered(run)) as fresh, asyncio.TaskGroup() as requests:
            while True:
                line = run.refused.popleft() if run.refused else await anext(fresh, None)
                if line is not None:
                    await run.wait()
                    await self.gate.enter()
                    run.inside += 1
                    requests.create_task(self._answer(run, *line)).add_done_callback(partial(self._left, run))
                elif run.inside:
                    run.changed.clear()
                    await run.changed.wait()
                elif not run.refused:
                    return

    def _left(self, run: Run, _: asyncio.Task[None]) -> None:
        run.inside -= 1
        run.changed.set()
        self.gate.leave()

    async def _unanswered(self, run: Run) -> AsyncGenerator[tuple[int, RequestLine], None]:
        """Requests of the input that have no answer yet, with the numbers of their lines."""
        done = await self.run(Store.answered, run.batch.id)
        run.left = run.batch.request_counts.total - len(done)
        numbers = itertools.count(1)
        with open(self._store.path(run.batch.input_file_id), "rb") as file:
            while chunk := await asyncio.to_thread(file.readlines, CHUNK_BYTES):
                for raw, number in zip(chunk, numbers, strict=False):
                    if raw.strip() and number not in done:
                        yield number, lines.parse(raw)

    async def _answer(self, run: Run, number: int, line: RequestLine) -> None:
        reply = await self._post(line.url, bytes(line.body), run.owner)
        if reply.status in REFUSALS:
            self.results["refused"] += 1
            return run.refuse(number, line, reply)
        request_id = reply.headers.get("x-request-id", "")
        result = lines.answered(number, line.custom_id, reply.status, request_id, reply.body)
        await self._persist(Store.add_result, run.batch.id, result)
        self.results["completed" if result.is_ok else "failed"] += 1
        run.left -= 1

    async def _finish(self, run: Run) -> None:
        batch_id = run.batch.id
        changes = {"status": "finalizing", "finalizing_at": int(time.time())}
        run.batch = await self._persist(Store.move, batch_id, ("in_progress",), changes)
        done = await self.run(Store.answered, batch_id)
        if run.batch.status == "cancelling":
            outcome = "cancelled"
        else:
            outcome = "completed" if len(done) == run.batch.request_counts.total else "expired"
        rest, ended = [], {"status": outcome, f"{outcome}_at": int(time.time())}
        if outcome != "completed":
            path = self._store.path(run.batch.input_file_id)
            code, why = f"batch_{outcome}", _WHY_UNANSWERED[outcome]
            rest = await asyncio.to_thread(lambda: list(lines.unanswered(path, done, code, why)))
            ended["request_counts"] = RequestCounts(total=len(done) + len(rest))
        run.batch = await self._persist(Store.finish, batch_id, rest, ended, self._is_mixed)
