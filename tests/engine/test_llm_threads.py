"""LLM called from several threads: one batch, errors and interrupts for whom they concern, and no fork."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway import LLM, SamplingParams
from headway.engine.messages import SequenceOutput
from headway.llm import CompletionOutput
from tests.bench.command_line import wait_until
from tests.engine.models import TINY_LLAMA, write_config
from tests.text.tiny_tokenizers import save_chat_model

THREADS = 16
ENGINE: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_threads": 1, "kv_cache_memory": 4 << 20}
DOCUMENT = Path(__file__).parents[2] / "docs" / "library.md"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    write_config(folder, vocab_size=TINY_LLAMA["vocab_size"])
    return LLM(str(folder), **ENGINE)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as executor:
        yield executor


class Steps:
    """Counts the steps of an engine; `before` is called with the number of each, in the thread that runs it."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
        self.count = 0
        self.drivers: set[threading.Thread] = set()
        self._before, self._step = before, llm.engine.core.advance
        monkeypatch.setattr(llm.engine.core, "advance", self._counted)

    def _counted(self) -> list[SequenceOutput]:
        self.count += 1
        self.drivers.add(threading.current_thread())
        self._before(self.count)
        return self._step()


def until_joined(llm: LLM, calls: int) -> Callable[[int], None]:
    """Holds the first step until so many calls are there."""

    def wait(number: int) -> None:
        batch = llm._batch
        if number == 1:
            wait_until(lambda: len(batch._joining) + len(set(batch._calls.values())) >= calls)

    return wait


def greedy(tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **others)


def completion(llm: LLM, prompt: str | list[int], params: SamplingParams) -> CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


def assert_empty(llm: LLM, steps: Steps) -> None:
    """The thread has gone, and has left nothing in the engine."""
    for driver in steps.drivers:
        driver.join(60)
        assert not driver.is_alive()
    llm.engine.core.scheduler.check()
    assert llm.engine.core.scheduler.blocks.usage == 0 and not llm.engine.core.has_work


def test_calls_share_a_batch_and_get_what_they_would_alone(
    llm: LLM, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = completion(llm, "Once upon a time", greedy(30)).text
    each = [greedy(40), SamplingParams(seed=7, max_tokens=40, ignore_eos=True), greedy(40, stop=[text[5:8]])]
    calls = [(f"Once upon a time {'and ' * number}", each[number % 3]) for number in range(THREADS)]
    alone = [completion(llm, *call) for call in calls]
    steps = Steps(llm, monkeypatch, until_joined(llm, THREADS))
    together = list(threads.map(lambda call: completion(llm, *call), calls))
    assert [(c.token_ids, c.text, c.finish_reason) for c in together] == [
        (c.token_ids, c.text, c.finish_reason) for c in alone
    ]
    assert 40 <= steps.count < 60, "one after the other they take ten times as many"
    assert len(steps.drivers) == 1
    assert_empty(llm, steps)


def test_a_call_joins_a_batch_that_is_running(
    llm: LLM, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: list[Future[CompletionOutput]] = []

    def before(number: int) -> None:
        if number == 20:
            short.append(threads.submit(completion, llm, [7, 8], greedy(10)))
            until_joined(llm, 2)(1)

    alone = completion(llm, [7, 8], greedy(10)).token_ids
    steps = Steps(llm, monkeypatch, before)
    ended_first = []
    long = threads.submit(completion, llm, [5, 6], greedy(200))
    long.add_done_callback(lambda _: ended_first.append(short[0].done()))
    assert len(long.result().token_ids) == 200 and short[0].result().token_ids == alone
    assert ended_first == [True] and steps.count < 205


def test_an_error_is_that_of_its_call_alone(
    llm: LLM, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = completion(llm, [5, 6, 7], greedy(20)).token_ids
    steps = Steps(llm, monkeypatch, until_joined(llm, 9))
    bad: list[list[int]] = [[5] * 300, [5, 9999], [5, 2**31 - 1]]
    failing = [threads.submit(llm.generate, [[5, 6], prompt], greedy(20)) for prompt in bad]
    running = [threads.submit(completion, llm, [5, 6, 7], greedy(20)) for _ in range(6)]
    assert [future.result().token_ids for future in running] == [good] * 6
    for future, message in zip(failing, ("300 tokens", "9999", "2147483647"), strict=True):
        with pytest.raises(ValueError, match=message):
            future.result()
    assert_empty(llm, steps)


def test_a_failed_step_is_that_of_every_call_and_of_no_later_one(
    llm: LLM, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(number: int) -> None:
        until_joined(llm, 3)(number)
        if number == 5:
            raise OSError("the device has gone")

    steps = Steps(llm, monkeypatch, before)
    for future in [threads.submit(completion, llm, [5, 6, 7], greedy(20)) for _ in range(3)]:
        with pytest.raises(OSError, match="the device has gone"):
            future.result()
    assert_empty(llm, steps)
    assert len(completion(llm, [5, 6, 7], greedy(20)).token_ids) == 20


def test_an_interrupt_ends_the_call_that_it_falls_into(
    llm: LLM, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(number: int) -> None:
        until_joined(llm, 2)(number)
        main = threading.main_thread().ident
        if number == 5:
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
        if number == 6:
            batch = llm._batch
            wait_until(lambda: bool(batch._leaving) or len(set(batch._calls.values())) == 1)

    alone = completion(llm, [5, 6, 7], greedy(100)).token_ids
    steps = Steps(llm, monkeypatch, before)
    other = threads.submit(completion, llm, [5, 6, 7], greedy(100))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[token, 8] for token in range(5, 9)], greedy(200))
    assert other.result().token_ids == alone
    assert_empty(llm, steps)
    assert steps.count < 120, "its requests would have gone on to 200"


def test_the_thread_keeps_no_interpreter_alive_longer_than_its_caller(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for daemon in (False, True):
        with monkeypatch.context() as patched:
            steps = Steps(llm, patched, lambda _: None)
            caller = threading.Thread(target=completion, args=(llm, [5, 6], greedy(3)), daemon=daemon)
            caller.start()
            caller.join()
            assert_empty(llm, steps)
            assert [driver.daemon for driver in steps.drivers] == [daemon]


def test_parameters_changed_while_a_call_runs_are_those_of_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = greedy(20)

    def before(number: int) -> None:
        params.max_tokens, params.n, params.temperature = 4, 3, 5.0

    alone = completion(llm, [5, 6, 7], greedy(20)).token_ids
    with monkeypatch.context() as patched:
        Steps(llm, patched, before)
        assert completion(llm, [5, 6, 7], params).token_ids == alone
    assert [len(c.token_ids) for c in llm.generate([5, 6, 7], params)[0].outputs] == [4, 4, 4]


def test_progress_is_shown_for_two_threads_at_once(
    llm: LLM, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Steps(llm, monkeypatch, until_joined(llm, 2))
    both = [threads.submit(llm.generate, [[5, 6], [7, 8]], greedy(5), use_progress=True) for _ in range(2)]
    assert [len(future.result()) for future in both] == [2, 2]
    assert "Prompts" in capsys.readouterr().out


def test_no_prompts_are_no_work(llm: LLM) -> None:
    assert llm.generate([], greedy(5)) == []


def _use(llm: LLM, folder: str, answers: Connection) -> None:
    for use in (lambda: llm.generate([5, 6], greedy(3)), lambda: LLM(folder, **ENGINE)):
        try:
            use()
            answers.send("it ran")
        except RuntimeError as error:
            answers.send(str(error))


def test_a_fork_is_refused_in_one_line(llm: LLM) -> None:
    assert completion(llm, [5, 6], greedy(3)).token_ids
    context = multiprocessing.get_context("fork")
    answers, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_use, args=(llm, str(llm._front.folder), theirs))
    child.start()
    for _ in range(2):
        assert answers.poll(60)
        said = answers.recv()
        assert "create the LLM in the child" in said and "'spawn'" in said and "\n" not in said
    child.join(60)
    assert child.exitcode == 0
    assert completion(llm, [5, 6], greedy(3)).token_ids


async def test_the_documents_web_application(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [block for block in DOCUMENT.read_text().split("```python\n") if "FastAPI()" in block]
    names: dict[str, Any] = {}
    exec(compile(example.partition("```")[0], str(DOCUMENT), "exec"), names)
    steps = Steps(names["llm"], monkeypatch, until_joined(names["llm"], THREADS))
    transport = httpx.ASGITransport(app=names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:

        async def infer(number: int) -> dict[str, Any]:
            body = {"prompt": "The old house", "max_tokens": 12, "seed": number, "request_id": str(number)}
            reply = await client.post("/infer", json=body, timeout=60)
            assert reply.status_code == 200
            answer: dict[str, Any] = reply.json()
            return answer

        answers = await asyncio.gather(*(infer(number) for number in range(THREADS)))
    names["threads"].shutdown()
    assert [answer["request_id"] for answer in answers] == [str(number) for number in range(THREADS)]
    assert all(answer["text"] for answer in answers) and len({answer["text"] for answer in answers}) > 8
    assert steps.count < 30
