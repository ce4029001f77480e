"""`headway deploy`: a gateway, and replicas of its models on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable

from headway.gateway.deployed.cluster import RayCluster
from headway.gateway.deployed.file import DeployFile, read_deploy_file
from headway.gateway.deployed.replicas import Controller
from headway.gateway.run import GatewayServer, run_gateway
from headway.gateway.servers import END_S
from headway.gateway.settings import GatewaySettings
from headway.policy.cache.handle import KEY_VARIABLE
from headway.server.edge.listening import Certificate

logger = logging.getLogger("headway.server")


def run_deployment(
    listener: socket.socket,
    file: DeployFile,
    settings: GatewaySettings,
    address: str | None,
    tell: Callable[[str], None],
    certificate: Certificate | None = None,
) -> None:
    """Run the gateway and its replicas until a signal says stop. Requests finish first, then replicas end.

    SIGHUP has the file read again: replicas of what has changed are replaced one after the other.

    Args:
        address: of the Ray cluster; see RayCluster.
        tell: is told of each change, as a line.

    Raises:
        ValueError: there is no Ray, or no such cluster.
        StartupError: the journal of quotas cannot be kept.
    """
    more = [f"--service-classes={settings.service_classes.path}"] if settings.service_classes else []
    cluster = RayCluster(address, {KEY_VARIABLE: os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(24)})
    settings.file = file.gateway

    @contextlib.asynccontextmanager
    async def replicas(server: GatewayServer, url: str) -> AsyncIterator[None]:
        controller = Controller(cluster, server.gateway, file, more, tell)

        def reload() -> None:
            server.reload()
            try:
                controller.take(read_deploy_file(file.path))
            except ValueError as error:
                logger.error("deployments are unchanged: %s", error)

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        tell(f"headway gateway at {url}")
        keeping = asyncio.create_task(controller.run())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await controller.end(settings.shutdown_timeout + END_S)

    try:
        run_gateway(listener, settings, certificate, replicas)
    finally:
        cluster.close()
