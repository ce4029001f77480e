"""What the operator chose for the edge: the address, who may come in, and the limits of connections."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from headway.config_files.classes import ClassFile, read_class_file
from headway.config_files.tenants import TenantFile, read_tenant_file
from headway.flags import Flag, Needs, listed, said, size
from headway.policy.admission.queue_bound import QueuedRequests, QueuedTokens

flag = functools.partial(Flag, panel="Server")
sized = functools.partial(flag, parse=size, metavar="SIZE")


@dataclass(slots=True)
class EdgeSettings:
    """Settings of whatever answers clients.

    Args:
        service_classes: the file of service classes; None for the built-in ones.
        tenants: the file of tenants; None for none.
        quota_journal: the journal's file as it was given; `journal` says where it is.
        api_keys: a request needs one of them, or one of a tenant; where there is no key at all, it needs none.
        max_num_queued_reqs, max_num_queued_tokens: bounds of the queue; infinite for no bound, None for bounds that
            suit what is behind the edge.
    """

    host: Annotated[str, flag("Address to listen on.", common=True)] = "0.0.0.0"
    port: Annotated[int, flag("Port to listen on; 0 takes a free one.", min=0, max=65535, common=True)] = 8000
    api_keys: Annotated[
        list[str],
        flag(
            "API key that requests must send; may be repeated.",
            "--api-key",
            parse=said,
            repeated=True,
            envvar=("HEADWAY_API_KEY",),
            common=True,
        ),
    ] = field(default_factory=list)
    service_classes: Annotated[
        ClassFile | None,
        flag(
            "TOML file with service classes and their objectives; SIGHUP reloads it. Default: built-in classes.",
            parse=read_class_file,
            metavar="FILE",
            needs=Needs.RELOAD,
            common=True,
        ),
    ] = None
    tenants: Annotated[
        TenantFile | None,
        flag(
            "TOML file with tenants, their limits and their API keys; SIGHUP reloads it.",
            parse=read_tenant_file,
            metavar="FILE",
            needs=Needs.RELOAD,
        ),
    ] = None
    quota_journal: Annotated[
        str,
        flag(
            "File that keeps tenants' usage over restarts; none disables it. Default: in --data-dir, or beside "
            "--tenants.",
            metavar="FILE|none",
        ),
    ] = ""
    metrics_keys: Annotated[
        list[str],
        flag(
            "Key that /metrics needs; may be repeated. Without one, /metrics needs none and leaves out tenants.",
            "--metrics-key",
            parse=said,
            repeated=True,
            envvar=("HEADWAY_METRICS_KEY",),
        ),
    ] = field(default_factory=list)
    ssl_certfile: Annotated[
        Path | None, flag("Serve HTTPS with this certificate: a PEM file, with those between it and the root.")
    ] = None
    ssl_keyfile: Annotated[Path | None, flag("The certificate's private key. Default: in --ssl-certfile.")] = None
    ssl_ca_certs: Annotated[Path | None, flag("PEM file with the authorities of clients' certificates.")] = None
    ssl_cert_reqs: Annotated[
        int, flag("Whether clients need a certificate: 0 no; 1 one that is sent must be valid; 2 yes.", min=0, max=2)
    ] = 0
    enable_ssl_refresh: Annotated[
        bool, flag("Take certificates that are renewed while the server runs; SIGHUP does so at once.")
    ] = True
    allowed_origins: Annotated[
        list[str],
        flag(
            "Origin whose pages may call the API from a browser (CORS), such as https://chat.example; * for all; may "
            "be repeated, or be a JSON list.",
            parse=listed,
            repeated=True,
        ),
    ] = field(default_factory=list)
    allowed_methods: Annotated[
        list[str], flag("Method that such pages may use. Default: all.", parse=listed, repeated=True)
    ] = field(default_factory=list)
    allowed_headers: Annotated[
        list[str], flag("Header that such pages may send. Default: all.", parse=listed, repeated=True)
    ] = field(default_factory=list)
    allow_credentials: Annotated[bool, flag("Let such pages send cookies.")] = False
    max_num_queued_reqs: QueuedRequests = None
    max_num_queued_tokens: QueuedTokens = None
    max_body_size: Annotated[int, sized("Largest request body.", default="8M")] = 8 * 2**20
    request_read_timeout: Annotated[
        float, flag("Seconds to receive a whole request, from its first byte.", min=0.1)
    ] = 60.0
    max_stream_buffer: Annotated[int, sized("Bytes of a stream that may wait for a slow client.", default="1M")] = 2**20
    send_timeout: Annotated[float, flag("Seconds to wait for a client that does not read its stream.", min=0.1)] = 30.0
    shutdown_timeout: Annotated[float, flag("Seconds that running requests get to finish after SIGTERM.", min=0.0)] = (
        30.0
    )
    log_level: Annotated[
        str, flag("Log level; info logs each request but plain probes.", choices=("debug", "info", "warning", "error"))
    ] = "info"

    @property
    def journal(self) -> str:
        """The file that keeps what tenants have used; empty where nothing does."""
        if self.tenants is None or self.quota_journal == "none":
            return ""
        return self.quota_journal or self.usual_journal

    @property
    def usual_journal(self) -> str:
        """Where the journal is unless something else was said; empty for nowhere."""
        return f"{self.tenants.path}.journal" if self.tenants is not None and self.tenants.path else ""

    @property
    def asks_for_key(self) -> bool:
        """Whether clients must give an API key."""
        return bool(self.api_keys) or (self.tenants is not None and bool(self.tenants.keys))

    @property
    def is_open(self) -> bool:
        """Whether other machines may use the server without an API key."""
        return not self.asks_for_key and self.host not in ("localhost", "::1") and not self.host.startswith("127.")
