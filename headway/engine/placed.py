"""Has Ray find machines for the ranks of an engine, and start a node on each.

Ray reserves a bundle of processors for each rank, together (a placement group), and the machine of this process has
that of rank 0. Of those that share a machine, one is an actor, which starts the ranks of all; they share memory. When
this process ends, Ray ends the actors and gives back what was reserved.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import replace
from typing import Any

import msgspec

from headway.engine.config import EngineConfig
from headway.engine.node import run_node

PLACED_S = 120.0  # Ray's autoscaler may have to start machines
_ASKED_S = 5.0
_NODE_LABEL = "ray.io/node-id"


class RayNode:
    """The actor of a machine."""

    def run(self, config: bytes, node: int) -> None:
        """See run_node()."""
        run_node(msgspec.msgpack.decode(config, type=EngineConfig), node, print, rejoins=False)


class Placement:
    """A placement group for the ranks of an engine.

    Args:
        threads: of a rank.

    Attributes:
        parts: the ranks of each machine, this one's first.
        host: the address of this machine, for others.

    Raises:
        ValueError: Ray is not installed, there is no cluster, or it has no room; one line.
    """

    def __init__(self, config: EngineConfig, threads: int) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError(
                "distributed_executor_backend is 'ray', which needs the package ray; install it with: "
                "pip install 'headway[serve,ray]'"
            )
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        self._ray, self._config, self._threads = ray, config, threads
        _join(ray)
        self.host = str(ray.util.get_node_ip_address())
        here = ray.get_runtime_context().get_node_id()
        bundles = [{"CPU": float(threads)} for _ in range(config.ranks)]
        labels = [{_NODE_LABEL: here}, *({} for _ in bundles[1:])]
        group = placement_group(bundles, strategy=config.placement_strategy, bundle_label_selector=labels)
        try:
            ray.get(group.ready(), timeout=PLACED_S)
        except ray.exceptions.GetTimeoutError:
            total, free = (each().get("CPU", 0.0) for each in (ray.cluster_resources, ray.available_resources))
            raise ValueError(
                f"the Ray cluster has no room for {config.ranks} ranks of {threads} CPUs each "
                f"({config.placement_strategy}, the first one on this machine): of {total:g} CPUs on "
                f"{len(ray.nodes())} machines, {free:g} are free; add machines, or give fewer --threads"
            ) from None
        self._group, found = group, dict[str, list[int]]({here: []})
        for bundle, machine in sorted(placement_group_table(group)["bundles_to_node_id"].items()):
            found.setdefault(machine, []).append(int(bundle))
        self._first_bundles = [bundles[0] for bundles in found.values()]
        self.parts, first = list[range](), 0
        for of_machine in found.values():
            self.parts.append(range(first, first + len(of_machine)))
            first += len(of_machine)
        self._actors, self._running = list[Any](), list[Any]()

    def bring(self, address: tuple[str, int]) -> None:
        """Start the other nodes, which join at this address. Raises ValueError where one has ended since."""
        if not self._actors:
            self._start(address)
        ended, _ = self._ray.wait(self._running, num_returns=1, timeout=0)
        if ended:
            try:
                self._ray.get(ended[0])
                said = "it has ended"
            except self._ray.exceptions.RayError as error:
                said = " ".join(str(getattr(error, "cause", None) or error).split())[-300:]
            raise ValueError(f"node {self._running.index(ended[0]) + 1} of the Ray cluster cannot join: {said}")

    def _start(self, address: tuple[str, int]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(RayNode)
        config = replace(self._config, master_addr=address[0], master_port=address[1])
        for number, bundle in enumerate(self._first_bundles[1:], 1):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            self._actors.append(actor.options(num_cpus=self._threads, scheduling_strategy=where).remote())
            self._running.append(self._actors[-1].run.remote(msgspec.msgpack.encode(config), number))


def _join(ray: Any) -> None:
    """Join the cluster at RAY_ADDRESS, or the one that this machine is part of. Raises ValueError where none is."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "/" not in host:  # Ray itself tries for two minutes
            socket.create_connection((host, int(port)), _ASKED_S).close()
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"there is no Ray cluster at {address} (RAY_ADDRESS): {said}") from None
