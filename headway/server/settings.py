"""What the operator chose for the API server."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_MAX_BODY_SIZE = 8 * 2**20


@dataclass(slots=True)
class ServerSettings:
    """Settings of the API process.

    Args:
        served_model_names: names that requests may give; the first is the one in answers.
        api_keys: any of them opens the API; none leaves it open.
        max_num_queued_reqs: choices that may wait or run at once; infinite for no limit, None suits the engine's size.
        max_num_queued_tokens: tokens of prompts without an output yet; infinite and None likewise.
        max_body_size: bytes of a request's body.
        max_queued_text: characters of requests' texts that may wait for a thread that tokenizes them.
        request_read_timeout: seconds that a request may take from its first byte to its last.
        max_stream_buffer: bytes of a stream that may wait for a client that does not read.
        send_timeout: seconds that a write may wait for a client that does not read.
        shutdown_timeout: seconds that requests have to finish after SIGTERM.
        generation_config: auto (the checkpoint's generation_config.json gives default sampling parameters) or none.
        priority_allowed: requests may have a priority; the engine's policy looks at it.
    """

    served_model_names: list[str]
    host: str = "0.0.0.0"
    port: int = 8000
    api_keys: list[str] = field(default_factory=list)
    max_num_queued_reqs: float | None = None
    max_num_queued_tokens: float | None = None
    max_body_size: int = DEFAULT_MAX_BODY_SIZE
    max_queued_text: int = 16 * 2**20
    request_read_timeout: float = 60.0
    max_stream_buffer: int = 2**20
    send_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    generation_config: str = "auto"
    priority_allowed: bool = False
    metrics_prefix: str = "headway:"
    log_level: str = "info"
