"""Replicas on a cluster: what is asked of it, and how Ray does it.

A replica is an actor that runs `headway serve` as its child. Ray finds a node with room for it, starts it again
elsewhere when a node or the actor is gone, and adds nodes where it can. Requests do not pass through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway import __version__
from headway.gateway.deployed.file import Deployment
from headway.gateway.servers import LocalServer, ServerEntry, free_port

_ASKED_S = 5.0  # an actor that says nothing for so long is not to be had now
_END_S = 10.0


class Absent(Exception):
    """A replica is not to be had now; Ray may bring it back."""


class Gone(Absent):
    """A replica does not come back."""


@dataclass(frozen=True, slots=True)
class Where:
    """A replica as it says it is."""

    url: str  # where its server listens
    state: str  # see LocalServer
    restarts: int
    node: str
    version: str  # of Headway, on its node


class Replica:
    """What runs in an actor: a server of this node."""

    def __init__(
        self,
        model: str,
        name: str,
        served_as: str,
        flags: tuple[str, ...],
        key: str,
        more: list[str],
        variables: dict[str, str],
    ) -> None:
        import ray

        os.environ.update(variables)
        self._host = ray.util.get_node_ip_address()
        self._node = ray.get_runtime_context().get_node_id()[:8]
        served = ServerEntry(name, model, free_port(self._host), key, served_as, flags)
        self._url = f"http://{self._host}:{served.port}"
        if "--role=prefill" in flags:
            more = [*more, f"--kv-transfer-host={self._host}"]
        log = Path(tempfile.mkdtemp(prefix="headway-replica-")) / f"{name}.log"
        self._server = LocalServer(served, log, more, self._host)
        self._keeping: asyncio.Task[None] | None = None

    async def where(self) -> Where:
        """Start the server with the first call; say where it is."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._server.keep())
        return Where(self._url, self._server.state, self._server.restarts, self._node, __version__)

    async def restart(self) -> None:
        self._server.kill()

    async def end(self, timeout_s: float) -> None:
        await self._server.end(timeout_s)


class RayCluster:
    """A Ray cluster, on which replicas run. A handle names one of them.

    Args:
        address: of its head node; None is RAY_ADDRESS, or a cluster of this machine alone, for as long as this process.
        variables: of the environment of all replicas.

    Raises:
        ValueError: Ray is not installed, or there is no such cluster; one line.
    """

    def __init__(self, address: str | None, variables: dict[str, str]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError("this needs the package ray; install it with: pip install 'headway[serve,ray]'")
        import ray

        self._ray, self._variables = ray, variables
        try:
            host, colon, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition(":")
            if colon and port.isdecimal() and "/" not in host:  # Ray itself tries for two minutes
                socket.create_connection((host, int(port)), _ASKED_S).close()
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"there is no Ray cluster at {address or 'RAY_ADDRESS'}: {said}") from None
        self._actor = ray.remote(Replica)

    def start(self, deployment: Deployment, name: str, key: str, more: list[str]) -> Any:
        """Have a replica started, where there is room, or as soon as there is; its handle.

        Args:
            key: its server's API key.
            more: further flags of its server.
        """
        options: dict[str, Any] = {
            "num_cpus": deployment.num_cpus,
            "num_gpus": deployment.num_gpus,
            "resources": dict(deployment.resources) or None,
            "max_restarts": -1,
            "scheduling_strategy": "SPREAD",
        }
        return self._actor.options(**options).remote(
            deployment.model, name, deployment.name, deployment.flags, key, more, self._variables
        )

    async def where(self, handle: Any) -> Where:
        """What a replica says. Raises Absent."""
        errors = self._ray.exceptions
        try:
            found: Where = await asyncio.wait_for(asyncio.wrap_future(handle.where.remote().future()), _ASKED_S)
            return found
        except errors.ActorDiedError as error:
            raise Gone(_line(error)) from None
        except TimeoutError:
            raise Absent("it waits for a node with room, or does not answer") from None
        except errors.RayError as error:
            raise Absent(_line(error)) from None

    async def restart(self, handle: Any) -> None:
        """Kill a replica's server, which is started again."""
        handle.restart.remote()

    async def stop(self, handle: Any, timeout_s: float) -> None:
        """End a replica: its server may finish what it is answering, for so long."""
        with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):  # it is killed in any case
            await asyncio.wait_for(asyncio.wrap_future(handle.end.remote(timeout_s).future()), timeout_s + _END_S)
        self._ray.kill(handle)

    def close(self) -> None:
        """Leave the cluster; its replicas end."""
        self._ray.shutdown()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
