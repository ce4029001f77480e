"""`headway serve`."""

from __future__ import annotations

import functools
import re
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from headway.bundled import NAME
from headway.cli.commands import command, config_lines, fail, take_defaults, toml_of
from headway.engine.config import EngineConfig
from headway.installation import require_engine
from headway.policy.step.bounds import Bounds
from headway.policy.step.policies import policy_class
from headway.server.settings import ServerSettings

_BEGAN_NS = time.monotonic_ns()

_of_server = functools.partial(typer.Option, rich_help_panel="Server")

ENDPOINTS = Path(__file__).parent.parent / "config_files" / "endpoints"
Endpoint = Literal["interactive", "batch", "rag", "agents", "embeddings"]


def _take_endpoint(context: typer.Context, kind: str | None) -> None:
    """The callback of --for: its defaults go behind those of --config. Files that it names are beside its own."""
    if kind is None:
        return
    content = toml_of(ENDPOINTS / f"{kind}.toml", f"--for {kind}")
    content["service-classes"] = str(ENDPOINTS / content["service-classes"])
    take_defaults(context, f"--for {kind}", content, below=True)


@command()
def serve(
    server: ServerSettings,
    engine: EngineConfig,
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or a Hugging Face id; default: the bundled model.")
    ] = None,
    endpoint: Annotated[
        Endpoint | None,
        typer.Option(
            "--for",
            callback=_take_endpoint,
            is_eager=True,
            help="Take the recommended defaults of a kind of endpoint; --config and the command line override them.",
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print what was chosen, as a file for --config, and exit.")
    ] = False,
    chat_template: Annotated[
        str | None,
        _of_server(help="Chat template: a name (as chatml), a file, or the template itself. Default: the model's."),
    ] = None,
    replay: Annotated[bool, _of_server(help="Continue requests on the next engine process if one dies.")] = True,
    engine_timeout: Annotated[
        float | None,
        _of_server(
            help="Seconds without the end of a step, while there are requests, after which /health is 503; after twice "
            "as long the engine is restarted. Default: 10 times the longest step that is predicted, from 30 to 600.",
            min=0.1,
        ),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API."""
    if show_config:
        print("\n".join(config_lines(context)))
        return
    require_engine()

    check_metrics_prefix(server.metrics_prefix)
    if engine.max_queue_time is not None and not engine.max_queue_time > 0:
        fail(f"--max-queue-time {engine.max_queue_time:g} must be more than 0 seconds")
    if server.service_classes is not None:
        engine.classes = server.service_classes.table
    if server.tenants is not None:
        try:
            server.tenants.check_classes(engine.classes)
        except ValueError as error:
            fail(f"--tenants: {error}")
        engine.weights = server.tenants.table.weights
    server.root = NAME if model is None else model
    engine.model = str(model_folder(server.root))
    if engine.node_rank:
        return _be_node(engine)
    server.served_model_names = server.served_model_names or [short_name(server.root)]
    for module in engine.lora_modules:
        if module.name in server.known_names:
            fail(f"--lora-modules: {module.name!r} is the base model; choose another name")
    server.priority_allowed = policy_class(engine.scheduling_policy).uses_priority
    _prepare_tuning(server, engine)
    _run(engine, server, chat_template, replay, engine_timeout)


def _be_node(engine: EngineConfig) -> None:
    """Have the ranks of this machine join those of node 0, until it is gone; or end the command."""
    from headway.engine.node import run_node

    signal.signal(signal.SIGTERM, _end)
    with suppress(KeyboardInterrupt):
        try:
            run_node(engine, engine.node_rank, lambda line: print(line, file=sys.stderr, flush=True))
        except ValueError as error:
            fail(str(error))


def _prepare_tuning(server: ServerSettings, engine: EngineConfig) -> None:
    """Have the engine record its traffic, with room for what --auto-tune may do; or end the command."""
    if not server.auto_tune:
        if server.auto_tune_bounds is not None:
            fail("--auto-tune-bounds bounds what --auto-tune does; add that, or leave it out")
        return
    if engine.role != "both":
        fail("--auto-tune predicts by simulation, and what another engine computes is not simulated; leave out --role")
    from headway.server.auto_tune import record_traffic

    server.auto_tune_bounds = server.auto_tune_bounds or Bounds()
    try:
        engine.limits = server.auto_tune_bounds.make_room(engine)
    except ValueError as error:
        fail(f"--auto-tune-bounds: {error}")
    engine.record_traffic = record_traffic()


def check_metrics_prefix(prefix: str) -> None:
    """End the command where names of metrics cannot begin like this."""
    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*:?", prefix) is None:
        fail(f"--metrics-prefix {prefix!r} is not a Prometheus name; an example is headway:")


def model_folder(model: str) -> Path:
    """The folder of a model's files, or the end of the command."""
    from headway.models.folder import resolve_model

    try:
        return resolve_model(model)
    except ValueError as error:
        fail(str(error))


def short_name(model: str) -> str:
    """The name of a model in the API: the last part of a folder or file, or any other name as it is."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    return (path.stem if path.suffix == ".gguf" else path.name) or model


def _end(number: int, frame: object) -> NoReturn:
    """End the process by an exception, so that blocks which end what was started are left."""
    sys.exit(128 + number)


def _run(
    config: EngineConfig,
    settings: ServerSettings,
    chat_template: str | None,
    replay: bool,
    engine_timeout: float | None,
) -> None:
    from headway.engine.client import EngineClient
    from headway.server.edge.listening import Certificate, StartupError, bind
    from headway.server.startup_display import StartupDisplay

    signal.signal(signal.SIGTERM, _end)  # until the server has a handler of its own
    display = StartupDisplay(settings.served_model_names[0], _BEGAN_NS)
    try:
        certificate = Certificate.of(settings)
        listener = bind(settings.host, settings.port)
    except StartupError as error:
        fail(str(error))
    display.on_server_stage("imports", time.monotonic_ns() - _BEGAN_NS)
    engine = EngineClient(config, display.on_progress, replay, engine_timeout)
    with listener, ExitStack() as ending:
        ending.callback(display.stop)
        ending.callback(engine.kill)
        if not settings.preload_prompts:  # else the engine needs their tokens
            with suppress(OSError):  # it is tried again, and then reported
                engine.launch()
        from headway.server.api.prompts import preloaded
        from headway.server.lifecycle import run_server
        from headway.text.chat_template import ChatTemplate, advice
        from headway.text.tokenizer import Tokenizer
        from headway.text.tokenizer_files import TextError

        try:
            began = time.monotonic_ns()
            tokenizer = Tokenizer.load(config.model)
            template = ChatTemplate.load(tokenizer, chat_template)
            display.on_template(template is not None, advice(tokenizer) if template is None else template.doubt)
            if settings.preload_prompts:
                display.on_server_stage("tokenizer", time.monotonic_ns() - began)
            config.preloaded = preloaded(settings.preload_prompts or [], tokenizer, template)
            display.start()
            can_reload = settings.service_classes is not None or settings.tenants is not None
            on_ready = functools.partial(
                display.on_ready, can_reload=can_reload, is_open=settings.is_open, asks_for_key=settings.asks_for_key
            )
            run_server(listener, engine, tokenizer, settings, template, on_ready, certificate)
        except (TextError, StartupError) as error:
            display.stop()
            fail(str(error))
