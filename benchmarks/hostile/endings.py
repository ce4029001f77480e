"""What ends a server, or should; and what a limit of the system does to it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.hostile.client import Answer, Talk, converse
from benchmarks.hostile.messages import CHAT, COMPLETIONS, PLAIN, chat, get, head, post
from benchmarks.hostile.victim import Row, Victim

STOPPED, TOO_LARGE = "an engine that is stopped (SIGSTOP)", "an upload beyond RLIMIT_FSIZE"


def _half_body() -> bytes:
    return head(COMPLETIONS, "Content-Length: 100", "Content-Type: application/json") + b'{"pro'


def _ended_after(victim: Victim, signals: int, seconds: float) -> tuple[float, list[str]]:
    """Send SIGTERM so often, a second apart; how long it took until the process ended, and what was wrong."""
    began = time.monotonic()
    for number in range(signals):
        victim.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            victim.process.wait(1.0 if number < signals - 1 else seconds)
            break
    took, code = time.monotonic() - began, victim.process.poll()
    wrong = ["it does not end"] if code is None else [] if code == 0 else [f"exit code {code}"]
    if code is not None and took > signals + seconds / 2:
        wrong.append(f"it ended after {took:.1f} s")
    return took, wrong + (["a traceback in the log"] if "Traceback" in victim.written() else [])


@dataclass(frozen=True)
class Ending:
    """What is sent to a server before SIGTERM.

    Args:
        signals: how many it gets, a second apart.
        seconds: after the last one, until it has to be gone.
        expect: of what was sent.
    """

    name: str
    talks: Callable[[], list[Talk]]
    expect: frozenset[int]
    signals: int = 1
    seconds: float = 3.0
    server: str = PLAIN


def endings() -> list[Ending]:
    stream = post(COMPLETIONS, json.dumps({"prompt": "a", "stream": True, "max_tokens": 900, "logprobs": 5}))
    upload = head("/v1/files", "Content-Length: 9000", "Content-Type: multipart/form-data; boundary=b") + b"--b\r\n"
    looped = lambda: [Talk([post(CHAT, chat())])]  # noqa: E731
    unread = lambda: [Talk([stream], reads=False)] * 64  # noqa: E731
    return [
        Ending("SIGTERM with half a body", lambda: [Talk([_half_body()])], frozenset({503})),
        Ending("SIGTERM with half an upload", lambda: [Talk([upload])], frozenset({503})),
        Ending("SIGTERM with half a header", lambda: [Talk([b"GET /health HTTP/1.1\r\nX: "])], frozenset({0, 503})),
        Ending("SIGTERM with 1,000 idle connections", lambda: [Talk([b""]) for _ in range(1000)], frozenset({0})),
        Ending("SIGTERM twice with 64 streams never read", unread, frozenset({0}), 2),
        Ending("SIGTERM twice in a template that loops", looped, frozenset({0, 400, 500, 503}), 2, 3.0, "a loop"),
    ]


def ended(victim: Victim, ending: Ending) -> Row:
    """The row of a server that is to end while a client is in the middle of something."""
    answers: list[Answer] = []
    talks = ending.talks()
    sender = threading.Thread(target=lambda: answers.extend(converse(victim.port, talks, 8.0)))
    sender.start()
    time.sleep(0.5)
    victim.watch.close()
    took, wrong = _ended_after(victim, ending.signals, ending.seconds)
    victim.end()
    sender.join()
    statuses: Counter[int] = sum((answer.statuses for answer in answers), Counter())
    if any(not (answer.statuses or {0: 1}).keys() <= ending.expect for answer in answers):
        wrong.append(f"got {sorted(statuses) or 'no answer'}")
    return Row(
        ending.name, "ending", {str(status): count for status, count in statuses.items()}, answered_s=took, wrong=wrong
    )


def hung(victim: Victim) -> Row:
    """An engine that is stopped in the middle of a stream: whether /health says so, and SIGTERM ends the server."""
    engine = victim.watch.engine()
    victim.watch.close()
    talk = Talk([post(COMPLETIONS, json.dumps({"prompt": "a", "stream": True, "max_tokens": 900, "ignore_eos": True}))])
    sender = threading.Thread(target=lambda: converse(victim.port, [talk], 45.0))
    sender.start()
    time.sleep(0.3)
    os.kill(engine, signal.SIGSTOP)
    began, status = time.monotonic(), 200
    while status == 200 and time.monotonic() - began < 40:
        time.sleep(0.2)
        status = next(iter(victim.ask(get("/health")).statuses), 0)
    noticed = time.monotonic() - began
    _, wrong = _ended_after(victim, 2, 3.0)
    victim.end()
    sender.join()
    wrong += ["/health says ready"] if status == 200 else []
    return Row(STOPPED, "ending", {str(status): 1}, answered_s=noticed, wrong=wrong)


def too_large_a_file(victim: Victim) -> Row:
    """An upload that passes by the largest file that the system allows (RLIMIT_FSIZE)."""
    resource.prlimit(victim.process.pid, resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
    lines = b'{"custom_id": "a"}\n' * 200_000
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    raw = part % (b"purpose", b"", b"batch") + part % (b"file", b'; filename="a"', lines) + b"--b--\r\n"
    stated = (f"Content-Length: {len(raw)}", "Content-Type: multipart/form-data; boundary=b", "Connection: close")
    answer = victim.ask(head("/v1/files", *stated) + raw)
    wrong = [] if answer.statuses == {507: 1} else [f"got {sorted(answer.statuses)}"]
    wrong += [] if victim.answers() else ["the server does not answer"]
    statuses = {str(status): count for status, count in answer.statuses.items()}
    return Row(TOO_LARGE, "uploads", statuses, error_bytes=answer.error_bytes, wrong=wrong)
