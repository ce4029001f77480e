"""`headway chat` and `headway models` against a live server: one answer, a conversation, pipes, Ctrl-C and refusals."""

from __future__ import annotations

import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headway.chat import Conversation, Timings
from headway.cli import main
from headway.engine.messages import EngineStats
from headway.server.activity import Activity
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer
from tests.server.test_completions import TEXT

Headway = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Headway:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("HEADWAY_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, typed: str | None = None, piped: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headway", *arguments])
        monkeypatch.setattr(sys, "stdin", Terminal(typed) if typed is not None else io.StringIO(piped))
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


def test_one_message_and_its_timings(headway: Headway, server: LiveServer, engine: FakeEngine) -> None:
    code, out, error = headway("chat", server.url, "--message", "Hello", "--max-tokens", "50", "--temperature", "0.5")
    assert code == 0 and out == TEXT + "\n"
    assert " tokens, the first after " in error and error.startswith("[")
    params = engine.requests[-1].params
    assert (params.max_tokens, params.temperature) == (50, 0.5)


def test_reasoning_is_shown_and_is_no_part_of_the_conversation(
    headway: Headway, start_server: Callable[..., LiveServer], engine: FakeEngine
) -> None:
    server = start_server(reasoning_parser="think")
    said = ("<think>Who is it?</think>Good day!", "Bye.")
    engine.reply = lambda request, index: engine.tokenizer.encode(said[len(engine.requests) - 1])
    code, out, _ = headway("chat", server.url, typed="Hello\nBye\n")
    assert code == 0 and "Who is it?\n\nGood day!" in out
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids, False)
    assert "assistant\nGood day!<|im_end|>" in prompt and "Who" not in prompt


def test_the_address_is_taken_in_every_spelling(headway: Headway, server: LiveServer) -> None:
    bare = server.url.removeprefix("http://")
    for address in ((bare,), (f"{bare}/v1",), ("--base-url", server.url), ("--base-url", bare)):
        code, out, _ = headway("chat", *address, "--message", "Hello")
        assert code == 0 and out == TEXT + "\n"
    assert headway("models", bare)[1].split()[0] == "tiny"
    code, _, error = headway("chat", bare, "--base-url", server.url, "--message", "Hello")
    assert code == 2 and error.endswith("both say what to talk to; give one\n")
    code, _, error = headway("chat", bare, "--message", "Hello", "--temperature", "9")
    assert code == 2 and "--temperature" in error and "2" in error


def test_what_is_piped_in_is_one_message(headway: Headway, server: LiveServer, engine: FakeEngine) -> None:
    code, out, _ = headway("chat", f"{server.url}/v1", piped="two\nlines\n")
    assert code == 0 and out == TEXT + "\n" and len(engine.requests) == 1
    assert "the message is empty" in headway("chat", server.url, piped=" \n")[2]
    assert "the message is empty" in headway("chat", server.url, "--message", " ")[2]
    for bad in ({"piped": "a\udcff"}, {"typed": "b\udcff\n"}):
        assert "the text is not UTF-8" in headway("chat", server.url, **bad)[2]


def test_a_conversation_remembers_what_was_said(headway: Headway, server: LiveServer, engine: FakeEngine) -> None:
    code, out, _ = headway("chat", server.url, "--system", "Be kind.", typed="Hello\n\nAnd now?\n")
    assert code == 0 and out.count(TEXT) == 2 and len(engine.requests) == 2
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.index("Be kind.") < prompt.index("Hello") < prompt.index(TEXT) < prompt.index("And now?")


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    headway: Headway, server: LiveServer, engine: FakeEngine
) -> None:
    engine.step_s = 0.05
    engine.reply = lambda request, index: engine.tokenizer.encode("word " * (100 if len(engine.requests) == 1 else 1))

    def interrupt() -> None:
        while "word" not in sys.stdout.getvalue():  # type: ignore[attr-defined]
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, out, error = headway("chat", server.url, typed="first\nsecond\n")
    assert code == 0 and "; stopped]" in error
    assert 0 < out.count("word") < 60 and len(engine.requests) == 2
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "second" in prompt and "first" not in prompt


def test_refusals_are_one_line(headway: Headway, server: LiveServer) -> None:
    code, _, error = headway("chat", server.url, "--message", "x", "--max-tokens", "9999")
    assert code == 2 and error.startswith("headway: 400: ") and error.count("\n") == 1
    code, _, error = headway("chat", server.url, "--message", "x", "--model", "nope")
    assert code == 2 and "404" in error and "nope" in error
    code, _, error = headway("chat", "http://127.0.0.1:9", "--message", "x")
    assert code == 2 and "no server answers at http://127.0.0.1:9" in error
    # In a conversation a refusal does not end it.
    code, _, error = headway("chat", server.url, "--max-tokens", "9999", typed="one\ntwo\n")
    assert code == 0 and error.count("headway: 400") == 2


def test_models_of_a_server_with_keys(headway: Headway, start_server: Callable[..., LiveServer]) -> None:
    server = start_server(api_keys=["sk-one"])
    assert headway("models", server.url, "--api-key", "sk-one")[0] == 0
    code, _, error = headway("models", server.url)
    assert code == 2 and "; give one with --api-key" in error and error.count("\n") == 1


def test_models_of_a_server_and_of_this_machine(headway: Headway, server: LiveServer) -> None:
    code, out, _ = headway("models", server.url)
    assert code == 0 and out.split() == ["tiny", "context", "256", "tokens"]
    code, out, _ = headway("models")
    assert code == 0 and out.startswith("headway/story") and "headway serve MODEL" in out
    assert "no server answers" in headway("models", "http://127.0.0.1:9")[2]
    assert "is not the address of a server" in headway("models", "/a/folder")[2]


def test_an_answer_that_is_given_up_is_not_remembered(server: LiveServer, engine: FakeEngine) -> None:
    conversation = Conversation(server.url)
    pieces: Iterator[str] = conversation.ask("Hello")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert conversation.messages == []
    assert "".join(conversation.ask("Hello")) == TEXT and len(conversation.messages) == 2


def test_timings_in_words() -> None:
    said = Timings(0.05, 1.05, 101, {"decode_compute": 700.0, "prefill_compute": 40.0, "send": 0.1}).words()
    assert said == (
        "101 tokens, the first after 50 ms, then 100.0 tokens/s (10.0 ms each); most of it in decode compute 700 ms, "
        "prefill compute 40 ms"
    )
    assert Timings().words() == "no token came"
    assert Timings(0.05, 0.05, 1).words() == "1 token, the first after 50 ms"
    # All were read at once: only the server knows how fast they came.
    assert Timings(0.05, 0.0501, 101).words() == "101 tokens, the first after 50 ms"
    assert "100.0 tokens/s" in Timings(0.05, 0.0501, 101, stream_s=1.0).words()


def test_the_log_tells_of_ten_seconds_of_work_and_is_silent_without(engine: FakeEngine) -> None:
    now = [0.0]
    activity = Activity(engine, clock=lambda: now[0])
    assert activity.line() == ""
    engine.stats, engine.num_waiting = EngineStats(3, 2, 0.25), 2
    activity.on_step(EngineStats(3, 2, 0.25, prompt_tokens=500, prefix_cache_queries=400, prefix_cache_hits=100))
    activity.on_step(EngineStats(3, 2, 0.25, generation_tokens=30))
    now[0] = 10.0
    assert activity.line() == (
        "50.0 prompt tokens/s, 3.0 generated tokens/s; 3 running, 2 waiting; KV cache 25.0% used, 25% of prompt tokens "
        "from the prefix cache"
    )
    engine.stats, engine.num_waiting = EngineStats(0, 0, 0.0), 0
    now[0] = 20.0
    assert activity.line() == ""
