"""Turns texts into token ids: many requests' texts together, beside the event loop, and known ones not again."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from headway.server.text_work import INLINE_CHARS, TextWork
from headway.text.known_texts import KnownTexts
from headway.text.process import TextProcess
from headway.text.tokenizer import Tokenizer

# Characters that are encoded in one call. Whoever comes meanwhile waits for its end.
TOGETHER_CHARS = 2**18
# Ids become Python's with the interpreter's lock held; the event loop gets it between two texts.
PAUSE_S = 2e-5
# Niceness of the tokenizer's threads, where others have 0: on a processor where both are busy they get a tenth of it.
NICENESS = 10


def share_cores(tokenizer: Tokenizer) -> None:
    """Start the tokenizer's threads, for half of the processor, as ones that give way to the engine's.

    A step waits for the slowest of the engine's threads. The tokenizer's hold no lock, so that only texts wait for
    them. There are as many as processors unless it is told otherwise; they inherit the niceness of the thread that
    first has texts encoded together.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))

    def start() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        list(tokenizer.encode_all(["", ""]))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()


class TooManyTokens(Exception):
    """A text has more tokens than are wanted; it has `count`."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


@dataclass(eq=False, slots=True)
class _Job:
    """Texts of one request that wait to be encoded."""

    texts: list[str]
    add_special_tokens: bool
    size: int
    done: asyncio.Future[list[list[int]]]


class Encoder:
    """Encodes texts, short ones at once and long ones in a thread, with all that have come meanwhile.

    Args:
        work: gives it threads, and bounds what may wait for them.
        process: encodes texts that are longer still, of which even to free the memory would delay the event loop;
            `process_work` has the thread that waits for it.

    Attributes:
        calls: how often a thread has called the tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, known: KnownTexts, work: TextWork, process_work: TextWork, process: TextProcess
    ) -> None:
        self.known, self.work, self._process_work, self._process = known, work, process_work, process
        self._tokenizer = tokenizer
        self._jobs: deque[_Job] = deque()
        self._encoding: asyncio.Task[None] | None = None
        self.calls = 0

    async def encode_all(
        self, texts: list[str], add_special_tokens: bool, salt: str | None = None, most: int = 2**31
    ) -> list[list[int]]:
        """Token ids of each text.

        Args:
            salt: texts that were encoded with another salt do not count as known.
            most: the most ids of a text that are wanted.

        Raises:
            ApiError: 429 when too much waits already.
            TooManyTokens: a very long text has more than `most`; others are encoded whole.
            TextError: a very long text takes too long.
        """
        if add_special_tokens:  # the tokenizer may put some anywhere
            return await self._encoded(texts, True, most)
        known, salt = self.known, salt or ""
        parts = [known.parts(text) for text in texts]
        found: dict[str, Iterable[int] | None] = {part: known.find(part, salt) for one in parts for part in one}
        missing = [part for part, ids in found.items() if ids is None]
        for part, ids in zip(missing, await self._encoded(missing, False, most), strict=True):
            known.keep(part, salt, ids)
            found[part] = ids
        whole = []
        for one in parts:
            whole.append(list[int]())
            for part in one:
                whole[-1].extend(found[part] or ())
        return whole

    async def _encoded(self, texts: list[str], add_special_tokens: bool, most: int) -> list[list[int]]:
        size = sum(map(len, texts))
        if size <= INLINE_CHARS:
            return [self._tokenizer.encode_here(text, add_special_tokens) for text in texts]
        if any(len(text) > TOGETHER_CHARS for text in texts):
            return await self._encoded_apart(texts, add_special_tokens, most)
        self.work.check(size)
        job = _Job(texts, add_special_tokens, size, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self.work.waiting += size
        if self._encoding is None:
            self._encoding = asyncio.create_task(self._encode_waiting())
        try:
            return await job.done
        finally:
            if job in self._jobs:  # its client has gone
                self._jobs.remove(job)
                self.work.waiting -= size

    async def _encoded_apart(self, texts: list[str], add_special_tokens: bool, most: int) -> list[list[int]]:
        folder, found = self._tokenizer.folder, list[list[int]]()
        for text in texts:
            if len(text) <= TOGETHER_CHARS:
                found += await self._encoded([text], add_special_tokens, most)
                continue
            encode = partial(self._process.encode, folder, [text], add_special_tokens, most)
            (ids,) = await self._process_work.run(len(text), encode)
            if isinstance(ids, int):
                raise TooManyTokens(ids)
            found.append(ids)
        return found

    async def _encode_waiting(self) -> None:
        while self._jobs:
            jobs = self._next_jobs()
            texts = [text for job in jobs for text in job.texts]
            encode = partial(self._encode, texts, jobs[0].add_special_tokens)
            try:
                found = iter(await self.work.finish(sum(job.size for job in jobs), encode))
            except Exception as error:
                for job in jobs:
                    if not job.done.done():
                        job.done.set_exception(error)
                continue
            for job in jobs:
                ids = [next(found) for _ in job.texts]
                if not job.done.done():
                    job.done.set_result(ids)
        self._encoding = None

    def _next_jobs(self) -> list[_Job]:
        """Take the jobs that are encoded next, in one call, from the queue."""
        jobs: list[_Job] = []
        size = 0
        while self._jobs and (not jobs or size + self._jobs[0].size <= TOGETHER_CHARS):
            if jobs and self._jobs[0].add_special_tokens != jobs[0].add_special_tokens:
                break
            jobs.append(self._jobs.popleft())
            size += jobs[-1].size
        self.work.waiting -= size
        return jobs

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self.calls += 1
        found = []
        for group in _groups(texts):
            for ids in self._tokenizer.encode_all(group, add_special_tokens):
                found.append(ids)
                time.sleep(PAUSE_S)
        return found


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """Groups of texts that are encoded together, small ones: what the tokenizer makes beside ids is freed at once."""
    group, size = list[str](), 0
    for text in texts:
        if group and size + len(text) > TOGETHER_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    yield group
