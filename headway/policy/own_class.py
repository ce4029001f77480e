"""A class of the user's own, named as `module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable


def own_class(what: str, name: str, known: Iterable[str]) -> object:
    """What the name stands for; the caller sees whether that is such a class.

    Args:
        what: what the class is to be, in words.
        known: names that stand for classes of ours.

    Raises:
        ValueError: there is no such class; one line that says what to do.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute.isidentifier()):
        raise ValueError(
            f"{what} {name!r} is unknown; choose one of {', '.join(known)}, or name a class as module:Class"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise ValueError(
                f"{what} {name!r}: there is no module {error.name!r}; put the folder that it is in into PYTHONPATH"
            ) from None
        raise ValueError(f"{what} {name!r}: {module} cannot be imported: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what} {name!r}: {module} cannot be imported: {type(error).__name__}: {reason}") from None
    if not hasattr(found, attribute):
        raise ValueError(f"{what} {name!r}: module {module!r} has no class {attribute!r}")
    return getattr(found, attribute)
