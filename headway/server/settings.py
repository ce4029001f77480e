"""What the operator chose for the API server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from headway.config_files.preload import NamedPrompt, read_preload_file
from headway.flags import said
from headway.policy.step.bounds import Bounds, parse_bounds
from headway.server.edge.settings import EdgeSettings, flag, sized
from headway.text.calls.families import CALL_PARSERS, REASONING_PARSERS


def collector(text: str) -> str:
    """The address of an OpenTelemetry collector. Raises ValueError where it is none."""
    if not re.match(r"https?://[^/]+", text):
        raise ValueError(f"{text!r} is no address; give one like http://localhost:4318")
    return text


@dataclass(slots=True)
class ServerSettings(EdgeSettings):
    """Settings of the API process.

    Args:
        served_model_names: names that a request may use; answers have the first.
        root: what the model was started with, such as a folder. A request may use it as a name, too.
        priority_allowed: requests may have a priority, as the engine's policy looks at it.
    """

    served_model_names: Annotated[
        list[str],
        flag(
            "Model name in the API; may be repeated. Default: MODEL, of a path its last part.",
            "--served-model-name",
            parse=said,
            repeated=True,
            common=True,
        ),
    ] = field(default_factory=list)
    preload_prompts: Annotated[
        list[NamedPrompt] | None,
        flag(
            "TOML file with prompts to compute at the start and keep in the KV cache.",
            parse=read_preload_file,
            metavar="FILE",
        ),
    ] = None
    data_dir: Annotated[
        Path | None, flag("Folder for /v1/files and /v1/batches; without it these routes answer 400.")
    ] = None
    response_store: Annotated[
        Path | None,
        flag("SQLite file that keeps the latest answers of /v1/responses over a restart. Default: in memory alone."),
    ] = None
    max_file_size: Annotated[int, sized("Largest uploaded file.", default="200M")] = 200 * 2**20
    max_queued_text: Annotated[
        int, sized("Limit of characters waiting to be tokenized; above it, 429.", default="16M")
    ] = 16 * 2**20
    max_known_text: Annotated[
        int, sized("Characters of chat prompts whose token ids are cached; 0 disables this.", default="32M")
    ] = 32 * 2**20
    grammar_timeout: Annotated[
        float, flag("Seconds that the grammar or schema of a structured output may take to compile.", min=0.1)
    ] = 10.0
    generation_config: Annotated[
        str, flag("Whether generation_config.json sets default sampling parameters.", choices=("auto", "none"))
    ] = "auto"
    tool_call_parser: Annotated[
        str, flag("How the model writes calls of tools. Default: as its chat template says.", choices=CALL_PARSERS)
    ] = "auto"
    reasoning_parser: Annotated[
        str, flag("How the model writes reasoning. Default: as its chat template says.", choices=REASONING_PARSERS)
    ] = "auto"
    lora_unload: Annotated[
        str,
        flag(
            "Requests of an adapter that is unloaded: finish lets them go on, abort ends them with an error.",
            choices=("finish", "abort"),
        ),
    ] = "finish"
    priority_allowed: bool = False
    root: str = ""
    metrics_prefix: Annotated[str, flag("Prefix of metric names; use vllm: with vLLM's dashboards.")] = "headway:"
    pages: Annotated[
        bool, flag("Answer browsers at / with a page to chat with the model and to see what the server does.")
    ] = True
    otlp_endpoint: Annotated[
        str | None,
        flag(
            "Send a trace of each request to this OpenTelemetry collector (OTLP over HTTP), such as "
            "http://localhost:4318.",
            parse=collector,
            metavar="URL",
            envvar=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ),
    ] = None
    trace_sample: Annotated[
        float, flag("Share of requests that are traced; who missed an objective or failed always is.", min=0.0, max=1.0)
    ] = 1.0
    request_log: Annotated[
        Path | None, flag("File for a line of JSON about each request that has ended, without its text.")
    ] = None
    auto_tune: Annotated[
        bool,
        flag(
            "Change own settings within --auto-tune-bounds, one at a time, where that is predicted to help and then "
            "proven to."
        ),
    ] = False
    auto_tune_bounds: Annotated[
        Bounds | None,
        flag(
            "Least and most of what --auto-tune changes: max-num-seqs, max-num-batched-tokens, max-prefill-stall-ms, "
            "window-ms, share, drafts. Default: no more sequences and tokens than it begins with.",
            parse=parse_bounds,
            metavar="NAME=LEAST:MOST,...",
        ),
    ] = None
    slow_request_ms: Annotated[
        float | None,
        flag(
            "Warn in the log, with the ledger and the cause, of each request that takes longer or misses an objective.",
            min=0.0,
        ),
    ] = None

    @property
    def usual_journal(self) -> str:
        """Where the journal is unless something else was said."""
        own = super(ServerSettings, self).usual_journal  # a class with slots is made anew: super() has the first one
        return own if self.data_dir is None else f"{self.data_dir}/quotas.journal"

    @property
    def known_names(self) -> list[str]:
        """What a request may call the model."""
        return [*self.served_model_names, self.root] if self.root else self.served_model_names
