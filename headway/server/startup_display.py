"""What the terminal shows while a model loads: each stage when it ends, then where the time has gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from headway.engine.messages import Ready
from headway.files import cache_folder


def _ms(elapsed_ns: int) -> str:
    """A time in the form that all times of a start have."""
    return f"{elapsed_ns / 1e6:,.0f} ms" if elapsed_ns >= 500_000 else "<1 ms"


class StartupDisplay:
    """Prints the stages of a start as it hears of them; on a terminal with a spinner.

    Args:
        began_ns: when the process began, by time.monotonic_ns().
    """

    def __init__(self, title: str, began_ns: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._began_ns, self._title = began_ns, title
        self._server_ns: dict[str, int] = {}
        self._printed: set[str] = set()
        self._said = False
        self._can_chat = True
        self._live: Live | None = None

    def start(self) -> None:
        if self._console.is_terminal:
            self._live = Live(Spinner("dots", Text(f"Loading {self._title}")), console=self._console, transient=True)
            self._live.start()
        else:
            self._console.print(f"Loading {self._title}")

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_template(self, can_chat: bool, said: str) -> None:
        """Print a remark on the model's chat template, or where it has none, how to give it one."""
        self._can_chat = can_chat
        if not can_chat:
            said = f"No chat template, so chats are refused. To chat, start with {said}"
        if said:
            self._console.print(f"{said}.")

    def on_server_stage(self, stage: str, elapsed_ns: int) -> None:
        """Note a stage of the API process itself that has ended."""
        self._server_ns[stage] = elapsed_ns

    def on_progress(self, stage: str, elapsed_ns: int) -> None:
        """Show a stage of the engine that has ended, or without a time what it is doing; a log gets only the first."""
        line = f"{stage.replace('_', ' ')}: {_ms(elapsed_ns)}" if elapsed_ns else stage
        if self._live is not None:
            self._live.update(Spinner("dots", Text(f"Loading {self._title} ({line})")))
        elif elapsed_ns or not self._said:
            self._said = self._said or not elapsed_ns
            self._console.print(f"  {line}")
            self._printed.add(stage)

    def on_ready(
        self, ready: Ready, url: str, can_reload: bool = False, is_open: bool = False, asks_for_key: bool = False
    ) -> None:
        """Print the stages that were not printed yet, and where the server is.

        Args:
            can_reload: the server reads files again at SIGHUP.
            asks_for_key: clients must give an API key.
            is_open: other machines reach the server without an API key.
        """
        self.stop()
        total_ns = time.monotonic_ns() - self._began_ns
        table = Table("stage", "ms", box=None, show_header=False, pad_edge=False)
        stages = {**{f"server: {name}": ns for name, ns in self._server_ns.items()}, **ready.startup_ns}
        for name, length in stages.items():
            if name not in self._printed:
                table.add_row(name.replace("_", " "), _ms(length))
        # The two processes start side by side, so the stages do not sum to the whole.
        other_ns = total_ns - sum(stages.values())
        if other_ns > 0:
            table.add_row("process starts and waiting", _ms(other_ns))
        self._console.print(table)
        self._console.print(f"Ready after {total_ns / 1e9:.2f} s on {ready.device}: {_sizes(ready)}")
        for line in (*_remarks(ready), *self._next(ready, url, asks_for_key)):
            self._console.print(line)
        if can_reload:
            self._console.print(f"`kill -HUP {os.getpid()}` reads the files of classes and tenants again.")
        if is_open:
            self._console.print(
                "Warning: without an API key, everybody who reaches this machine can use the server; set --api-key, or "
                "--host 127.0.0.1 for this machine alone."
            )

    def _next(self, ready: Ready, url: str, asks_for_key: bool) -> Iterator[str]:
        """Where the server is, and what can be done with it."""
        yield f"Serving {self._title} at {url}/v1"
        yield "Next, in another terminal:"
        key = " --api-key KEY" * asks_for_key
        if self._can_chat and ready.generates:
            yield f"  headway chat {url}{key}"
        else:
            header = " -H 'Authorization: Bearer KEY'" * asks_for_key
            route, field = ("completions", "prompt") if ready.generates else ("embeddings", "input")
            body = f'{{"{field}": "Once upon a time"}}'
            yield f"  curl {url}/v1/{route}{header} -H 'Content-Type: application/json' -d '{body}'"
        yield f"  headway bench --base-url {url}{key} --request-rate 4 --num-prompts 80"
        yield f"The API is described at {url}/docs; Ctrl-C ends the server (process {os.getpid()})."


def _sizes(ready: Ready) -> str:
    blocks = f"{ready.num_blocks:,} blocks of {ready.block_size} tokens in {ready.kv_cache_dtype}"
    return f"context {ready.max_model_len:,} tokens, KV cache {blocks}"


def _remarks(ready: Ready) -> Iterator[str]:
    """What only some engines have."""
    if ready.draft_block_bytes:
        own, drafts = (ready.num_blocks * each / 2**20 for each in (ready.block_bytes, ready.draft_block_bytes))
        yield f"Draft model: its KV cache takes {drafts:,.0f} MiB beside the model's {own:,.0f} MiB"
    if ready.kernels:
        yield f"Kernels: {ready.kernels}"
    if ready.kept_bytes:
        where = f"{cache_folder() / 'weights'}, for quicker starts; `headway cache` lists and clears them"
        yield f"Writing {ready.kept_bytes / 1e6:,.0f} MB of packed weights to {where}"
    if ready.checkpoints is not None:
        yield f"Recurrent layers: states of {ready.max_num_seqs:,} requests, and {ready.checkpoints:,} checkpoints"
