"""Servers of this machine that `headway up` starts behind its gateway, and starts again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.config_files.gateway import FILE_KEYS, GatewayFile, backend_of, gateway_of
from headway.config_files.toml import check_keys, parse, read_text
from headway.policy.cache.handle import KEY_VARIABLE
from headway.policy.objectives.service_class import InvalidEntry, entries_of

# Seconds until a server that died is started again: the first time, and later where it lived for less than STABLE_S.
RESTART_AFTER_S, STABLE_S = (0.0, 1.0, 5.0, 15.0, 30.0), 60.0
# What a server may take beyond --shutdown-timeout until it is killed.
END_S = 10.0
# Flags that are the gateway's business.
OURS = ("role", "host", "port", "api-key", "tenants", "service-classes", "config", "quota-journal")
_OF_BACKEND = ("name", "role", "labels", "weight", "max_requests", "min_prompt_tokens", "max_prompt_tokens")
HEADWAY = (sys.executable, "-m", "headway")
_PR_SET_PDEATHSIG = 1
_HANDOVER_KEY = secrets.token_urlsafe(24)  # of servers that are given none by the environment
logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """A server as the file has it."""

    name: str
    model: str
    port: int
    key: str = field(repr=False)
    served_as: str  # the model's name in the API
    flags: tuple[str, ...] = ()  # flags of `headway serve`, as they are written on its command line


@dataclass(frozen=True, slots=True)
class UpFile:
    """The contents of a file of servers and their gateway."""

    servers: tuple[ServerEntry, ...]
    gateway: GatewayFile


def read_up_file(path: str) -> UpFile:
    """Read and check the file; each server gets a free port and a key of its own.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    return parse(path, read_text(path), (*FILE_KEYS, "server"), _up_of)


def _up_of(content: Mapping[str, Any]) -> UpFile:
    backends: list[dict[str, Any]] = []

    def server(entry: dict[str, Any]) -> ServerEntry:
        made = _server_of(entry)
        own = {key: entry[key] for key in _OF_BACKEND if key in entry}
        url = f"http://127.0.0.1:{made.port}"
        backends.append(own | {"url": url, "kind": "headway", "key": made.key})
        backend_of(backends[-1])  # so that an error has the server's line
        return made

    servers = entries_of(content, "server", server)
    if not servers:
        raise InvalidEntry("there are no servers; write [[server]] once for each", "server")
    return UpFile(tuple(servers), gateway_with(content, "server", backends))


def gateway_with(content: Mapping[str, Any], key: str, more: list[dict[str, Any]]) -> GatewayFile:
    """The gateway of a file, with more backends, in place of the tables of a key. Raises InvalidEntry."""
    given = content.get("backend", [])
    if not isinstance(given, list):
        raise InvalidEntry("backend must be a list; write [[backend]] once for each", "backend")
    return gateway_of({name: each for name, each in content.items() if name != key} | {"backend": [*given, *more]}, "")


def model_of(entry: Mapping[str, Any], what: str) -> str:
    """The model that a table names. Raises InvalidEntry."""
    model = entry.get("model", "")
    if not isinstance(model, str) or not model:
        raise InvalidEntry(f'{what} has no model; write model = "..."', "model")
    return model


def _server_of(entry: dict[str, Any]) -> ServerEntry:
    check_keys(entry, ("model", "served_model_name", "flags", *_OF_BACKEND), "a server")
    model = model_of(entry, "a server")
    name = str(entry.get("name", ""))
    served_as = entry.get("served_model_name", name)
    if not isinstance(served_as, str):
        raise InvalidEntry(f"served_model_name is {served_as!r:.80}; give a name", "served_model_name")
    found = list(flags_of(entry.get("flags", {})))
    if role := entry.get("role"):
        found.append(f"--role={role}")
    return ServerEntry(name, model, free_port(), secrets.token_urlsafe(24), served_as, tuple(found))


def flags_of(flags: Any) -> tuple[str, ...]:
    """A table of flags as they are written on the command line of `headway serve`. Raises InvalidEntry."""
    if not isinstance(flags, dict):
        raise InvalidEntry("flags must be a table, such as { max-num-seqs = 8 }", "flags")
    found: list[str] = []
    for key, value in flags.items():
        option = key.replace("_", "-")
        if option in OURS:
            raise InvalidEntry(f"flags has {key!r}, which the gateway sets itself; leave it out", "flags")
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float) for each in values):
            raise InvalidEntry(f"flags has {key} = {value!r:.80}; write a number, true, false or a string", "flags")
        for each in values:
            found += (
                [f"--{option}"] if each is True else [f"--no-{option}"] if each is False else [f"--{option}={each}"]
            )
    return tuple(found)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as trial:
        trial.bind((host, 0))
        port: int = trial.getsockname()[1]
        return port


class LocalServer:
    """A server in a process of its own.

    Args:
        more: further flags.
        host: the address that it listens on.

    Attributes:
        restarts: how often it was started again.
        state: starting, running, or why it is not.
    """

    def __init__(self, entry: ServerEntry, log: Path, more: list[str], host: str = "127.0.0.1") -> None:
        self.entry, self.log = entry, log
        self.restarts = 0
        self.state = "starting"
        self._more, self._host = more, host
        self._process: asyncio.subprocess.Process | None = None
        self._is_ending = False

    async def keep(self) -> None:
        """Run it, and start it again whenever it ends, until end()."""
        quick = 0
        while not self._is_ending:
            began = time.monotonic()
            code = await self._run()
            if self._is_ending:
                break
            quick = 0 if time.monotonic() - began > STABLE_S else quick + 1
            wait_s = RESTART_AFTER_S[min(max(0, quick - 1), len(RESTART_AFTER_S) - 1)]
            self.state = f"died (exit code {code}); starts again in {wait_s:g} s"
            logger.warning("server %s %s; its last words: %s", self.entry.name, self.state, self.last_words())
            await asyncio.sleep(wait_s)
            self.restarts += 1
        self.state = "ended"

    async def _run(self) -> int:
        entry = self.entry
        command = [*HEADWAY, "serve", entry.model, f"--host={self._host}", f"--port={entry.port}"]
        command += [f"--served-model-name={entry.served_as}", *entry.flags, *self._more]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={KEY_VARIABLE: _HANDOVER_KEY} | os.environ | {"HEADWAY_API_KEY": entry.key},
                start_new_session=True,  # a Ctrl-C is for the gateway, which lets requests finish first
                preexec_fn=_end_with_parent,
            )
        self.state = "running"
        if self._is_ending:
            self._process.terminate()
        return await self._process.wait()

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    def last_words(self) -> str:
        """The last line of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 2000))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1].strip()[:200] if lines else ""
        return ""

    def kill(self) -> None:
        """Kill it; it is started again."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self, timeout_s: float) -> None:
        """End it: what it is answering may finish first, for so long."""
        self._is_ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _end_with_parent() -> None:
    """Have the kernel end this process when the gateway dies, however that is."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
