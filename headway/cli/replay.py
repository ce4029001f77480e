"""`headway replay`: makes recorded decisions again, and plays them in the page of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.commands import command, fail
from headway.installation import require_engine


@command()
def replay(
    recording: Annotated[Path, typer.Argument(metavar="FILE", help="What headway serve --record-steps has written.")],
    page: Annotated[
        Path | None, typer.Option(help="Write an HTML file that plays it, fast or slow.", metavar="FILE")
    ] = None,
    since: Annotated[float, typer.Option("--from", help="Seconds from which on the page plays.", min=0.0)] = 0.0,
    until: Annotated[float | None, typer.Option("--to", help="Seconds up to which it plays.", min=0.0)] = None,
) -> None:
    """Make the decisions of a recording again, and play them in a page.

    The exit code is 1 if the scheduler now decides otherwise.
    """
    require_engine()
    from headway.files import write_files
    from headway.replay import name_of, page_of
    from headway.simulator.recording import read_recordings
    from headway.simulator.replay import DifferentStep
    from headway.simulator.replay import replay as again

    if page is None and (since or until is not None):
        fail("--from and --to go with --page FILE")
    try:
        recordings = read_recordings(recording)
        if page is not None:
            write_files({page: page_of(recordings, since, until)})
            print(page)
            return
        for number, each in enumerate(recordings, start=1):
            print(f"{name_of(each)}, engine {number}: {again(each):,} steps, decided as they were recorded")
    except DifferentStep as error:
        print(f"step {error.number} is decided otherwise by this version: {error}")
        raise typer.Exit(1) from None
    except OSError as error:
        fail(f"cannot write {page}: {error.strerror}; name another file with --page")
    except ValueError as error:
        fail(str(error))
