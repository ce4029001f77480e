"""Makes commands of dataclasses. Each field with a `Flag` is a flag, and a key of the file that --config names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from headway.cli.help import Command, show_all
from headway.cli.spellings import hint as spelling_hint
from headway.flags import Flag, flags_of, option

# Where a context keeps the files of defaults, the one that goes before others last.
_LAYERS = "headway.layers"
SECRETS = frozenset({"api-key", "metrics-key"})  # options that are never printed
_NO_CONFIG = frozenset({"config", "help", "help_all", "endpoint", "show_config"})

# The options of the command that runs, by the names of their fields.
_options: ContextVar[dict[str, str]] = ContextVar("options", default={})  # noqa: B039


def fail(message: str) -> NoReturn:
    """End the command with one line on standard error and exit code 2."""
    print(f"headway: {' '.join(_with_options(message).split())}", file=sys.stderr)
    raise typer.Exit(2)


def _with_options(message: str) -> str:
    """The message with options in place of the fields that it names, as `max_model_len is 0`.

    A name of one word can be any word, so it must begin the message. A line of a file has keys of its own.
    """
    if re.search(r", line \d+: ", message):
        return message

    def named(found: re.Match[str]) -> str:
        is_name = "_" in found[0] or (found.start() == 0 and re.match(" (is|and) ", message[found.end() :]))
        return _options.get().get(found[0], found[0]) if is_name else found[0]

    return re.sub(r"(?<![\w./'\"-])[a-z]\w*(?![\w/'\"=-]|\.\w)", named, message)


def command(**settings: Any) -> Callable[[Callable[..., None]], typer.Typer]:
    """Make a function the only command of its module; `settings` are those of Typer's commands."""

    def made(function: Callable[..., None]) -> typer.Typer:
        app = typer.Typer(add_completion=False)
        app.command(cls=Command, **settings)(with_flags(function))
        return app

    return made


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command, for Typer: of each parameter that is a dataclass its flags, and --config.

    A field that is itself a dataclass gives its flags in its place; one without a `Flag` has none. A ValueError is
    one line and exit code 2 where the values cannot be made, and from the command where its class is one of ours.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        own = [parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)]
        for each in _parameters(hints[name]) if dataclasses.is_dataclass(hints[name]) else own:
            parameters[each.name] = each
    more: list[tuple[str, Any, Any]] = [("config", None, _Config), ("help_all", False, _HelpAll)]
    asked_for = next((name for name, hint in hints.items() if hint is typer.Context), None)  # one parameter has it
    if asked_for is None:
        more.append(("context", inspect.Parameter.empty, typer.Context))
    for name, default, hint in more:
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        said = _given_keys(values[asked_for or "context"])
        _options.set(dict(_named(hints)))
        try:
            for name, hint in hints.items():
                if dataclasses.is_dataclass(hint):
                    values[name] = _made(hint, values, said)
        except ValueError as error:
            fail(str(error))
        try:
            command(**{name: value for name, value in values.items() if name in hints})
        except ValueError as error:
            if not type(error).__module__.startswith("headway."):
                raise
            fail(str(error))

    run.common = frozenset(_common(hints))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    optional_last = sorted(parameters.values(), key=lambda each: each.default is not inspect.Parameter.empty)
    run.__signature__ = inspect.Signature(optional_last)  # type: ignore[attr-defined]
    return run


def _given_keys(context: typer.Context) -> frozenset[str]:
    """Keys of the flags that were given, in whatever way."""
    sources = {key: context.get_parameter_source(key) for key in context.params}
    return frozenset(key for key, source in sources.items() if source is not None and source.name != "DEFAULT")


def _common(hints: dict[str, Any]) -> Iterator[str]:
    """Names of the parameters that --help shows: flags that are marked so, and those that are no field."""
    for name, hint in hints.items():
        if not dataclasses.is_dataclass(hint):
            yield name
            continue
        for field, inner, flag in flags_of(typing.cast(type, hint)):
            if flag is None:
                yield from _common({"": inner})
            elif flag.common:
                yield _key(option(field, flag))


def _named(hints: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Parameters and fields of dataclasses, and their options."""
    for name, hint in hints.items():
        for declared in getattr(hint, "__metadata__", ()):
            if isinstance(declared, typer.models.OptionInfo):
                names = (declared.default, *(declared.param_decls or ()))  # Typer tells a default from a name later
                long = (each for each in names if isinstance(each, str) and each.startswith("--"))
                yield name, next(long, "--" + name.replace("_", "-"))
        for field, inner, flag in flags_of(typing.cast(type, hint)) if dataclasses.is_dataclass(hint) else ():
            if flag is None:
                yield from _named({"": inner})
            elif not flag.positional:
                yield field.name, option(field, flag)


def _key(option: str) -> str:
    """The key of an option among the values of a command."""
    return option.removeprefix("--").replace("-", "_")


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    for field, hint, flag in flags_of(kind):
        if flag is None:
            yield from _parameters(hint)
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if flag.parse is not None:
            default = flag.default
        yield inspect.Parameter(
            _key(option(field, flag)),
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=Annotated[_typed(hint, flag), _described(field, flag)],
        )


def _typed(hint: Any, flag: Flag) -> Any:
    """The type of the value that Typer reads, before `parse` is applied to it."""
    if flag.repeated:
        return list[str] | None
    if flag.choices:
        return Literal[flag.choices] | None
    return hint if flag.parse is None else str | None


def _described(field: dataclasses.Field[Any], flag: Flag) -> Any:
    told: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar, "rich_help_panel": flag.panel}
    told |= {"min": flag.min, "max": flag.max, "envvar": list(flag.envvar) or None}
    if flag.positional:
        return typer.Argument(**told)
    name = option(field, flag) if flag.short else flag.name
    return typer.Option(*filter(None, (name, flag.short)), **told)


def _made(kind: Any, values: dict[str, Any], said: frozenset[str]) -> Any:
    """A dataclass of the values of its flags. What was not given is left to its default.

    Args:
        said: keys of the flags that were given, for dataclasses that have them as a field `given`.
    """
    given: dict[str, Any] = {"given": said} if "given" in (each.name for each in dataclasses.fields(kind)) else {}
    for field, hint, flag in flags_of(kind):
        if flag is None:
            given[field.name] = _made(hint, values, said)
            continue
        name = option(field, flag)
        value = values[_key(name)]
        if value is None or value == []:
            continue
        try:
            given[field.name] = value if flag.parse is None else flag.parse(value)
        except ValueError as error:
            raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from None
    return kind(**given)


def _read_config(context: typer.Context, path: Path | None) -> None:
    """The callback of --config."""
    if path is not None:
        take_defaults(context, f"--config {path}", toml_of(path, f"--config {path}"))


def toml_of(path: Path, source: str) -> dict[str, Any]:
    """The content of a file, which errors call `source`, or the end of the command."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"cannot read {source}: {error.strerror}")
    except ValueError as error:
        fail(f"{source} is not TOML: {error}")


def take_defaults(context: typer.Context, source: str, content: dict[str, Any], below: bool = False) -> None:
    """Let values of a file be defaults: a flag on the command line and an environment variable go before.

    Args:
        source: what errors and a printed configuration call the file.
        below: values of other files go before these.
    """
    names = {name.lstrip("-"): each.name for each in context.command.params for name in each.opts}
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        flag = key.replace("_", "-")
        name = names.get(flag, names.get(key))
        if name is None or name in ("config", "help", "help_all"):
            near = spelling_hint(flag, [f"--{each}" for each in names]).replace("--", "")
            near = near or f"its keys are the flags of {context.command_path}"
            fail(f"{source} has the unknown key {key!r}; {near}")
        defaults[name] = [_text(each) for each in value] if isinstance(value, list) else _text(value)
    layers: list[tuple[str, dict[str, Any]]] = context.meta.setdefault(_LAYERS, [])
    layers.insert(0 if below else len(layers), (source, defaults))
    context.default_map = {name: value for _, layer in layers for name, value in layer.items()}


def config_lines(context: typer.Context) -> Iterator[str]:
    """The options that were given, in whatever way, as TOML that --config reads, each with its source."""
    layers: list[tuple[str, dict[str, Any]]] = context.meta.get(_LAYERS, [])
    for each in context.command.params:
        key = each.name or ""
        source = context.get_parameter_source(key)
        if source is None or source.name == "DEFAULT" or key in _NO_CONFIG or each.param_type_name == "argument":
            continue
        where = {"COMMANDLINE": "the command line", "ENVIRONMENT": "the environment"}.get(source.name, "")
        where = where or next((name for name, layer in reversed(layers) if key in layer), "")
        name = next((opt for opt in each.opts if opt.startswith("--")), "").removeprefix("--")
        if name in SECRETS:
            yield f"# {name} is given by {where} and not shown"
        else:
            yield f"{name} = {_toml(context.params[key])}  # {where}"


def _toml(value: Any) -> str:
    """A value in TOML; JSON writes texts, truth values and lists of them the same way."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Path):
        value = str(value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)


def _text(value: Any) -> Any:
    """A value as the command line would give it: all but truth values are texts."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_Config = Annotated[
    Path | None,
    typer.Option(
        callback=_read_config,
        is_eager=True,
        metavar="FILE",
        help="Read options from this TOML file; the command line overrides it.",
    ),
]
_HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=show_all, is_eager=True, help="Show all options, by groups, and exit.")
]
