"""`headway serve`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.bundled import STORY
from headway.cli.values import fail, limit, size
from headway.engine.config import DEFAULTS
from headway.installation import require_engine

if TYPE_CHECKING:
    from headway.engine.config import EngineConfig
    from headway.server.settings import ServerSettings

_BEGAN_NS = time.monotonic_ns()
_LIMIT_OPTION: dict[str, Any] = {"parser": limit, "metavar": "N|none"}
_SIZE_OPTION: dict[str, Any] = {"parser": size, "metavar": "SIZE"}


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or a Hugging Face id; default: the bundled model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests give; may be repeated. Default: MODEL.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HEADWAY_API_KEY", help="Key that requests must carry; may be repeated."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type of weights and activations.")
    ] = "auto",
    quantization: Annotated[
        Literal["none", "int8", "int8-weight-only", "int4"],
        typer.Option("--quantization", "-q", help="Quantise the weights of an ordinary checkpoint while loading; CPU."),
    ] = "none",
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="Type of keys and values in the KV cache; auto: --dtype. int8: CPU.")
    ] = "auto",
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], typer.Option(help="dummy makes random weights from config.json.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of dummy weights.")] = 0,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt plus output, in tokens. Default: the model's.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = DEFAULTS.block_size,
    kv_cache_memory: Annotated[
        Any, typer.Option(**_SIZE_OPTION, help="Memory of the KV cache, as 4G. Default: measured.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of device memory to use when --kv-cache-memory is not set.")
    ] = DEFAULTS.gpu_memory_utilization,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a step.")] = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of a step. Default: chosen for the device.")
    ] = None,
    max_prefill_stall_ms: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Longest that prompts may hold up others in a step, in ms, unless these take longer themselves.",
        ),
    ] = DEFAULTS.max_prefill_stall_ms,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Share KV blocks of equal prompt beginnings.")] = True,
    enable_chunked_prefill: Annotated[bool, typer.Option(help="Split long prompts over steps.")] = True,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], typer.Option(help="Order of requests; priority: lower goes first.")
    ] = "fcfs",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: one a physical core.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="File with a chat template, or the template itself. Default: the model's.")
    ] = None,
    generation_config: Annotated[
        Literal["auto", "none"], typer.Option(help="Take default sampling parameters from generation_config.json?")
    ] = "auto",
    max_num_queued_reqs: Annotated[
        Any,
        typer.Option(
            **_LIMIT_OPTION,
            help="Most choices that wait or run; then 429. Default: 8 times --max-num-seqs.",
        ),
    ] = None,
    max_num_queued_tokens: Annotated[
        Any,
        typer.Option(
            **_LIMIT_OPTION,
            help="Most tokens of prompts without an output yet; then 429. Default: 8 KV pools.",
        ),
    ] = None,
    max_queue_time: Annotated[
        float | None, typer.Option(help="Seconds that a request may wait without being begun; then 503. Default: any.")
    ] = None,
    max_body_size: Annotated[Any, typer.Option(**_SIZE_OPTION, help="Largest request body.")] = "8M",
    max_queued_text: Annotated[
        Any, typer.Option(**_SIZE_OPTION, help="Most characters of text that wait to be tokenized; then 429.")
    ] = "16M",
    request_read_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a request may take from its first byte to its last.")
    ] = 60.0,
    max_stream_buffer: Annotated[
        Any, typer.Option(**_SIZE_OPTION, help="Most bytes of a stream that wait for a slow client.")
    ] = "1M",
    send_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a stream waits for a client that does not read.")
    ] = 30.0,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that requests have to finish after SIGTERM.")
    ] = 30.0,
    replay: Annotated[
        bool, typer.Option(help="Go on with running requests on the next engine process when one has died.")
    ] = True,
    record_steps: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Append each step's plan and times to this file, without any text."),
    ] = None,
    metrics_prefix: Annotated[str, typer.Option(help="Prefix of metric names; vllm: for its dashboards.")] = "headway:",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What the server logs; info logs each request.")
    ] = "info",
) -> None:
    """Serve a model over the OpenAI API."""
    require_engine()

    from headway.engine.config import EngineConfig
    from headway.server.settings import ServerSettings

    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*:?", metrics_prefix) is None:
        raise typer.BadParameter(f"--metrics-prefix {metrics_prefix!r} is not a Prometheus name, as headway: is")
    if max_queue_time is not None and not max_queue_time > 0:
        raise typer.BadParameter(f"--max-queue-time {max_queue_time:g} is no time to wait; it must be more than 0")
    folder = _model_folder(model)
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        load_format=load_format,
        device=device,
        seed=seed,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_cache_memory=kv_cache_memory,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_stall_ms=max_prefill_stall_ms,
        enable_prefix_caching=enable_prefix_caching,
        enable_chunked_prefill=enable_chunked_prefill,
        scheduling_policy=scheduling_policy,
        max_queue_time=max_queue_time,
        num_threads=threads,
        record_steps=record_steps,
    )
    settings = ServerSettings(
        served_model_names=served_model_name or [model or f"headway/{STORY.name}"],
        host=host,
        port=port,
        api_keys=api_key or [],
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        max_body_size=max_body_size,
        max_queued_text=max_queued_text,
        request_read_timeout=request_read_timeout,
        max_stream_buffer=max_stream_buffer,
        send_timeout=send_timeout,
        shutdown_timeout=shutdown_timeout,
        generation_config=generation_config,
        priority_allowed=scheduling_policy == "priority",
        metrics_prefix=metrics_prefix,
        log_level=log_level,
    )
    _run(config, settings, chat_template, replay)


def _model_folder(model: str | None) -> Path:
    if model is None:
        folder = STORY
        if not folder.is_dir():
            fail(f"the bundled model is missing from this installation ({folder}); name a model to serve")
        return folder
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from headway.models.folder import resolve_model

    try:
        return resolve_model(model)
    except ValueError as error:
        fail(str(error))


def _run(config: EngineConfig, settings: ServerSettings, chat_template: str | None, replay: bool) -> None:
    from headway.engine.client import EngineClient
    from headway.server.lifecycle import StartupError, run_server
    from headway.server.startup_display import StartupDisplay
    from headway.text.chat_template import ChatTemplate
    from headway.text.tokenizer import TextError, Tokenizer

    display = StartupDisplay(settings.served_model_names[0], _BEGAN_NS)
    display.on_server_stage("imports", time.monotonic_ns() - _BEGAN_NS)
    try:
        began = time.monotonic_ns()
        tokenizer = Tokenizer.load(config.model)
        template = ChatTemplate.load(tokenizer, chat_template)
        display.on_server_stage("tokenizer", time.monotonic_ns() - began)
        engine = EngineClient(config, display.on_progress, replay)
        display.start()
        run_server(engine, tokenizer, settings, template, display.on_ready)
    except (TextError, StartupError) as error:
        display.stop()
        fail(str(error))
    finally:
        display.stop()
