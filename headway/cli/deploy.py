"""`headway deploy`."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from headway.cli.commands import command, fail
from headway.cli.gateway import check_tenants
from headway.flags import flags_of, option
from headway.gateway.deployed.file import DeployFile, Deployment, read_deploy_file
from headway.gateway.settings import GatewaySettings
from headway.installation import require_engine


@command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def deploy(
    settings: GatewaySettings,
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="TOML file with the models and their replicas; SIGHUP reads it again.")],
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray cluster, such as auto. Default: RAY_ADDRESS, or a cluster of this machine alone."
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Predict what clients would see; further options are those of simulate.")
    ] = False,
) -> None:
    """Serve models on a Ray cluster behind one door, with as many replicas as their objectives need."""
    try:
        read = read_deploy_file(file)
        if simulate:
            files = {"service-classes": settings.service_classes, "tenants": settings.tenants}
            given = [f"--{name}={each.path}" for name, each in files.items() if each is not None]
            return _simulate(read, given + context.args)
        if context.args:
            fail(f"there is no option {context.args[0]}; see headway deploy --help-all")
        require_engine()
        from headway.gateway.deployed.run import run_deployment
        from headway.server.edge.listening import Certificate, StartupError, bind

        check_tenants(settings)
        try:
            certificate = Certificate.of(settings)
            with bind(settings.host, settings.port) as listener:
                run_deployment(listener, read, settings, address, _tell, certificate)
        except StartupError as error:
            fail(str(error))
    except ValueError as error:
        fail(str(error))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _simulate(file: DeployFile, further: list[str]) -> None:
    """Simulate each deployment with the load that further options name. Raises ValueError."""
    from headway.cli.simulate import app as simulator

    if any(each.entry.role for each in file.deployments):
        raise ValueError(
            "a deployment has a role; describe servers for prompts and for answers in a fleet file, and simulate it "
            "with headway simulate --fleet FILE"
        )
    for each in file.deployments:
        arguments, left_out = _arguments(each, file.gateway.routing)
        print(f"{each.name}{f' without {shlex.join(left_out)}' if left_out else ''}:", flush=True)
        if code := simulator(arguments + further, prog_name="headway simulate", standalone_mode=False):
            raise typer.Exit(code)


def _arguments(deployment: Deployment, routing: str) -> tuple[list[str], list[str]]:
    """What the simulator is told of a deployment, and the flags of its servers that mean nothing to it."""
    from headway.simulator.options import SimulateOptions

    known = set(_options_of(SimulateOptions))
    flags = {flag: flag.partition("=")[0].replace("--no-", "--") for flag in deployment.flags}
    rule = deployment.rule
    arguments = [deployment.model, f"--replicas={rule.least}", f"--routing={routing}"]
    if rule.most > rule.least:
        arguments += [f"--max-replicas={rule.most}", f"--scale-at={rule.choices}"]
        arguments.append(f"--scale-down-seconds={rule.down_after_s:g}")
    kept = [flag for flag, name in flags.items() if name in known]
    return arguments + kept, [flag for flag, name in flags.items() if name not in known]


def _options_of(kind: type) -> list[str]:
    found = list[str]()
    for field, hint, flag in flags_of(kind):
        found += _options_of(hint) if flag is None else [option(field, flag)]
    return found
