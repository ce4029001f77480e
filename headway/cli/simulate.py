"""`headway simulate`: what clients of a server would see, with the server's own policy on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import typer

from headway.cli.commands import fail, with_flags
from headway.cli.help import Command
from headway.cli.plan import PlanGroup
from headway.installation import require_engine
from headway.simulator.options import SimulateOptions, VerifyOptions

app = typer.Typer(
    name="simulate",
    cls=PlanGroup,
    add_completion=False,
    help="Predict what clients would see: run a workload through the real scheduler on a virtual clock.",
)


@app.command("model", cls=Command, hidden=True)
@with_flags
def simulate(options: SimulateOptions) -> None:
    """Predict what clients would see: run a workload through the real scheduler on a virtual clock.

    Workloads and results are those of `headway bench`. See also: simulate verify.
    """
    from headway.simulator.run import run_simulation

    _run(lambda: run_simulation(options))


@app.command("verify", cls=Command)
@with_flags
def verify(options: VerifyOptions) -> None:
    """Check the simulator: compare a simulated server with a live one on this machine.

    The command starts the server and sends the workload several times. Runs to learn how long steps take
    alternate with runs to compare.

    The exit code is 1 if a median is not within 10 %, or if there were too few requests to tell.
    """
    require_engine()

    from headway.simulator.verify import run_verification

    _run(lambda: run_verification(options))


def _run(work: Callable[[], int]) -> None:
    try:
        code = work()
    except ValueError as error:
        fail(str(error))
    raise typer.Exit(code)
