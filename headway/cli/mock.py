"""`headway bench mock`: a server without a model, for tests of clients."""

from __future__ import annotations

import typer

from headway.bench.mock import MockOptions, MockServer
from headway.cli.commands import fail, with_flags
from headway.load.errors import BenchError


@with_flags
def mock(options: MockOptions) -> None:
    """Serve the OpenAI API without a model, at the times and with the faults that are asked for. Ctrl-C ends it."""
    import asyncio

    import uvloop

    try:
        server = MockServer(options)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(server))
    except BenchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print(f"Answered {server.answered:,} requests.")
    raise typer.Exit(0)


async def _serve(server: MockServer) -> None:
    import asyncio

    async with server.listening() as address:
        print(f"Serving {address}, without a model. Ctrl-C ends it.", flush=True)
        await asyncio.Event().wait()
