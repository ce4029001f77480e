"""What the operator chose for the API server."""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from headway.config_files.classes import ClassFile, read_class_file
from headway.config_files.preload import NamedPrompt, read_preload_file
from headway.config_files.tenants import TenantFile, read_tenant_file
from headway.flags import Flag, limit, listed, said, size
from headway.text.calls.families import CALL_PARSERS, REASONING_PARSERS


def collector(text: str) -> str:
    """The address of an OpenTelemetry collector.

    Raises:
        ValueError: it is none, or the package that spans need is missing.
    """
    if not re.match(r"https?://[^/]+", text):
        raise ValueError(f"{text!r} is no address; give one like http://localhost:4318")
    if importlib.util.find_spec("google.protobuf") is None:
        raise ValueError("it needs the package opentelemetry-proto; install headway[otel]")
    return text


_flag = functools.partial(Flag, panel="Server")
_size = functools.partial(_flag, parse=size, metavar="SIZE")
_limit = functools.partial(_flag, parse=limit, metavar="N|none")


@dataclass(slots=True)
class ServerSettings:
    """Settings of the API process.

    Args:
        served_model_names: names that a request may use; answers have the first.
        root: what the model was started with, such as a folder. A request may use it as a name, too.
        service_classes: the file of service classes; None for the built-in ones.
        tenants: the file of tenants; None for none.
        quota_journal: the journal's file as it was given; `journal` says where it is.
        api_keys: a request needs one of them, or one of a tenant; where there is no key at all, it needs none.
        max_num_queued_reqs, max_num_queued_tokens: bounds of the queue; infinite for no bound, None for bounds that
            suit the engine's size.
        priority_allowed: requests may have a priority, as the engine's policy looks at it.
    """

    host: Annotated[str, _flag("Address to listen on.", common=True)] = "0.0.0.0"
    port: Annotated[int, _flag("Port to listen on; 0 takes a free one.", min=0, max=65535, common=True)] = 8000
    served_model_names: Annotated[
        list[str],
        _flag(
            "Model name in the API; may be repeated. Default: MODEL, of a path its last part.",
            "--served-model-name",
            parse=said,
            repeated=True,
            common=True,
        ),
    ] = field(default_factory=list)
    api_keys: Annotated[
        list[str],
        _flag(
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
        _flag(
            "TOML file with service classes and their objectives; SIGHUP reloads it. Default: built-in classes.",
            parse=read_class_file,
            metavar="FILE",
            common=True,
        ),
    ] = None
    tenants: Annotated[
        TenantFile | None,
        _flag(
            "TOML file with tenants, their limits and their API keys; SIGHUP reloads it.",
            parse=read_tenant_file,
            metavar="FILE",
        ),
    ] = None
    quota_journal: Annotated[
        str,
        _flag(
            "File that keeps tenants' usage over restarts; none disables it. Default: in --data-dir, or beside "
            "--tenants.",
            metavar="FILE|none",
        ),
    ] = ""
    preload_prompts: Annotated[
        list[NamedPrompt] | None,
        _flag(
            "TOML file with prompts to compute at the start and keep in the KV cache.",
            parse=read_preload_file,
            metavar="FILE",
        ),
    ] = None
    metrics_keys: Annotated[
        list[str],
        _flag(
            "Key that /metrics needs; may be repeated. Without one, /metrics needs none and leaves out tenants.",
            "--metrics-key",
            parse=said,
            repeated=True,
            envvar=("HEADWAY_METRICS_KEY",),
        ),
    ] = field(default_factory=list)
    ssl_certfile: Annotated[
        Path | None, _flag("Serve HTTPS with this certificate: a PEM file, with those between it and the root.")
    ] = None
    ssl_keyfile: Annotated[Path | None, _flag("The certificate's private key. Default: in --ssl-certfile.")] = None
    ssl_ca_certs: Annotated[Path | None, _flag("PEM file with the authorities of clients' certificates.")] = None
    ssl_cert_reqs: Annotated[
        int,
        _flag("Whether clients need a certificate: 0 no; 1 one that is sent must be valid; 2 yes.", min=0, max=2),
    ] = 0
    enable_ssl_refresh: Annotated[
        bool, _flag("Take certificates that are renewed while the server runs; SIGHUP does so at once.")
    ] = True
    allowed_origins: Annotated[
        list[str],
        _flag(
            "Origin whose pages may call the API from a browser (CORS), such as https://chat.example; * for all; may "
            "be repeated, or be a JSON list.",
            parse=listed,
            repeated=True,
        ),
    ] = field(default_factory=list)
    allowed_methods: Annotated[
        list[str], _flag("Method that such pages may use. Default: all.", parse=listed, repeated=True)
    ] = field(default_factory=list)
    allowed_headers: Annotated[
        list[str], _flag("Header that such pages may send. Default: all.", parse=listed, repeated=True)
    ] = field(default_factory=list)
    allow_credentials: Annotated[bool, _flag("Let such pages send cookies.")] = False
    max_num_queued_reqs: Annotated[
        float | None,
        _limit("Limit of requests (times n) in the server; above it, 429. Default: 8 times --max-num-seqs."),
    ] = None
    max_num_queued_tokens: Annotated[
        float | None,
        _limit("Limit of prompt tokens whose output has not begun; above it, 429. Default: 8 times the KV cache."),
    ] = None
    max_body_size: Annotated[int, _size("Largest request body.", default="8M")] = 8 * 2**20
    data_dir: Annotated[
        Path | None,
        _flag("Folder for /v1/files and /v1/batches; without it these routes answer 400."),
    ] = None
    max_file_size: Annotated[int, _size("Largest uploaded file.", default="200M")] = 200 * 2**20
    max_queued_text: Annotated[
        int, _size("Limit of characters waiting to be tokenized; above it, 429.", default="16M")
    ] = 16 * 2**20
    max_known_text: Annotated[
        int,
        _size("Characters of chat prompts whose token ids are cached; 0 disables this.", default="32M"),
    ] = 32 * 2**20
    grammar_timeout: Annotated[
        float, _flag("Seconds that the grammar or schema of a structured output may take to compile.", min=0.1)
    ] = 10.0
    request_read_timeout: Annotated[
        float, _flag("Seconds to receive a whole request, from its first byte.", min=0.1)
    ] = 60.0
    max_stream_buffer: Annotated[int, _size("Bytes of a stream that may wait for a slow client.", default="1M")] = 2**20
    send_timeout: Annotated[float, _flag("Seconds to wait for a client that does not read its stream.", min=0.1)] = 30.0
    shutdown_timeout: Annotated[float, _flag("Seconds that running requests get to finish after SIGTERM.", min=0.0)] = (
        30.0
    )
    generation_config: Annotated[
        str, _flag("Whether generation_config.json sets default sampling parameters.", choices=("auto", "none"))
    ] = "auto"
    tool_call_parser: Annotated[
        str, _flag("How the model writes calls of tools. Default: as its chat template says.", choices=CALL_PARSERS)
    ] = "auto"
    reasoning_parser: Annotated[
        str, _flag("How the model writes reasoning. Default: as its chat template says.", choices=REASONING_PARSERS)
    ] = "auto"
    priority_allowed: bool = False
    root: str = ""
    metrics_prefix: Annotated[str, _flag("Prefix of metric names; use vllm: with vLLM's dashboards.")] = "headway:"
    pages: Annotated[
        bool,
        _flag("Answer browsers at / with a page to chat with the model and to see what the server does."),
    ] = True
    otlp_endpoint: Annotated[
        str | None,
        _flag(
            "Send a trace of each request to this OpenTelemetry collector (OTLP over HTTP), such as "
            "http://localhost:4318.",
            parse=collector,
            metavar="URL",
            envvar=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ),
    ] = None
    trace_sample: Annotated[
        float,
        _flag("Share of requests that are traced; who missed an objective or failed always is.", min=0.0, max=1.0),
    ] = 1.0
    request_log: Annotated[
        Path | None, _flag("File for a line of JSON about each request that has ended, without its text.")
    ] = None
    slow_request_ms: Annotated[
        float | None,
        _flag(
            "Warn in the log, with the ledger and the cause, of each request that takes longer or misses an objective.",
            min=0.0,
        ),
    ] = None
    log_level: Annotated[
        str, _flag("Log level; info logs each request but plain probes.", choices=("debug", "info", "warning", "error"))
    ] = "info"

    @property
    def journal(self) -> str:
        """The file that keeps what tenants have used; empty where nothing does."""
        if self.tenants is None or self.quota_journal == "none":
            return ""
        if self.quota_journal or self.data_dir is not None:
            return self.quota_journal or f"{self.data_dir}/quotas.journal"
        return f"{self.tenants.path}.journal" if self.tenants.path else ""

    @property
    def known_names(self) -> list[str]:
        """What a request may call the model."""
        return [*self.served_model_names, self.root] if self.root else self.served_model_names

    @property
    def asks_for_key(self) -> bool:
        """Whether clients must give an API key."""
        return bool(self.api_keys) or (self.tenants is not None and bool(self.tenants.keys))

    @property
    def is_open(self) -> bool:
        """Whether other machines may use the server without an API key."""
        return not self.asks_for_key and self.host not in ("localhost", "::1") and not self.host.startswith("127.")
