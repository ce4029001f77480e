"""What the operator chose for a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from headway.config_files.gateway import GatewayFile
from headway.flags import Flag, limit, said
from headway.server.edge.settings import EdgeSettings

MOST_IN_FLIGHT, MOST_TOKENS = 10_000, 50_000_000


@dataclass(slots=True)
class GatewaySettings(EdgeSettings):
    """Settings of a gateway."""

    max_num_queued_reqs: Annotated[
        float | None,
        Flag(
            f"Limit of requests (times n) in flight; above it, 429. Default: {MOST_IN_FLIGHT}.",
            panel="Server",
            parse=limit,
            metavar="N|none",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        float | None,
        Flag(
            f"Limit of estimated prompt tokens whose output has not begun; above it, 429. Default: {MOST_TOKENS}.",
            panel="Server",
            parse=limit,
            metavar="N|none",
        ),
    ] = None
    admin_keys: Annotated[
        list[str],
        Flag(
            "Key for /admin/keys, which makes and revokes keys in the file of --tenants; may be repeated.",
            "--admin-key",
            panel="Server",
            parse=said,
            repeated=True,
            envvar=("HEADWAY_ADMIN_KEY",),
        ),
    ] = field(default_factory=list)
    metrics_prefix: Annotated[str, Flag("Prefix of metric names.", panel="Server")] = "headway_gateway:"
    file: GatewayFile = field(default_factory=lambda: GatewayFile(()))  # the backends
