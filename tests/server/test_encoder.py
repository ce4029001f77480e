"""Texts of many requests are encoded together, and known parts of prompts not again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headway.server.encoder import TOGETHER_CHARS, Encoder, TooManyTokens
from headway.server.errors import ApiError
from headway.server.text_work import INLINE_CHARS, THREADS, TextWork
from headway.text.known_texts import KnownTexts, safe_cuts
from headway.text.process import TextProcess
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually
from tests.text.tiny_tokenizers import TEMPLATE

StartServer = Callable[..., LiveServer]
LONG = "Once upon a time. " * 200


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> Iterator[Encoder]:
    work, apart, process = TextWork(10**7), TextWork(10**7, threads=1, inline=-1), TextProcess()
    yield Encoder(tokenizer, KnownTexts(safe_cuts(tokenizer.backend, TEMPLATE), 10**6), work, apart, process)
    assert (work.waiting, apart.waiting) == (0, 0)
    process.close()
    work.close()
    apart.close()


async def test_texts_are_encoded_as_they_are_alone(encoder: Encoder, tokenizer: Tokenizer) -> None:
    texts = [LONG, "", "short", f"<|im_start|>user\n{LONG}<|im_end|>\n", LONG[::-1]]
    for special in (True, False):
        expected = [tokenizer.encode(text, special) for text in texts]
        assert await encoder.encode_all(texts, special) == expected
        alone = await asyncio.gather(*(encoder.encode_all([text], special) for text in texts))
        assert [each[0] for each in alone] == expected
    assert await encoder.encode_all([], True) == []


async def test_those_that_come_meanwhile_are_encoded_together(encoder: Encoder, tokenizer: Tokenizer) -> None:
    gate = threading.Event()
    blocked = [asyncio.create_task(encoder.work.run(INLINE_CHARS + 1, gate.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)
    texts = [f"{number} {LONG}" for number in range(40)]
    waiting = [asyncio.create_task(encoder.encode_all([text], number % 2 == 0)) for number, text in enumerate(texts)]
    await asyncio.sleep(0.01)
    assert encoder.work.waiting >= sum(map(len, texts[1:]))
    waiting[7].cancel()  # a client that goes away
    await asyncio.sleep(0)
    gate.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    for number, text in enumerate(texts):
        if number != 7:
            assert found[number] == [tokenizer.encode(text, number % 2 == 0)]
    await asyncio.gather(*blocked)
    encoder.calls = 0
    await asyncio.gather(*(encoder.encode_all([text], True) for text in texts))
    assert encoder.calls <= 2 + sum(map(len, texts)) // TOGETHER_CHARS


async def test_more_than_may_wait_is_refused(tokenizer: Tokenizer) -> None:
    work = TextWork(2 * len(LONG))
    encoder = Encoder(tokenizer, KnownTexts(None, 0), work, work, TextProcess())
    gate = threading.Event()
    blocked = [asyncio.create_task(work.run(INLINE_CHARS + 1, gate.wait)) for _ in range(THREADS)]
    waiting = [asyncio.create_task(encoder.encode_all([LONG], True)) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(ApiError) as refused:
        await encoder.encode_all([LONG], True)
    assert refused.value.code == "text_queue_full"
    assert await encoder.encode_all(["short"], True) == [tokenizer.encode("short")]
    gate.set()
    assert await asyncio.gather(*waiting) == [[tokenizer.encode(LONG)]] * 2
    await asyncio.gather(*blocked)
    work.close()


async def test_an_error_is_told_to_all_whom_it_concerns(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        raise OverflowError("no ids")

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_encode", fail)
        found = await asyncio.gather(*(encoder.encode_all([LONG], True) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [OverflowError] * 3
    assert (await encoder.encode_all([LONG], True))[0]


async def test_only_what_is_new_is_encoded(
    encoder: Encoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    encode_all = tokenizer.encode_all

    def noted(texts: list[str], add_special_tokens: bool = True) -> Any:
        asked.extend(texts)
        return encode_all(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_all", noted)
    first = f"<|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}Hello<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    await encoder.encode_all([first], False)
    asked.clear()
    found = await encoder.encode_all([second], False)
    assert sum(map(len, asked)) < 100
    assert found == list(encode_all([second], False))
    asked.clear()
    await encoder.encode_all([second], False, "a salt of its own")
    assert "".join(asked).count(LONG) == 1


def test_a_conversation_goes_on(start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """Through the server: the engine gets the ids of the whole prompt, and the metrics count what was known."""
    engine.max_model_len = 10**6
    server = start_server()
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}]
    for _ in range(3):
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=4)
        assert answer.status_code == 200, answer.text
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        text = server.service.template.render([{**one} for one in messages[:-2]])
        assert engine.requests[-1].prompt_token_ids == tokenizer.encode(text, False)
    known = server.service.encoder.known
    assert known.hits > 2 * len(LONG)
    metrics = server.client.get("/metrics").text
    assert f'headway:tokenizer_hits_total{{engine="0",model_name="tiny"}} {float(known.hits)}' in metrics
    eventually(lambda: server.service.text_work.waiting == 0)


def test_the_tokenizers_threads_give_way_and_short_texts_do_not_wait_for_them(tokenizer: Tokenizer) -> None:
    """In a process of its own: these threads begin once."""
    program = f"""
import asyncio, os, threading, time
from headway.server.encoder import NICENESS, Encoder, share_cores
from headway.server.text_work import TextWork
from headway.text.known_texts import KnownTexts
from headway.text.process import TextProcess
from headway.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load({str(tokenizer.folder)!r})
os.environ["RAYON_NUM_THREADS"] = "1"
share_cores(tokenizer)
niceness = sorted(os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task"))
assert niceness[-1] == NICENESS > niceness[0] and niceness.count(niceness[-1]) == 1, niceness
texts = ["Once upon a time. " * 20_000] * 4
busy = threading.Thread(target=lambda: list(tokenizer.encode_all(texts)))
busy.start()
time.sleep(0.05)
work = TextWork(10**6)
encoder = Encoder(tokenizer, KnownTexts(None, 0), work, work, TextProcess())
waited = []
while busy.is_alive():
    began = time.monotonic()
    asyncio.run(encoder.encode_all(["Once upon a time.", "There was a fox."], False))
    waited.append(time.monotonic() - began)
    time.sleep(0.01)
assert len(waited) > 3, "the texts were encoded before a short one came"
assert min(waited) < 0.01, waited
"""
    # Forks of a process that has used the library's threads get a variable that forbids them.
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"TOKENIZERS_PARALLELISM": "true"})


async def test_very_long_texts_are_encoded_in_a_process(encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Even to free what the library makes of them would delay the event loop."""
    texts = ["Once upon a time. " * (TOGETHER_CHARS // 17 + 1), "short", "", "Once upon. " * (TOGETHER_CHARS // 11 + 1)]
    for special in (True, False):
        found = await encoder.encode_all(texts, special)
        assert found == [tokenizer.encode(text, special) for text in texts]
    assert encoder.calls == 0
    with pytest.raises(TooManyTokens) as refused:
        await encoder.encode_all(texts, True, most=1000)
    assert refused.value.count == len(tokenizer.encode(texts[0]))


async def test_many_texts_are_encoded_a_few_at_a_time(
    encoder: Encoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    encode_all = tokenizer.encode_all

    def counting(texts: list[str], add_special_tokens: bool = True) -> Iterator[list[int]]:
        sizes.append(sum(map(len, texts)))
        return encode_all(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_all", counting)
    texts = [f"{number} " * (TOGETHER_CHARS // 16) for number in range(10, 30)]
    found = await encoder.encode_all(texts, True)
    assert len(sizes) > 2 and max(sizes) <= TOGETHER_CHARS
    assert found == [next(encode_all([text])) for text in texts]
