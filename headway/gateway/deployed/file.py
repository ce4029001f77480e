"""The file of `headway deploy`: which models have how many replicas, and how their gateway treats them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.config_files.gateway import FILE_KEYS, BackendEntry, GatewayFile, backend_of
from headway.config_files.toml import check_keys, number, parse, read_text, whole_number
from headway.gateway.servers import flags_of, gateway_with, model_of
from headway.policy.fleet.scaling import ScalingRule
from headway.policy.objectives.service_class import InvalidEntry, entries_of

MOST_REPLICAS = 1000
SCALE_AT, SCALE_DOWN_S, ATTAINMENT = 128, 300.0, 0.99
_OF_BACKEND = ("role", "labels", "weight", "max_requests", "min_prompt_tokens", "max_prompt_tokens")
_OF_SCALING = ("replicas", "max_replicas", "scale_at", "scale_down_s", "attainment")
_OF_PLACE = ("num_cpus", "num_gpus", "resources")
_NOWHERE = "http://127.0.0.1:1"  # until a replica has an address


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model and its replicas, as the file has them.

    Args:
        name: the model's name in the API.
        flags: of `headway serve`, as they are written on its command line.
        attainment: share of first tokens that are to be in time, below which a replica is added.
        num_cpus, num_gpus, resources: what each replica takes of a node.
        entry: a backend without its address.
    """

    name: str
    model: str
    flags: tuple[str, ...]
    rule: ScalingRule
    attainment: float
    num_cpus: float
    num_gpus: float
    entry: BackendEntry
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def version(self) -> tuple[Any, ...]:
        """What a replica cannot change while it runs."""
        return self.model, self.flags, self.num_cpus, self.num_gpus, tuple(self.resources.items()), self.entry.role


@dataclass(frozen=True, slots=True)
class DeployFile:
    """The contents of a file; the gateway has the backends that are no replicas."""

    deployments: tuple[Deployment, ...]
    gateway: GatewayFile
    path: str = ""


def read_deploy_file(path: str) -> DeployFile:
    """Read and check the file.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    return parse(path, read_text(path), (*FILE_KEYS, "deployment"), lambda content: _deploy_of(content, path))


def _deploy_of(content: Mapping[str, Any], path: str) -> DeployFile:
    found = entries_of(content, "deployment", _deployment)
    if not found:
        raise InvalidEntry("there are no deployments; write [[deployment]] once for each model", "deployment")
    keys = [(each.name, each.entry.role) for each in found]
    for at, key in enumerate(keys):
        if key in keys[:at]:
            said = "two deployments have one name and role; give each its own"
            raise InvalidEntry(f"{said}: {key[0]!r}", "deployment", at, "name")
    stand_ins = [
        {"name": f"replica-{at}", "url": _NOWHERE, "kind": "headway"} | ({"role": role} if role else {})
        for at, (_, role) in enumerate(keys)
    ]
    gateway = gateway_with(content, "deployment", stand_ins)
    return DeployFile(tuple(found), replace(gateway, backends=gateway.backends[: -len(stand_ins)]), path)


def _deployment(entry: dict[str, Any]) -> Deployment:
    check_keys(entry, ("name", "model", "flags", *_OF_BACKEND, *_OF_SCALING, *_OF_PLACE), "a deployment")
    model = model_of(entry, "a deployment")
    own = {key: entry[key] for key in _OF_BACKEND if key in entry}
    made = backend_of(own | {"name": entry.get("name", ""), "url": _NOWHERE, "kind": "headway"})
    least = whole_number(entry, "replicas", 1, MOST_REPLICAS) if "replicas" in entry else 1
    most = whole_number(entry, "max_replicas", least, MOST_REPLICAS) if "max_replicas" in entry else least
    rule = ScalingRule(
        least,
        most,
        whole_number(entry, "scale_at", 1, 10**6) if "scale_at" in entry else SCALE_AT,
        number(entry, "scale_down_s", 0.0) if "scale_down_s" in entry else SCALE_DOWN_S,
    )
    resources = entry.get("resources", {})
    if not isinstance(resources, dict):
        raise InvalidEntry("resources must be a table, such as { a100 = 1 }", "resources")
    flags = list(flags_of(entry.get("flags", {})))
    if made.role:
        flags.append(f"--role={made.role}")
    return Deployment(
        made.name,
        model,
        tuple(flags),
        rule,
        number(entry, "attainment", 0.0, 1.0) if "attainment" in entry else ATTAINMENT,
        number(entry, "num_cpus", 0.0) if "num_cpus" in entry else 1.0,
        number(entry, "num_gpus", 0.0) if "num_gpus" in entry else 0.0,
        made,
        {key: number(resources, key, 0.0, math.inf) for key in resources},
    )
