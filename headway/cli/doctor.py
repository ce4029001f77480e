"""`headway doctor`: what slows a running server down."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headway.bench.options import Target
from headway.cli.commands import command, fail

if TYPE_CHECKING:
    from headway.advisor.evidence import Evidence
    from headway.advisor.probe import Limits

Address = Annotated[
    str | None, typer.Argument(metavar="URL", help="Address of the server; or give --base-url, --host, --port.")
]
Seconds = Annotated[float, typer.Option(help="Limit of the whole probe.", min=1.0, max=600.0)]
Local = Annotated[bool, typer.Option(help="Look at the server's processes, if they are known to run on this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@command()
def doctor(
    target: Target,
    address: Address = None,
    seconds: Seconds = 30.0,
    requests: Annotated[
        bool, typer.Option(help="Send about forty small requests. Without them, read metrics for --seconds.")
    ] = True,
    local: Local = True,
    as_json: Json = False,
) -> None:
    """Find what slows a running server of Headway, vLLM, SGLang or llama.cpp down.

    It sends a short, bounded probe, reads the server's metrics and, on this machine, its processes. Each finding has
    its evidence, a confidence, a predicted gain and the next step.

    The exit code is 1 if something is wrong, so that a pipeline can stop.
    """
    import json

    from rich.console import Console

    from headway.advisor.doctor import as_object, exit_code, print_findings
    from headway.advisor.pitfalls import findings
    from headway.advisor.probe import Limits

    evidence, url = probed(target, address, Limits(seconds, requests, local))
    found = findings(evidence)
    if as_json:
        print(json.dumps(as_object(url, evidence, found), indent=2, allow_nan=False))
    else:
        print_findings(url, evidence, found, Console())
    raise typer.Exit(exit_code(found))


def probed(target: Target, address: str | None, limits: Limits) -> tuple[Evidence, str]:
    """What a probe of a server found, and its address; or the end of the command."""
    import asyncio

    from rich.console import Console

    from headway.advisor.probe import probe
    from headway.chat import as_url

    if address is not None:
        target = replace(target, base_url=as_url(address) or f"http://{address}")
    if not target.generates:
        fail(f"--backend is {target.backend}; give one that generates text, such as openai or openai-chat")
    with Console(stderr=True).status(f"probing {target.url}"):
        return asyncio.run(probe(target, limits)), target.url
