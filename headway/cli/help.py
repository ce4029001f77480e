"""Help as plain text that no terminal is too narrow for: names and numbers are never broken or cut.

`--help` shows the options that matter most, `--help-all` all of them, by groups.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from headway.cli.spellings import fold_objectives, spread_modules, subcommand

WIDEST = 100  # lines longer than this are hard to read
_GAP = 2
OTHERS = "Other"


def _width() -> int:
    return max(20, min(WIDEST, shutil.get_terminal_size().columns))


def wrapped(text: str, indent: int = 0) -> str:
    """The text in lines as wide as the terminal; a word is never broken, however long it is."""
    space = " " * indent
    return textwrap.fill(
        " ".join(text.split()),
        max(_width(), indent + 10),
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )


class _Help:
    """Typer's commands and groups with our `--help`, and with vLLM's options that take as many values as follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, spread_modules(fold_objectives(args)))  # type: ignore[misc]
        return parsed

    def get_help(self, ctx: Any) -> str:
        everything = bool(ctx.meta.get("headway.help_all"))
        return "\n".join(_lines(self, ctx, everything)).rstrip()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print(self.get_help(ctx))


class Command(_Help, TyperCommand):
    """A command with our help."""


class Group(_Help, TyperGroup):
    """A group of commands with our help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            known = [name for name, each in self.commands.items() if not each.hidden]
            near = subcommand(args[0], known)
            ctx.fail(
                f"{_path(ctx)} has no command {args[0]!r}; "
                + (f"did you mean {near}?" if near else f"it has {', '.join(known)}")
            )
        return super().resolve_command(ctx, args)


def show_all(context: typer.Context, wanted: bool) -> None:
    """The callback of --help-all."""
    if wanted:
        context.meta["headway.help_all"] = True
        print(context.get_help())
        raise typer.Exit


def _lines(command: Any, ctx: Any, everything: bool) -> Iterator[str]:
    yield wrapped("Usage: " + " ".join([_path(ctx), *_usage(command, ctx)]))
    for paragraph in re.split(r"\n\s*\n", (command.help or "").strip()):
        yield ""
        yield wrapped(paragraph)
    options = [each for each in command.get_params(ctx) if not getattr(each, "hidden", False)]
    common = getattr(command.callback, "common", None)
    shown = options if everything or common is None else [each for each in options if _is_common(each, common)]
    for title, group in _groups(shown, everything):
        yield f"\n{title}:"
        for each in group:
            yield from _option(each, ctx)
    commands = {name: each for name, each in getattr(command, "commands", {}).items() if not each.hidden}
    if commands:
        yield "\nCommands:"
        longest = max(map(len, commands))
        for name, each in commands.items():
            yield from _two_columns(name, (each.help or "").strip().partition("\n\n")[0], longest)
    if len(shown) < len(options):
        yield f"\n{len(options) - len(shown)} more options: {_path(ctx)} --help-all"


def _path(ctx: Any) -> str:
    return " ".join(ctx.command_path.removesuffix("model").split())


def _usage(command: Any, ctx: Any) -> Iterator[str]:
    yield "[OPTIONS]"
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            yield _argument(each) if each.required else f"[{_argument(each)}]"
    if getattr(command, "commands", None):
        yield "[COMMAND]"


def _argument(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _is_common(option: Any, common: frozenset[str]) -> bool:
    return option.param_type_name == "argument" or option.name in common or option.name in ("help", "help_all")


def _groups(options: Iterable[Any], everything: bool) -> Iterator[tuple[str, list[Any]]]:
    """Group options by the panels of their flags. Options are one group unless `everything` is shown."""
    found: dict[str, list[Any]] = {}
    for each in options:
        panel = getattr(each, "rich_help_panel", None) or OTHERS
        title = "Arguments" if each.param_type_name == "argument" else panel if everything else "Options"
        found.setdefault(title, []).append(each)
    yield from sorted(found.items(), key=lambda group: (group[0] != "Arguments", group[0] == OTHERS))


def _option(option: Any, ctx: Any) -> Iterator[str]:
    if option.param_type_name == "argument":
        name, said = _argument(option), option.help or ""
    else:
        names = [*option.opts, *option.secondary_opts]
        name = " / ".join(names) if option.secondary_opts else ", ".join(names)
        if not option.is_flag:
            name += f" {option.metavar or _kind(option.display_type(ctx))}"
        said = (option.help or "") + _default(option)
    yield from _two_columns(name, said, 24)


def _kind(typed: str) -> str:
    """A value's placeholder: of Typer's "<int range>" just N, of "<auto|cpu>" the choices."""
    plain = typed.strip("<>").removesuffix(" range").removeprefix("list[").removesuffix("]")
    return {"int": "N", "float": "X", "str": "TEXT", "path": "PATH"}.get(plain, plain)


def _default(option: Any) -> str:
    value = option.default() if callable(option.default) else option.default
    if "Default" in (option.help or "") or value in (None, [], (), "", {}) or isinstance(value, bool):
        return ""
    return f" Default: {value:g}." if isinstance(value, float) else f" Default: {value}."


def _two_columns(name: str, said: str, longest: int) -> Iterator[str]:
    """The name before its text where it is short; else the text below."""
    indent = _GAP + longest + _GAP
    if len(name) <= longest and indent < _width() // 2:
        text = wrapped(said, indent)
        yield (" " * _GAP + name).ljust(indent) + text[indent:] if text.strip() else " " * _GAP + name
    else:
        yield " " * _GAP + name
        if said:
            yield wrapped(said, 6)
