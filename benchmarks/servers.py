"""Servers under measurement: Headway, vLLM and llama.cpp on one model of random weights, each a process of its own."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gguf_checkpoint import write_gguf
from benchmarks.processes import Died, tail
from benchmarks.weights import write_weights

MODEL = "model"  # the name under which every server serves it
CHECKPOINTS = Path(__file__).parent / "checkpoints"
KV_CACHE_GIB = 1


@dataclass(frozen=True)
class Settings:
    """The same for every server.

    Args:
        shape: of benchmarks.checkpoint.SHAPES.
        threads: of computation.
        context: longest prompt plus output, in tokens.
        streams: most requests at once.
        start_seconds: how long a server may take until it answers /health.
    """

    shape: str
    threads: int
    context: int
    streams: int
    start_seconds: float = 300.0


@dataclass(frozen=True)
class Launch:
    command: list[str]
    environment: dict[str, str]


def headway(binary: str, port: int, settings: Settings, quantization: str = "none") -> Launch:
    """`binary` is a Python with Headway."""
    command = [binary, "-m", "headway", "serve", str(write_weights(settings.shape, CHECKPOINTS))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--log-level", "error"]
    command += ["--quantization", quantization, "--dtype", "bfloat16", "--kv-cache-memory", f"{KV_CACHE_GIB}G"]
    command += ["--max-model-len", str(settings.context), "--threads", str(settings.threads)]
    return Launch([*command, "--no-enable-prefix-caching"], {"PYTHONPATH": str(Path(__file__).parent.parent)})


def vllm(binary: str, port: int, settings: Settings) -> Launch:
    """Eager, as it is fastest at few streams and starts in seconds; VLLM_COMPILED=1 in the environment compiles."""
    command = [binary, "serve", str(write_weights(settings.shape, CHECKPOINTS))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    command += ["--dtype", "bfloat16", "--max-model-len", str(settings.context)]
    command += ["--no-enable-prefix-caching"]
    if os.environ.get("VLLM_COMPILED") != "1":
        command.append("--enforce-eager")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Launch(command, {**environment, **os.environ})  # the user's word goes first


def llama_cpp(binary: str, port: int, settings: Settings) -> Launch:
    """Greedy by `--temp 0`, as it reads no generation_config.json."""
    command = [binary, "--model", str(write_gguf(settings.shape, CHECKPOINTS)), "--alias", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(settings.streams), "--ctx-size", str(settings.streams * settings.context)]
    command += ["--threads", str(settings.threads), "--threads-batch", str(settings.threads)]
    return Launch([*command, "--no-cache-prompt", "--cache-ram", "0", "--no-webui", "--temp", "0"], {})


OURS = {"headway": "none", "headway int8": "int8"}  # and their --quantization
ENGINES: dict[str, Callable[[str, int, Settings], Launch]] = {
    **{name: partial(headway, quantization=quantization) for name, quantization in OURS.items()},
    "vllm": vllm,
    "llama.cpp": llama_cpp,
}


@functools.cache
def version(binary: str, name: str) -> str:
    """What the program says of itself."""
    command = [binary, "-m", "headway", "--version"] if name in OURS else [binary, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return next((line for line in lines if any(character.isdigit() for character in line)), "unknown")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A server's process and its children. They are stopped (SIGSTOP) but while they are measured.

    Args:
        engine: of ENGINES; None where it is the name.
        flags: further ones, which go before the settings.
    """

    def __init__(
        self, name: str, binary: str, settings: Settings, engine: str | None = None, flags: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.version = version(binary, engine or name)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        launch = ENGINES[engine or name](binary, port, settings)
        command = [*launch.command, *flags]
        self.arguments = [part.removeprefix(f"{CHECKPOINTS.parent}/") for part in command[1:]]
        self._seconds = settings.start_seconds
        self.log = tempfile.NamedTemporaryFile(prefix=f"served-{name}-", suffix=".log", delete=False)  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **launch.environment},
            start_new_session=True,
        )
        try:
            self._until_ready()
        except BaseException:
            self.close(keep_log=True)
            raise

    @property
    def process_group(self) -> int:
        """The process group of the server and its children."""
        return self._process.pid

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _until_ready(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._healthy():
            self._check_alive()
            if time.monotonic() > deadline:
                raise Died(f"{self.name} was not ready after {self._seconds:.0f} s; its log is {self.log.name}")
            time.sleep(0.1)

    def _check_alive(self) -> None:
        code, log = self._process.poll(), Path(self.log.name)
        if code is not None:
            raise Died(f"{self.name} ended with exit code {code}; its log ({log}):\n{tail(log)}")

    def _signal(self, which: signal.Signals) -> None:
        os.killpg(self._process.pid, which)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run, from its first answer on, until the end of the block.

        Raises:
            Died: it ended meanwhile, whatever else went wrong for that.
        """
        try:
            self._check_alive()
            self._signal(signal.SIGCONT)
            self._until_ready()
            yield
        except Exception:
            with suppress(subprocess.TimeoutExpired):  # its sockets close a moment before it is gone
                self._process.wait(timeout=1)
            raise
        finally:
            self._check_alive()
            self.pause()

    def close(self, keep_log: bool = False) -> None:
        keep_log = keep_log or self._process.poll() is not None
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with suppress(ProcessLookupError):  # a server may leave children behind
            self._signal(signal.SIGKILL)
        self.log.close()
        if not keep_log:
            Path(self.log.name).unlink(missing_ok=True)


@contextmanager
def running(
    name: str, binary: str, settings: Settings, engine: str | None = None, flags: Sequence[str] = ()
) -> Iterator[Server]:
    """A server that has answered, paused."""
    print(f"starting {name} ...", file=sys.stderr)
    began = time.monotonic()
    server = Server(name, binary, settings, engine, flags)
    try:
        print(f"{name} ({server.version}) ready after {time.monotonic() - began:.1f} s", file=sys.stderr)
        server.pause()
        yield server
    finally:
        server.close()
