"""Files that are written whole or not at all, and where those are that can be made again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

_LONGEST_NAME = 200  # bytes in the name of a draft, before what makes it unique: file systems allow 255


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/headway, or ~/.cache/headway."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """$XDG_CONFIG_HOME/headway, or ~/.config/headway."""
    return _user_folder("XDG_CONFIG_HOME", ".config")


def _user_folder(variable: str, name: str) -> Path:
    """A folder of the user by the XDG Base Directory Specification, in which a relative path counts as none."""
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():
        try:
            base = Path.home() / name
        except RuntimeError:  # as in a container, under the id of no user
            base = Path("/nonexistent") / name
    return base / "headway"


def not_a_file(path: Path) -> str | None:
    """What a path is instead, to be said after its name: "a named pipe, not a file"; None where it is a file.

    Opening another kind may wait for ever, and reading it may never end.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else "not found"
    except OSError as error:  # such as a circle of links
        return f"cannot be read ({error.strerror})"
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return None if stat.S_ISREG(mode) else f"a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file"


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write files into folders that are there: all of them, or none where one cannot be written.

    They take their places in this order, when all are on the disk. Where there was a file, its permissions stay.

    Raises:
        OSError: with the name of the file that cannot be written.
    """
    drafts = {path: path.with_name(f".{path.name[:_LONGEST_NAME]}.{secrets.token_hex(8)}") for path in contents}
    path = None
    try:
        for path, content in contents.items():
            with open(drafts[path], "xb") as file:
                if path.exists():
                    shutil.copymode(path, drafts[path])
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, draft in drafts.items():
            os.replace(draft, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()
