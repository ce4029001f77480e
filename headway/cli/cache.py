"""`headway cache`: what lies in ~/.cache/headway, and how it goes."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.commands import command, fail
from headway.files import cache_folder

# Folders of the cache. All of it is made again where it is missing.
KINDS = {
    "weights": "packed weights, which a start reads instead of packing them",
    "kernels": "compiled CPU kernels; without them, the next start compiles",
    "gguf": "configs and tokenizers of GGUF files, with links to the files",
}
_AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True)
class Entry:
    """A file or folder of one kind."""

    path: Path
    size: int  # bytes of all files in it; links count as themselves
    used: float  # when it was last written, or read as a whole (time.time())


@command()
def cache(
    action: Annotated[str, typer.Argument(metavar="[list|clear]", help="What to do. Default: list.")] = "list",
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WHAT]...", help=f"Kinds: {', '.join(KINDS)}, or names as listed. Default: all."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With clear: delete without asking.")] = False,
) -> None:
    """List or clear what Headway keeps on disk: packed weights, compiled kernels, GGUF configs."""
    if action not in ("list", "clear"):
        fail(f"cache can list or clear, not {action!r}")
    if yes and action != "clear":
        fail("--yes goes with clear: headway cache clear --yes")
    try:
        chosen = _chosen(what or [])
        if action == "list":
            return _list(chosen)
        _clear(chosen, yes)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")


def _chosen(wanted: list[str]) -> dict[str, list[Entry]]:
    """The entries that are wanted, by kind: all of them, or those of the kinds and names in `wanted`."""
    found = {kind: list(_entries(cache_folder() / kind)) for kind in KINDS}
    names = {entry.path.name for entries in found.values() for entry in entries}
    if unknown := [each for each in wanted if each not in names and each not in KINDS]:
        fail(f"{unknown[0]!r} is not in the cache; name a kind, {', '.join(KINDS)}, or what headway cache lists")
    if not wanted:
        return found
    return {
        kind: [entry for entry in entries if kind in wanted or entry.path.name in wanted]
        for kind, entries in found.items()
    }


def _entries(folder: Path) -> Iterator[Entry]:
    for path in folder.iterdir() if folder.is_dir() else ():
        is_folder = path.is_dir() and not path.is_symlink()
        try:
            found = [each.lstat() for each in (path.rglob("*") if is_folder else (path,))]
            used = max((each.st_mtime for each in found), default=path.lstat().st_mtime)
        except FileNotFoundError:  # a server has just deleted it
            continue
        yield Entry(path, sum(each.st_size for each in found), used)


def _list(chosen: dict[str, list[Entry]]) -> None:
    total = sum(entry.size for entries in chosen.values() for entry in entries)
    print(f"{cache_folder()}: {_size(total)}")
    for kind, entries in chosen.items():
        if not entries:
            continue
        print(f"\n{kind}: {_size(sum(entry.size for entry in entries))}, {KINDS[kind]}")
        widest = max(len(entry.path.name) for entry in entries)
        for entry in sorted(entries, key=lambda entry: -entry.size):
            print(f"  {entry.path.name.ljust(widest)}  {_size(entry.size):>8}  used {_age(time.time() - entry.used)}")
    if total:
        print("\nheadway cache clear deletes all of it; headway cache clear weights, or a name, only that.")


def _clear(chosen: dict[str, list[Entry]], yes: bool) -> None:
    entries = [entry for of_kind in chosen.values() for entry in of_kind]
    total = _size(sum(entry.size for entry in entries))
    kinds = ", ".join(kind for kind, of_kind in chosen.items() if of_kind)
    if not entries:
        print(f"{cache_folder()} has nothing of this")
        return
    if not yes:
        if not _is_asked():
            fail(f"this would delete {total} ({kinds}); say so with --yes")
        if not typer.confirm(f"Delete {total} ({kinds}) in {cache_folder()}?"):
            raise typer.Exit(1)
    for entry in entries:
        if entry.path.is_dir() and not entry.path.is_symlink():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink(missing_ok=True)
    print(f"deleted {total} ({kinds}); the next starts make what they need again")


def _is_asked() -> bool:
    """Whether somebody can answer."""
    return sys.stdin.isatty()


def _size(size: int) -> str:
    """A size in decimal units, as file managers show it."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size} B"


def _age(seconds: float) -> str:
    for length, name in _AGES:
        if (count := int(seconds // length)) > 0:
            return f"{count} {name}{'s' * (count > 1)} ago"
    return "just now"
