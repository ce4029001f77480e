"""A server that is attacked, and the row of an attack on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hostile.client import Answer, Talk, converse
from benchmarks.hostile.messages import COMPLETIONS, PLAIN, TEMPLATES, Attack, get, post
from benchmarks.hostile.watch import Watch
from benchmarks.processes import environment
from benchmarks.servers import free_port

DELAY_MS = 100.0
GROWTH_MB = 1000.0
ERROR_BYTES = 2048
NORMAL_S = 1.5
_READY_S = 90.0
_ANSWERS_S = 5.0  # in which a server has to answer after an attack
READ_TIMEOUT_S = 2
_PATIENCE = ("--request-read-timeout", str(READ_TIMEOUT_S))
FLAGS = ("--threads", "1", "--kv-cache-memory", "256M", *_PATIENCE)


@dataclass
class Row:
    """What one attack did.

    Attributes:
        statuses: how many answers had which; "none" for connections without one.
        health_ms: longest wait for /health that overlaps with the attack; `gap_ms` likewise between two tokens.
        growth_mb: of the memory of all processes of the server.
        answered_s: until the first byte of the first answer.
        error_bytes: of the body of the largest error.
        wrong: why it failed.
    """

    name: str
    group: str
    statuses: dict[str, int] = field(default_factory=dict)
    health_ms: float = 0.0
    gap_ms: float = 0.0
    growth_mb: float = 0.0
    answered_s: float | None = None
    error_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


class NotStarted(Exception):
    """A server did not get ready; with the end of its log."""


class Victim:
    """A server with the bundled model, and what watches it.

    Args:
        template: a name in TEMPLATES, or PLAIN.
        checkout: whose server it is.
        by_gateway: what is attacked and watched is a gateway in front of it.
    """

    def __init__(self, template: str, checkout: Path, folder: Path, by_gateway: bool = False) -> None:
        port = self.port = free_port()
        flags = ["--data-dir", str(folder / f"data-{port}"), *FLAGS]
        if template != PLAIN:
            flags += ["--chat-template", TEMPLATES[template]]
        self.log = folder / f"server-{port}.log"
        self.processes = [self._start("serve", flags, checkout)]
        self.also: frozenset[int] = frozenset()  # what answers may be beside what is expected
        if by_gateway:
            file = folder / f"gateway-{port}.toml"
            file.write_text(f'[[backend]]\nname = "a"\nurl = "http://127.0.0.1:{port}"\nbatches = true\n')
            self.port, self.also = free_port(), frozenset({404, 429})  # it has fewer routes, and a bound of its own
            self.processes.append(self._start("gateway", [str(file), *_PATIENCE], checkout))
        self.process = self.processes[-1]
        until = time.monotonic() + _READY_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > until:
                self.end()
                raise NotStarted(self.log.read_text(errors="replace")[-1000:])
            time.sleep(0.05)
        self.watch = Watch(self.port, self.process.pid)
        began = time.monotonic()
        time.sleep(NORMAL_S)
        self.normal = self.watch.between(began, time.monotonic())

    def _start(self, command: str, flags: list[str], checkout: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "headway", command, *flags, "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*words, "--log-level", "warning"],
                env=environment(checkout),
                cwd=checkout,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def answers(self) -> bool:
        """Whether /health and a completion do, within seconds."""
        asked = [get("/health"), post(COMPLETIONS, json.dumps({"prompt": "Once", "max_tokens": 1}))]
        return all(self.ask(each).statuses == {200: 1} for each in asked)

    def ask(self, message: bytes, seconds: float = _ANSWERS_S) -> Answer:
        return converse(self.port, [Talk([message])], seconds)[0]

    def written(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, patience: float = 5.0) -> None:
        with suppress(AttributeError):  # it did not start
            self.watch.close()
        for process in reversed(self.processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def attacked(victim: Victim, attack: Attack, delay_ms: float = DELAY_MS) -> Row:
    """The row of an attack on this server, which may delay others by so much."""
    talks = attack.talks()
    log_before, growth_from = len(victim.written()), victim.watch.memory_mb()
    answers: list[Answer] = []

    def send() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        answers.extend(converse(victim.port, talks, attack.seconds, attack.at_once))

    sender, began = threading.Thread(target=send), time.monotonic()
    sender.start()
    sender.join()
    is_alive = victim.process.poll() is None and victim.answers()
    seen = victim.watch.between(began, time.monotonic())
    statuses: Counter[int] = sum((answer.statuses for answer in answers), Counter())
    unanswered = sum(not answer.statuses for answer in answers)
    failed = [answer for answer in answers if not answer.statuses.keys() <= attack.expect | victim.also]
    row = Row(
        attack.name,
        attack.group,
        {
            **{str(status): count for status, count in sorted(statuses.items())},
            **({"none": unanswered} if unanswered else {}),
        },
        seen.health_ms,
        seen.gap_ms,
        max(0.0, seen.memory_mb - growth_from),
        min((answer.seconds for answer in answers if answer.seconds is not None), default=None),
        max((answer.error_bytes for answer in answers), default=0),
    )
    row.wrong = [
        *(
            ["the server ended"]
            if victim.process.poll() is not None
            else []
            if is_alive
            else ["the server does not answer"]
        ),
        *([f"got {sorted(failed[0].statuses)}"] if failed else []),
        *(["no answer"] if unanswered and 0 not in attack.expect else []),
        *([f"/health took {row.health_ms:.0f} ms"] if row.health_ms > victim.normal.health_ms + delay_ms else []),
        *([f"the stream stood still for {row.gap_ms:.0f} ms"] if row.gap_ms > victim.normal.gap_ms + delay_ms else []),
        *([f"{row.growth_mb:.0f} MB more memory"] if row.growth_mb > GROWTH_MB else []),
        *([f"an error of {row.error_bytes:,} bytes"] if row.error_bytes > ERROR_BYTES else []),
        *(["the stream broke off"] if seen.broken else []),
        *(["a traceback in the log"] if "Traceback" in victim.written()[log_before:] else []),
        *sorted({wrong for answer in answers if answer.statuses and (wrong := attack.judge(answer))}),
    ]
    return row
