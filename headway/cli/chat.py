"""`headway chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from headway.chat import NOT_UTF8, ChatError, Conversation, as_url
from headway.cli.commands import command, fail

DEFAULT_URL = "http://localhost:8000"


@command()
def chat(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="URL|MODEL",
            help="Address of a server, or a model to serve for this conversation. Default: http://localhost:8000.",
        ),
    ] = None,
    message: Annotated[str | None, typer.Option(help="Send this message, print the answer and exit.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Address of the server, as the first argument.", metavar="URL")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the server. Default: the first one.")] = None,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 to 2. Default: the server's.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["HEADWAY_API_KEY", "OPENAI_API_KEY"], help="API key of the server.")
    ] = None,
) -> None:
    """Talk to a model in the terminal, and see the timings of each answer.

    Ctrl-C stops an answer; at the prompt, it ends the conversation. Text from a pipe is sent as one message. Timings
    go to standard error.
    """
    if base_url is not None:
        if target is not None:
            fail(f"{target} and --base-url {base_url} both say what to talk to; give one")
        target = as_url(base_url) or f"http://{base_url}"
    try:
        with _address(target) as url:
            conversation = Conversation(url, model, api_key, system, max_tokens=max_tokens, temperature=temperature)
            code = _talk(conversation, message)
    except ChatError as error:
        fail(f"{error}{_hint(str(error), target)}")
    raise typer.Exit(code)


def _hint(error: str, target: str | None) -> str:
    if error.startswith(("401", "403")):
        return "; give one with --api-key"
    if "no server" in error and target is None:
        return "; start one with `headway serve`, or name a model: `headway chat headway/story`"
    return "; wait until the server prints that it serves" if "is loading" in error else ""


@contextlib.contextmanager
def _address(target: str | None) -> Iterator[str]:
    """Yield the address of a server. If a model is named, it is served as long as the conversation lasts."""
    url = DEFAULT_URL if target is None else as_url(target)
    if target is None or url is not None:
        yield url or DEFAULT_URL
        return
    from headway.bench.profile.local_server import LocalServer
    from headway.installation import require_engine
    from headway.load.errors import BenchError

    require_engine()
    with asyncio.Runner() as runner:
        print(f"Loading {target} ...", file=sys.stderr)
        server = LocalServer([target], timeout_s=900.0)
        try:
            runner.run(server.__aenter__())
        except BenchError as error:
            fail(str(error))
        try:
            yield server.startup.url
        finally:
            runner.run(server.stop())


def _talk(conversation: Conversation, message: str | None) -> int:
    if message is None and not sys.stdin.isatty():
        try:
            message = sys.stdin.read()
        except UnicodeDecodeError:
            raise ChatError(NOT_UTF8) from None
    if message is not None:
        if not message.strip():
            fail("the message is empty; pipe a message, or give one with --message")
        return 0 if _answer(conversation, message) else 130
    print(f"{conversation.model}. Ctrl-C ends an answer; Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            return 130
        if text:
            try:
                _answer(conversation, text)
            except ChatError as error:
                print(f"headway: {error}", file=sys.stderr)


def _answer(conversation: Conversation, text: str) -> bool:
    """Print the answer as it comes; False where Ctrl-C ended it."""
    whole = True
    try:
        for piece in conversation.ask(text):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        whole = False
    print()
    print(f"[{conversation.timings.words()}{'' if whole else '; stopped'}]", file=sys.stderr)
    return whole
